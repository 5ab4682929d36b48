"""Linear algebra and Fourier transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from minibatch._batched import Axis, Batched, is_batched, move
from minibatch._jax import rebind
from minibatch._registry import leading, lift_leading, rule
from minibatch.rules.fallback import one_by_one

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


@rule("cholesky_update")
def cholesky_update(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[n, n], [n] -> [n, n]   lifts to   a loop: what it lowers to takes one matrix at a time."""
    return one_by_one(axis, eqn, *operands)
