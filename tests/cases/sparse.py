"""Cases for rules/sparse.py."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import sparse
from oracle import Case, f32, i32

SHAPE = (3, 4)
INDICES = jnp.array([[0, 1], [2, 0], [2, 3], [0, 0]], jnp.int32)
ANY = i32(4, 2, low=0, high=5)  # with entries at the same place, and some out of range
COLUMNS, INDPTR, ORDER = jnp.array([0, 1, 0, 3], jnp.int32), jnp.array([0, 2, 2, 4], jnp.int32), jnp.array([3, 0, 1, 2])
SYSTEM = jnp.array([0, 1, 2], jnp.int32), jnp.array([0, 1, 2, 3], jnp.int32)


def matrix(data: Any, indices: Any = INDICES) -> Any:
    """A sparse [3, 4] of entries data [4]."""
    return sparse.BCOO((data, indices), shape=SHAPE)


def rows(data: Any) -> Any:
    """The same in compressed rows."""
    return sparse.BCSR((data[ORDER], COLUMNS, INDPTR), shape=SHAPE)


def old(data: Any) -> list:
    """The same in the formats without batch dims."""
    row, col = INDICES.T
    return [sparse.COO((data, row, col), shape=SHAPE), sparse.CSR((data[ORDER], COLUMNS, INDPTR), shape=SHAPE)]


def converted(x: Any) -> list:
    """A dense [3, 4] by way of all formats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [f.fromdense(x, nse=n).todense() for f, n in zip(FORMATS, (12, 13, 12, 12), strict=True)]


FORMATS = sparse.BCOO, sparse.BCSR, sparse.COO, sparse.CSR


def reordered(data: Any, indices: Any) -> list:
    """Sorted, and entries at the same place summed."""
    m = matrix(data, indices)
    summed = m.sum_duplicates(nse=3, remove_zeros=False)
    return [m.sort_indices().data, summed.data, summed.indices, m.sum_duplicates(nse=5).todense()]


def sampled(x: Any, y: Any, indices: Any) -> Any:
    """The entries of x @ y at indices."""
    return sparse.bcoo_dot_general_sampled(x, y, indices, dimension_numbers=(([1], [0]), ([], [])))


def batched_dot(data: Any, x: Any) -> Any:
    """Two matrices, data [2, 4], by x [2, k, 4]."""
    matrices = sparse.BCOO((data, jnp.stack([INDICES, INDICES[::-1]])), shape=(2, *SHAPE))
    return sparse.bcoo_dot_general(matrices, x, dimension_numbers=(([2], [2]), ([0], [0])))


def products(data: Any, x: Any, v: Any) -> list:
    """x [4, n], v [3] from the right and the left."""
    coo, csr = old(data)
    return [coo @ x, coo @ x[:, 0], sparse.coo_matvec(coo, v, transpose=True), csr @ x, csr @ x[:, 0], csr.T @ v]


def extracted(x: Any, indices: Any, data: Any) -> list:
    """The entries of a dense x at places of both formats."""
    unique = sparse.BCOO((data, indices), shape=SHAPE, unique_indices=True)
    m = rows(data)
    return [sparse.bcoo_extract(unique, x).data, sparse.bcsr_extract(m.indices, m.indptr, x) * data]


def solved(data: Any, b: Any) -> Any:
    """The x of a diagonal A x = b."""
    return sparse.linalg.spsolve(2 + lax.abs(data), *SYSTEM, b)


# jax.vmap takes some of these with lanes in front only, and some not at all.
CASES = [
    Case("todense", lambda d, i: matrix(d, i).todense(), (f32(4), ANY), "bcoo_todense", grad=True, jax=False),
    Case("dot", lambda d, i, x: matrix(d, i) @ x, (f32(4), ANY, f32(4)), "bcoo_dot_general", grad=True, jax=False),
    Case("dot-matrix", lambda d, x: x @ matrix(d), (f32(4), f32(2, 3)), "bcoo_dot_general", grad=True, jax=False),
    Case("dot-batch", batched_dot, (f32(2, 4), f32(2, 2, 4)), "bcoo_dot_general", grad=True, jax=False),
    Case("transpose", lambda d: matrix(d).T.todense(), (f32(4),), "bcoo_transpose", grad=True, jax=False),
    Case("extract", extracted, (f32(*SHAPE), ANY, f32(4)), "bcoo_extract bcsr_extract", grad=True, jax=False),
    Case(
        "convert",
        converted,
        (f32(*SHAPE),),
        "bcoo_fromdense bcsr_fromdense bcsr_todense coo_fromdense coo_todense csr_fromdense csr_todense",
        jax=False,
    ),
    Case("reorder", reordered, (f32(4), ANY), "bcoo_sort_indices bcoo_sum_duplicates", jax=False),
    Case("sampled", sampled, (f32(3, 2), f32(2, 4), ANY), "bcoo_dot_general_sampled", grad=True, jax=False),
    Case("sparse-sparse", lambda d, e: (matrix(d) @ matrix(e).T).todense(), (f32(4), f32(4)), "bcoo_spdot_general", jax=False),
    Case("rows", lambda d, x: rows(d) @ x, (f32(4), f32(4, 2)), "bcsr_dot_general", grad=True, jax=False),
    Case("any-class", lambda d: sparse.todense(matrix(d)) + sparse.todense(rows(d)), (f32(4),), "todense", jax=False),
    Case("products", products, (f32(4), f32(4, 2), f32(3)), "coo_matmat coo_matvec csr_matmat csr_matvec", jax=False),
    Case("spsolve", solved, (f32(3), f32(3)), "spsolve", grad=True, jax=False),
]
