"""Derivative rules that users gave: still theirs under every order of mapping and differentiating."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cases.calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import arguments

from minibatch import vmap

X = jnp.asarray([0.5, -1.0, 2.0])
K = jnp.asarray([1.0, 3.0, -2.0])


@jax.custom_vjp
def scaled(x: Any, k: Any) -> Any:
    """sin(x) * k, with a derivative in x that is deliberately 7."""
    return jnp.sin(x) * k


scaled.defvjp(lambda x, k: (scaled(x, k), (jnp.sin(x), k)), lambda res, ct: (7.0 * ct, (res[0] * ct).sum() * jnp.cos(res[1])))


@jax.custom_jvp
def bent(x: Any, k: Any) -> Any:
    """sin(x) * k, with a derivative in x that is deliberately 7 k."""
    return jnp.sin(x) * k


bent.defjvp(lambda primals, tangents: (bent(*primals), 7 * tangents[0] * primals[1] + jnp.cos(primals[0]) * tangents[1]))

RULED = pytest.mark.parametrize("f", [scaled, bent], ids=["custom_vjp", "custom_jvp"])
AXES = pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=["both", "k shared", "x shared"])


def lane(args: tuple, axes: tuple, i: int) -> list:
    """What lane i is given."""
    return [x if axis is None else x[i] for x, axis in zip(args, axes, strict=True)]


def gradients(f: Callable, args: tuple, axes: tuple) -> list:
    """The gradient of the sum over lanes, by each lane's own: summed where they share the argument."""
    each = [jax.grad(f, (0, 1))(*lane(args, axes, i)) for i in range(3)]
    stacked = [jnp.stack(g) for g in zip(*each, strict=True)]
    return [g.sum(0) if axis is None else g for g, axis in zip(stacked, axes, strict=True)]


def given(axes: tuple) -> tuple:
    """X and K, or their first where shared."""
    return tuple(x if axis == 0 else x[0] for x, axis in zip((X, K), axes, strict=True))


@RULED
@AXES
@pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, jax.checkpoint, lambda f: vmap(f, compile=False)], ids=["", "jit", "remat", "vmap"]
)
def test_rule_is_used_in_gradients_of_the_map(f: Callable, axes: tuple, around: Callable) -> None:
    args = given(axes)
    if around is jax.checkpoint or around is jax.jit:
        total = lambda x, k: around(vmap(f, axes))(x, k).sum()
    else:
        total = lambda x, k: vmap(f, axes)(x, k).sum()
    for g, wanted in zip(jax.grad(total, (0, 1))(*args), gradients(f, args, axes), strict=True):
        np.testing.assert_allclose(g, wanted, rtol=1e-5)


@RULED
@AXES
def test_rule_is_used_in_the_map_of_gradients(f: Callable, axes: tuple) -> None:
    args = given(axes)
    found = vmap(jax.grad(f, (0, 1)), axes)(*args)
    for i in range(3):
        for g, wanted in zip(found, jax.grad(f, (0, 1))(*lane(args, axes, i)), strict=True):
            np.testing.assert_allclose(g[i], wanted, rtol=1e-5)


@RULED
@AXES
@pytest.mark.parametrize("inner", ["jit", "scan", "cond", "remat", "vmap"])
def test_rule_is_used_inside(f: Callable, axes: tuple, inner: str) -> None:
    def g(x: Any, k: Any) -> Any:
        match inner:
            case "jit":
                return jax.jit(f)(x, k)
            case "scan":
                return lax.scan(lambda c, _: (f(c, k), None), x, None, length=2)[0]
            case "cond":
                return lax.cond(x > 0, f, lambda x, k: x - k, x, k)
            case "remat":
                return jax.checkpoint(f)(x, k)
            case "vmap":
                return vmap(f, (0, None))(jnp.stack([x, x + 1]), k).sum()

    args = given(axes)
    found = jax.grad(lambda x, k: jax.jit(vmap(g, axes))(x, k).sum(), (0, 1))(*args)
    for got, wanted in zip(found, gradients(g, args, axes), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@RULED
def test_rule_is_used_in_second_derivatives(f: Callable) -> None:
    f = lambda x, k, f=f: f(x * x, k) * x
    each = jax.grad(jax.grad(f))
    wanted = [each(x, k) for x, k in zip(X, K, strict=True)]
    np.testing.assert_allclose(vmap(each)(X, K), wanted, rtol=1e-5)
    total = lambda x: vmap(f)(x, K).sum()
    np.testing.assert_allclose(jax.grad(lambda x: jax.grad(total)(x).sum())(X), wanted, rtol=1e-5)
    inner = lambda x: vmap(jax.grad(f))(x, K).sum()
    np.testing.assert_allclose(jax.jit(jax.grad(inner))(X), wanted, rtol=1e-5)


def test_tangents_use_the_rule() -> None:
    _, found = jax.jvp(lambda x, k: vmap(bent, (0, None))(x, k), (X, 2.0), (K, 1.0))
    np.testing.assert_allclose(found, 14 * K + jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(vmap(bent))(X, K), np.diag(7 * K), rtol=1e-6)


def test_forward_rule_may_leave_an_argument_as_residual_and_an_integer_without_cotangent() -> None:
    f = lambda x, k, n: sum(map(jnp.sum, cases.calls.scaled(x, k, n)))
    x, n = jnp.stack([X, X + 1]), jnp.asarray([2, 3])
    found = jax.grad(lambda x, k: vmap(f, (0, None, 0))(x, k, n).sum(), (0, 1))(x, 2.0)
    each = [jax.grad(f, (0, 1))(x[i], 2.0, n[i]) for i in range(2)]
    np.testing.assert_allclose(found[0], [g[0] for g in each], rtol=1e-5)
    np.testing.assert_allclose(found[1], sum(g[1] for g in each), rtol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_rule_is_told_which_arguments_matter(axes: tuple) -> None:
    f = functools.partial(cases.calls.summed, jnp.sin)
    x = jnp.stack([X, X + 1, X + 2])
    args = tuple(v if axis == 0 else v[0] for v, axis in zip((x, x + 1), axes, strict=True))
    for argnums in ((0,), (1,), (0, 1)):
        found = jax.grad(lambda *args: vmap(f, axes)(*args).sum(), argnums)(*args)
        each = [jax.grad(f, argnums)(*lane(args, axes, i)) for i in range(3)]
        for j, n in enumerate(argnums):
            g = jnp.stack([g[j] for g in each])
            np.testing.assert_allclose(found[j], g if axes[n] == 0 else g.sum(0), rtol=1e-5)


def test_symbolic_zeros_reach_the_rule_and_come_back() -> None:
    zeros = []

    @jax.custom_jvp
    def f(x: Any, k: Any) -> Any:
        return x * k, jnp.floor(x)

    @functools.partial(f.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        zeros.append([type(t) is jax.custom_derivatives.SymbolicZero for t in tangents])
        out = f(*primals)
        return out, (7 * tangents[0], jax.custom_derivatives.zero_from_primal(out[1], symbolic_zeros=True))

    np.testing.assert_allclose(jax.jvp(lambda x: vmap(f)(x, K)[0], (X,), (K,))[1], 7 * K)
    np.testing.assert_allclose(jax.jvp(lambda x: vmap(f)(x, K)[1], (X,), (K,))[1], jnp.zeros(3))
    assert zeros
    assert all(seen == [False, True] for seen in zeros)


def test_backward_rule_that_ignores_its_cotangent_counts_once_for_each_lane() -> None:
    @jax.custom_vjp
    def f(x: Any, k: Any) -> Any:
        return x * k

    f.defvjp(lambda x, k: (x * k, None), lambda _, ct: (ct, jnp.float32(5)))
    total = lambda k: vmap(f, (0, None))(X, k).sum()
    assert jax.grad(total)(2.0) == sum(jax.grad(f, 1)(x, 2.0) for x in X)


def test_collectives_in_rules_meet_over_the_mapped_axis() -> None:
    @jax.custom_vjp
    def meaned(x: Any) -> Any:
        return x

    meaned.defvjp(lambda x: (x, None), lambda _, ct: (lax.pmean(ct, "i"),))
    found = jax.grad(lambda x: (vmap(meaned, axis_name="i")(x) * K).sum())(X)
    np.testing.assert_allclose(found, [K.mean()] * 3, rtol=1e-6)
    shared = lambda w: vmap(lambda x, w: meaned(w) * x, (0, None), axis_name="i")(X, w).sum()
    np.testing.assert_allclose(jax.grad(shared)(2.0), X.sum(), rtol=1e-6)

    @jax.custom_jvp
    def placed(x: Any) -> Any:
        return x * lax.axis_index("i")

    placed.defjvp(lambda primals, tangents: (placed(*primals), lax.psum(tangents[0], "i")))
    out, tangent = jax.jvp(vmap(placed, axis_name="i"), (X,), (K,))
    np.testing.assert_allclose(out, X * jnp.arange(3))
    np.testing.assert_allclose(tangent, [K.sum()] * 3)


def test_linearized_function_with_a_backward_rule_transposes() -> None:
    push = lambda x, t: jax.linearize(lambda x: scaled(x, 2.0), x)[1](t)
    (found,) = jax.linear_transpose(lambda t: vmap(push)(X, t), X)(K)
    np.testing.assert_allclose(found, 7 * K, rtol=1e-6)
    (found,) = jax.linear_transpose(lambda t: vmap(push, (0, None))(X, t), 1.0)(K)
    np.testing.assert_allclose(found, 7 * K.sum(), rtol=1e-6)


def test_hand_written_transpose_is_used() -> None:
    found = jax.grad(lambda x: vmap(cases.calls.linear)(K, x).sum())(X)
    np.testing.assert_allclose(found, 3 * K)
    found = jax.grad(lambda x: vmap(cases.calls.linear, (0, None))(K, x).sum())(2.0)
    np.testing.assert_allclose(found, 3 * K.sum())


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_with_no_batch_dims_saveable"])
def test_checkpoint_keeps_its_policy_and_what_it_computes_twice(policy: str) -> None:
    block = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(w @ x)), policy=getattr(jax.checkpoint_policies, policy))
    w, x = jnp.ones((2, 2)) / 2, jnp.stack([X[:2], X[1:]])
    g = jax.grad(lambda w: vmap(block, (None, 0))(w, x).sum())
    np.testing.assert_allclose(g(w), jax.grad(lambda w: jnp.sin(jnp.sin(x @ w.T)).sum())(w), rtol=1e-5)
    text = str(jax.make_jaxpr(g)(w))
    recomputes = {"everything_saveable": (0, 0), "nothing_saveable": (1, 1), "dots_with_no_batch_dims_saveable": (0, 1)}
    assert (text.count("dot_general[") - 2, text.count(" sin ") - 2 > 0) == recomputes[policy]


def test_forward_rule_optimized_for_remat_is_dropped_where_its_residuals_are_not_read() -> None:
    f = jax.checkpoint(lambda x, k: cases.calls.light(x, k).sum())
    x = jnp.stack([X, X + 1])
    found = jax.grad(lambda x: vmap(f, (0, None))(x, jnp.full(3, 3.0)).sum())(x)
    np.testing.assert_allclose(found, jnp.full_like(x, 4.0))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_linear_solve_is_differentiated_by_its_own_rule(axes: tuple) -> None:
    f = lambda a, b: jnp.sin(cases.calls.solve(a, b)[0]).sum()
    a, b = jnp.arange(12.0).reshape(3, 2, 2) / 8, jnp.stack([X[:2], X[1:], K[:2]])
    args = tuple(v if axis == 0 else v[0] for v, axis in zip((a, b), axes, strict=True))
    found = jax.grad(lambda *args: vmap(f, axes)(*args).sum(), (0, 1))(*args)
    for got, wanted in zip(found, gradients(f, args, axes), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


# --- custom_vmap ------------------------------------------------------------------------------------------------------


def noted() -> tuple[Callable, list]:
    """A custom_vmap function, and a list of how its rule was asked."""
    asked = []

    @jax.custom_batching.custom_vmap
    def f(x: Any, k: Any) -> Any:
        return jnp.sin(x) * k

    @f.def_vmap
    def _(size: int, batched: list, x: Any, k: Any) -> Any:
        asked.append((size, tuple(batched)))
        return jnp.sin(x) * k, True

    return f, asked


@pytest.mark.parametrize(
    "inner", [lambda f: f, jax.jit, lambda f: lambda x, k: lax.scan(lambda c, _: (c, f(c, k)), x, None, 1)[1][0]]
)
def test_rule_for_many_lanes_is_used_under_reverse_mode(inner: Callable) -> None:
    f, asked = noted()
    wanted = 2 * jnp.cos(X)
    np.testing.assert_allclose(vmap(jax.grad(inner(f)), (0, None))(X, 2.0), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: vmap(inner(f), (0, None))(x, 2.0).sum())(X), wanted, rtol=1e-6)
    assert set(asked) == {(3, (True, False))}


def test_rule_for_many_lanes_is_not_asked_about_what_the_function_closes_over() -> None:
    def g(x: Any, k: Any) -> Any:
        @jax.custom_batching.custom_vmap
        def f(x: Any) -> Any:
            return x * k

        f.def_vmap(lambda size, batched, x: (x * 0, True))
        return f(x)

    np.testing.assert_allclose(vmap(g)(X, K), X * K)
    np.testing.assert_allclose(vmap(g, (0, None))(X, 2.0), X * 0)


def test_rule_for_many_lanes_that_returns_something_else_is_an_error() -> None:
    @jax.custom_batching.custom_vmap
    def f(x: Any) -> Any:
        return x

    f.def_vmap(lambda size, batched, x: (x[:2], True))
    with pytest.raises(ValueError, match=r"an output of shape \(2,\) has not 3 lanes in front"):
        vmap(f)(X)


# --- rules that close over values of the mapped function --------------------------------------------------------------


def closing(mode: str) -> Callable:
    """sin(x), with a derivative rule that says 7 k, of k not an argument of the rule but closed over."""

    def f(x: Any, k: Any) -> Any:
        k = k * 1
        if mode == "custom_jvp":
            g = jax.custom_jvp(lambda x: jnp.sin(x))
            g.defjvp(lambda primals, tangents: (g(*primals), 7 * k * tangents[0]))
        elif mode == "custom_vjp":
            g = jax.custom_vjp(lambda x: jnp.sin(x))
            g.defvjp(lambda x: (jnp.sin(x), k), lambda res, ct: (7 * res * ct,))
        else:
            g = jax.custom_vjp(lambda x: jnp.sin(x))
            g.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (7 * k * ct,))
        return g(x)

    return f


def slope(mapped: Callable) -> Callable:
    return jax.grad(lambda x, k: mapped(x, k).sum())


SLOPES = {
    "grad": slope,
    "jit(grad)": lambda mapped: jax.jit(slope(mapped)),
    "grad(jit)": lambda mapped: slope(jax.jit(mapped)),
    "grad(checkpoint)": lambda mapped: slope(jax.checkpoint(mapped)),
    "grad(vmap)": lambda mapped: lambda x, k: slope(vmap(mapped))(x[None], k[None])[0],
    "grad(vmap(jit))": lambda mapped: lambda x, k: slope(vmap(jax.jit(mapped)))(x[None], k[None])[0],
    "vmap(grad)": lambda mapped: lambda x, k: vmap(slope(mapped))(x[None], k[None])[0],
}


@AXES
@pytest.mark.parametrize("order", SLOPES)
@pytest.mark.parametrize("mode", ["custom_jvp", "custom_vjp", "only bwd"])
def test_rule_may_close_over_an_argument_of_the_mapped_function(mode: str, order: str, axes: tuple) -> None:
    x, k = given(axes)
    wanted = jnp.broadcast_to(7 * k, (3,))
    found = SLOPES[order](vmap(closing(mode), axes))
    np.testing.assert_allclose(found(x, k), wanted if axes[0] == 0 else wanted.sum())
    if order in ("grad", "grad(jit)"):  # what a rule says depends on what it closes over
        second = jax.grad(lambda k: found(x, k).sum())(k)
        np.testing.assert_allclose(second, jnp.full(3, 7.0) if axes[1] == 0 else 21.0)
        np.testing.assert_allclose(jax.grad(lambda k: vmap(closing(mode), axes)(x, k).sum())(k), jnp.zeros_like(k))


def closing_over(y: Any, mode: str) -> Callable:
    """w * y with a derivative that is deliberately 3 cos(y), which needs y in the rule alone."""
    slope = jnp.cos(y)
    if mode == "custom_jvp":
        f = jax.custom_jvp(lambda w: w * y)
        f.defjvp(lambda primals, tangents: (f(*primals), 3 * tangents[0] * slope))
    else:
        f = jax.custom_vjp(lambda w: w * y)
        f.defvjp(lambda w: (f(w), None), lambda _, ct: (3 * ct * slope,))
    return f


WITHIN = {
    "jit": lambda f, x: jax.jit(f)(x),
    "jit in jit": lambda f, x: jax.jit(lambda x: jax.jit(f)(x))(x),
    "scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "loop": lambda f, x: lax.fori_loop(0, 1, lambda _, c: f(c), x),
    "while": lambda f, x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "branch": lambda f, x: lax.cond(True, f, jnp.sin, x),
    "branches that differ": lambda f, x: lax.cond(x > 9, jnp.sin, f, x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("mode", ["custom_jvp", "custom_vjp"])
def test_rule_may_close_over_a_value_around_the_loop_or_call_it_is_in(mode: str, within: str) -> None:
    mapped = vmap(lambda x, y: WITHIN[within](closing_over(y, mode), x))
    for call in (mapped, jax.jit(mapped)):
        np.testing.assert_allclose(call(X, K), X * K, rtol=1e-6)
    if within != "while":
        slopes = jax.grad(lambda x: mapped(x, K).sum())(X)
        np.testing.assert_allclose(slopes, 3 * jnp.cos(K), rtol=1e-5)


def test_backward_rule_that_weighs_lanes_gets_each_cotangent_by_itself() -> None:
    f = jax.custom_vjp(lambda x, k: (jnp.sin(x), jnp.int32(2)))  # lanes share both outputs, but not the first's derivative
    f.defvjp(lambda x, k: (f(x, k), k), lambda k, cts: (7 * k * cts[0], None))
    mapped = vmap(f, (None, 0), (0, None))
    assert mapped(2.0, K)[1] == 2
    found = jax.grad(lambda x: (mapped(x, K)[0] * X).sum())(2.0)
    np.testing.assert_allclose(found, (7 * K * X).sum(), rtol=1e-6)


def test_derivative_with_respect_to_what_a_function_closes_over_is_an_error() -> None:
    def f(x: Any) -> Any:
        g = jax.custom_vjp(lambda y: y * x)
        g.defvjp(lambda y: (y * x, None), lambda _, ct: (ct * x,))
        return g(x)

    with pytest.raises(Exception, match="Detected differentiation of a custom_vjp function with respect to a closed-over"):
        jax.grad(lambda x: vmap(f)(x).sum())(X)


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp", "custom_vjp optimized for remat"])
def test_rules_hold_no_value_of_the_trace(name: str) -> None:
    [case] = [case for case in cases.calls.CASES if case.name == name]
    args, _ = arguments(case, [0] * len(case.args), 3)
    with jax.checking_leaks():
        vmap(case.fun)(*args)
        vmap(jax.grad(lambda *args: jnp.sum(jax.tree.leaves(case.fun(*args))[0])))(*args)
