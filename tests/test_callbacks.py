"""Calls to the host: how often, with what, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def test_callback_of_no_lanes() -> None:
    found = minibatch.vmap(lambda x: jax.pure_callback(lambda x: 1 / 0, ONE, x))(jnp.zeros(0))
    assert found.shape == (0,) and found.dtype == jnp.float32


def failing(x: Any) -> Any:
    checkify.check(x > 0, "lane value {v} is not positive", v=x)
    checkify.check(x < 9, "lane value {v} is too large", v=x)
    return x


def test_check_reports_the_first_lane_that_fails() -> None:
    error, _ = checkify.checkify(minibatch.vmap(failing))(jnp.asarray([1.0, -2.5, 3.0, -4.0]))
    assert "lane value -2.5 is not positive" in error.get()
    error, _ = checkify.checkify(minibatch.vmap(failing))(jnp.asarray([1.0, 12.0]))
    assert "lane value 12.0 is too large" in error.get()
    error, _ = checkify.checkify(minibatch.vmap(failing))(jnp.asarray([1.0, 2.0]))
    assert error.get() is None


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
