"""Lanes as a dimension of an array: the one fact, and all the batch-dim algebra there is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from minibatch import _jax
from minibatch._divergence import Divergence

Array = Any  # a jax.Array, a tracer, a numpy array or a Python scalar: what a primitive takes


class Axis(NamedTuple):
    """The mapped axis: its size, and the names under which programs and meshes know it.

    `manual`: inside a shard_map, the mesh axes over which the lanes lie, so that each shard has some of them.
    `divergence`: how loops and branches run in which its lanes diverge.
    `probing`: a program is lifted only to see which of its values differ by lane.
    """

    size: Any
    name: Hashable | None = None
    spmd_name: tuple[Hashable, ...] = ()
    mesh_name: Any = None
    manual: tuple[Hashable, ...] = ()
    divergence: Divergence = Divergence()
    probing: bool = False


class Batched(NamedTuple):
    """An array with one lane per index of dimension `bdim`. A bare array is shared by all lanes."""

    value: Array
    bdim: int


def is_batched(x: Any) -> TypeGuard[Batched]:
    """Whether `x` differs by lane."""
    return type(x) is Batched


def apart(operands: Iterable[Batched | Array]) -> tuple[list[Array], list[int | None]]:
    """The operands as plain arrays, and where each has its lanes (None: shared)."""
    operands = list(operands)
    return [x.value if is_batched(x) else x for x in operands], [x.bdim if is_batched(x) else None for x in operands]


def together(arrays: Iterable[Array], bdims: Iterable[int | None]) -> list[Batched | Array]:
    """Plain arrays with their lanes at `bdims`, as operands again."""
    return [x if d is None else Batched(x, d) for x, d in zip(arrays, bdims, strict=True)]


def move(x: Array, source: int, destination: int) -> Array:
    """`x` with dimension `source` at `destination`, the others in order."""
    if source == destination:
        return x
    order = [i for i in range(np.ndim(x)) if i != source]
    order.insert(destination, source)
    shape = np.shape(x)
    return _jax.reshaped(lax.transpose_p, x, tuple([shape[i] for i in order]), permutation=tuple(order))


def expand(x: Array, dims: Sequence[int]) -> Array:
    """`x` with new dimensions, of size 1, which are the `dims` of the result."""
    sizes = iter(np.shape(x))
    rank = np.ndim(x) + len(dims)
    kept = tuple([d for d in range(rank) if d not in dims])
    return _spread(x, tuple([1 if d in dims else next(sizes) for d in range(rank)]), kept)


def _spread(x: Array, shape: tuple, dims: tuple) -> Array:
    """`x`, its dimensions being these `dims` of `shape`, and repeated along the others."""
    return _jax.reshaped(lax.broadcast_in_dim_p, x, shape, shape=shape, broadcast_dimensions=dims, sharding=None)


def front(x: Batched) -> Array:
    """The array of `x` with its batch dim first: [B, *s]."""
    return move(x.value, x.bdim, 0)


def lanes(axis: Axis, x: Any, bdim: int = 0) -> Array:
    """`x` as a plain array with a batch dim at `bdim`: moved if batched, repeated if shared."""
    if is_batched(x):
        return move(x.value, x.bdim, bdim)
    shape = np.shape(x)
    dims = tuple(i for i in range(len(shape) + 1) if i != bdim)
    shape = (*shape[:bdim], axis.size, *shape[bdim:])
    if axis.mesh_name is None and not axis.manual:
        return _spread(x, shape, dims)
    return _jax.vary(lax.broadcast_in_dim(x, shape, dims, out_sharding=_sharding(axis, x, bdim)), axis.manual)


def _sharding(axis: Axis, x: Array, bdim: int) -> Any:
    """On an explicit mesh: the sharding of shared `x` repeated at `bdim`, lanes on the mesh axis."""
    if axis.mesh_name is None:
        return None
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty:  # a constant
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec(*[None] * np.ndim(x)))
    return sharding_of_lanes(axis, sharding, bdim)


def laid(axis: Axis, x: Array, entry: Any) -> Any:
    """[B, *s], with B laid over the mesh axis `entry` (None: whole everywhere) where the mesh is explicit."""
    sharding = jax.typeof(x).sharding
    if axis.mesh_name is None or sharding.mesh.empty:
        return x
    return jax.reshard(x, sharding.update(spec=sharding.spec.update(partitions=(entry, *sharding.spec.partitions[1:]))))


def shardings(axis: Axis, eqn: Any, bdim: int = 0) -> dict[str, Any]:
    """The params of `eqn` that say how its result is sharded, changed for a result with its lanes at `bdim`."""
    params = eqn.params
    if "sharding" not in params and "out_sharding" not in params:
        return {}
    given = [name for name in ("sharding", "out_sharding") if params.get(name) is not None]
    return {name: sharding_of_lanes(axis, params[name], bdim) for name in given}


def sharding_of_lanes(axis: Axis, sharding: Any, bdim: int) -> Any:
    """`sharding` of one lane's array, with a dimension for the lanes at `bdim`."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    entry = _jax.explicit_names(sharding.mesh, axis.mesh_name)
    return sharding.update(spec=_jax.with_lanes(sharding.spec, bdim, entry))


def lifted(axis: Axis, eqn: Any, bdim: int, /, *values: Array, **changed: Any) -> list[Batched]:
    """The same equation on `values`, with these params changed, where each result is one lane's with its lanes at `bdim`."""
    avals = [_jax.plain_aval(v.aval, axis.size, bdim) for v in eqn.outvars]
    outs = _jax.rebind_as(avals, eqn, *values, **changed, **shardings(axis, eqn, bdim))
    return [Batched(out, bdim) for out in outs]


def shift(dims: Iterable[int], bdim: int = 0) -> tuple[int, ...]:
    """Logical dims to physical: those at or after the batch dim move up by one."""
    return tuple(int(d) + (d >= bdim) for d in dims)
