"""Buffers of which a branch or a step changes a few elements: the update is what is chosen, not the whole buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import assert_close

import minibatch
from minibatch import _jax, vmap

LANES, LONG, STEPS = 3, 32, 12
X = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (LANES, STEPS)), jnp.float32)
START = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, (LANES, LONG)), jnp.float32)


def scanned(step: Callable) -> Callable:
    """A program of one lane that steps a buffer [LONG] and a place in it along x [STEPS]."""

    def program(buffer: Any, x: Any) -> Any:
        return lax.scan(lambda carry, x: (step(carry, x), carry[0][carry[1]]), (buffer, 0), x)

    return program


def push(carry: Any, x: Any) -> Any:
    return lax.cond(x > 0, lambda b, i: (b.at[i].set(jnp.sqrt(x)), i + 1), lambda b, i: (b, i), *carry)


def pushed_or_added(carry: Any, x: Any) -> Any:
    which = jnp.where(x > 0.3, 0, jnp.where(x > -0.3, 1, 2))
    return lax.switch(
        which,
        [
            lambda b, i: (b.at[i].set(x), i + 1),
            lambda b, i: (b.at[jnp.array([1, 3])].add(jnp.stack([x, b[i]])), i + 1),
            lambda b, i: (lax.dynamic_update_slice(b, jnp.log(b[2:4] + x * x), (i,)), i),
        ],
        *carry,
    )


def inside_another(carry: Any, x: Any) -> Any:
    inner = jax.jit(lambda b, i: lax.cond(x > 0.5, lambda: b.at[i].mul(x), lambda: b.at[i].max(x)))
    return lax.cond(x > 0, lambda b, i: (inner(b, i), i + 1), lambda b, i: (b.at[i + 1].min(x), i), *carry)


def weighed(carry: Any, x: Any) -> Any:
    w = jnp.arange(1.0, 4.0)
    return lax.cond(x > 0, lambda b, i: (b.at[i].set(jnp.sqrt(x) * w.sum()), i + 1), lambda b, i: (b, i), *carry)


def reshaped(carry: Any, x: Any) -> Any:
    """What is updated is not the buffer as it is."""
    b, i = carry
    return lax.cond(x > 0, lambda b: (b.reshape(8, 4).at[i % 8].set(x).reshape(-1), i + 1), lambda b: (b, i), b)


STEPPED = [push, pushed_or_added, inside_another, weighed]


def choices(jaxpr: Any) -> Iterator[int]:
    """How long what is chosen is, in lanes, of every choice in `jaxpr` that is not of a value and itself."""
    copies = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "detach":
            copies[eqn.outvars[0]] = eqn.invars[0]
        if eqn.primitive.name == "select_n":
            cases = {copies.get(v, v) if not hasattr(v, "val") else v.val for v in eqn.invars[1:]}
            if len(cases) > 1:
                yield int(np.prod(eqn.outvars[0].aval.shape[1:]))
        for inner in _jax.inner_jaxprs(eqn):
            yield from choices(_jax.open_jaxpr(inner))


@pytest.mark.parametrize("step", STEPPED)
def test_no_choice_is_between_whole_buffers(step: Callable) -> None:
    program = scanned(step)
    assert max(choices(jax.make_jaxpr(vmap(program))(START, X).jaxpr)) < LONG
    assert max(choices(jax.make_jaxpr(jax.vmap(program))(START, X).jaxpr)) == LONG


@pytest.mark.parametrize(("step", "axis"), [*((step, 0) for step in (*STEPPED, reshaped)), (pushed_or_added, 1), (push, None)])
def test_lanes_agree(step: Callable, axis: int | None) -> None:
    program = jax.jit(scanned(step))
    start = START[0] if axis is None else jnp.moveaxis(START, 0, axis)
    found = vmap(program, (axis, 0))(start, X)
    wanted = [program(START[0 if axis is None else i], X[i]) for i in range(LANES)]
    assert_close(found, jax.tree.map(lambda *xs: jnp.stack(xs), *wanted), 1e-6)


@pytest.mark.parametrize("size", [0, 1])
def test_few_lanes(size: int) -> None:
    program = scanned(pushed_or_added)
    assert_close(vmap(program)(START[:size], X[:size]), jax.vmap(program)(START[:size], X[:size]), 1e-6)


@pytest.mark.parametrize("step", [push, pushed_or_added, weighed])
def test_derivatives_agree_though_what_is_not_meant_gives_nan(step: Callable) -> None:
    program = scanned(step)
    slope = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(program(*args)[0][0])), (0, 1)))
    total = lambda *args: jnp.sum(jnp.sin(vmap(program)(*args)[0][0]))
    lanes = [slope(START[i], X[i]) for i in range(LANES)]
    wanted = jax.tree.map(lambda *xs: jnp.stack(xs), *lanes)
    assert np.isfinite(wanted[0]).all()
    assert_close(jax.jit(jax.grad(total, (0, 1)))(START, X), wanted, 1e-5)
    second = jax.jit(jax.grad(lambda s, x: jnp.sum(slope(s, x)[1] ** 2)))
    lanes = jnp.stack([second(START[i], X[i]) for i in range(LANES)])
    assert_close(jax.jit(jax.grad(lambda s: jnp.sum(vmap(slope)(s, X)[1] ** 2)))(START), lanes, 1e-4)


def table(n: Any, x: Any) -> Any:
    """A table filled up to where x or n stop it."""

    def step(carry: Any) -> Any:
        i, b, s = carry
        b = lax.cond(s > 1, lambda: b.at[i].set(s), lambda: lax.dynamic_update_index_in_dim(b, -s, i, 0))
        return i + 1, b, s * 1.5 + b[i] / 10

    return lax.while_loop(lambda carry: (carry[0] < n) & (carry[2] < 50), step, (0, x, x[0]))


@pytest.mark.parametrize("schedule", ["lockstep", "compact", "refill"])
def test_loop_whose_lanes_stop_at_different_times(schedule: str) -> None:
    n = jnp.array([2, 20, 0])
    one = jax.jit(table)
    wanted = jax.tree.map(lambda *xs: jnp.stack(xs), *[one(n[i], START[i]) for i in range(LANES)])
    assert_close(vmap(table, divergence=schedule)(n, START), wanted, 1e-6)
    if schedule == "lockstep":
        assert max(choices(jax.make_jaxpr(vmap(table))(n, START).jaxpr)) == 1
    tangents = lambda f: jax.jit(lambda x: jax.jvp(lambda x: f(n, x)[1], (x,), (jnp.ones_like(x),))[1])(START)
    assert_close(tangents(vmap(table, divergence=schedule)), tangents(jax.vmap(table)), 1e-5)


def weighed_by(table: Any, buffer: Any, x: Any, w: Any) -> Any:
    """A buffer and a table that are read in a branch, beside an array that all lanes share."""

    def step(carry: Any, x: Any) -> Any:
        b, i = carry
        taken = lambda b: b.at[i].set(jnp.sqrt(x) * b[i + 1] * (w * table[i]).sum() + table[i + 1])
        return (lax.cond(x > 0, taken, lambda b: b, b), i + 1), None

    return lax.scan(step, (buffer, 0), x)[0][0]


def test_what_is_read_of_a_buffer_is_lent_to_lanes_that_sit_out() -> None:
    args = START * 2, START, X, jnp.array([0.5, 1.0])
    axes = (0, 0, 0, None)
    assert max(choices(jax.make_jaxpr(vmap(weighed_by, axes))(*args).jaxpr)) < LONG
    lanes = jax.jit(lambda *args: jnp.stack([weighed_by(*(x[i] for x in args[:3]), args[3]) for i in range(LANES)]))
    assert_close(vmap(weighed_by, axes)(*args), lanes(*args), 1e-6)
    slopes = lambda f: jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3)))(*args)
    wanted = slopes(lanes)
    assert all(np.isfinite(x).all() for x in wanted)
    assert_close(slopes(vmap(weighed_by, axes)), wanted, 1e-4)


def sifted(heap: Any, n: Any, x: Any) -> Any:
    """x let in at the end of a heap of n, and up to its place."""
    up = lambda c: (c[0].at[c[1]].set(c[0][(c[1] - 1) // 2]).at[(c[1] - 1) // 2].set(c[0][c[1]]), (c[1] - 1) // 2)
    return lax.while_loop(lambda c: (c[1] > 0) & (c[0][c[1]] < c[0][(c[1] - 1) // 2]), up, (heap.at[n].set(x), n))[0]


@pytest.mark.parametrize("loop", [True, False])
def test_heap(loop: bool) -> None:
    """A loop inside must only see what it was meant for, and stops in each lane by itself."""

    def program(x: Any) -> Any:
        step = lambda n, h, x: (n + (x > -0.2), lax.cond(x > -0.2, lambda h: sifted(h, n, x), lambda h: h, h))
        if loop:  # ends where the lane's own number of elements is there
            end = lambda c: (c[0] < len(x)) & (c[2] < 6)
            stepped = lambda c: (c[0] + 1, *(lambda n, h: (h, n))(*step(c[2], c[1], x[c[0]])))
            return lax.while_loop(end, stepped, (0, jnp.full(LONG, jnp.inf), 0))
        return lax.scan(lambda c, x: (step(*c, x), None), (0, jnp.full(LONG, jnp.inf)), x)[0]

    one = jax.jit(program)
    wanted = jax.tree.map(lambda *xs: jnp.stack(xs), *map(one, X))
    for schedule in ("auto", "refill"):
        assert_close(vmap(program, divergence=schedule)(X), wanted, 0)


def test_buffer_that_two_outputs_come_from() -> None:
    f = lambda p, b, i: lax.cond(p, lambda: (b.at[i].set(1), b.at[i + 1].set(2), b), lambda: (b, b, b * 2))
    args = jnp.array([True, False, True]), START, jnp.arange(3)
    assert_close(vmap(f)(*args), jax.vmap(f)(*args), 1e-6)


def test_buffer_that_is_also_handed_out_as_it_was() -> None:
    f = lambda p, b, i: lax.cond(p, lambda: (b.at[i].set(1), b, b[i]), lambda: (b, b, b[0]))
    args = jnp.array([True, False, True]), START, jnp.arange(3)
    assert_close(vmap(f)(*args), jax.vmap(f)(*args), 1e-6)


def test_lanes_that_meet_see_what_jax_has_them_see() -> None:
    def f(n: Any, b: Any) -> Any:
        step = lambda carry: (carry[0] + 1, carry[1].at[carry[0]].set(lax.psum(carry[1][0], "i")))
        return lax.while_loop(lambda carry: carry[0] < n, step, (0, b))

    args = jnp.array([1, 3, 2]), START
    assert_close(vmap(f, axis_name="i")(*args), jax.vmap(f, axis_name="i")(*args), 1e-5)


def test_reference_written_at_an_index_in_a_branch() -> None:
    def f(p: Any, b: Any, i: Any) -> Any:
        ref = jax.new_ref(b)

        def write() -> None:
            ref[i] = ref[i + 1] * 3

        lax.cond(p, write, lambda: None)
        return ref[...]

    args = jnp.array([True, False, True]), START, jnp.arange(3)
    wanted = jnp.stack([b.at[i].set(b[i + 1] * 3) if p else b for p, b, i in zip(*args, strict=True)])
    assert_close(vmap(f)(*args), wanted, 1e-6)
    assert max(choices(jax.make_jaxpr(vmap(f))(*args).jaxpr), default=0) < LONG


def test_reference_made_in_a_loop_that_also_updates_a_buffer() -> None:
    def f(n: Any, b: Any) -> Any:
        def step(carry: Any) -> Any:
            ref = jax.new_ref(b[:2])
            ref[0] = ref[0] + carry[1][carry[0]]
            return carry[0] + 1, carry[1].at[carry[0]].set(ref[0])

        return lax.while_loop(lambda carry: carry[0] < n, step, (0, b))

    args = jnp.array([1, 3, 0]), START
    for schedule in ("lockstep", "refill"):
        assert_close(vmap(f, divergence=schedule)(*args), jax.vmap(f)(*args), 1e-6)


def test_schedule_of_the_untaken() -> None:
    """A branch that is skipped if nobody takes it hands its buffer on."""

    def f(p: Any, b: Any, i: Any, m: Any) -> Any:
        heavy = lambda: b.at[i].set(jnp.linalg.inv(m + 10 * jnp.eye(24)).sum())
        return lax.cond(p, heavy, lambda: b)

    args = START, jnp.arange(3), jnp.ones((3, 24, 24))
    for p in (jnp.zeros(3, bool), jnp.array([True, False, True])):
        with minibatch.divergence("select"):
            assert_close(vmap(f)(p, *args), jax.vmap(f)(p, *args), 1e-4)
