"""Sparse matrices as arguments and results, their derivatives against dense ones, and what is not repeated for each lane."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.sparse import INDICES, SHAPE, matrix, old, rows
from jax import lax
from jax.experimental import sparse
from oracle import assert_close

import minibatch
from minibatch import _jax
from minibatch._registry import RULES

RNG = np.random.default_rng(0)
DENSE = jnp.asarray(RNG.normal(size=(2, 3, *SHAPE)) * (RNG.random((2, 3, *SHAPE)) < 0.5), jnp.float32)
DATA, X = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32), jnp.asarray(RNG.normal(size=(2, 3, 4)), jnp.float32)
PRODUCTS = {
    "bcoo": lambda d, x: matrix(d) @ x,
    "bcsr": lambda d, x: rows(d) @ x,
    "coo": lambda d, x: old(d)[0] @ x,
    "csr": lambda d, x: old(d)[1] @ x,
}


def product(data: Any, x: Any) -> Any:
    """What each of PRODUCTS is, of dense arrays."""
    return jnp.zeros(SHAPE).at[tuple(INDICES.T)].add(data) @ x


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of `jaxpr` and of those inside."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("form", [sparse.BCOO, sparse.BCSR])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_matrices_are_arguments_and_results(form: Any, wrap: Callable) -> None:
    batch = form.fromdense(DENSE[0], n_batch=1)
    assert_close(wrap(minibatch.vmap(lambda m, x: m @ x))(batch, X[0]), jnp.einsum("bij,bj->bi", DENSE[0], X[0]), 1e-5)
    same, dense = wrap(minibatch.vmap(lambda m: (m, m.todense())))(batch)
    assert isinstance(same, form) and (same.shape, same.n_batch) == (batch.shape, 1)
    assert_close(same.todense(), DENSE[0], 1e-6)
    assert_close(dense, DENSE[0], 1e-6)


@pytest.mark.parametrize("form", [sparse.BCOO, sparse.BCSR])
def test_matrices_are_arguments_and_results_when_nested(form: Any) -> None:
    batch = form.fromdense(DENSE, n_batch=2)
    found = minibatch.vmap(minibatch.vmap(lambda m, x: m @ x))(batch, X)
    assert_close(found, jnp.einsum("abij,abj->abi", DENSE, X), 1e-5)
    made = minibatch.vmap(minibatch.vmap(lambda x: form.fromdense(x, nse=12, index_dtype=jnp.int32)))(DENSE)
    assert isinstance(made, form) and made.n_batch == 2
    assert_close(made.todense(), DENSE, 1e-6)


def test_matrices_with_batch_and_dense_dims_of_their_own() -> None:
    x = jnp.asarray(RNG.normal(size=(3, 2, 4, 5, 2)), jnp.float32)
    made = minibatch.vmap(lambda x: sparse.BCOO.fromdense(x, nse=20, n_batch=1, n_dense=1).transpose((0, 2, 1, 3)))(x)
    assert (made.n_batch, made.n_dense) == (2, 1)
    assert_close(made.todense(), x.transpose(0, 1, 3, 2, 4), 1e-6)
    one = sparse.BCOO((DATA[:1], jnp.stack([INDICES, INDICES[::-1]])), shape=(2, *SHAPE))  # data that a batch shares
    found = minibatch.vmap(lambda d: sparse.BCOO((d, one.indices), shape=one.shape).todense())(DATA[:, None])
    wanted = [sparse.BCOO((d[None], one.indices), shape=one.shape).todense() for d in DATA]
    assert_close(found, jnp.stack(wanted), 1e-6)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (None, -1)])
def test_derivatives_are_those_of_dense_matrices(form: str, in_axes: tuple) -> None:
    def loss(product: Callable) -> Callable:
        return lambda d, x: jnp.sin(minibatch.vmap(product, in_axes)(d, x)).sum()

    args = [a if d == 0 else a[0] if d is None else a.T for a, d in zip((DATA, X[0]), in_axes, strict=True)]
    found = jax.jit(jax.grad(loss(PRODUCTS[form]), (0, 1)))(*args)
    assert_close(found, jax.grad(loss(product), (0, 1))(*args), 1e-4)


@pytest.mark.parametrize("form", PRODUCTS)
def test_maps_of_gradients_are_those_of_dense_matrices(form: str) -> None:
    def grads(product: Callable) -> Callable:
        return minibatch.vmap(jax.grad(lambda d, x: jnp.sin(product(d, x)).sum(), (0, 1)))

    assert_close(grads(PRODUCTS[form])(DATA, X[0]), grads(product)(DATA, X[0]), 1e-4)


def test_products_of_two_sparse_matrices_have_gradients() -> None:
    def loss(fun: Callable) -> Callable:
        return lambda d, e: jnp.sin(minibatch.vmap(fun)(d, e)).sum()

    def sparse_product(d: Any, e: Any) -> Any:
        return (matrix(d) @ matrix(e).T).sum_duplicates(nse=9).todense()

    dense = lambda d: jnp.zeros(SHAPE).at[tuple(INDICES.T)].add(d)
    found = jax.grad(loss(sparse_product), (0, 1))(DATA, X[0])
    assert_close(found, jax.grad(loss(lambda d, e: dense(d) @ dense(e).T), (0, 1))(DATA, X[0]), 1e-4)


@pytest.mark.parametrize("numbers", [(([3], [2]), ([0, 1], [1, 0])), (([2], [3]), ([1, 0], [0, 1]))])
def test_products_of_batches_of_sparse_matrices(numbers: tuple) -> None:
    x, y = DENSE, DENSE.transpose(1, 0, 3, 2)
    batches = [sparse.BCOO.fromdense(jnp.stack([a, 2 * a]), n_batch=3) for a in (x, y)]
    found = minibatch.vmap(lambda a, b: sparse.bcoo_dot_general(a, b, dimension_numbers=numbers).todense())(*batches)
    wanted = lax.dot_general(x, y, numbers)
    assert_close(found, jnp.stack([wanted, 4 * wanted]), 1e-4)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("shape", [(7, 4), (7, 4, 2)])
def test_lanes_are_more_columns_for_a_matrix_that_they_share(form: str, shape: tuple) -> None:
    jaxpr = jax.make_jaxpr(minibatch.vmap(lambda x: PRODUCTS[form](DATA[0], x), compile=False))(jnp.ones(shape))
    name = f"{form}_dot_general" if form[0] == "b" else f"{form}_matmat"
    products = [eqn for eqn in equations(jaxpr) if eqn.primitive.name.startswith(form)]
    assert [eqn.primitive.name for eqn in products] == [name]
    *buffers, x = products[0].invars
    assert all(v.aval.size <= 8 for v in buffers) and x.aval.shape == (4, 7 * np.prod(shape[2:], dtype=int))


@pytest.mark.parametrize("form", PRODUCTS)
def test_lanes_that_are_laid_over_a_mesh_stay_so(form: str) -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X[0], jax.NamedSharding(mesh, jax.P("x")))
        found = minibatch.vmap(lambda x: PRODUCTS[form](DATA[0], x))(x)
        assert jax.typeof(found).sharding.spec == jax.P("x", None)
    assert_close(found, jnp.stack([product(DATA[0], x) for x in X[0]]), 1e-5)


def test_indices_that_lanes_share_are_sorted_once() -> None:
    def fun(data: Any) -> Any:
        m = matrix(data)
        return m.sort_indices().indices, m.sum_duplicates(nse=4, remove_zeros=False).indices, m.T.indices

    sorts = [eqn for eqn in equations(minibatch.vmap(fun, out_axes=None).jaxpr(DATA)) if eqn.primitive.name == "sort"]
    assert sorts and all(v.aval.shape in [(4,), (4, 2)] for eqn in sorts for v in eqn.invars)


@pytest.mark.parametrize("form", PRODUCTS)
def test_nothing_dense_is_made_on_the_way(form: str) -> None:
    def loss(d: Any, i: Any, x: Any) -> Any:
        m = sparse.BCOO((d, i), shape=(50, 60))
        buffers = {"bcoo": m, "coo": sparse.COO((d, *i.T), shape=m.shape)}.get(form) or _compressed(form, d, i, m.shape)
        return (buffers @ x).sum()

    data, indices = jnp.ones((3, 4)), jnp.asarray(RNG.integers(0, 50, (3, 4, 2)), jnp.int32)
    lifted = jax.value_and_grad(lambda *args: minibatch.vmap(loss, compile=False)(*args).sum(), (0, 2))
    jaxpr = jax.make_jaxpr(lifted)(data, indices, jnp.ones((3, 60)))
    assert max(v.aval.size for eqn in equations(jaxpr) for v in eqn.outvars) < 50 * 60


def _compressed(form: str, data: Any, indices: Any, shape: tuple) -> Any:
    indptr = jnp.searchsorted(jnp.sort(indices[:, 0]), jnp.arange(shape[0] + 1)).astype(jnp.int32)
    return {"bcsr": sparse.BCSR, "csr": sparse.CSR}[form]((data, indices[:, 1], indptr), shape=shape)


def test_every_definition_is_found() -> None:
    names = {name for name, rule in RULES.items() if rule.module == "minibatch.rules.sparse"} - {"spsolve"}
    for name in names:
        assert callable(_jax.sparse_definition(getattr(sparse, f"{name}_p")))


def test_who_has_no_sparse_matrices_need_not_import_them() -> None:
    program = "import minibatch, sys; assert 'jax.experimental.sparse' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
