"""Cases for rules/windows.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lax.windowed_reductions import _select_and_scatter
from oracle import Case, f32, i32

WINDOW = {
    "window_dimensions": (2, 3),
    "window_strides": (1, 2),
    "padding": ((0, 1), (2, 0)),
    "base_dilation": (1, 2),
    "window_dilation": (2, 1),
}
PLAIN = {"window_dimensions": (2, 2), "window_strides": (1, 2), "padding": ((0, 1), (0, 0))}


def over(op: Callable, init: Any, window: dict = WINDOW) -> Callable:
    """A reduction over windows."""
    return lambda x: lax.reduce_window(x, init, op, **window)


def cotangent(x: Any, g: Any) -> Any:
    """How max pooling sends `g` back."""
    pool = over(lax.max, -jnp.inf, PLAIN)
    return jax.vjp(pool, x)[1](g)[0]


def of_greatest(x: Any, y: Any) -> Any:
    """The greatest of x in each window, and the y that goes with it."""

    def greater(a: tuple, b: tuple) -> tuple:
        first = a[0] >= b[0]
        return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])

    return lax.reduce_window((x, y), (-jnp.inf, jnp.int32(0)), greater, **WINDOW)


def scattered(x: Any, source: Any, init: Any) -> Any:
    """`source` added, to `init`, where each window of `x` has its greatest."""
    return _select_and_scatter(x, lax.ge, (2, 2), (1, 2), ((0, 0), (0, 0)), source, init, lax.add)


CASES = [
    Case("reduce_window_sum", over(lax.add, 0.0), (f32(4, 5),), "reduce_window_sum", grad=True),
    Case("reduce_window_max", over(lax.max, -jnp.inf), (f32(4, 5),), "reduce_window_max"),
    Case("reduce_window_min", over(lax.min, jnp.inf, PLAIN), (f32(4, 5),), "reduce_window_min", grad=True),
    Case("select_and_scatter_add", cotangent, (f32(4, 5), f32(4, 2)), "select_and_scatter_add"),
    Case(
        "select_and_gather_add",
        lambda x, t: jax.jvp(over(lax.max, -jnp.inf), (x,), (t,)),
        (f32(4, 5), f32(4, 5)),
        "select_and_gather_add",
    ),
    Case("reduce_window-product", over(lax.mul, 1.0), (f32(4, 5),), "reduce_window"),
    Case("reduce_window-pairs", of_greatest, (f32(4, 5), i32(4, 5))),
    Case("reduce_window-from", lambda x, init: over(lax.add, init)(x), (f32(4, 5), f32()), "reduce_window", jax=False),
    Case("select_and_scatter", scattered, (f32(4, 6), f32(3, 3), f32()), "select_and_scatter", jax=False),
]
