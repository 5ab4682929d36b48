"""Real programs, against both oracles: the workloads that are measured, and libraries as people use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import distrax
import equinox as eqx
import inox.nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.experimental import fused, sparse
from oracle import assert_close, stack_of_lanes
from sklearn.datasets import load_digits
from workloads import WORKLOADS, Workload, filters, layers, network_loss, perceptron_loss

import minibatch
from minibatch import if_array, if_batched

KEYS = jax.random.split(jax.random.key(0), 3)


def assert_agrees(fun: Callable, in_axes: Any, args: Sequence[Any], lanes: Sequence[Sequence[Any]], tol: float = 1e-4) -> None:
    """What `minibatch.vmap` gives is what the lanes give one by one, and what `jax.vmap` gives."""
    found = minibatch.vmap(fun, in_axes)(*args)
    assert_close(found, stack_of_lanes(fun, lanes), tol, "stack of lanes")
    assert_close(found, jax.jit(jax.vmap(fun, in_axes))(*args), tol, "jax.vmap")


def unstacked(tree: Any) -> list:
    """The lanes of `tree`, one by one."""
    leaves, treedef = jax.tree.flatten(tree)
    return [treedef.unflatten(lane) for lane in zip(*leaves, strict=True)]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workload_agrees(workload: Workload) -> None:
    args = workload.args(3)
    found = minibatch.vmap(workload.fun(minibatch.vmap), workload.in_axes)(*args)
    fun = workload.fun(jax.vmap)
    assert_close(found, stack_of_lanes(fun, [workload.lane(args, i) for i in range(3)]), 1e-3, "stack of lanes")
    assert_close(found, jax.jit(jax.vmap(fun, workload.in_axes))(*args), 1e-3, "jax.vmap")


# --- per-sample gradients on scikit-learn's digits --------------------------------------------------------------------


def digits(count: int) -> tuple[jax.Array, jax.Array]:
    """Images [count, 8, 8] in [0, 1] and their digits [count]."""
    data = load_digits()
    return jnp.asarray(data.images[:count] / 16, jnp.float32), jnp.asarray(data.target[:count], jnp.int32)


def test_sample_gradients_of_a_perceptron_on_digits() -> None:
    images, targets = digits(16)
    x, params = images.reshape(len(images), 64), layers(0, 64, 32, 10)
    lanes = [(params, x[i], targets[i]) for i in range(len(x))]
    assert_agrees(jax.grad(perceptron_loss), (None, 0, 0), (params, x, targets), lanes)


def test_sample_gradients_of_a_convolutional_network_on_digits() -> None:
    images, targets = digits(8)
    params = filters(0)
    lanes = [(params, images[i], targets[i]) for i in range(len(images))]
    assert_agrees(jax.grad(network_loss), (None, 0, 0), (params, images, targets), lanes)


def test_sample_gradients_are_clipped_and_summed_inside_jit() -> None:
    images, targets = digits(8)
    x, params = images.reshape(len(images), 64), layers(0, 64, 16, 10)

    def private(vmap: Callable) -> Callable:
        def step(params: Any, x: Any, targets: Any) -> Any:
            grads = vmap(jax.grad(perceptron_loss), (None, 0, 0))(params, x, targets)
            norms = vmap(optax.tree.norm)(grads)
            scale = jnp.minimum(1, 0.5 / norms)
            return jax.tree.map(lambda g: jnp.einsum("n,n...->...", scale, g), grads)

        return jax.jit(step)

    assert_close(private(minibatch.vmap)(params, x, targets), private(jax.vmap)(params, x, targets), 1e-4)


# --- libraries --------------------------------------------------------------------------------------------------------


def test_equinox_ensemble_is_made_and_called() -> None:
    def make(key: Any) -> eqx.nn.MLP:
        return eqx.nn.MLP(2, 1, width_size=8, depth=2, key=key)

    ensemble = minibatch.vmap(make, out_axes=if_batched(0))(KEYS)  # activations come out as they are
    wanted = eqx.filter_vmap(make)(KEYS)
    assert_close(eqx.filter(ensemble, eqx.is_array), eqx.filter(wanted, eqx.is_array), 1e-6)
    assert ensemble.activation is wanted.activation

    x = jnp.array([[0.5, -1.0], [2.0, 1.0]])
    found = minibatch.vmap(lambda model, x: jax.vmap(model)(x), in_axes=(if_array(0), None))(ensemble, x)
    assert_close(found, jnp.stack([jax.vmap(make(key))(x) for key in KEYS]), 1e-5)


def test_equinox_module_partitioned() -> None:
    arrays, static = eqx.partition(eqx.filter_vmap(lambda key: eqx.nn.MLP(2, 1, 8, 1, key=key))(KEYS), eqx.is_array)

    def loss(arrays: Any, x: Any) -> Any:
        return (eqx.combine(arrays, static)(x) ** 2).sum()

    x = jnp.array([0.5, -1.0])
    assert_agrees(jax.grad(loss), (0, None), (arrays, x), [(lane, x) for lane in unstacked(arrays)])


def test_equinox_module_as_result_and_argument() -> None:
    linear = minibatch.vmap(lambda key: eqx.nn.Linear(2, 4, key=key))(KEYS)
    assert isinstance(linear, eqx.nn.Linear) and linear.weight.shape == (3, 4, 2)
    twice = minibatch.vmap(lambda m: jax.tree.map(lambda w: 2 * w, m))(linear)
    assert_close(twice, jax.tree.map(lambda w: 2 * w, linear), 1e-6)


def test_flax_linen_ensemble_is_trained() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(linen.Dense(8)(x))
            return linen.Dense(1)(linen.LayerNorm()(x))

    net, x = Net(), jax.random.normal(jax.random.key(1), (16, 3))
    y = x.sum(1, keepdims=True)

    def make(key: Any) -> TrainState:
        return TrainState.create(apply_fn=net.apply, params=net.init(key, x), tx=optimizer)

    def step(state: TrainState) -> TrainState:
        grads = jax.grad(lambda params: ((state.apply_fn(params, x) - y) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    optimizer = optax.adam(1e-2)
    states = minibatch.vmap(make)(KEYS)
    lanes = [(make(key),) for key in KEYS]
    assert_close(states, stack_of_lanes(make, [(key,) for key in KEYS]), 1e-6)
    assert_agrees(step, 0, (states,), lanes)


def test_flax_nnx_model_is_split_and_merged() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(2, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.last = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.norm(nnx.relu(self.first(x))))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (3, 2))

    def loss(state: Any, x: Any) -> Any:
        return (nnx.merge(graph, state)(x) ** 2).sum()

    assert_agrees(jax.grad(loss), (None, 0), (state, x), [(state, row) for row in x])
    states = minibatch.vmap(lambda key: nnx.split(Net(nnx.Rngs(key)))[1])(KEYS)
    assert_agrees(loss, (0, None), (states, x[0]), [(lane, x[0]) for lane in unstacked(states)])


def test_inox_module_as_result_and_argument() -> None:
    def make(key: Any) -> inox.nn.Module:
        first, last = jax.random.split(key)
        return inox.nn.Sequential(inox.nn.Linear(2, 8, key=first), inox.nn.ReLU(), inox.nn.Linear(8, 1, key=last))

    modules, x = minibatch.vmap(make)(KEYS), jnp.array([0.5, -1.0])
    assert isinstance(modules, inox.nn.Sequential)
    found = minibatch.vmap(lambda module, x: module(x), in_axes=(0, None))(modules, x)
    assert_close(found, jnp.stack([make(key)(x) for key in KEYS]), 1e-5)

    static, params, others = modules.partition(inox.nn.Parameter)
    found = minibatch.vmap(lambda params, x: static(params, others)(x), in_axes=(0, None))(params, x)
    assert_close(found, jnp.stack([make(key)(x) for key in KEYS]), 1e-5)


def test_distrax_distribution_as_result_and_argument() -> None:
    def make(loc: Any) -> distrax.Distribution:
        return distrax.Independent(distrax.Normal(loc, jnp.full(2, 0.5)), 1)

    def draw(normal: Any, key: Any) -> Any:
        return normal.sample_and_log_prob(seed=key), normal.log_prob(x), normal.entropy()

    locs, x = jax.random.normal(jax.random.key(1), (3, 2)), jnp.array([0.5, -1.0])
    normals = minibatch.vmap(make)(locs)
    assert isinstance(normals, distrax.Independent)
    wanted = stack_of_lanes(lambda loc, key: draw(make(loc), key), list(zip(locs, KEYS, strict=True)))
    assert_close(minibatch.vmap(draw)(normals, KEYS), wanted, 1e-4)


def test_distrax_mixture_inside() -> None:
    def density(logits: Any, x: Any) -> Any:
        parts = distrax.Normal(jnp.array([-1.0, 1.0]), jnp.array([0.5, 2.0]))
        return distrax.MixtureSameFamily(distrax.Categorical(logits=logits), parts).log_prob(x)

    logits, x = jax.random.normal(jax.random.key(1), (3, 2)), jnp.array([0.5, -1.0, 0.1])
    assert_agrees(jax.grad(density), (0, 0), (logits, x), list(zip(logits, x, strict=True)))


def test_sparse_matrices_are_mapped_as_a_whole() -> None:
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.normal(size=(3, 4, 5)) * (rng.random((3, 4, 5)) < 0.5), jnp.float32)
    matrices, vectors = sparse.BCOO.fromdense(dense, n_batch=1), jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
    found = minibatch.vmap(lambda m, v: m @ v)(matrices, vectors)
    assert_close(found, jnp.einsum("bij,bj->bi", dense, vectors), 1e-4)
    doubled = minibatch.vmap(lambda m: m * 2)(matrices)
    assert isinstance(doubled, sparse.BCOO) and doubled.n_batch == 1
    assert_close(doubled.todense(), 2 * dense, 1e-5)


def test_a_fused_call_is_mapped_inside() -> None:
    summed = fused.fused(out_spaces=(jax.memory.Space.Device,))(lambda x: (jnp.sin(x).sum(),))
    (call,) = minibatch.vmap(summed).jaxpr(jnp.ones((3, 2))).eqns
    assert call.primitive.name == "fused_call"
    assert [eqn.params["axes"] for eqn in call.params["jaxpr"].eqns if eqn.primitive.name == "reduce_sum"] == [(1,)]
