"""Cases for rules/elementwise.py."""

import jax.numpy as jnp
from jax import lax
from oracle import Case, bools, f32, i32

CASES = [
    Case("sin", lax.sin, (f32(3),), "sin", grad=True),
    Case("add", lambda x, y: lax.add(x, y), (f32(2, 3), f32(2, 3)), "add", grad=True),
    Case("add-scalar", lambda x, y: x + y, (f32(2, 3), f32()), "add", grad=True),
    Case("select_n", lambda p, x, y: jnp.where(p, x, y), (bools(3), f32(3), f32(3)), "select_n", grad=True),
    Case("shift_left", lambda x: lax.shift_left(x, jnp.int32(2)), (i32(3),), "shift_left"),
]
