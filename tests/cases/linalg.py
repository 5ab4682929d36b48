"""Cases for rules/linalg.py."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax.linalg import geqp3, geqrf, ormqr
from oracle import Case, Draw, c64, f32, i32

L = lax.linalg


def dominant(*shape, dtype=np.float32):
    """A matrix with a large diagonal."""

    def make(rng, size):
        noise = rng.uniform(-1, 1, (size, *shape))
        return jnp.asarray(noise + 4 * np.eye(*shape[-2:]), dtype)

    return Draw(shape, dtype, make=make)


def definite(*shape, dtype=np.float32):
    """A positive definite matrix with eigenvalues apart."""

    def make(rng, size):
        a = rng.uniform(-1, 1, (size, *shape))
        if np.dtype(dtype).kind == "c":
            a = a + 1j * rng.uniform(-1, 1, (size, *shape))
        a = a @ np.conj(np.swapaxes(a, -1, -2)) + np.diag(np.arange(1, 1 + shape[-1]) * 2.0)
        return jnp.asarray(a, dtype)

    return Draw(shape, dtype, make=make)


def rebuilt_eigh(a):
    """The matrix from its eigenvalues and eigenvectors, and the eigenvalues."""
    v, w = L.eigh(a)
    return (v * w) @ v.conj().T, w


def rebuilt_svd(a):
    """The matrix from its singular values and vectors, and the singular values."""
    u, s, vt = L.svd(a, full_matrices=False)
    return (u * s) @ vt, s


def rebuilt_lu(a):
    """The permuted matrix from its factors, and the permutation."""
    lu, pivots, permutation = L.lu(a)
    lower = jnp.tril(lu, -1) + jnp.eye(a.shape[0], dtype=a.dtype)
    return lower @ jnp.triu(lu), permutation, L.lu_pivots_to_permutation(pivots, a.shape[0])


def reflected(a, c):
    """Products of c with the orthogonal factor of a, by reflectors and by the factor itself."""
    qr, taus = geqrf(a)
    return ormqr(qr, taus, c), ormqr(qr, taus, c.T, left=False, transpose=True), L.householder_product(qr, taus) @ c


def rebuilt_schur(a):
    """The matrix from its Schur form, and from its Hessenberg form."""
    t, z = L.schur(a)
    h, taus = L.hessenberg(a)
    return z @ t @ z.T, h, taus


def solves(a, b):
    """Solutions by the triangles of a, from both sides."""
    return (
        L.triangular_solve(a, b, left_side=True, lower=True),
        L.triangular_solve(a, b, left_side=True, transpose_a=True, unit_diagonal=True),
        L.triangular_solve(a, b.T, left_side=False, lower=True, conjugate_a=True),
    )


CASES = [
    Case("cholesky", L.cholesky, (definite(3, 3),), "cholesky", grad=True),
    Case("cholesky-complex", L.cholesky, (definite(3, 3, dtype=np.complex64),), "cholesky"),
    Case("cholesky_update", L.cholesky_update, (dominant(3, 3), f32(3)), "cholesky_update", jax=False),
    Case(
        "cholesky_update, some of it nothing",
        lambda r, z: L.cholesky_update(-jnp.triu(r), jnp.where(jnp.arange(3) == 1, 0, z)),
        (dominant(3, 3), f32(3)),
        "cholesky_update",
        jax=False,
    ),
    Case("eig", lambda a: jnp.sort(jnp.abs(L.eig(a)[0])), (dominant(3, 3),), "eig"),
    Case("eigh", rebuilt_eigh, (definite(3, 3),), "eigh", grad=True, tol=1e-3),
    Case("svd", rebuilt_svd, (f32(3, 2),), "svd", grad=True, tol=1e-3),
    Case("qr", lambda a: jnp.abs(L.qr(a, full_matrices=False)[1]), (dominant(3, 2),), "qr", grad=True, tol=1e-3),
    Case("qr-pivoting", lambda a: jax.scipy.linalg.qr(a, pivoting=True)[1:], (c64(2, 3),), "qr geqp3", tol=1e-3),
    Case("lu", rebuilt_lu, (f32(3, 3),), "lu lu_pivots_to_permutation"),
    Case("reflectors", reflected, (f32(3, 3), f32(3, 2)), "geqrf ormqr householder_product", tol=1e-3),
    Case("geqp3", geqp3, (f32(3, 3), i32(3, low=0, high=1)), "geqp3", tol=1e-3, jax=False),
    Case("schur", rebuilt_schur, (f32(3, 3),), "schur hessenberg", tol=1e-3),
    Case("tridiagonal", lambda a: L.tridiagonal(a)[1:3], (definite(3, 3),), "tridiagonal", tol=1e-3),
    Case(
        "symmetric_product",
        lambda a, c: L.symmetric_product(a, c + c.T, alpha=2.0),
        (f32(3, 2), f32(3, 3)),
        "symmetric_product",
    ),
    Case("triangular_solve", solves, (dominant(3, 3), f32(3, 2)), "triangular_solve", grad=True, tol=1e-3),
    Case(
        "triangular_solve-complex",
        lambda a, b: L.triangular_solve(a, b, left_side=True, transpose_a=True, conjugate_a=True),
        (dominant(3, 3, dtype=np.complex64), c64(3, 1)),
        "triangular_solve",
    ),
    Case(
        "tridiagonal_solve",
        lambda e, d, b: L.tridiagonal_solve(e, d, e, b),
        (Draw((3,), make=lambda rng, n: jnp.float32(rng.uniform(-1, 1, (n, 3)) * [0, 1, 1])), f32(3, low=3, high=4), f32(3, 2)),
        "tridiagonal_solve",
        grad=True,
    ),
    Case("solve", jnp.linalg.solve, (dominant(3, 3), f32(3)), "lu triangular_solve", grad=True, tol=1e-3),
    Case(
        "fft",
        lambda z: (jnp.fft.fft(z), jnp.fft.ifft2(z), jnp.fft.irfft(z), jnp.fft.rfft(z.real, axis=0)),
        (c64(2, 4),),
        "fft",
        grad=True,
        tol=1e-3,
    ),
]
