"""Programs whose lanes diverge, timed by schedule: `python bench/divergence.py` writes the table in docs/divergence.md.

`--only NAME` measures one and prints it, `--calibrate` prints the constants of `minibatch/schedule/choose.py` for this machine.
Times are those of the CPU, or with `--wall` of the wall; the sides take turns.
"""

from __future__ import annotations

import argparse
import bisect
import datetime
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from workloads import Workload, normal

import minibatch
from minibatch.schedule.choose import Machine
from minibatch.schedule.partition import _seated
from minibatch.tour.programs import van_der_pol

# --- trips that somebody drew -----------------------------------------------------------------------------------------


def pareto(lanes: int, mean: float = 35, most: int = 5000) -> Any:
    """[lanes] trip counts with a heavy tail."""
    rng = np.random.default_rng(0)
    trips = np.minimum(rng.pareto(1.2, lanes) + 1, most / mean)
    trips = np.clip(trips * mean / trips.mean(), 1, most)
    trips[lanes // 2] = most
    return jnp.asarray(trips, jnp.int32)


def geometric(lanes: int, mean: float = 50) -> Any:
    """[lanes] trip counts of a process that stops at each step with the same probability."""
    return jnp.asarray(np.random.default_rng(0).geometric(1 / mean, lanes), jnp.int32)


MATRIX = np.asarray(np.random.default_rng(1).normal(size=(8, 8)) * 0.3, np.float32)


def products(trips: Any, x: Any) -> Any:
    """As many steps as the lane says, each a product of 8x8 matrices."""
    return lax.while_loop(lambda c: c[0] < trips, lambda c: (c[0] + 1, jnp.tanh(MATRIX @ c[1]) + 0.1), (0, x))[1]


def counted(trips: Any) -> Any:
    """As many steps as the lane says, each next to nothing."""
    return lax.fori_loop(0, trips, lambda i, x: x * 0.99 + i, 1.0)


def collatz(n: Any) -> Any:
    """The number of steps from n to 1."""

    def step(c: tuple) -> tuple:
        return jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1

    return lax.while_loop(lambda c: c[0] > 1, step, (n, 0))[1]


def mandelbrot(real: Any, imaginary: Any) -> Any:
    """The number of steps until z leaves the disk, at most 2000."""

    def step(c: tuple) -> tuple:
        x, y, n = c
        return x * x - y * y + real, 2 * x * y + imaginary, n + 1

    return lax.while_loop(lambda c: (c[0] ** 2 + c[1] ** 2 < 4) & (c[2] < 2000), step, (0.0, 0.0, 0))[2]


def plane(lanes: int) -> tuple:
    """A square of points around the Mandelbrot set."""
    side = max(1, round(lanes**0.5))
    real, imaginary = jnp.meshgrid(jnp.linspace(-2, 0.6, side), jnp.linspace(-1.3, 1.3, side))
    return real.reshape(-1), imaginary.reshape(-1)


# --- programs that somebody wants -------------------------------------------------------------------------------------


def no_u_turn(key: Any, width: Any) -> Any:
    """20 draws [20, 2] from a ring of this width: Hamiltonian trajectories that go on until they turn back."""

    @jax.grad
    def slope(x: Any) -> Any:
        return (jnp.sqrt((x**2).sum() + 1e-6) - 2) ** 2 / (2 * width**2)

    def draw(start: Any, key: Any) -> tuple:
        for_momentum, for_choice = jax.random.split(key)
        momentum = jax.random.normal(for_momentum, (2,))

        def leap(c: tuple) -> tuple:
            x, p, chosen, n, _ = c
            p = p - 0.5 * step * slope(x)
            x = x + step * p
            p = p - 0.5 * step * slope(x)
            takes = jax.random.uniform(jax.random.fold_in(for_choice, n)) < 1 / (n + 1)
            return x, p, jnp.where(takes, x, chosen), n + 1, (x - start) @ p

        step = 0.3 * width
        out = lax.while_loop(lambda c: (c[4] >= 0) & (c[3] < 1024), leap, (start, momentum, start, 1, 0.0))
        return out[2], out[2]

    return lax.scan(draw, jnp.array([2.0, 0.0]), jax.random.split(key, 20))[1]


def sphere_tracing(x: Any, y: Any) -> Any:
    """How far the ray through pixel (x, y) goes until it meets four spheres or a floor, at most 256 steps."""
    centers = jnp.array([[0.0, 0.0, 4.0], [1.5, 0.3, 5.0], [-1.6, 0.2, 3.5], [0.3, 1.4, 6.0]])
    ray = jnp.stack([x, y, jnp.ones_like(x)])
    ray = ray / jnp.sqrt((ray**2).sum())

    def distance(point: Any) -> Any:
        spheres = jnp.sqrt(((point - centers) ** 2).sum(1)) - 1
        return jnp.minimum(spheres.min(), point[1] + 1)

    def step(c: tuple) -> tuple:
        t, _, n = c
        gap = distance(t * ray)
        return t + gap, gap, n + 1

    return lax.while_loop(lambda c: (c[1] > 1e-4) & (c[0] < 40) & (c[2] < 256), step, (0.0, 1.0, 0))[0]


def rejection(key: Any, bound: Any) -> Any:
    """A normal number above `bound`: drawn until one is."""

    def draw(c: tuple) -> tuple:
        key, _ = c
        key, now = jax.random.split(key)
        return key, jax.random.normal(now)

    return lax.while_loop(lambda c: c[1] <= bound, draw, (key, -jnp.inf))[1]


def newton(a: Any, start: Any) -> Any:
    """The ninth root of a, by Newton's method from where one is told."""

    def step(c: tuple) -> tuple:
        x, _, n = c
        change = (x - a / x**8) / 9
        return x - change, jnp.abs(change / x), n + 1

    return lax.while_loop(lambda c: (c[1] > 1e-6) & (c[2] < 500), step, (start, 1.0, 0))[0]


def far(lanes: int) -> tuple:
    """Numbers, and where to start looking for their roots: up to ten thousand."""
    return jnp.linspace(1, 9, lanes), 10 ** (jnp.linspace(0, 2, lanes) ** 2)


def edit_distance(word: Any, other: Any, bound: Any) -> Any:
    """The edit distance of two words [n], or a number above `bound` as soon as it is known to be."""
    n = len(word)

    def row(c: tuple) -> tuple:
        before, i = c
        change = jnp.minimum(before[:-1] + (other != word[i]), before[1:] + 1)
        first = jnp.concatenate([jnp.array([i + 1]), change])
        places = jnp.arange(n + 1)
        return lax.cummin(first - places) + places, i + 1

    return lax.while_loop(lambda c: (c[1] < n) & (c[0].min() <= bound), row, (jnp.arange(n + 1), 0))[0].min()


def words(lanes: int, length: int = 32) -> tuple:
    """Words, and others of which every tenth differs in few letters."""
    rng = np.random.default_rng(0)
    word, other = rng.integers(0, 4, (2, lanes, length))
    other[::10] = np.where(rng.random((len(other[::10]), length)) < 0.05, other[::10], word[::10])
    return jnp.asarray(word, jnp.int32), jnp.asarray(other, jnp.int32), jnp.full(lanes, 4)


def queue(key: Any, load: Any) -> Any:
    """The customers served until the queue is empty again, event by event, from two on, at most 4000 events."""

    def event(c: tuple) -> tuple:
        key, waiting, served, n = c
        key, now = jax.random.split(key)
        arrives = jax.random.uniform(now) < load / (1 + load)
        return key, waiting + jnp.where(arrives, 1, -1), served + ~arrives, n + 1

    return lax.while_loop(lambda c: (c[1] > 0) & (c[3] < 4000), event, (key, 2, 0, 0))[2]


def keys(lanes: int) -> Any:
    """A key for each lane."""
    return jax.random.split(jax.random.key(0), lanes)


def loops(fun: Callable) -> Callable:
    """`fun` as a workload has it, which maps nothing itself."""
    return lambda vmap: fun


LOOPS = [
    Workload("Pareto trips, 8x8 products", loops(products), (0, 0), lambda n: (pareto(n), normal(0, n, 8, 8)), 8192),
    Workload("geometric trips, 8x8 products", loops(products), (0, 0), lambda n: (geometric(n), normal(0, n, 8, 8)), 8192),
    Workload("Collatz", loops(collatz), (0,), lambda n: (jnp.arange(1, n + 1),), 200_000),
    Workload("Mandelbrot", loops(mandelbrot), (0, 0), plane, 512 * 512),
    Workload("uniform trips, 8x8 products", loops(products), (0, 0), lambda n: (jnp.full(n, 50), normal(0, n, 8, 8)), 8192),
    Workload("uniform trips, next to nothing", loops(counted), (0,), lambda n: (jnp.full(n, 200),), 65536),
    Workload("2 or 3 trips, next to nothing", loops(counted), (0,), lambda n: (2 + jnp.arange(n) % 2,), 65536),
    Workload("uniform trips, edit distance", loops(edit_distance), (0, 0, 0), lambda n: (*words(n)[:2], jnp.full(n, 32)), 8192),
    Workload("one trip, rejection sampling", loops(rejection), (0, 0), lambda n: (keys(n), jnp.full(n, -9.0)), 16384),
    Workload("Pareto trips, few lanes", loops(products), (0, 0), lambda n: (pareto(n, most=200), normal(0, n, 8, 8)), 16),
    Workload(
        "adaptive Runge-Kutta, mixed stiffness",
        loops(van_der_pol),
        (0, None),
        lambda n: (0.1 * 10 ** (3 * jnp.linspace(0, 1, n) ** 4), jnp.array([2.0, 0.0])),
        2048,
    ),
    Workload("no-U-turn sampler", loops(no_u_turn), (0, 0), lambda n: (keys(n), 10 ** -jnp.linspace(0.3, 2, n)), 2048),
    Workload(
        "sphere tracing", loops(sphere_tracing), (0, 0), lambda n: tuple(x / 2 for x in plane(n)), 256 * 256
    ),
    Workload("rejection sampling", loops(rejection), (0, 0), lambda n: (keys(n), jnp.linspace(-1, 2.5, n)), 16384),
    Workload("Newton from far", loops(newton), (0, 0), far, 65536),
    Workload("edit distance, bounded", loops(edit_distance), (0, 0, 0), words, 8192),
    Workload("events until a queue is empty", loops(queue), (0, 0), lambda n: (keys(n), jnp.linspace(0.1, 1, n)), 16384),
]  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------

SCHEDULES = ("lockstep", "compact", "refill", "auto")


def compiled(mapped: Any, args: tuple) -> tuple[Any, float, float]:
    """The compiled program, the seconds it takes to compile it, and the bytes it needs beside arguments and results."""
    taken, program = [], None
    for _ in range(3):
        lowered = jax.jit(lambda *args: mapped(*args)).lower(*args)
        start = time.process_time()
        program = lowered.compile()
        taken.append(time.process_time() - start)
    return program, statistics.median(taken), getattr(program.memory_analysis(), "temp_size_in_bytes", 0)


def by_turns(calls: dict[str, Callable], clock: Callable[[], float], budget: float = 6.0) -> dict[str, float]:
    """Median seconds of each call."""
    start = time.perf_counter()
    for call in calls.values():
        jax.block_until_ready(call())
    rounds = max(3, min(25, int(budget / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            jax.block_until_ready(call())
            times[name].append(clock() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def measure(workload: Workload, clock: Callable[[], float], schedules: tuple[str, ...] = SCHEDULES) -> Iterator[tuple]:
    """For jit(jax.vmap(f)) and for each schedule: the name, seconds to run and to compile, and bytes."""
    args = workload.args(workload.lanes)
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    programs = {"jax.vmap": compiled(jax.vmap(workload.fun(jax.vmap), workload.in_axes), args)}
    for schedule in schedules:
        mapped = minibatch.vmap(workload.fun(minibatch.vmap), workload.in_axes, divergence=schedule)
        programs[schedule] = compiled(mapped, args)
    calls = {name: lambda program=program: program(*args) for name, (program, *_) in programs.items()}
    seconds = by_turns(calls, clock)
    for name, (_, to_compile, size) in programs.items():
        yield name, seconds[name], to_compile, size


def row(workload: Workload, clock: Callable[[], float]) -> str:
    """A line of the table."""
    (_, theirs, their_compile, their_size), *ours = measure(workload, clock)
    ratios = [f"{theirs / seconds:.2f}" for _, seconds, *_ in ours]
    _, _, to_compile, size = ours[-1]
    cells = (
        workload.name, f"{workload.lanes}", f"{theirs * 1e3:.1f} ms", *ratios, f"{to_compile / their_compile:.1f}",
        f"{their_size / 1e6:.2f} → {size / 1e6:.2f} MB",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = f"| program | lanes | jit(jax.vmap) | {' | '.join(SCHEDULES)} | compile | memory |\n| --- | {'---: | ' * 8}".rstrip()


# --- the constants of the model ---------------------------------------------------------------------------------------


def per_step(body: Callable, x: Any, steps: int) -> float:
    """Seconds that a step takes in a loop."""
    run = jax.jit(lambda x: lax.fori_loop(0, steps, lambda _, x: body(x), x))
    return by_turns({"run": lambda: run(x)}, time.process_time, budget=1.0)["run"] / steps


def product(x: Any) -> Any:
    """A step that is not fused with others."""
    return jnp.tanh(MATRIX @ x)


def polynomial(x: Any) -> Any:
    """32 operations."""
    for _ in range(16):
        x = x * 0.99 + 0.01
    return x


def calibrate() -> dict[str, float]:
    """The constants of `Machine` for this one, in its order, but for the last two."""
    found = {**arithmetic(), **overheads(), **moves(), **kernels()}
    return {name: found[name] for name in Machine._fields if name in found}


def arithmetic(size: int = 4096) -> dict[str, float]:
    """What is done in a second, in cache."""

    x, many = jnp.full(size, 0.5), jnp.arange(1 << 20, dtype=jnp.float32)
    return {
        "flops": 32 * size / per_step(polynomial, x, 500),
        "transcendentals": 3 * size / per_step(lambda x: jnp.tanh(x) + jnp.exp(-x) + jnp.sin(x), x, 500),
        "bytes": 8 * many.size / per_step(lambda x: x[::-1] * 1.0, many, 20),
    }


def overheads(size: int = 4096) -> dict[str, float]:
    """What is paid beside: for a step, an equation that is not fused, one that is started in a branch, and a question."""
    few, x = tuple(jnp.ones((16, 8, 8)) for _ in range(2)), jnp.full(size, 0.5)
    step, both = per_step(lambda c: (product(c[0]), c[1]), few, 2000), per_step(lambda c: tuple(map(product, c)), few, 2000)

    def sines(size: int) -> float:
        return per_step(lambda x: jnp.sin(x) * 1.01, jnp.full(size, 0.5), 1000)

    def asked(x: Any) -> Any:
        return lax.cond((x > 2).any(), lambda x: x * 2, lambda x: x, x * 0.99)

    return {
        "step": step,
        "equation": max(0.0, both - step) / 3,
        "launch": max(0.0, 2 * sines(size // 2) - sines(size)) / 2,  # for a loop two are counted: its condition, too
        "ask": max(0.0, per_step(asked, x, 2000) - per_step(lambda x: x * 0.99, x, 2000)),
    }


def moves(size: int = 4096) -> dict[str, float]:
    """What it takes to take rows and put them, by row and by byte, and to find lanes their places."""
    numbers = jnp.asarray(np.random.default_rng(0).permutation(1 << 16)[:size], jnp.int32)
    turn = jnp.asarray(np.random.default_rng(0).integers(0, 3, size), jnp.int32)

    def moved(x: Any) -> Any:
        return x.at[numbers].set(x[numbers] + 1, unique_indices=True)

    def seated(turn: Any) -> Any:
        return turn + jnp.minimum(_seated(2, 128, size // 128 + 2, turn)[0], 0)

    def in_order(x: Any) -> Any:
        return jnp.sort(x * 77.7 % 1, 1)

    rows = per_step(moved, jnp.arange(1 << 16, dtype=jnp.float32), 50) / (2 * size)
    far = jnp.ones((1 << 16, 1024))
    x = jnp.asarray(np.random.default_rng(0).random((64, 1024)), jnp.float32)
    return {
        "row": rows,
        "move": 2 * 2 * far[:size].nbytes / per_step(moved, far, 10),
        "place": per_step(seated, turn, 20) / size,
        "compare": per_step(in_order, x, 5) / (x.size * 10),
    }


def kernels() -> dict[str, float]:
    """The work of a kernel up to which XLA leaves it to one thread, and what the library takes to factorize a small matrix."""
    matrices = jnp.broadcast_to(jnp.eye(2) + 0.1, (4096, 2, 2))

    def shared_out(size: int) -> bool:
        program = jax.jit(polynomial).lower(jnp.ones(size)).compile()
        return "outer_dimension_partitions" in program.as_text()

    most = 1 << 16
    alone = bisect.bisect_left(range(most), True, lo=64, key=shared_out)
    return {
        "alone": math.inf if alone == most else alone * (32 + 10 * 8),  # operations, and bytes in and out
        "call": per_step(lambda x: lax.linalg.lu(x)[0], matrices, 20) / len(matrices),
    }


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "divergence.md"
BEGIN, END = "<!-- written by bench/divergence.py -->", "<!-- until here -->"


def main() -> None:
    """Measure, and write the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only")
    options.add_argument("--calibrate", action="store_true")
    options.add_argument("--wall", action="store_true")
    given = options.parse_args()
    if given.calibrate:
        print("Machine(" + ", ".join(f"{name}={value:.1e}" for name, value in calibrate().items()) + ")")
        return
    clock = time.perf_counter if given.wall else time.process_time
    table = [HEAD]
    for workload in LOOPS:
        if given.only in (None, workload.name):
            table.append(row(workload, clock))
            print(table[-1], flush=True)
    if given.only is None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__} on {jax.default_backend()}"
        where = f"{datetime.date.today()}; {machine}. Seconds of the {'wall' if given.wall else 'CPU'}."
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, "", where, "", *table, "", END + rest.split(END)[1]]))


if __name__ == "__main__":
    main()
