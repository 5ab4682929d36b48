"""Cases for rules/reductions.py."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from oracle import Case, Draw, bools, c64, f32, i32, u32


def longest(a, b):
    """Whichever is farther from zero."""
    return jnp.where(jnp.abs(a) >= jnp.abs(b), a, b)


def with_position(a, b):
    """The larger of two values, with its position."""
    (x, i), (y, j) = a, b
    first = (x > y) | ((x == y) & (i <= j))
    return jnp.where(first, x, y), jnp.where(first, i, j)


def arg_largest(x, start):
    """The largest of x and `start`, and where."""
    at = lax.broadcasted_iota(np.int32, x.shape, 1)
    return lax.reduce((x, at), (start, jnp.int32(-1)), with_position, (1,))


CASES = [
    Case(
        "sums",
        lambda x: (x.sum(), x.sum(1), x.prod(0), x.max((0, 2)), x.min(1)),
        (f32(2, 3, 2),),
        "reduce_sum reduce_prod reduce_max reduce_min",
        grad=True,
    ),
    Case("no-axes", lambda x: lax.reduce_sum_p.bind(x, axes=(), out_sharding=None), (f32(3),), "reduce_sum"),
    Case("complex", lambda z: (z.sum(0), z.prod(1)), (c64(2, 3),), "reduce_sum reduce_prod"),
    Case("half", lambda x: (x.max(0), x.sum(1)), (Draw((2, 3), jnp.bfloat16),), "reduce_max", tol=3e-2),
    Case("logic", lambda p: (p.any(0), p.all(1), p.any()), (bools(2, 3),), "reduce_or reduce_and"),
    Case(
        "bitwise",
        lambda n: (lax.reduce_xor(n, (0,)), lax.reduce_and(n, (1,)), lax.reduce_or(n, (0, 1))),
        (u32(2, 3),),
        "reduce_xor reduce_and reduce_or",
    ),
    Case(
        "positions",
        lambda x: (x.argmax(0), lax.argmin(x, 1, np.int8), jnp.argmax(x)),
        (i32(2, 3),),
        "argmax argmin",
    ),
    Case(
        "running",
        lambda x: (lax.cumsum(x, 0), lax.cumprod(x, 1), lax.cumlogsumexp(x, 1, reverse=True)),
        (f32(2, 3),),
        "cumsum cumprod cumlogsumexp",
        grad=True,
    ),
    Case("running-extremes", lambda n: (lax.cummax(n, 1), lax.cummin(n, 0, reverse=True)), (i32(2, 3),), "cummax cummin"),
    Case("reduce", lambda x: lax.reduce(x, jnp.float32(0), longest, (1,)), (f32(2, 3, 2),), "reduce", grad=True),
    Case("reduce-start", lambda x, s: lax.reduce(x, s, longest, (0, 2)), (f32(2, 3, 2), f32()), "reduce", jax=False),
    Case("reduce-start-of-none", lambda x, s: lax.reduce(x, s, longest, (0,)), (i32(0, 2), i32()), "reduce", jax=False),
    Case("reduce-pairs", arg_largest, (f32(2, 3), f32()), "reduce", jax=False),
    Case("reduce-to-constant", lambda x, s: lax.reduce(x, s, lambda a, b: a, (0,)), (i32(3), i32()), "reduce", jax=False),
]
