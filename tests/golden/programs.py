"""The programs of the golden reports: one for each thing that a report may say.

`pytest tests/test_report.py --write-golden` writes the reports anew; read what `git diff` shows before committing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir


class Program(NamedTuple):
    """A function of one lane, and what `vmap` is to be told of it."""

    fun: Callable
    args: tuple
    options: Mapping[str, Any] = MappingProxyType({})


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "int32")


def layer(x, w):
    return jnp.tanh(x @ w)


def loss(params, x):
    hidden = jnp.sin(x @ params["w"])
    return ((hidden @ params["v"]) ** 2).sum()


def either(x, w):
    return lax.cond(
        x.sum() > 0,
        lambda: w @ jnp.sin(x),
        lambda: x,
    )


def newton(x, tolerance):
    def unfinished(state):
        y, _ = state
        return jnp.abs(y * y - x) > tolerance

    def step(state):
        y, count = state
        return (y + x / y) / 2, count + 1

    return lax.while_loop(unfinished, step, (x, 0))


def recurrent(xs, w):
    def step(h, x):
        h = jnp.tanh(w @ h + x)
        return h, h.sum()

    return lax.scan(step, jnp.zeros(16), xs)


def look_up(table, i):
    row = table[i]
    window = lax.dynamic_slice(table, (i, 0), (4, 8))
    return row.sum() + window


def columns(x, w):
    return jnp.linalg.cholesky(x @ x.T + w), w


def printed(x):
    jax.debug.print("x = {}", x)
    return jnp.sin(x)


def standardized(x):
    return (x - lax.pmean(x, "lanes")) / lax.psum(x * x, "lanes")


halve_p = Primitive("halve")
halve_p.def_impl(lambda x: x / 2)
halve_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(halve_p, mlir.lower_fun(lambda x: x / 2, multiple_results=False))


def halved(x):
    return halve_p.bind(jnp.sin(x))


PROGRAMS = {
    "layer": Program(layer, (f32(128, 16), f32(16, 8)), {"in_axes": (0, None)}),
    "gradient": Program(jax.grad(loss), ({"w": f32(16, 8), "v": f32(8)}, f32(128, 16)), {"in_axes": (None, 0)}),
    "branches": Program(either, (f32(128, 32), f32(32, 32)), {"in_axes": (0, None)}),
    "loop": Program(newton, (f32(1000), f32()), {"in_axes": (0, None), "divergence": "lockstep"}),
    "scan": Program(recurrent, (f32(64, 10, 16), f32(16, 16)), {"in_axes": (0, None)}),
    "indexing": Program(look_up, (f32(1000, 8), i32(256)), {"in_axes": (None, 0)}),
    "transposed": Program(columns, (f32(8, 8, 64), f32(8, 8)), {"in_axes": (2, None), "out_axes": (1, 0)}),
    "effect": Program(printed, (f32(4, 3),)),
    "collectives": Program(standardized, (f32(32, 5),), {"axis_name": "lanes"}),
    "no_rule": Program(halved, (f32(32, 5),)),
}
