"""What slices, gathers and scatters become, where results alone do not show it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minibatch

ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
ONE_ROW = lax.GatherDimensionNumbers((0,), (0,), (0,))
INTO_ONE_ROW = lax.ScatterDimensionNumbers((0,), (0,), (0,))

dynamic_slice = partial(lax.dynamic_slice, allow_negative_indices=False)
dynamic_update_slice = partial(lax.dynamic_update_slice, allow_negative_indices=False)


def equations(fun: Callable, in_axes: tuple, *args: Any) -> list:
    """The equations of `fun` mapped."""
    return jax.make_jaxpr(minibatch.vmap(fun, in_axes, compile=False))(*args).jaxpr.eqns


@pytest.mark.parametrize("bdim", [0, 1, 2])
def test_update_at_a_shared_index_stays_an_update(bdim: int) -> None:
    x, u = (jnp.moveaxis(jnp.ones((7, *shape)), 0, bdim) for shape in ((4, 5), (1, 5)))
    eqns = equations(lambda x, u, i: dynamic_update_slice(x, u, (i, i)), (bdim, bdim, None), x, u, 1)
    assert [eqn.primitive.name for eqn in eqns][:1] == ["dynamic_update_slice"]
    assert {eqn.primitive.name for eqn in eqns[1:]} <= {"transpose"}  # the result's lanes, where vmap wants them


def test_slice_at_a_shared_index_stays_a_slice() -> None:
    eqns = equations(lambda x, i: dynamic_slice(x, (i, i), (1, 5)), (0, None), jnp.ones((7, 4, 5)), 1)
    assert [eqn.primitive.name for eqn in eqns] == ["dynamic_slice"]


def test_shared_table_stays_shared() -> None:
    eqns = equations(lambda x, i: lax.gather(x, i, ROWS, (1, 5)), (None, 0), jnp.ones((4, 5)), jnp.zeros((7, 3, 1), int))
    assert [eqn.primitive.name for eqn in eqns] == ["gather"]
    assert eqns[0].invars[0].aval.shape == (4, 5)


@pytest.mark.parametrize(
    ("in_axes", "unique", "in_order"), [((0, None), True, True), ((0, 0), True, False), ((None, 0), False, False)]
)
def test_gather_promises_no_more_than_holds(in_axes: tuple, unique: bool, in_order: bool) -> None:
    x, i = np.ones((7, 4, 5)), np.zeros((7, 3, 1), int)
    args = [a if d == 0 else a[0] for a, d in zip((x, i), in_axes, strict=True)]
    promised = {"unique_indices": True, "indices_are_sorted": True}
    [eqn] = equations(lambda x, i: lax.gather(x, i, ROWS, (1, 5), **promised), in_axes, *args)
    assert (eqn.params["unique_indices"], eqn.params["indices_are_sorted"]) == (unique, in_order)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_small_index_types_reach_all_lanes(dtype: Any) -> None:
    x = jnp.arange(300 * 3 * 2.0).reshape(300, 3, 2)
    i = jnp.asarray(np.arange(300) % 5 - (dtype == np.int8), dtype)
    rows = np.clip(np.arange(300) % 5 - (dtype == np.int8), 0, 2)
    wanted = np.asarray(x)[np.arange(300), rows]

    def read(x: Any, i: Any) -> list:
        sliced = dynamic_slice(x, (i, jnp.zeros_like(i)), (1, 2))[0]
        return [sliced, lax.gather(x, i[None], ONE_ROW, (1, 2), mode="clip")]

    for found in minibatch.vmap(read)(x, i):
        np.testing.assert_array_equal(found, wanted)

    def write(x: Any, i: Any) -> list:
        updated = dynamic_update_slice(x, jnp.zeros((1, 2)), (i, jnp.zeros_like(i)))
        return [updated, lax.scatter(x, i[None], jnp.zeros(2), INTO_ONE_ROW, mode="clip")]

    wanted = np.array(x)
    wanted[np.arange(300), rows] = 0
    for found in minibatch.vmap(write)(x, i):
        np.testing.assert_array_equal(found, wanted)


def test_keys_are_set_in_lanes() -> None:
    keys, new = jax.random.split(jax.random.key(0), (3, 4)), jax.random.split(jax.random.key(1), 3)
    i = jnp.asarray([3, 0, 2])
    found = minibatch.vmap(lambda k, i, n: k.at[i].set(n))(keys, i, new)
    wanted = jnp.stack([k.at[j].set(n) for k, j, n in zip(keys, i, new, strict=True)])
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(wanted))
