"""What dots and convolutions become, where results alone do not show it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

import minibatch


def names(fun: Callable, in_axes: tuple, *args: Any) -> list[str]:
    """The primitives of `fun` mapped, in order."""
    jaxpr = jax.make_jaxpr(minibatch.vmap(fun, in_axes, compile=False))(*args)
    return [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (1, 2)])
def test_dot_is_one_equation(in_axes: tuple) -> None:
    x, y = (jnp.ones((3, 4) if d is None else (*(3, 4)[:d], 7, *(3, 4)[d:])) for d in in_axes)
    assert names(lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))), in_axes, x, y) == ["dot_general"]


def test_dot_with_a_shared_left_side_moves_its_result_alone() -> None:
    found = names(lax.dot, (None, 0), jnp.ones((3, 4)), jnp.ones((7, 4, 5)))
    assert found == ["dot_general", "transpose"]


def test_lanes_stay_where_they_came() -> None:
    w, x = jnp.ones((4, 3)), jnp.ones((3, 7))
    for axis, values in ((0, (w, x.T)), (1, (w, x))):
        jaxpr = jax.make_jaxpr(minibatch.vmap(jnp.dot, (None, axis), axis, compile=False))(*values)
        assert [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns] == ["dot_general"]


def test_convolution_with_a_shared_kernel_folds_lanes_into_its_batch() -> None:
    found = names(lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (0, None), jnp.ones((7, 2, 3, 5, 5)), jnp.ones((4, 3, 2, 2)))
    assert found == ["reshape", "conv_general_dilated", "reshape"]


def test_convolution_of_no_lanes_is_empty() -> None:
    found = minibatch.vmap(lambda x, k: lax.conv(x, k, (1, 1), "SAME"))(jnp.ones((0, 2, 3, 5, 5)), jnp.ones((0, 4, 3, 2, 2)))
    assert found.shape == (0, 2, 4, 5, 5)


def dense(jaxpr: Any, args: list) -> list:
    """`jaxpr` evaluated with scaled products, which only GPUs have, in their plain meaning."""
    env = dict(zip(jaxpr.jaxpr.invars, args, strict=True))
    for eqn in jaxpr.jaxpr.eqns:
        values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        if "jaxpr" in eqn.params:
            outs = dense(eqn.params["jaxpr"], values)
        elif eqn.primitive.name.startswith("scaled_matmul"):
            x, y, x_scale, y_scale = values
            assert x.shape[:2] == x_scale.shape[:2] and y.shape[:2] == y_scale.shape[:2]
            repeats = x.shape[2] // x_scale.shape[2]
            outs = [jnp.einsum("bmk,bnk->bmn", x * jnp.repeat(x_scale, repeats, 2), y * jnp.repeat(y_scale, repeats, 2))]
        else:
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            outs = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [env[v] for v in jaxpr.jaxpr.outvars]


@pytest.mark.parametrize("in_axes", [axes for axes in itertools.product((0, None), repeat=4) if any(d == 0 for d in axes)][::2])
def test_scaled_matmul_means_the_same(in_axes: tuple) -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 3, 4), (2, 5, 4), (2, 3, 2), (2, 5, 2)
    args = [jnp.asarray(rng.normal(size=s if d is None else (6, *s)), np.float32) for s, d in zip(shapes, in_axes, strict=True)]
    [found] = dense(jax.make_jaxpr(minibatch.vmap(jax.nn.scaled_matmul, in_axes))(*args), args)
    lane = jax.make_jaxpr(jax.nn.scaled_matmul)(*(a if d is None else a[0] for a, d in zip(args, in_axes, strict=True)))
    for i in range(6):
        [wanted] = dense(lane, [a if d is None else a[i] for a, d in zip(args, in_axes, strict=True)])
        np.testing.assert_allclose(found[i], wanted, rtol=1e-5, atol=1e-5)
