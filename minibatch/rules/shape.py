"""Primitives that move elements without looking at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from minibatch._batched import Axis, Batched, is_batched, lanes, lifted, shift
from minibatch._jax import rebind
from minibatch._registry import along, reduction, rule

reduction("squeeze", "dimensions")
reduction("unstack", "axis")
along("split", "axis")
along("rev", "dimensions")


@rule("transpose", anywhere=True)
def transpose(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*t]   lifts to   [B, *s] -> [B, *t], in one transposition wherever B is."""
    return lifted(axis, eqn, 0, x.value, permutation=(x.bdim, *shift(eqn.params["permutation"], x.bdim)))


@rule("broadcast_in_dim", anywhere=True)
def broadcast_in_dim(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*t]   lifts to   [B, *s] -> [B, *t]; B elsewhere in s comes right after the dim of t that it came after in s."""
    dims = eqn.params["broadcast_dimensions"]
    bdim = int(dims[x.bdim - 1]) + 1 if x.bdim else 0
    dims = insert(shift(dims, bdim), x.bdim, bdim)
    return lifted(axis, eqn, bdim, x.value, shape=insert(eqn.params["shape"], bdim, axis.size), broadcast_dimensions=dims)


@rule("reshape")
def reshape(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*t]   lifts to   [B, *s] -> [B, *t]."""
    dims = eqn.params["dimensions"]
    changed = {
        "new_sizes": (axis.size, *eqn.params["new_sizes"]),
        "dimensions": dims if dims is None else (0, *shift(dims)),
    }
    return lifted(axis, eqn, 0, x.value, **changed)


@rule("tile", anywhere=True)
def tile(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*(s r)]   lifts to   [B, *s] -> [B, *(s r)]."""
    return lifted(axis, eqn, x.bdim, x.value, reps=insert(eqn.params["reps"], x.bdim, 1))


@rule("concatenate", anywhere=True)
def concatenate(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s], [*t]… -> [*u]   lifts to   [B, *s], [B, *t]… -> [B, *u]."""
    bdim = next(x.bdim for x in operands if is_batched(x))
    (dimension,) = shift([eqn.params["dimension"]], bdim)
    return lifted(axis, eqn, bdim, *(lanes(axis, x, bdim) for x in operands), dimension=dimension)


@rule("stack", anywhere=True)
def stack(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s], [*s]… -> [*s with n]   lifts to   [B, *s], [B, *s]… -> [B, *s with n]."""
    bdim = next(x.bdim for x in operands if is_batched(x))
    new = eqn.params["axis"]
    outs = rebind(eqn, *(lanes(axis, x, bdim) for x in operands), axis=new + (new > bdim))
    return [Batched(out, bdim + (new <= bdim)) for out in outs]


@rule("pad", anywhere=True)
def pad(axis: Axis, eqn: Any, x: Any, value: Any) -> list:
    """[*s], [] -> [*t]   lifts to   [B, *s], [] -> [B, *t]; values [B] are selected where a padded mask is off."""
    bdim = x.bdim if is_batched(x) else 0
    config = insert(eqn.params["padding_config"], bdim, (0, 0, 0))
    x = lanes(axis, x, bdim)
    if not is_batched(value):
        return lifted(axis, eqn, bdim, x, value, padding_config=config)
    inside = lax.pad(lax.full_like(x, True, bool), False, config)
    padded = lax.pad(x, lax.full_like(value.value, 0, shape=()), config)
    around = lax.broadcast_in_dim(value.value, np.shape(padded), [bdim], out_sharding=jax.typeof(padded).sharding)
    return [Batched(lax.select(inside, padded, around), bdim)]


def insert(items: Sequence[Any], position: int, item: Any) -> tuple:
    """`items` with `item` at `position`."""
    return (*items[:position], item, *items[position:])
