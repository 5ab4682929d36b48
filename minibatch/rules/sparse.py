"""Sparse matrices of jax.experimental.sparse: products with a matrix that all lanes share, and the parts of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Axis, Batched, is_batched, move
from minibatch._interpreter import batch_jaxpr
from minibatch._jax import rebind
from minibatch._registry import rule
from minibatch.rules.fallback import one_by_one


@rule(
    """
    bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense
    bcoo_transpose bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_todense csr_fromdense csr_todense todense
    """,
    anywhere=True,
)
def decomposed(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f   lifts to   the gathers, scatters and sorts that f is defined by, lifted: what lanes share stays shared in them.

    The formats' own batch dimensions would do for most, but go by way of a dense [B, n, m] when they are differentiated.
    """
    definition = _jax.sparse_definition(eqn.primitive)

    def parts(*arrays: Any) -> list:
        out = definition(*arrays, **eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return batch_jaxpr(axis, _jax.trace_jaxpr(parts, [v.aval for v in eqn.invars]), operands)


@rule("bcoo_dot_general bcsr_dot_general", anywhere=True)
def dot_general(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*x] . [*y] -> [*batch, *free of x, *free of y]   lifts to   its parts, or, for a matrix x that all lanes share, to
    [*x] . [*y, B] -> [*batch, *free of x, B, *free of y].
    """
    (contract, y_contract), (_, y_batch) = eqn.params["dimension_numbers"]
    free = [d for d in range(eqn.invars[-1].aval.ndim) if d not in {*y_contract, *y_batch}]
    return _product(axis, eqn, operands, eqn.primitive, free, len(eqn.params["lhs_spinfo"].shape) - len(contract))


@rule("coo_matmat coo_matvec csr_matmat csr_matvec", anywhere=True)
def matmat(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[n, m] . [m, k] -> [n, k]   lifts to   its parts, or, for a matrix that all lanes share, to
    [n, m] . [m, B k] -> [n, B k]: what was by a vector is by a matrix.
    """
    from jax.experimental import sparse  # here, since most programs do without

    primitive = {"coo": sparse.coo_matmat_p, "csr": sparse.csr_matmat_p}[eqn.primitive.name[:3]]
    return _product(axis, eqn, operands, primitive, range(1, eqn.invars[-1].aval.ndim), 1)


def _product(axis: Axis, eqn: Any, operands: Sequence, primitive: Any, free: Sequence[int], bdim: int) -> list:
    """x y by `primitive`, with the lanes of y as more columns: in the first of its `free` dims, which is dim `bdim` of the
    result, or as a last dim. By its parts if x differs by lane, or lanes are laid over a mesh, of which `primitive` knows not.
    """
    *matrix, y = operands
    if any(map(is_batched, matrix)) or axis.mesh_name is not None:
        return decomposed(axis, eqn, *operands)
    column = free[0] if free else np.ndim(y.value) - 1
    wide = move(y.value, y.bdim, column)
    (out,) = rebind(eqn.replace(primitive=primitive), *matrix, lax.collapse(wide, column, column + 2) if free else wide)
    shape = eqn.outvars[0].aval.shape
    return [Batched(lax.reshape(out, (*shape[:bdim], axis.size, *shape[bdim:])), bdim)]


@rule("spsolve")
def spsolve(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[n, n], [n] -> [n]   lifts to   a loop: the solver takes one system at a time, and a singular one spoils its answer."""
    return one_by_one(axis, eqn, *operands)
