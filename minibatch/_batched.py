"""Lanes as a dimension of an array: the one fact, and all the batch-dim algebra there is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

Array = Any  # a jax.Array, a tracer, a numpy array or a Python scalar: what a primitive takes


class Axis(NamedTuple):
    """The mapped axis: its size, and the names under which programs and meshes know it."""

    size: int
    name: Hashable | None = None
    spmd_name: tuple[Hashable, ...] = ()
    mesh_name: Any = None


class Batched(NamedTuple):
    """An array with one lane per index of dimension `bdim`. A bare array is shared by all lanes."""

    value: Array
    bdim: int


def is_batched(x: Any) -> bool:
    """Whether `x` differs by lane."""
    return type(x) is Batched


def move(x: Array, source: int, destination: int) -> Array:
    """`x` with dimension `source` at `destination`, the others in order."""
    if source == destination:
        return x
    order = [i for i in range(np.ndim(x)) if i != source]
    order.insert(destination, source)
    return lax.transpose(x, order)


def front(x: Batched) -> Array:
    """The array of `x` with its batch dim first: [B, *s]."""
    return move(x.value, x.bdim, 0)


def lanes(axis: Axis, x: Batched | Array, bdim: int = 0) -> Array:
    """`x` as a plain array with a batch dim at `bdim`: moved if batched, repeated if shared."""
    if is_batched(x):
        return move(x.value, x.bdim, bdim)
    shape = np.shape(x)
    dims = [i for i in range(len(shape) + 1) if i != bdim]
    return lax.broadcast_in_dim(
        x, (*shape[:bdim], axis.size, *shape[bdim:]), dims, out_sharding=_sharding(axis, x, bdim)
    )


def _sharding(axis: Axis, x: Array, bdim: int) -> Any:
    """On an explicit mesh: the sharding of shared `x` repeated at `bdim`, lanes on the mesh axis."""
    return None if axis.mesh_name is None else _lifted(axis, jax.typeof(x).sharding, bdim)


def shardings(axis: Axis, eqn: Any, bdim: int = 0) -> dict[str, Any]:
    """The params of `eqn` that say how its result is sharded, changed for a result with its lanes at `bdim`."""
    found = {name: eqn.params.get(name) for name in ("sharding", "out_sharding")}
    return {name: _lifted(axis, sharding, bdim) for name, sharding in found.items() if sharding is not None}


def _lifted(axis: Axis, sharding: Any, bdim: int) -> Any:
    """`sharding` of one lane's array, with a dimension for the lanes at `bdim`."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    parts = list(sharding.spec.partitions)
    parts += [None] * (bdim - len(parts))
    parts.insert(bdim, axis.mesh_name)
    return sharding.update(spec=sharding.spec.update(partitions=tuple(parts)))


def shift(dims: Iterable[int], bdim: int = 0) -> tuple[int, ...]:
    """Logical dims to physical: those at or after the batch dim move up by one."""
    return tuple(int(d) + (d >= bdim) for d in dims)
