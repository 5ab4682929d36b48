"""Cases for rules/shape.py."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from oracle import Case, Draw, bools, c64, f32, i32, keys

CASES = [
    Case(
        "broadcast_in_dim",
        lambda x: (
            lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)),
            lax.broadcast_in_dim(x, (5, 2, 3), (1, 2)),
            lax.broadcast_in_dim(x[:, :1], (2, 3, 4), (0, 1)),
        ),
        (f32(2, 3),),
        "broadcast_in_dim",
        grad=True,
    ),
    Case(
        "broadcast_in_dim, dims as numpy numbers",
        lambda x: jax.jit(jnp.sin)(lax.broadcast_in_dim(x, (3, 2), (np.int64(0),))),
        (f32(3),),
        "broadcast_in_dim",
    ),
    Case("broadcast-scalar", lambda x: jnp.broadcast_to(x, (2, 3)), (Draw((), jnp.bfloat16),), "broadcast_in_dim"),
    Case(
        "reshape",
        lambda x: (x.reshape(-1), x.reshape(3, 2, 2), lax.reshape(x, (6, 2), (2, 0, 1)), x.reshape(1, 2, 3, 2)),
        (f32(2, 3, 2),),
        "reshape",
        grad=True,
    ),
    Case("transpose", lambda x: (x.T, jnp.moveaxis(x, 0, 1)), (i32(2, 3, 4),), "transpose"),
    Case("squeeze", lambda x: (lax.squeeze(x, (0, 2)), lax.squeeze(x, (2,))), (c64(1, 3, 1),), "squeeze"),
    Case("rev", lambda x: (x[::-1], lax.rev(x, (0, 1))), (f32(2, 3),), "rev", grad=True),
    Case("split", lambda x: [*jnp.split(x, [1], 1), *jnp.split(x, 2, 0)], (f32(2, 3),), "split", grad=True),
    Case("unstack", lambda x: [*jnp.unstack(x, axis=1), *jnp.unstack(x)], (i32(2, 3),), "unstack"),
    Case("tile", lambda x: (jnp.tile(x, (2, 3)), jnp.tile(x, 2)), (f32(2, 1),), "tile", grad=True),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y, x], 1), (f32(2, 3), f32(2, 1)), "concatenate", grad=True),
    Case("concatenate-empty", lambda x, y: jnp.concatenate([x, y]), (bools(0), bools(2)), "concatenate"),
    Case(
        "stack",
        lambda x, y: [jnp.stack([x, y, y], axis) for axis in (0, 1, 2)],
        (f32(2, 3), f32(2, 3)),
        "stack",
        grad=True,
    ),
    Case(
        "pad",
        lambda x, v: (lax.pad(x, v, ((1, 2, 1), (0, -1, 0))), lax.pad(x, v, ((-1, 0, 0), (1, 0, 2)))),
        (f32(2, 3), f32()),
        "pad",
        grad=True,
    ),
    Case("pad-scalar", lambda x, v: lax.pad(x, v, ()), (i32(), i32()), "pad"),
    Case(
        "keys",
        lambda k: (k.T, k.reshape(-1), k[::-1], jnp.stack([k, k], 1), jnp.concatenate([k, k])),
        (keys(2, 3),),
        "transpose reshape rev stack concatenate",
    ),
]
