"""Functions of JAX's own library, each of many primitives, against the stack of lanes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import Case, Draw, arguments, assert_close, f32, i32, keys, stack_of_lanes

import minibatch

pytestmark = pytest.mark.usefixtures("compiles_quickly")
KEY = keys()
POSITIVE = f32(low=0.5, high=3.0)
cube_root = lambda a: lax.custom_root(
    lambda x: x**3 - a, jnp.ones_like(a), lambda f, x: lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3 * x * x), x),
    lambda g, y: y / g(jnp.ones_like(y)),
)  # fmt: skip
solid = lambda a: a @ a.T + 3 * jnp.eye(len(a))


def decayed(y, k):
    """The solution of a differential equation, by its parameters."""
    from jax.experimental.ode import odeint

    return odeint(lambda y, t, k: -k * y, y, jnp.linspace(0.0, 1.0, 3), k).sum()


ARRAYS = [
    Case("unique", lambda x: jnp.unique(x, size=4, return_counts=True, return_inverse=True, fill_value=0), (i32(6),)),
    Case("lexsort", lambda x, y: jnp.lexsort((x, y)), (i32(6), i32(6))),
    Case("argsort of nan", lambda x: jnp.argsort(jnp.where(x > 0, x, jnp.nan)), (f32(6),)),
    Case("partition", lambda x: jnp.partition(x, 2), (f32(6),)),
    Case("interp", lambda x, xp, fp: jnp.interp(x, jnp.sort(xp), fp), (f32(4), f32(5), f32(5))),
    Case("histogram", lambda x: jnp.histogram(x, bins=4, range=(-1, 1)), (f32(9),)),
    Case("digitize", lambda x, bins: jnp.digitize(x, jnp.sort(bins)), (f32(9), f32(4))),
    Case("convolve", lambda x, y: [jnp.convolve(x, y, mode=mode) for mode in ("full", "same", "valid")], (f32(6), f32(3))),
    Case("pad", lambda x: [jnp.pad(x, 1, mode=mode) for mode in ("reflect", "edge", "wrap", "linear_ramp")], (f32(3, 4),)),
    Case("pad by less than nothing", lambda x, v: lax.pad(x, v, [(-1, 2, 0), (1, -1, 1)]), (f32(4, 4), f32())),
    Case("piecewise", lambda x: jnp.piecewise(x, [x < 0, x > 1], [0.0, lambda x: x**2, lambda x: -x]), (f32(4),)),
    Case("vectorize", jnp.vectorize(jnp.dot, signature="(n),(n)->()"), (f32(2, 4), f32(4))),
    Case("apply_along_axis", lambda x: jnp.apply_along_axis(jnp.sort, 0, x), (f32(4, 2),)),
    Case("map_coordinates", lambda x, c: jax.scipy.ndimage.map_coordinates(x, [c, c], 1), (f32(4, 4), f32(5, low=0))),
    Case("resize", lambda x: jax.image.resize(x, (6, 3), "bilinear"), (f32(4, 4),)),
    Case("scale_and_translate", lambda x, s, t: jax.image.scale_and_translate(x, (4, 4), (0, 1), s, t, "linear"),
         (f32(4, 4), f32(2, low=0.5), f32(2))),
    Case("polynomials", lambda p, x: (jnp.polyval(p, x), jnp.polyfit(x, x * x, 1)), (f32(3), f32(5))),
    Case("quantile", jnp.quantile, (f32(7), f32(2, low=0, high=1))),
    Case("packbits", lambda x: jnp.packbits(x.astype(jnp.uint8)), (i32(10, low=0, high=2),)),
    Case("four bits", lambda x: (x.astype(jnp.int4) + x.astype(jnp.int4)).astype(jnp.int32), (i32(3, low=0, high=3),)),
    Case("eight bits", lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (f32(3),)),
    Case("product of int8", lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
         (Draw((2, 3), jnp.int8, -9, 9), Draw((3, 2), jnp.int8, -9, 9))),
    Case("rows that are nowhere", lambda x, i: [x.at[i].get(mode=mode, fill_value=-1) for mode in ("fill", "clip")],
         (f32(4), i32(5, low=-6, high=7))),
    Case("slices that end outside", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 2)), (f32(4, 3), i32(low=-5, high=9))),
    Case("updates that end outside", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)),
         (f32(4, 3), f32(2, 2), i32(low=-5, high=9))),
    Case("attention", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), (f32(4, 2, 3),) * 3),
    Case("distributions", lambda x: (jax.scipy.stats.norm.logcdf(x), jax.scipy.stats.rankdata(x),
                                     jax.scipy.stats.multivariate_normal.logpdf(x, jnp.zeros(3), jnp.eye(3))), (f32(3),)),
    Case("convolve2d", lambda x: jax.scipy.signal.convolve2d(x, x, mode="same"), (f32(4, 4),)),
]  # fmt: skip
LINEAR = [
    Case("lstsq", lambda a, b: (jnp.linalg.lstsq(a, b)[0], jnp.linalg.matrix_rank(a)), (f32(4, 2), f32(4))),
    Case("slogdet", lambda a: (jnp.linalg.slogdet(solid(a)), jnp.linalg.cond(solid(a))), (f32(3, 3),)),
    Case("expm", jax.scipy.linalg.expm, (f32(3, 3),)),
    Case("slope of eigh", jax.grad(lambda a: jnp.linalg.eigh(solid(a))[0].prod()), (f32(3, 3),), tol=1e-2),
    Case("slope of svd", jax.grad(lambda a: jnp.linalg.svd(a, compute_uv=False).sum()), (f32(3, 2),), tol=1e-2),
    Case("slope of det", jax.grad(lambda a: jnp.log(jnp.linalg.det(solid(a)))), (f32(3, 3),), tol=1e-2),
    Case("lu_solve", lambda a, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(solid(a)), b), (f32(3, 3), f32(3))),
    Case("conjugate gradients", lambda a, b: jax.scipy.sparse.linalg.cg(solid(a), b)[0], (f32(3, 3), f32(3)), tol=1e-3),
    Case("eigh_tridiagonal", lambda d, e: jax.scipy.linalg.eigh_tridiagonal(d, e, eigvals_only=True), (f32(4), f32(3))),
    Case("toeplitz", lambda c: jax.scipy.linalg.toeplitz(c), (f32(3),)),
    Case("custom_root", lambda a: (cube_root(a), jax.grad(cube_root)(a)), (POSITIVE,)),
    Case("odeint", lambda y, k: (decayed(y, k), jax.grad(decayed)(y, k)), (f32(2), POSITIVE), tol=1e-3),
    Case("linear_transpose", lambda a, y: jax.linear_transpose(lambda x: a @ x, y)(y)[0], (f32(3, 3), f32(3))),
]
RANDOM = [
    Case("categorical", jax.random.categorical, (KEY, f32(4))),
    Case("choice", lambda key: jax.random.choice(key, 5, (3,), replace=False), (KEY,)),
    Case("slope of gamma", lambda key, a: jax.grad(lambda a: jax.random.gamma(key, a))(a), (KEY, POSITIVE)),
    Case("truncated_normal", lambda key: jax.random.truncated_normal(key, -1, 1, (2,)), (KEY,)),
    Case("keys in keys", lambda key: jnp.stack([jnp.reshape(jax.random.split(key, 4), (2, 2))] * 2), (KEY,)),
    *(Case(impl, lambda key: (jax.random.normal(key), jax.random.split(key), jax.random.fold_in(key, 1)), (keys(impl=impl),))
      for impl in ("rbg", "unsafe_rbg")),
]  # fmt: skip
CASES = [*ARRAYS, *LINEAR, *RANDOM]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_lanes_agree(case: Case) -> None:
    """Its first argument mapped on its last axis, every other one mapped in front or, in turn, shared."""
    rest = [0 if i % 2 else None for i in range(len(case.args) - 1)]
    bdims = [len(case.args[0].shape), *rest]
    stacked, per_lane = arguments(case, bdims, 3)
    found = minibatch.vmap(case.fun, tuple(bdims))(*stacked)
    assert_close(found, stack_of_lanes(case.fun, per_lane), case.tol, "stack of lanes")
    assert all(np.shape(x)[0] == 3 for x in jax.tree.leaves(found))
