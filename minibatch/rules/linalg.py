"""Linear algebra and Fourier transforms."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Axis, Batched, is_batched, move
from minibatch._interpreter import batch_jaxpr
from minibatch._jax import rebind
from minibatch._registry import leading, lift_leading, rule

leading("""
    cholesky eig eigh fft geqp3 geqrf hessenberg householder_product lu lu_pivots_to_permutation qr schur svd
    symmetric_product tridiagonal
""")


@rule("ormqr triangular_solve tridiagonal_solve", anywhere=True)
def solve(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[n, n], [n, k] -> [n, k]   lifts to   [B, n, n], [B, n, k] -> [B, n, k], or, by one matrix that all lanes share, to
    [n, n], [n, B k] -> [n, B k]: the lanes are more columns (rows, where the matrix multiplies from the right).
    """
    *matrix, x = operands
    if any(map(is_batched, matrix)):
        return lift_leading(axis, eqn, *operands)
    from_left = eqn.params.get("left_side", eqn.params.get("left", True))
    bdim = np.ndim(x.value) - (2 if from_left else 3)
    wide = move(x.value, x.bdim, bdim)
    (out,) = rebind(eqn, *matrix, lax.collapse(wide, bdim, bdim + 2))
    return [Batched(lax.reshape(out, wide.shape), bdim)]


@rule("cholesky_update", anywhere=True)
def cholesky_update(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[n, n], [n] -> [n, n]   lifts to   its rotations, lifted: what it lowers to takes one matrix at a time."""
    return batch_jaxpr(axis, _jax.trace_jaxpr(rotated, [v.aval for v in eqn.invars]), operands)


def rotated(r: Any, z: Any) -> list:
    """The triangular q with qᵀq = rᵀr + z zᵀ: row after row of r is rotated against z, whose element it takes in."""

    def step(k: Any, state: Any) -> Any:
        r, z = state
        row = lax.dynamic_index_in_dim(r, k, keepdims=False)
        x, y = (lax.dynamic_index_in_dim(vector, k, keepdims=False) for vector in (row, z))
        length = jnp.where(y == 0, 1, jnp.hypot(x, y))
        cos, sin = jnp.where(y == 0, 1, x / length), y / length
        return lax.dynamic_update_index_in_dim(r, cos * row + sin * z, k, 0), cos * z - sin * row

    return [lax.fori_loop(0, z.shape[0], step, (r, z))[0]]
