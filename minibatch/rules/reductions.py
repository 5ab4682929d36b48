"""Primitives that fold an axis, and those that run along one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from minibatch._batched import Axis, Batched, is_batched, lanes, lifted, shift
from minibatch._interpreter import batch_jaxpr
from minibatch._registry import along, reduction, rule

reduction("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
along("cumlogsumexp cummax cummin cumprod cumsum")


@rule("reduce")
def reduce(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s]…, []… -> [*t]…   lifts to   [B, *s]…, []… -> [B, *t]…; initial values [B] are one more element to fold."""
    many = len(operands) // 2
    xs, starts = [lanes(axis, x) for x in operands[:many]], operands[many:]
    dims = shift(eqn.params["dimensions"])
    if not any(map(is_batched, starts)):
        return lifted(axis, eqn, 0, *xs, *starts, dimensions=dims)
    rows = [elements_first(x, dims) for x in xs]
    heads = [lax.broadcast_in_dim(lanes(axis, s), (1, *row.shape[1:]), [1]) for s, row in zip(starts, rows, strict=True)]
    rows = [lax.concatenate(pair, 0) for pair in zip(heads, rows, strict=True)]
    return [Batched(x, 0) for x in fold(eqn.params["jaxpr"], rows)]


def elements_first(x: Any, dims: Sequence[int]) -> Any:
    """[B, *s] -> [n, B, *t]: the `dims` of x as one, in front."""
    rest = [d for d in range(np.ndim(x)) if d not in dims]
    return lax.reshape(x, (math.prod(x.shape[d] for d in dims), *(x.shape[d] for d in rest)), (*dims, *rest))


def fold(monoid: Any, rows: Sequence[Any]) -> list:
    """[n, *t]… -> [*t]…: neighbours combined, elementwise and in order, until one row is left."""
    while (count := rows[0].shape[0]) > 1:
        pairs = [x[start : count - count % 2 : 2] for start in (0, 1) for x in rows]
        size = math.prod(pairs[0].shape)
        combined = batch_jaxpr(Axis(size), monoid, [Batched(x.reshape(size), 0) for x in pairs])
        combined = [lanes(Axis(size), x).reshape(pairs[0].shape) for x in combined]
        rows = [lax.concatenate([x, row[count - count % 2 :]], 0) for x, row in zip(combined, rows, strict=True)]
    return [x[0] for x in rows]
