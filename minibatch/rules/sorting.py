"""Primitives that order elements along an axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch._batched import Axis, Batched, is_batched, lanes, lifted, shift
from minibatch._jax import rebind
from minibatch._registry import along, rule

along("top_k", "axis")
along("approx_top_k", "reduction_dimension")


@rule("sort", anywhere=True)
def sort(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s]… -> [*s]…   lifts to   [B, *s]… -> [B, *s]…; by keys that all lanes share, one sort gives the order for all."""
    if not any(map(is_batched, operands[: eqn.params["num_keys"]])):
        return by_shared_keys(eqn, operands)
    bdim = next(x.bdim for x in operands if is_batched(x))
    (dimension,) = shift([eqn.params["dimension"]], bdim)
    return lifted(axis, eqn, bdim, *(lanes(axis, x, bdim) for x in operands), dimension=dimension)


def by_shared_keys(eqn: Any, operands: tuple) -> list:
    """The shared operands sorted, and the batched ones taken in the same order: [B, *s] at [*s] -> [B, *s]."""
    dimension = eqn.params["dimension"]
    key = operands[0]
    positions = lax.broadcasted_iota(np.int32, np.shape(key), dimension, out_sharding=jax.typeof(key).sharding)
    *in_order, order = rebind(eqn, *(x for x in operands if not is_batched(x)), positions)
    rest = iter(in_order)

    def taken(x: Batched) -> Batched:
        (along,) = shift([dimension], x.bdim)
        at = lax.expand_dims(order, [x.bdim])
        return Batched(jnp.take_along_axis(x.value, at, along, mode="promise_in_bounds"), x.bdim)

    return [taken(x) if is_batched(x) else next(rest) for x in operands]
