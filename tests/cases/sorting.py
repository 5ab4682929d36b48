"""Cases for rules/sorting.py."""

import jax.numpy as jnp
from jax import lax
from oracle import Case, Draw, f32, i32

CASES = [
    Case("sort", lambda x: (jnp.sort(x), jnp.sort(x, 0, descending=True)), (f32(2, 4),), "sort", grad=True),
    Case("argsort", lambda x: jnp.argsort(x, axis=0), (i32(4, 2),), "sort"),
    Case("sort-key-value", lambda k, v: lax.sort_key_val(k, v, 0), (f32(4, 2), f32(4, 2)), "sort", grad=True),
    Case(
        "sort-by-two-of-three",
        lambda a, b, c: lax.sort((a, b, c), dimension=1, num_keys=2),
        (i32(2, 4, low=0, high=2), Draw((2, 4), jnp.bfloat16), i32(2, 4)),
        "sort",
    ),
    Case("top_k", lambda x: (*lax.top_k(x, 2), *lax.top_k(x, 1, axis=0)), (f32(2, 4),), "top_k", grad=True),
    Case(
        "approx_top_k",
        lambda x: (*lax.approx_max_k(x, 2, recall_target=1.0), *lax.approx_min_k(x, 1, reduction_dimension=0)),
        (f32(2, 4),),
        "approx_top_k",
    ),
]
