"""Branches and loops whose lanes diverge: what runs, for whom, on what, and what it costs."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minibatch
from minibatch import vmap

X = jnp.asarray([-1.0, 0.0, 4.0, 9.0])


def primitives(jaxpr: Any) -> collections.Counter:
    """How often each primitive appears in `jaxpr`, inner jaxprs included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple) else (param,):
                if hasattr(inner, "eqns"):
                    found += primitives(inner)
    return found


def shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """The shapes of all that `jaxpr` computes."""
    return {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars}


class Host:
    """A host function that notes what it was called with."""

    def __init__(self, answer: Callable = lambda x: x) -> None:
        self.calls: list = []
        self.answer = answer

    def __call__(self, x: Any) -> Any:
        self.calls.append(float(x))
        return np.asarray(self.answer(x), np.float32)

    def seen(self) -> list:
        jax.effects_barrier()
        return sorted(self.calls)


# --- what stays shared ------------------------------------------------------------------------------------------------


def test_operand_shared_by_all_lanes_stays_shared_in_a_mapped_cond() -> None:
    w = jnp.ones((5, 5))
    f = lambda x, w: lax.cond(x > 0, lambda x, w: x * (w @ w).sum(), lambda x, w: x, x, w)
    assert not any(shape[1:] == (5, 5) for shape in shapes(vmap(f, (0, None)).jaxpr(X, w)))


def test_cond_on_what_all_lanes_share_stays_a_cond() -> None:
    f = lambda x, w: lax.cond(w > 0, jnp.sin, jnp.cos, x)
    found = primitives(vmap(f, (0, None)).jaxpr(X, jnp.float32(1)))
    assert found["cond"] == 1 and found["select_n"] == 0


def test_output_that_no_branch_makes_differ_stays_shared() -> None:
    f = lambda x, w: lax.cond(w > 0, lambda: (x, w, w), lambda: (w, w + 1, x))
    out = vmap(f, (0, None), minibatch.if_batched(0))(X, jnp.float32(1))
    assert [y.shape for y in out] == [(4,), (), (4,)]


def test_output_that_every_branch_hands_through_is_the_operand() -> None:
    f = lambda x, w: lax.cond(x > 0, lambda w: (w, x), lambda w: (w, -x), w)
    kept, _ = vmap(f, (0, None), minibatch.if_batched(0))(X, jnp.ones(3))
    assert kept.shape == (3,)


def test_carry_that_no_step_makes_differ_stays_shared() -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: ((c[0] + 1, c[1] * x, c[2]), c[0]), (0, x, w), None, length=3)

    (n, y, w), ns = vmap(f, (0, None), minibatch.if_batched(0))(X, jnp.ones(2))
    assert (n.shape, y.shape, w.shape, ns.shape) == ((), (4,), (2,), (3,))


def test_carry_handed_through_a_loop_whose_lanes_diverge_stays_shared() -> None:
    f = lambda n, w: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1]), (0, w))
    n, w = vmap(f, (0, None), minibatch.if_batched(0))(jnp.arange(4), jnp.ones(2))
    np.testing.assert_array_equal(n, [0, 1, 2, 3])
    assert w.shape == (2,)


def test_scanned_arrays_are_not_moved() -> None:
    f = lambda xs: lax.scan(lambda c, x: (c + x.sum(), None), 0.0, xs)[0]
    assert primitives(vmap(f, in_axes=1).jaxpr(jnp.ones((5, 4, 2))))["transpose"] == 0
    assert primitives(vmap(f, in_axes=2).jaxpr(jnp.ones((5, 2, 4))))["transpose"] == 0


# --- a branch sees only what is meant for it --------------------------------------------------------------------------


def test_untaken_branch_with_a_host_call_is_not_run() -> None:
    host = Host()
    ask = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x, vmap_method="sequential")
    f = vmap(lambda x: lax.cond(x > 5, ask, lambda x: x, x))
    np.testing.assert_array_equal(f(X[:3]), X[:3])
    assert host.seen() == []
    np.testing.assert_array_equal(f(X), X)
    assert set(host.seen()) == {9.0}


def test_loop_in_a_branch_ends_though_it_would_not_for_other_lanes() -> None:
    countdown = lambda n: lax.while_loop(lambda n: n != 0, lambda n: n - 2, n)
    f = lambda n: lax.cond(n % 2 == 0, countdown, lambda n: n, n)
    np.testing.assert_array_equal(vmap(f)(jnp.asarray([4, 3, 1])), [0, 3, 1])
    np.testing.assert_array_equal(vmap(f)(jnp.asarray([5, 3, 1])), [5, 3, 1])


def test_loop_in_a_loop_ends_though_it_would_not_for_lanes_that_have_stopped() -> None:
    inner = lambda n: lax.while_loop(lambda k: k != 0, lambda k: k - 2, n)
    f = lambda n: lax.while_loop(lambda s: s[0] % 2 == 0, lambda s: (s[0] + 1 + inner(s[0]), s[1] + 1), (n, 0))
    np.testing.assert_array_equal(vmap(f)(jnp.asarray([3, 4, 7]))[1], [0, 1, 0])


@pytest.mark.parametrize("compile", [True, False])
def test_no_nan_is_made_that_the_lanes_do_not_make(compile: bool) -> None:
    f = vmap(lambda x: lax.cond(x > 0, lambda x: jnp.sqrt(x) / x, lambda x: x, x), compile=compile)
    g = vmap(lambda x: lax.while_loop(lambda x: x > 1, lambda x: jnp.sqrt(x - 1), x), compile=compile)
    with jax.debug_nans(True):
        np.testing.assert_allclose(f(X), [-1, 0, 0.5, 1 / 3], rtol=1e-6)
        np.testing.assert_allclose(f(X[:2]), [-1, 0])
        np.testing.assert_allclose(g(X), [jnp.float32(r) for r in (-1, 0, np.sqrt(np.sqrt(3) - 1), g(X[3:])[0])], rtol=1e-6)


# --- derivatives ------------------------------------------------------------------------------------------------------


def root(x: Any, w: Any) -> Any:
    """A branch that is singular where it is not taken, in its own operand and in one that the lanes share."""
    return lax.cond(x > 0, lambda x, w: jnp.sqrt(x) * jnp.sqrt(w), lambda x, w: x * w, x, w)


@pytest.mark.parametrize("order", [1, 2])
def test_gradient_has_no_nan_from_a_branch_not_taken(order: int) -> None:
    def lanes(x: Any) -> Any:
        return jnp.asarray([g(v) for v in x])

    f = lambda x: root(x, 1.0)
    g = jax.grad(f) if order == 1 else jax.grad(jax.grad(f))
    total = lambda x: vmap(f)(x).sum()
    mapped = jax.grad(total) if order == 1 else lambda x: jax.grad(lambda x: jax.grad(total)(x).sum())(x)
    np.testing.assert_allclose(mapped(X), lanes(X), rtol=1e-6)
    np.testing.assert_allclose(vmap(g)(X), lanes(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(mapped)(X[:2]), lanes(X[:2]), rtol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("x", [X, X[:2]], ids=["some", "none"])
def test_gradient_of_shared_operand_has_no_nan_from_a_branch_not_taken(order: int, x: Any) -> None:
    f = lambda x, w: lax.cond(x > 0, lambda w: x * jnp.sqrt(w), lambda w: w * x, w)
    total = lambda w: vmap(f, (0, None))(x, w).sum()
    each = lambda w: sum(f(v, w) for v in x)
    w = jnp.float32(0.0 if len(x) == 2 else 4.0)
    g, h = (jax.grad(total), jax.grad(each)) if order == 1 else (jax.grad(jax.grad(total)), jax.grad(jax.grad(each)))
    np.testing.assert_allclose(g(w), h(w), rtol=1e-6)


def test_derivatives_along_a_loop_whose_lanes_diverge() -> None:
    f = lambda n, x: lax.fori_loop(0, n, lambda i, x: jnp.sin(x) * 2, x)
    n, x = jnp.asarray([0, 3, 1]), jnp.asarray([0.1, 0.2, 0.3])
    _, found = jax.jvp(lambda x: vmap(f)(n, x), (x,), (jnp.ones(3),))
    wanted = [jax.jvp(lambda x, k=k: f(k, x), (v,), (1.0,))[1] for k, v in zip(n, x, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


# --- what happens beside the computation ------------------------------------------------------------------------------


def test_print_in_a_branch_is_for_the_lanes_that_take_it() -> None:
    host = Host()
    vmap(lambda x: lax.cond(x > 0, lambda: jax.debug.callback(host, x), lambda: None))(X)
    assert host.seen() == [4.0, 9.0]


def test_prints_in_a_loop_are_for_lanes_that_have_not_stopped_and_in_order() -> None:
    calls = []

    def f(n: Any) -> Any:
        def step(i: Any) -> Any:
            jax.debug.callback(lambda *x: calls.append(tuple(map(int, x))), n, i, ordered=True)
            return i + 1

        return lax.while_loop(lambda i: i < n, step, 0)

    np.testing.assert_array_equal(vmap(f)(jnp.asarray([2, 0, 1])), [2, 0, 1])
    jax.effects_barrier()
    assert calls == [(2, 0), (2, 1), (1, 0)]
    vmap(f)(jnp.zeros(0, jnp.int32))
    jax.effects_barrier()
    assert len(calls) == 3


def test_host_is_asked_only_for_the_lanes_that_take_the_branch() -> None:
    host = Host(lambda x: 100 * x)
    ask = lambda x: jax.experimental.io_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)
    np.testing.assert_allclose(vmap(lambda x: lax.cond(x > 0, ask, lambda x: x, x))(X), [-1, 0, 400, 900])
    assert host.seen() == [4.0, 9.0]


def test_ordered_effect_and_collective_in_a_loop_that_lanes_leave_apart_is_an_error() -> None:
    def f(n: Any) -> Any:
        def step(i: Any) -> Any:
            jax.debug.callback(lambda x: None, i, ordered=True)
            return i + lax.pmax(n, "i")

        return lax.while_loop(lambda i: i < n, step, 0)

    with pytest.raises(NotImplementedError, match="both meet over axis 'i' and have side effects"):
        vmap(f, axis_name="i")(jnp.arange(3))


def test_refs_are_written_by_the_lanes_that_take_the_branch() -> None:
    ref, count = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(4, jnp.int32))

    def f(ref: Any, count: Any, x: Any) -> Any:
        def write() -> None:
            ref[...] = x
            count[...] += 1

        lax.cond(x > 0, write, lambda: None)
        return lax.while_loop(lambda n: n < x, lambda n: n + count[...] + 1, 0)

    np.testing.assert_array_equal(vmap(f)(ref, count, X), [0, 0, 4, 10])
    np.testing.assert_array_equal(ref[...], [0, 0, 4, 9])
    np.testing.assert_array_equal(count[...], [0, 0, 1, 1])


def test_ref_that_lanes_share_cannot_be_written_by_some() -> None:
    ref = jax.new_ref(jnp.zeros(()))
    with pytest.raises(ValueError, match="on an unbatched array reference of type"):
        vmap(lambda x: lax.cond(x > 0, lambda: ref.__setitem__(..., 1.0), lambda: None))(X)


def test_refs_made_inside_go_through_loops() -> None:
    def f(x: Any, n: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(3))
        lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(i, x * i), None)
        lax.while_loop(lambda k: k < n, lambda k: (ref.__setitem__(k, -1.0), k + 1)[1], 0)
        return ref[...]

    found = vmap(f)(X[:3], jnp.arange(3))
    np.testing.assert_array_equal(found, [[0, -1, -2], [-1, 0, 0], [-1, -1, 8]])


# --- collectives ------------------------------------------------------------------------------------------------------


def test_lanes_meet_in_loops_and_in_branches_that_all_of_them_take() -> None:
    total = lambda x: lax.scan(lambda c, _: (lax.psum(c, "i"), None), x, None, length=2)[0]
    np.testing.assert_allclose(vmap(total, axis_name="i")(X), [48.0] * 4)
    branch = lambda x, w: lax.cond(w > 0, lambda: lax.pmax(x, "i"), lambda: x)
    np.testing.assert_allclose(vmap(branch, (0, None), axis_name="i")(X, 1.0), [9.0] * 4)


@pytest.mark.parametrize("inner, outer", [(vmap, vmap), (vmap, jax.vmap), (jax.vmap, vmap)])
def test_lanes_of_a_map_around_meet_in_a_branch(inner: Callable, outer: Callable) -> None:
    """A lane that does not take it gives its own values to those that do, not what it borrows for a loop that must end."""
    doubled = lambda x: lax.while_loop(lambda c: c < 4, lambda c: 2 * c + 1, jnp.abs(x))
    f = lambda p, x: lax.cond(p > 0, lambda x: lax.psum(doubled(x), "outer"), lambda x: x, x)
    p, x = jnp.asarray([[0, 1, 0], [1, 1, 0], [0, 0, 1], [0, 1, 0]]), jnp.linspace(-1, 2, 12).reshape(4, 3)
    np.testing.assert_allclose(
        outer(inner(f), axis_name="outer")(p, x), jax.vmap(jax.vmap(f), axis_name="outer")(p, x), rtol=1e-6
    )


def test_derivative_of_what_is_sent_to_a_branch() -> None:
    """By those who do not take it, too; `jax.vmap` leaves it out."""
    f = lambda p, x: lax.cond(p > 0, lambda x: lax.psum(jnp.sin(x), "i"), lambda x: x, x)
    p, x = jnp.asarray([0, 1, 1, 0]), X / 9
    found = jax.jacfwd(lambda x: vmap(f, axis_name="i")(p, x))(x)
    np.testing.assert_allclose(found, jnp.where(p[:, None] > 0, jnp.cos(x)[None], jnp.eye(4)), rtol=1e-6)


def test_axis_index_makes_lanes_differ_where_all_operands_are_shared() -> None:
    f = lambda x, w: (
        lax.fori_loop(0, 3, lambda i, c: c + lax.axis_index("i"), w),
        lax.while_loop(lambda c: c < lax.axis_index("i"), lambda c: c + 1, w),
        jax.jit(lambda w: w + lax.axis_index("i"))(w),
        lax.cond(w == 0, lambda: lax.axis_index("i"), lambda: w),
    )
    for out, factor in zip(vmap(f, (0, None), axis_name="i")(X, 0), (3, 1, 1, 1), strict=True):
        np.testing.assert_array_equal(out, factor * np.arange(4))


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_cheap_branches_are_not_guarded() -> None:
    assert primitives(vmap(lambda x: root(x, 2.0)).jaxpr(X))["cond"] == 0


def test_equations_do_not_grow_with_the_lanes() -> None:
    f = lambda n, x: lax.cond(n > 1, lambda x: lax.fori_loop(0, n, lambda i, x: x * 2, x), lambda x: x, x)
    count = lambda size: primitives(vmap(f).jaxpr(jnp.arange(size), jnp.ones(size))).total()
    assert count(3) == count(300)


def test_inner_jaxprs_are_batched_once() -> None:
    traced = []

    @jax.jit
    def step(x: Any) -> Any:
        traced.append(1)
        return jnp.sin(x)

    def f(x: Any) -> Any:
        for _ in range(5):
            x = step(x)
        return x

    jaxpr = vmap(f).jaxpr(X)
    assert len(traced) == 1
    assert len({id(eqn.params["jaxpr"]) for eqn in jaxpr.eqns}) == 1


AROUND = [(i, (i + 1) % 4) for i in range(4)]


def shifted(x: Any) -> Any:
    """JAX's effects do not say that this uses the axis."""
    return lax.ppermute(x, "i", AROUND)


def test_lanes_that_exchange_what_all_of_them_share_in_a_loop() -> None:
    f = lambda x, y: lax.map(lambda x: jnp.sin(shifted(x)), x) + y
    args = jnp.arange(3.0), jnp.arange(4.0)
    np.testing.assert_allclose(vmap(f, (None, 0), axis_name="i")(*args), jnp.sin(args[0]) + args[1][:, None], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["auto", "compact", "refill"])
def test_lanes_that_exchange_values_stay_together_in_a_loop(schedule: str) -> None:
    f = lambda n, x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(shifted(c[1])) + c[1]), (0, x))
    args = jnp.array([1, 5, 2, 3]), jnp.arange(4.0)
    found = vmap(f, axis_name="i", divergence=schedule)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, jax.vmap(f, axis_name="i")(*args))


def test_lanes_that_exchange_values_stay_together_in_a_branch() -> None:
    f = lambda p, x: lax.cond(p, lambda x: lax.scan(lambda c, _: (shifted(c) * 2, None), x, None, 2)[0], lambda x: x + 1, x)
    args = jnp.array([True, False, True, False]), jnp.arange(4.0)
    np.testing.assert_allclose(vmap(f, axis_name="i", divergence="partition")(*args), jax.vmap(f, axis_name="i")(*args))
