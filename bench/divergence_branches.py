"""Programs whose lanes take different branches, timed by schedule: `python bench/divergence_branches.py` prints a table.

Times are those of the CPU; the sides take turns. `--only NAME` measures one.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from divergence import compiled
from jax import lax
from workloads import Workload, normal

import minibatch

MATRIX = normal(1, 64, 64) / 8


def share(part: float, lanes: int) -> Any:
    """[lanes] of which this part is true, anywhere."""
    return jnp.asarray(np.random.default_rng(0).random(lanes) < part)


def iterated(x: Any) -> Any:
    """200 steps, next to nothing each, of a vector [8]."""
    return lax.fori_loop(0, 200, lambda i, x: jnp.sin(x) * 1.01, x)


def network(x: Any) -> Any:
    """Ten layers of a network with the same weights."""
    return lax.fori_loop(0, 10, lambda i, x: jnp.tanh(MATRIX @ x), x)


def sometimes(branch: Callable) -> Callable:
    """`branch` for some lanes, nothing for others."""
    return lambda vmap: lambda taken, x: lax.cond(taken, branch, lambda x: x, x)


def on_shared(taken: Any, x: Any, w: Any) -> Any:
    """A branch that multiplies a matrix which all lanes share."""
    return lax.cond(taken, lambda x, w: (w @ w).sum() * x, lambda x, w: x, x, w)


def six(number: Any, x: Any) -> Any:
    """Six branches that cost alike."""

    def steps(by: float) -> Callable:
        return lambda x: lax.fori_loop(0, 200, lambda i, x: jnp.sin(x) * by, x)

    return lax.switch(number, [steps(1 + 0.01 * k) for k in range(6)], x)


def loop_in_branch(taken: Any, trips: Any, x: Any) -> Any:
    """As many products of matrices as the lane says, in a branch."""
    w = MATRIX[:8, :8]

    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < trips, lambda c: (c[0] + 1, jnp.tanh(w @ c[1]) + 0.1), (0, x))[1]

    return lax.cond(taken, loop, lambda x: x, x)


def trips(lanes: int) -> Any:
    """[lanes] of trip counts with a heavy tail, mean 35, at most 5000."""
    drawn = np.random.default_rng(1).pareto(1.2, lanes) + 1
    return jnp.asarray(np.clip(drawn * 35 / drawn.mean(), 1, 5000), jnp.int32)


def vectors(part: float, width: int = 8) -> Callable:
    """Arguments for a branch of vectors [width] that this part of the lanes takes."""
    return lambda n: (share(part, n), normal(0, n, width))


def scalars(part: float) -> Callable:
    """Likewise of numbers."""
    return lambda n: (share(part, n), normal(0, n))


WORKLOADS = [
    *(Workload(f"{part:.0%} take a loop", sometimes(iterated), (0, 0), vectors(part), 4096) for part in (0, 0.01, 0.1, 0.5, 1)),
    *(Workload(f"{part:.0%} take a network", sometimes(network), (0, 0), vectors(part, 64), 4096) for part in (0.01, 0.5, 1)),
    Workload(
        "shared 256x256 operand", lambda vmap: on_shared, (0, 0, None),
        lambda n: (*scalars(0.5)(n), normal(2, 256, 256)), 64,
    ),
    Workload("six branches", lambda vmap: six, (0, 0), lambda n: (jnp.arange(n) * 7 % 6, normal(0, n, 8)), 4096),
    Workload(
        "a while in a 5% branch", lambda vmap: loop_in_branch, (0, 0, 0),
        lambda n: (share(0.05, n), trips(n), normal(0, n, 8, 8)), 4096,
    ),
    Workload("cheap branches", sometimes(lambda x: 2 * x + 1), (0, 0), scalars(0.5), 65536),
    Workload("cheap functions", sometimes(lambda x: jnp.exp(-x * x) * jnp.sin(x)), (0, 0), scalars(0.5), 65536),
    Workload("16 lanes", sometimes(iterated), (0, 0), vectors(0.5), 16),
]  # fmt: skip
WITHOUT_GRADIENT = {"a while in a 5% branch"}


def total(fun: Callable, workload: Workload) -> Callable:
    """The gradient of all that the lanes make, with respect to their last mapped argument."""
    which = max(i for i, axis in enumerate(workload.in_axes) if axis is not None)
    return jax.grad(lambda *args: (fun(*args) ** 2).sum(), which)


def by_turns(calls: dict[str, Callable], budget: float = 4.0) -> dict[str, float]:
    """Median seconds of the CPU for each call."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + budget
    while min(map(len, taken.values())) < 5 or (time.perf_counter() < end and len(taken["auto"]) < 100):
        for name, call in calls.items():
            start = time.process_time()
            jax.block_until_ready(call())
            taken[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def row(workload: Workload, gradient: bool) -> str:
    """A line of the table."""
    args, programs = workload.args(workload.lanes), {}
    for name in ("jit(jax.vmap)", "select", "partition", "auto"):
        if name == "jit(jax.vmap)":
            mapped: Any = jax.vmap(workload.fun(jax.vmap), workload.in_axes)
        else:
            mapped = minibatch.vmap(workload.fun(minibatch.vmap), workload.in_axes, divergence=name)
        programs[name] = compiled(total(mapped, workload) if gradient else mapped, args)
    times = by_turns({name: lambda program=program: program(*args) for name, (program, *_) in programs.items()})
    theirs = times.pop("jit(jax.vmap)")
    _, their_compile, their_size = programs["jit(jax.vmap)"]
    _, to_compile, size = programs["auto"]
    cells = (
        f"{workload.name}{', gradient' if gradient else ''}", f"{workload.lanes}", f"{theirs * 1e3:.2f} ms",
        *(f"{theirs / ours:.2f}" for ours in times.values()),
        f"{to_compile / their_compile:.1f}",
        f"{their_size / 1e6:.2f} → {size / 1e6:.2f} MB",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only")
    only = options.parse_args().only
    print(f"{platform.machine()}, JAX {jax.__version__} on {jax.default_backend()}; times faster than jit(jax.vmap).\n")
    print("| program | lanes | jit(jax.vmap) | select | partition | auto | compile | memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    for workload in WORKLOADS:
        for gradient in (False, True)[: 1 + (workload.name not in WITHOUT_GRADIENT)]:
            if only in (None, workload.name):
                print(row(workload, gradient), flush=True)


if __name__ == "__main__":
    main()
