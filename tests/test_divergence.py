"""Schedules: the same answers by each, for the lanes alone, and the words that choose one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minibatch
from minibatch import vmap
from minibatch._divergence import LOOPS, Divergence, chosen
from minibatch.schedule import choose, stages
from minibatch.schedule.loop import count

# --- the words --------------------------------------------------------------------------------------------------------


def test_words_of_a_call_go_before_those_of_the_region() -> None:
    assert chosen(None) == Divergence("auto", "auto")
    assert chosen(("compact", "select")) == Divergence("compact", "select")
    with minibatch.divergence("refill", "partition"):
        assert chosen(None) == Divergence("refill", "partition")
        assert chosen("lockstep") == Divergence("lockstep", "partition")
        assert chosen("auto") == Divergence()
        with minibatch.divergence("select"):
            assert chosen(None) == Divergence("refill", "select")
    assert chosen(None) == Divergence()


def test_region_is_that_of_its_thread() -> None:
    seen = []
    with minibatch.divergence("refill"):
        thread = threading.Thread(target=lambda: seen.append(chosen(None)))
        thread.start()
        thread.join()
    assert seen == [Divergence()]


@pytest.mark.parametrize("compile", [True, False])
def test_program_is_traced_anew_where_the_region_differs(compile: bool) -> None:
    calls = []

    @jax.jit
    def mapped(x: Any) -> Any:
        calls.append(chosen(None).loops)
        return vmap(lambda x: lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x), compile=compile)(x)

    x = jnp.arange(1, 4)
    for words in ((), ("refill",), (), ("refill",)):
        with minibatch.divergence(*words):
            assert mapped(x).tolist() == [16, 16, 12]
    assert calls == ["auto", "refill"]


# --- loops: each lane's own answer, by every schedule -------------------------------------------------------------------

A = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)).astype("f") * 0.4)


def steps_and_state(n: Any, x: Any, w: Any) -> Any:
    """As many steps as the lane says, with a const of its own, one that is shared, and a carry that is handed through."""
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(A @ c[1]) + w * x.sum(), c[2]), (0, x, w))


def collatz(n: Any, x: Any, w: Any) -> Any:
    """Integers, exact."""
    return lax.while_loop(lambda c: c[0] > 1, lambda c: (jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1] + 1), (n + 1, 0))[1]


def trips(n: Any, x: Any, w: Any = 0) -> Any:
    """A fori_loop."""
    return lax.fori_loop(0, n, lambda i, x: x * 0.9 + i, x)


def scan_of_loops(n: Any, x: Any, w: Any) -> Any:
    """A loop in the body of a scan."""
    return lax.scan(lambda c, k: (trips((n * k) % 7, c), c.sum()), x, jnp.arange(4))


def loop_of_loops(n: Any, x: Any, w: Any) -> Any:
    """Both of as many rounds as the lane says, the inner of none where the lane has stopped."""
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, trips(n - c[0], c[1])), (0, x))


def loop_in_a_branch(n: Any, x: Any, w: Any) -> Any:
    """For some lanes only; for the others it would not end."""
    halve = lambda: lax.while_loop(lambda c: c[0] != 0, lambda c: (c[0] - 2, c[1] * 0.5), (n, x))[1]
    return lax.cond(n % 2 == 0, halve, lambda: x)


def branch_in_a_loop(n: Any, x: Any, w: Any) -> Any:
    """Each step by one of two ways."""
    step = lambda c: (c[0] + 1, lax.cond((c[0] * n) % 3 == 0, lambda x: jnp.sin(x), lambda x: x * 0.5 + n, c[1]))
    return lax.while_loop(lambda c: c[0] < n, step, (0, x))


def walk(n: Any, x: Any, w: Any) -> Any:
    """A random walk of as many steps as it takes: typed keys among the carries."""

    def step(c: Any) -> Any:
        key, y, k = c
        key, sub = jax.random.split(key)
        return key, y + jax.random.randint(sub, (), -1, 3), k + 1

    key, y, k = lax.while_loop(lambda c: c[1] < n, step, (jax.random.fold_in(jax.random.key(3), n), 0, 0))
    return jax.random.key_data(key), y, k


def not_meant_for_others(n: Any, x: Any, w: Any) -> Any:
    """A step that is NaN, and does not end, for lanes that have stopped."""

    def step(c: Any) -> Any:
        odd = lax.while_loop(lambda k: k % 2 == 0, lambda k: k // 2, c[0])
        return c[0] - 1, c[1] + jnp.sqrt(c[0] - 0.5) / odd

    return lax.while_loop(lambda c: c[0] > 0, step, (n, x))


def from_shared_start(n: Any, x: Any, w: Any) -> Any:
    """Only the predicate makes the lanes differ."""
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * w), (0, w))


PROGRAMS = {
    f.__name__: f
    for f in (
        steps_and_state, collatz, trips, scan_of_loops, loop_of_loops, loop_in_a_branch, branch_in_a_loop, walk,
        not_meant_for_others, from_shared_start,
    )
}  # fmt: skip


def arguments(size: int, seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    n = np.minimum(rng.pareto(0.7, size) * 2, 40).astype(np.int32)
    return jnp.asarray(n), jnp.asarray(rng.normal(size=(size, 3)).astype("f"))


def of_lanes(f: Callable, in_axes: Any, *args: Any) -> Any:
    """The stack of the lanes' own answers, compiled once."""
    f, size = jax.jit(f), len(args[0])
    rows = [f(*(x if d is None else x[i] for x, d in zip(args, in_axes, strict=True))) for i in range(size)]
    return jax.tree.map(lambda *rows: np.stack(rows), *rows)


def agree(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("schedule", LOOPS[1:])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_schedule_gives_each_lane_its_own_answer(name: str, schedule: str) -> None:
    n, x = arguments(13)
    w = jnp.float32(0.5)
    found = vmap(PROGRAMS[name], (0, 1, None), divergence=schedule)(n, jnp.moveaxis(x, 0, 1), w)
    agree(found, of_lanes(PROGRAMS[name], (0, 0, None), n, x, w))


@pytest.mark.parametrize("soon", [0.0, np.inf])
@pytest.mark.parametrize("name", ["steps_and_state", "walk", "not_meant_for_others"])
def test_a_window_from_the_start_and_after_steps_of_all(monkeypatch: pytest.MonkeyPatch, name: str, soon: float) -> None:
    monkeypatch.setattr(choose, "SOON", soon)
    n, x = arguments(13, seed=1)
    found = vmap(PROGRAMS[name], (0, 0, None), divergence="refill")(n, x, jnp.float32(0.5))
    agree(found, of_lanes(PROGRAMS[name], (0, 0, None), n, x, jnp.float32(0.5)))


@pytest.mark.parametrize("asked", [0, 4, 17, 18])
def test_seats_are_taken_in_order(asked: int) -> None:
    """One by one, as on a CPU, and at once, as elsewhere."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        waits, live = rng.random(18) < 0.1 * seed, rng.random(7) < 0.5
        place = np.where(live, rng.permutation(18)[:7], 18).astype(np.int32)
        coming = [i for i in range(asked, 18) if waits[i]]
        free = np.flatnonzero(~live)
        wanted = place.copy()
        wanted[free] = (coming + [18] * 7)[: len(free)]
        for seated in (stages._seated, stages.at_once):
            begun, alive, found = jax.jit(seated)(waits, jnp.int32(asked), jnp.float32(live.sum()), place, live)
            np.testing.assert_array_equal(found, wanted)
            assert alive == (wanted < 18).sum()
            rest = [i for i in range(int(begun), 18) if waits[i]]
            assert rest == coming[len(free) :]


def test_who_is_live_at_first_is_asked_of_what_all_lanes_start_with() -> None:
    """Repeated for each lane, it would be computed so many times, and be folded by XLA, which takes long."""

    def f(n: Any) -> Any:
        return jax.lax.while_loop(lambda c: c.min() < n, lambda c: c + 1, jnp.arange(5))

    eqns = vmap(f, divergence="lockstep").jaxpr(jnp.arange(3)).eqns
    assert [eqn.invars[0].aval.shape for eqn in eqns if eqn.primitive.name == "reduce_min"] == [(5,)]
    agree(vmap(f)(jnp.arange(3)), of_lanes(f, (0,), jnp.arange(3)))


@pytest.mark.parametrize("size", [1, 15, 100, 10_000, 70_001])
def test_lanes_are_counted(size: int) -> None:
    live = np.random.default_rng(0).random(size) < 0.7
    assert jax.jit(count)(live) == live.sum()


@pytest.mark.parametrize("size", [0, 1, 2, 5])
@pytest.mark.parametrize("schedule", LOOPS[1:])
def test_few_lanes(size: int, schedule: str) -> None:
    n, x = arguments(5)
    found = vmap(steps_and_state, (0, 0, None), divergence=schedule)(n[:size], x[:size], 0.5)
    agree(found, jax.tree.map(lambda y: y[:size], of_lanes(steps_and_state, (0, 0, None), n, x, 0.5)))


@pytest.mark.parametrize("schedule", LOOPS)
def test_lanes_that_never_start(schedule: str) -> None:
    n, x = jnp.zeros(9, jnp.int32), jnp.ones((9, 3))
    agree(vmap(steps_and_state, (0, 0, None), divergence=schedule)(n, x, 0.5)[1], x)


@pytest.mark.parametrize("schedule", LOOPS)
def test_maps_of_maps(schedule: str) -> None:
    n, x = arguments(12)
    with minibatch.divergence(schedule):
        found = vmap(vmap(steps_and_state, (0, 0, None)), (0, 0, None))(n.reshape(3, 4), x.reshape(3, 4, 3), 0.5)
        outside = jax.vmap(vmap(steps_and_state, (0, 0, None)), (0, 0, None))(n.reshape(3, 4), x.reshape(3, 4, 3), 0.5)
        inside = vmap(jax.vmap(steps_and_state, (0, 0, None)), (0, 0, None))(n.reshape(3, 4), x.reshape(3, 4, 3), 0.5)
    wanted = jax.tree.map(lambda y: y.reshape(3, 4, *y.shape[1:]), of_lanes(steps_and_state, (0, 0, None), n, x, 0.5))
    for each in (found, outside, inside):
        agree(each, wanted)


@pytest.mark.parametrize("schedule", LOOPS)
def test_forward_derivatives_through_every_schedule(schedule: str) -> None:
    n, x = arguments(10)
    push = lambda n, x, v: jax.jvp(lambda x: steps_and_state(n, x, 0.5 * x.sum())[1:], (x,), (v,))
    wanted = of_lanes(push, (0, 0, 0), n, x, x + 1)
    mapped = vmap(lambda n, x: steps_and_state(n, x, 0.5 * x.sum())[1:], divergence=schedule)
    agree(jax.jit(lambda n, x, v: jax.jvp(lambda x: mapped(n, x), (x,), (v,)))(n, x, x + 1), wanted)
    agree(vmap(push, divergence=schedule)(n, x, x + 1), wanted)


@pytest.mark.parametrize("schedule", LOOPS)
def test_gradient_past_a_loop_that_only_counts(schedule: str) -> None:
    """The loop reads what is differentiated, as a const and as a carry, but gives back integers: reverse mode needs no loop."""

    def f(n: Any, x: Any) -> Any:
        k = lax.while_loop(lambda c: c[0] * x[0] ** 2 < n, lambda c: (c[0] + 1 + jnp.int32(x[1] > 9), c[1]), (1, x))[0]
        return (k * x).sum()

    n, x = arguments(9)
    x = x + jnp.sign(x) * 0.3
    total = lambda x: vmap(f, divergence=schedule)(n, x).sum()
    agree(jax.jit(jax.grad(total))(x), of_lanes(jax.grad(f, 1), (0, 0), n, x))
