"""Cases for rules/callbacks.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, io_callback
from jax.experimental.buffer_callback import buffer_callback
from oracle import Case, f32

import minibatch


def host(vmap_method: str | None) -> Callable:
    """A call of the host that does for lanes in front what it does for one."""

    def fun(x: Any, y: Any) -> Any:
        def rows(x: Any, y: Any) -> Any:
            x, y = np.asarray(x), np.asarray(y)
            both = x * 2 + y[..., None]
            return both, both.max(-1)

        shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), x.dtype)
        return jax.pure_callback(rows, shapes, x, y, vmap_method=vmap_method)

    return fun


def buffers(vmap_method: str | None) -> Callable:
    """The same on the host's buffers."""

    def fun(x: Any, y: Any) -> Any:
        def fill(_: Any, out: Any, x: Any, y: Any) -> None:
            np.asarray(out)[...] = np.asarray(x) * 2 + np.asarray(y)[..., None]

        return buffer_callback(fill, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method=vmap_method)(x, y)

    return fun


def io(x: Any, y: Any) -> Any:
    return io_callback(lambda x, y: np.asarray(x) + np.asarray(y), jax.ShapeDtypeStruct(x.shape, x.dtype), x, y)


def said(x: Any) -> Any:
    jax.debug.callback(lambda *_: None, x, 2.0)
    jax.debug.print("{}", x[0])
    jax.debug.inspect_array_sharding(x, callback=lambda _: None)
    return x


def checked(x: Any) -> Any:
    def log(x: Any) -> Any:
        checkify.check(x > 0, "{v}", v=x)
        return jnp.log(jnp.abs(x))

    error, out = checkify.checkify(minibatch.vmap(log))(x)
    told = [leaf for leaf in jax.tree.leaves(error) if not jnp.issubdtype(leaf.dtype, jnp.integer)]
    return out, told  # whether, and with what payload; which error it is is a number that differs from trace to trace


def foreign(vmap_method: str | None) -> Callable:
    """A Cholesky factor by LAPACK itself, which takes matrices by columns and any number of them."""

    def fun(x: Any) -> Any:
        x = x @ x.T + 3 * jnp.eye(3)
        columns = (1, 0)
        call = jax.ffi.ffi_call(
            "lapack_spotrf_ffi",
            (jax.ShapeDtypeStruct((3, 3), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)),
            vmap_method=vmap_method,
            input_layouts=[columns],
            output_layouts=[columns, ()],
            input_output_aliases={0: 0},
        )
        return jnp.tril(call(x, uplo=np.uint8(ord("L")))[0]), jnp.linalg.cholesky(x)

    return fun


METHODS = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized")
CASES = [
    *(Case(method, host(method), (f32(3), f32()), "pure_callback") for method in METHODS),
    Case("no method", host(None), (f32(3), f32()), "pure_callback", jax=False),
    Case("io", io, (f32(3), f32()), "io_callback"),
    Case("said", said, (f32(3),), "debug_callback debug_print inspect_sharding", grad=True),
    Case("checked", checked, (f32(3),), "check"),
    *(Case(f"buffers, {method}", buffers(method), (f32(3), f32()), "buffer_callback") for method in METHODS),
    Case("buffers one by one", buffers(None), (f32(3), f32()), "buffer_callback", jax=False),
    Case("foreign", foreign("broadcast_all"), (f32(3, 3),), "ffi_call"),
    Case("foreign one by one", foreign(None), (f32(3, 3),), "ffi_call", jax=False),
]
