"""The cost model: as XLA counts where XLA counts, and by the textbook where it does not look inside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from minibatch._cost import jaxpr_cost

X = jnp.ones((128, 64))
W = jnp.ones((64, 32))
SQUARE = jnp.eye(64) + 1


def cost(fun, *args):
    return jaxpr_cost(jax.make_jaxpr(fun)(*args))


def steps(fun):
    return lambda x: lax.scan(lambda c, _: (fun(c), None), x, None, length=10)[0]


AS_XLA = {
    "matrix product": (lambda x, w: jnp.tanh(x @ w).sum(), X, W),
    "gradient": (jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum()), W, X),
    "softmax": (jax.nn.softmax, X),
    "convolution": (lambda x, k: lax.conv(x, k, (1, 1), "VALID"), jnp.ones((4, 3, 16, 16)), jnp.ones((8, 3, 3, 3))),
    "grouped convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", feature_group_count=2),
        jnp.ones((4, 6, 16, 16)),
        jnp.ones((8, 3, 3, 3)),
    ),
    "one trip of a loop": (lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: jnp.sin(c) @ SQUARE, x), X),
    "the dearest branch": (lambda p, x: lax.cond(p, lambda x: x @ SQUARE, lambda x: x, x), True, X),
}


@pytest.mark.parametrize("name", AS_XLA)
def test_operations_are_those_that_xla_counts(name):
    fun, *args = AS_XLA[name]
    analysis = jax.jit(fun).lower(*args).compile().cost_analysis()
    found = cost(fun, *args)
    assert found.flops == pytest.approx(analysis["flops"], rel=0.05)
    assert found.transcendentals == pytest.approx(analysis.get("transcendentals", 0), rel=0.05)


def test_scan_costs_all_its_steps():
    step = cost(lambda x: x @ SQUARE, X)
    assert cost(steps(lambda x: x @ SQUARE), X).flops == 10 * step.flops


def test_while_costs_the_trips_that_it_is_told_of():
    def loop(x):
        return lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ SQUARE, x)

    jaxpr = jax.make_jaxpr(loop)(X)
    assert jaxpr_cost(jaxpr, trips=7).flops == pytest.approx(7 * jaxpr_cost(jaxpr).flops)


def test_fused_equations_move_what_goes_in_and_comes_out():
    assert cost(lambda x: jnp.sin(x) * 2 + x, X).bytes == 2 * X.nbytes
    assert cost(lambda x, w: jnp.tanh(x) @ w, X, W).bytes == X.nbytes + (X.nbytes + W.nbytes + 128 * 32 * 4)


def test_indexing_moves_what_is_indexed():
    assert cost(lambda x, i: lax.dynamic_index_in_dim(x, i), X, 3).bytes < X.nbytes / 10
    assert cost(lambda x, i: x.at[i].set(0.0), X, 3).bytes < X.nbytes / 10


@pytest.mark.parametrize("name", ["cholesky", "eigh", "qr", "svd"])
def test_factorizations_are_cubic(name):
    small, large = (cost(getattr(jnp.linalg, name), jnp.eye(n)).flops for n in (64, 128))
    assert large / small == pytest.approx(8, rel=0.3)
