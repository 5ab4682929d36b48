"""Calls to the host: how often, with what, and in what order."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import minibatch

ONE = jax.ShapeDtypeStruct((), jnp.float32)


def told(fun: Callable, *args: Any, **options: Any) -> list:
    """What the host hears from mapped `fun(tell)`, in order."""
    heard: list = []
    minibatch.vmap(fun(lambda *xs: heard.append(tuple(np.asarray(x).tolist() for x in xs))), **options)(*args)
    jax.effects_barrier()
    return heard


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_debug_callback_once_for_each_lane_in_order(ordered: bool, compile: bool) -> None:
    fun = lambda tell: lambda x, y: jax.debug.callback(tell, x, y, ordered=ordered)
    assert told(fun, jnp.arange(3), 7, in_axes=(0, None), compile=compile) == [(0, 7), (1, 7), (2, 7)]


def test_debug_callback_once_where_nothing_is_mapped() -> None:
    assert told(lambda tell: lambda x, y: jax.debug.callback(tell, y), jnp.arange(3), 7, in_axes=(0, None)) == [(7,)]


def test_debug_callback_of_many_lanes_is_one_equation() -> None:
    def fun(x: Any) -> None:
        jax.debug.callback(print, x)
        jax.debug.print("{x}", x=x)

    assert len(minibatch.vmap(fun).jaxpr(jnp.arange(512)).eqns) == 2


@pytest.mark.parametrize("compile", [False, True])
def test_debug_print_prints_each_lane_in_order(capfd: pytest.CaptureFixture, compile: bool) -> None:
    def fun(x: Any, key: Any) -> None:
        jax.debug.print("{x} {} {y}", key, x=x, y="static", ordered=True)

    minibatch.vmap(minibatch.vmap(fun, (0, None)), (0, None), compile=compile)(jnp.arange(4).reshape(2, 2), 5)
    jax.effects_barrier()
    assert capfd.readouterr().out == "0 5 static\n1 5 static\n2 5 static\n3 5 static\n"


@pytest.mark.parametrize("ordered", [False, True])
def test_io_callback_once_for_each_lane_in_order(ordered: bool) -> None:
    heard = []

    def tell(x: Any) -> Any:
        heard.append(float(x))
        return np.float32(len(heard))

    found = minibatch.vmap(lambda x: io_callback(tell, ONE, x, ordered=ordered))(jnp.arange(3.0))
    np.testing.assert_array_equal(found, [1, 2, 3])
    assert heard == [0, 1, 2]


def test_pure_callback_gets_for_each_lane_what_it_gets_unmapped() -> None:
    def tell(x: Any, y: Any) -> Any:
        assert isinstance(x, jax.Array) and isinstance(y, jax.Array) and x.shape == y.shape == ()
        return np.asarray(x * 0) + np.asarray(y)

    fun = minibatch.vmap(lambda x, y: jax.pure_callback(tell, ONE, x, y, vmap_method="sequential"), (0, None))
    np.testing.assert_array_equal(fun(jnp.arange(3.0), 2.0), [2, 2, 2])


@pytest.mark.parametrize("method", [None, "expand_dims"])
def test_pure_callback_is_traced_to_the_same_program_twice(method: str | None) -> None:
    def tell(x: Any) -> Any:
        return np.asarray(x)

    compiled = jax.jit(minibatch.vmap(lambda x: jax.pure_callback(tell, ONE, x, vmap_method=method)))
    first, second = (compiled.trace(jnp.arange(3.0)).jaxpr.eqns[0].params["callback"] for _ in range(2))
    assert first == second


# --- in branches and loops --------------------------------------------------------------------------------------------

X = jnp.arange(4.0)
NOTHING = lambda: None


def asked(tell: Callable, ordered: bool) -> Callable:
    return lambda x: io_callback(lambda x: (tell(x), np.float32(10 * x))[1], ONE, x, ordered=ordered)


def computed(tell: Callable, ordered: bool) -> Callable:
    del ordered
    return lambda x: jax.pure_callback(lambda x: (tell(x), np.float32(10 * x))[1], ONE, x, vmap_method="sequential")


ACTING = {  # name: program of (say, ask, x)
    "branch": lambda say, ask, x: lax.cond(x > 1.5, lambda: say(x), NOTHING),
    "both branches": lambda say, ask, x: lax.cond(x > 1.5, lambda: say(x), lambda: say(-x, 7)),
    "switch": lambda say, ask, x: lax.switch(jnp.int32(x), [lambda: say(x), NOTHING, lambda: say(x * 10)]),
    "branch in branch": lambda say, ask, x: lax.cond(
        x > 0.5, lambda: lax.cond(x < 2.5, lambda: say(x), lambda: say(-x)), NOTHING
    ),
    "branch of jit": lambda say, ask, x: lax.cond(x > 1.5, lambda: jax.jit(lambda y: say(y))(x), NOTHING),
    "branch of checkpoint": lambda say, ask, x: lax.cond(x > 1.5, lambda: jax.checkpoint(lambda y: say(y))(x), NOTHING),
    "branch of scan": lambda say, ask, x: lax.cond(
        x > 1.5, lambda: lax.scan(lambda c, i: (say(x, i), (c + i, c))[1], 0, jnp.arange(2))[1].sum(), lambda: 0
    ),
    "branch of loop": lambda say, ask, x: lax.cond(
        x > 1.5, lambda: lax.while_loop(lambda i: i < x, lambda i: (say(x, i), i + 1)[1], 0), lambda: 9
    ),
    "loop": lambda say, ask, x: lax.while_loop(lambda i: i < x, lambda i: (say(x, i), i + 1)[1], 0),
    "condition of loop": lambda say, ask, x: lax.while_loop(lambda i: (say(x, i), i < x)[1], lambda i: i + 1, 0),
    "branch in loop": lambda say, ask, x: lax.fori_loop(
        0, jnp.int32(x), lambda i, c: (lax.cond(i > 0, lambda: say(x, i), NOTHING), c + i)[1], 0
    ),
    "answer in branch": lambda say, ask, x: lax.cond(x > 1.5, ask, lambda x: -x, x),
    "answer in loop": lambda say, ask, x: lax.while_loop(lambda c: c < 50, ask, x + 1),
}


@pytest.mark.parametrize(
    ("name", "ask", "ordered"),
    [
        *((name, asked, False) for name in ACTING),
        *((name, computed, False) for name in ("answer in branch", "answer in loop")),
        *((name, asked, True) for name in ("branch of jit", "branch of loop", "loop", "answer in branch", "answer in loop")),
    ],
)
def test_host_hears_of_the_lanes_that_come_there_and_of_no_others(name: str, ask: Callable, ordered: bool) -> None:
    if ask is computed and not name.startswith("answer"):
        return
    heard: list = []
    tell = lambda *xs: heard.append(tuple(np.asarray(x).tolist() for x in xs))
    f = lambda x: ACTING[name](lambda *xs: jax.debug.callback(tell, *xs, ordered=ordered), ask(tell, ordered), x)
    lanes = [f(x) for x in X]
    jax.effects_barrier()
    wanted = heard[:]
    heard.clear()
    found = minibatch.vmap(f)(X)
    jax.effects_barrier()
    if found is not None:
        np.testing.assert_array_equal(found, jnp.stack(lanes))
    assert collections.Counter(heard) == collections.Counter(wanted)
    if ordered and "loop" in name and "branch" not in name:
        assert heard == wanted  # one lane after the other
    if "branch" in name and "of" not in name:
        heard.clear()
        minibatch.vmap(minibatch.vmap(f))(X.reshape(2, 2))
        jax.effects_barrier()
        assert collections.Counter(heard) == collections.Counter(wanted)


def test_callback_in_a_branch_is_one_equation_and_knows_its_lane(capfd: pytest.CaptureFixture) -> None:
    def f(x: Any) -> None:
        lax.cond(x > 1.5, lambda: jax.debug.print("lane {}: {x}", lax.axis_index("i"), x=x), NOTHING)

    mapped = minibatch.vmap(f, axis_name="i")
    assert str(mapped.jaxpr(X)).count("debug_callback[") == 1 and "scan" not in str(mapped.jaxpr(X))
    mapped(X)
    jax.effects_barrier()
    assert capfd.readouterr().out == "lane 2: 2.0\nlane 3: 3.0\n"


def test_call_over_a_captured_array_in_a_branch_that_acts() -> None:
    heard: list = []
    table = jnp.arange(4.0) * 2

    @jax.jit
    def looked_up(i: Any) -> Any:
        jax.debug.callback(lambda i: heard.append(int(i)), i)
        return table[i]

    f = lambda i: lax.cond(i > 1, looked_up, lambda i: -1.0, i)
    np.testing.assert_array_equal(minibatch.vmap(f)(jnp.arange(4)), [-1, -1, 4, 6])
    jax.effects_barrier()
    assert heard == [2, 3]


def test_callback_under_a_checkpoint_in_a_branch_or_loop_is_one_equation() -> None:
    heard: list = []

    @jax.checkpoint
    def f(x: Any) -> Any:
        jax.debug.callback(lambda x: heard.append(float(x)), x)
        return jnp.sin(x) - lax.axis_index("i")

    branch = lambda x: lax.cond(x > 1.5, f, lambda x: x, x)
    loop = lambda x: lax.while_loop(lambda x: x > 1.5, f, x)
    for fun in (branch, loop):
        mapped = minibatch.vmap(fun, axis_name="i")
        assert "remat2[" in str(mapped.jaxpr(X)) and "scan[" not in str(mapped.jaxpr(X))
        np.testing.assert_allclose(mapped(X), jnp.where(X > 1.5, jnp.sin(X) - jnp.arange(4.0), X), rtol=1e-6)
        jax.effects_barrier()
    assert heard == [2, 3, 2, 3]
    slope = jax.grad(lambda x: minibatch.vmap(branch, axis_name="i")(x).sum())(X)
    np.testing.assert_allclose(slope, jnp.where(X > 1.5, jnp.cos(X), 1.0), rtol=1e-6)


def test_lanes_may_meet_in_a_branch_that_acts() -> None:
    heard: list = []

    def f(x: Any) -> Any:
        taken = lambda x: (jax.debug.callback(lambda x: heard.append(float(x)), x), lax.psum(x, "i"))[1]
        return lax.cond(x > 1.5, taken, lambda x: x, x)

    np.testing.assert_allclose(minibatch.vmap(f, axis_name="i")(X), [0, 1, 6, 6])
    jax.effects_barrier()
    assert heard == [2, 3]


def test_branch_that_no_lane_takes_is_not_run() -> None:
    def never(x: Any) -> Any:  # does not end, and would trip over NaN
        return io_callback(lambda x: 1 / 0, ONE, lax.while_loop(lambda y: y > 0, lambda y: jnp.log(-y) * 0 + y, x))

    with jax.debug_nans(True):
        np.testing.assert_array_equal(minibatch.vmap(lambda x: lax.cond(x > 9, never, lambda x: -x, x))(X), -X)


def test_callback_of_no_lanes() -> None:
    found = minibatch.vmap(lambda x: jax.pure_callback(lambda x: 1 / 0, ONE, x))(jnp.zeros(0))
    assert found.shape == (0,) and found.dtype == jnp.float32


def failing(x: Any) -> Any:
    checkify.check(x > 0, "lane value {v} is not positive", v=x)
    checkify.check(x < 9, "lane value {v} is too large", v=x)
    return x


def test_check_reports_the_first_lane_that_fails() -> None:
    error, _ = checkify.checkify(minibatch.vmap(failing))(jnp.asarray([1.0, -2.5, 3.0, -4.0]))
    assert error.get().startswith("lane value -2.5 is not positive (at mapped index 1)")
    error, _ = checkify.checkify(minibatch.vmap(failing))(jnp.asarray([1.0, 12.0]))
    assert "lane value 12.0 is too large" in error.get()
    error, _ = checkify.checkify(minibatch.vmap(failing))(jnp.asarray([1.0, 2.0]))
    assert error.get() is None
    error, _ = checkify.checkify(minibatch.vmap(minibatch.vmap(failing)))(jnp.asarray([[1.0, 2.0], [3.0, -4.0]]))
    assert error.get().startswith("lane value -4.0 is not positive (at mapped index 1) (at mapped index 1)")


@pytest.mark.parametrize("errors", [checkify.user_checks, checkify.all_checks], ids=["user", "all"])
@pytest.mark.parametrize("place", ["branch", "loop", "scan"])
def test_check_fails_only_for_lanes_that_come_there(place: str, errors: Any) -> None:
    def f(x: Any) -> Any:
        fits = lambda y: checkify.check(y != 3, "{y} of {x}", y=y, x=x)
        match place:
            case "branch":
                return lax.cond(x > 0, lambda: (fits(x), jnp.log(x))[1], lambda: x)
            case "loop":
                return lax.while_loop(lambda y: y < x, lambda y: (fits(y), y + 1)[1], 0.0)
            case "scan":
                return lax.scan(lambda y, _: (fits(y), (y + x, None))[1], 0.0, None, length=3)[0]

    mapped, bad = minibatch.vmap(f), jnp.asarray([-3.0, 7.0 if place == "loop" else 3.0])
    good = jnp.asarray([-3.0, 2.0])
    for checked in (checkify.checkify(mapped, errors), minibatch.vmap(checkify.checkify(f, errors))):
        assert checked(good)[0].get() is None
        said = checked(bad)[0].get()
        assert "3.0 of " in said and "at mapped index 1" in said


def test_errors_of_a_checked_function_are_one_for_each_lane() -> None:
    error, out = minibatch.vmap(checkify.checkify(failing))(jnp.asarray([1.0, -2.5, 12.0]))
    assert "at mapped index 1" in error.get() and "-2.5" in error.get() and "12.0" in error.get()
    np.testing.assert_array_equal(out, [1, -2.5, 12])


@pytest.mark.parametrize(
    ("method", "layouts", "shapes"),
    [
        ("expand_dims", ((1, 2, 0), (1, 0)), ((3, 2, 4), (1, 5))),
        ("broadcast_all", ((1, 2, 0), (1, 0)), ((3, 2, 4), (3, 5))),
        ("legacy_vectorized", ((1, 2, 0), (0,)), ((3, 2, 4), (5,))),
    ],
)
def test_ffi_call_of_many_lanes(method: str, layouts: tuple, shapes: tuple) -> None:
    def fun(x: Any, y: Any) -> Any:
        call = jax.ffi.ffi_call(
            "none", jax.ShapeDtypeStruct((2, 4), jnp.float32), vmap_method=method, input_layouts=[(1, 0), (0,)]
        )
        return call(x, y, k=1)

    (eqn,) = minibatch.vmap(fun, (0, None)).jaxpr(jnp.ones((3, 2, 4)), jnp.ones(5)).eqns[-1:]
    assert eqn.primitive.name == "ffi_call" and eqn.params["attributes"] == (("k", 1),)
    assert tuple(v.aval.shape for v in eqn.invars) == shapes
    assert eqn.outvars[0].aval.shape == (3, 2, 4)
    assert eqn.params["output_layouts"] == ((2, 1, 0),)
    assert eqn.params["input_layouts"] == layouts


def test_ffi_call_that_overwrites_a_shared_operand_gets_one_for_each_lane() -> None:
    def fun(x: Any, y: Any) -> Any:
        call = jax.ffi.ffi_call("none", jax.typeof(y), vmap_method="legacy_vectorized", input_output_aliases={1: 0})
        return call(x, y)

    eqn = minibatch.vmap(fun, (0, None)).jaxpr(jnp.ones(3), jnp.ones(5)).eqns[-1]
    assert [v.aval.shape for v in eqn.invars] == [(3,), (3, 5)]


def test_ffi_call_that_knows_no_lanes_is_looped() -> None:
    fun = minibatch.vmap(lambda x: jax.ffi.ffi_call("none", ONE)(x))
    assert [eqn.primitive.name for eqn in fun.jaxpr(jnp.ones(3)).eqns] == ["scan"]
