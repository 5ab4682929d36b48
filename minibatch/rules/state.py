"""Mutable references: one of many lanes is one with a dimension more, and every lane indexes its own part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.tree_util import tree_flatten, tree_unflatten

from minibatch import _jax
from minibatch._batched import Axis, Batched, front, is_batched, lanes
from minibatch._interpreter import batch_jaxpr
from minibatch._jax import rebind
from minibatch._registry import rule


@rule("new_ref", always=True, anywhere=True)
def new_ref(axis: Axis, eqn: Any, x: Any) -> list:
    """[*s] -> Ref[*s] lifts to [B, *s] -> Ref[B, *s], shared or not: what a lane may yet store there is not known."""
    x = x if is_batched(x) else Batched(lanes(axis, x), 0)
    return [Batched(ref, x.bdim) for ref in rebind(eqn, x.value)]


@rule("empty_ref", always=True)
def empty_ref(axis: Axis, eqn: Any) -> list:
    """Ref[*s] lifts to Ref[B, *s]."""
    return [Batched(ref, 0) for ref in rebind(eqn, ty=_jax.batched_aval(eqn.params["ty"], axis.size, 0, axis.mesh_name))]


@rule("freeze free_ref", anywhere=True)
def freeze(axis: Axis, eqn: Any, ref: Batched) -> list:
    """Ref[*s] -> [*s] lifts to Ref[B, *s] -> [B, *s]."""
    return [Batched(out, ref.bdim) for out in rebind(eqn, ref.value)]


@rule("run_state", anywhere=True, inside=True)
def run_state(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f on references that start as [*s]… -> what they hold at last   lifts to   the same on values, lifted: what f does not
    store into stays as it is, and shared.
    """
    return batch_jaxpr(axis, _jax.discharged(eqn.params["jaxpr"]), operands)


@rule("get", anywhere=True)
def get(axis: Axis, eqn: Any, ref: Any, *leaves: Any) -> list:
    """Ref[*s], indices -> [*t] lifts to Ref[B, *s], or to indices of all lanes."""
    part = part_of(axis, eqn, ref, leaves)
    return [part.from_ref(out) for out in rebind(eqn, part.ref, *part.leaves, tree=part.tree)]


@rule("swap", anywhere=True, always=True)
def swap(axis: Axis, eqn: Any, ref: Any, x: Any, *leaves: Any) -> list:
    """Ref[*s], [*t], indices -> [*t] lifts to Ref[B, *s], [B, *t] -> [B, *t]."""
    own(eqn, ref)
    part = part_of(axis, eqn, ref, leaves)
    return [part.from_ref(out) for out in rebind(eqn, part.ref, part.to_ref(axis, x), *part.leaves, tree=part.tree)]


@rule("addupdate", anywhere=True, always=True)
def addupdate(axis: Axis, eqn: Any, ref: Any, x: Any, *leaves: Any) -> list:
    """Ref[*s], [*t], indices -> lifts to Ref[B, *s], [B, *t] ->."""
    own(eqn, ref)
    part = part_of(axis, eqn, ref, leaves)
    return rebind(eqn, part.ref, part.to_ref(axis, x), *part.leaves, tree=part.tree)


def own(eqn: Any, ref: Any) -> None:
    """Raise where the lanes would all store into one reference that they share, even the same: each would do so."""
    if not is_batched(ref):
        what = "an addupdate" if eqn.primitive.name == "addupdate" else "a set/swap"
        raise ValueError(
            f"performing {what} operation with vmapped value on an unbatched array reference of type {jax.typeof(ref)}. "
            "The lanes share it, and each would store into it: move the array reference to be an argument of the mapped "
            "function, with an axis for the lanes, or store after the map."
        )


# --- indices ----------------------------------------------------------------------------------------------------------

LANE = "lane"


class Part(NamedTuple):
    """What an indexing of all lanes reads or writes: the indices, and the dims it has, by name, and those it ought to.

    A dim is named by the dimension of one lane's reference that it is a slice of, or by its place among the indices.
    """

    ref: Any
    leaves: Sequence[Any]
    tree: Any
    physical: list
    logical: list

    def from_ref(self, x: Any) -> Batched:
        """What was read, its dims as in `logical` but for the lanes."""
        if [dim for dim in self.physical if dim != LANE] == self.logical:
            return Batched(x, self.physical.index(LANE))
        return Batched(lax.transpose(x, [self.physical.index(dim) for dim in (LANE, *self.logical)]), 0)

    def to_ref(self, axis: Axis, x: Any) -> Any:
        """What is to be written, its dims as in `physical`."""
        if [dim for dim in self.physical if dim != LANE] == self.logical:
            return lanes(axis, x, self.physical.index(LANE))
        named = [LANE, *self.logical]
        return lax.transpose(lanes(axis, x), [named.index(dim) for dim in self.physical])


def part_of(axis: Axis, eqn: Any, ref: Any, leaves: Sequence[Any]) -> Part:
    """The part of `ref` that all lanes together index."""
    value, bdim = ref if is_batched(ref) else (ref, None)
    transforms = tree_unflatten(eqn.params["tree"], leaves)
    if not transforms:
        dims = list(range(len(value.shape) - 1))
        return Part(value, (), eqn.params["tree"], [*dims[:bdim], LANE, *dims[bdim:]], dims)
    if len(transforms) > 1 or not isinstance(transforms[0], _jax.NDIndexer):
        raise NotImplementedError(f"minibatch: {eqn.primitive} of a reference seen through {transforms}.")
    (indexer,) = transforms
    logical = dims_of(list(enumerate(indexer.indices)), [("index", i) for i in range(len(indexer.int_indexer_shape))])
    mapped = any(map(is_batched, leaves))
    indices, shape, names = (with_lane_index if mapped else with_lane_slice)(axis, indexer, bdim)  # pyright: ignore[reportArgumentType] - one of the two is mapped
    lifted = dataclasses.replace(indexer, indices=tuple(i for _, i in indices), shape=value.shape, int_indexer_shape=shape)
    leaves, tree = tree_flatten((lifted,))
    return Part(value, leaves, tree, dims_of(indices, names), logical)


def dims_of(indices: list[tuple], names: list) -> list:
    """The dims of what `indices` (each with a name) pick: those of all integer indices where these stand, else in front."""
    places = [i for i, (_, index) in enumerate(indices) if not isinstance(index, _jax.Slice)]
    slices = [name for name, index in indices if isinstance(index, _jax.Slice)]
    together = places and places == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    return [*slices[:first], *names, *slices[first:]]


def with_lane_slice(axis: Axis, indexer: Any, bdim: int) -> tuple[list, tuple, list]:
    """All lanes pick alike: the lanes are a slice."""
    indices: list[tuple] = list(enumerate(indexer.indices))
    indices.insert(bdim, (LANE, _jax.Slice(0, axis.size)))
    return indices, indexer.int_indexer_shape, [("index", i) for i in range(len(indexer.int_indexer_shape))]


def with_lane_index(axis: Axis, indexer: Any, bdim: int | None) -> tuple[list, tuple, list]:
    """Each lane picks for itself: the lanes are the first dim of all integer indices, slices that differ the last ones."""
    differ = [i for i, index in enumerate(indexer.indices) if isinstance(index, _jax.Slice) and is_batched(index.start)]
    names = [LANE, *(("index", i) for i in range(len(indexer.int_indexer_shape))), *differ]
    shape = (axis.size, *indexer.int_indexer_shape, *(indexer.indices[i].size for i in differ))

    def integers(i: int, index: Any) -> Any:
        if i in differ:
            steps = lax.broadcasted_iota(np.int32, shape, names.index(i)) * index.stride
            return lax.broadcast_in_dim(front(index.start), shape, (0,)) + steps
        if isinstance(index, _jax.Slice):
            return index
        if is_batched(index):
            return lax.broadcast_in_dim(front(index), shape, range(index.value.ndim))
        return lax.broadcast_in_dim(index, shape, range(1, 1 + np.ndim(index)))

    indices: list[tuple] = [(i, integers(i, index)) for i, index in enumerate(indexer.indices)]
    if bdim is not None:
        indices.insert(bdim, (LANE, lax.broadcasted_iota(np.int32, shape, 0)))
    return indices, shape, names


@rule("broadcast_to")
def broadcast_to(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*t] lifts to [B, *s] -> [B, *t]."""
    shape = eqn.params["shape"]
    value = lax.expand_dims(x.value, range(1, 2 + len(shape) - x.value.ndim))
    return [Batched(out, 0) for out in rebind(eqn, value, shape=(axis.size, *shape))]
