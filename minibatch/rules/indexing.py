"""Slices, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from minibatch._batched import Array, Axis, Batched, front, is_batched, lanes, lifted, shift
from minibatch._registry import rule


def inserted(dims: Sequence[Any], bdim: int, value: Any) -> tuple:
    """`dims`, one for each logical dimension, with `value` for the lanes."""
    return (*dims[:bdim], value, *dims[bdim:])


@rule("slice", anywhere=True)
def slice(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*t]   lifts to   [B, *s] -> [B, *t]: from 0 to B along the lanes."""
    value, bdim = x
    starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    changed = {
        "start_indices": inserted(starts, bdim, 0),
        "limit_indices": inserted(limits, bdim, value.shape[bdim]),
        "strides": strides if strides is None else inserted(strides, bdim, 1),
    }
    return lifted(axis, eqn, bdim, value, **changed)


# --- gather and scatter -----------------------------------------------------------------------------------------------


def lift(numbers: Any, operand: bool, indices: bool) -> Any:
    """The dimension numbers of a gather or scatter whose operand, indices or both have lanes in front.

    The result of the gather, or the updates of the scatter, have them in front too. Lanes of the operand alone are one
    more dimension of the window; of the indices alone, one more of theirs; of both, one more batching pair.
    """
    window, collapsed, index_map, operand_batching, indices_batching = numbers
    window = shift(window)
    if operand:
        collapsed, index_map, operand_batching = shift(collapsed), shift(index_map), shift(operand_batching)
    if indices:
        indices_batching = shift(indices_batching)
    if operand and indices:
        operand_batching, indices_batching = (0, *operand_batching), (0, *indices_batching)
    elif operand:
        window = (0, *window)
    return type(numbers)(window, collapsed, index_map, operand_batching, indices_batching)


def widened(indices: Array) -> Array:
    """Indices in a type that can also count lanes, as the batching dimensions may come to be counted."""
    return lax.convert_element_type(indices, np.int32) if indices.dtype.itemsize < 4 else indices


@rule("gather")
def gather(axis: Axis, eqn: Any, operand: Any, indices: Any) -> list:
    """[*s], [*i, k] -> [*t]   lifts to   [B, *s], [B, *i, k] -> [B, *t]; what is shared stays so.

    Indices sorted in each lane are not sorted over all, and those unique in each lane are so only where the lanes have
    operands of their own.
    """
    x, i = is_batched(operand), is_batched(indices)
    sizes = eqn.params["slice_sizes"]
    return lifted(
        axis,
        eqn,
        0,
        operand.value if x else operand,
        widened(indices.value) if i else indices,
        dimension_numbers=lift(eqn.params["dimension_numbers"], x, i),
        slice_sizes=(1 if i else axis.size, *sizes) if x else sizes,
        indices_are_sorted=eqn.params["indices_are_sorted"] and not i,
        unique_indices=eqn.params["unique_indices"] and (x or not i),
    )


@rule("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
def scatter(axis: Axis, eqn: Any, operand: Any, indices: Any, updates: Any) -> list:
    """[*s], [*i, k], [*u] -> [*s]   lifts to   [B, *s], [B, *i, k], [B, *u] -> [B, *s]; shared indices stay so."""
    i = is_batched(indices)
    return lifted(
        axis,
        eqn,
        0,
        lanes(axis, operand),
        widened(indices.value) if i else indices,
        lanes(axis, updates),
        dimension_numbers=lift(eqn.params["dimension_numbers"], True, i),
        indices_are_sorted=eqn.params["indices_are_sorted"] and not i,
    )


# --- slices at indices known at run time ------------------------------------------------------------------------------


def stacked(axis: Axis, starts: Sequence[Any]) -> Array:
    """Scalars, one for each dimension, as an index vector for each lane: [B, k]."""
    return widened(lax.concatenate([lax.expand_dims(lanes(axis, i), (1,)) for i in starts], 1))


def moving(shape: Sequence[Any], sizes: Sequence[Any]) -> tuple[int, ...]:
    """The dimensions along which a slice of `sizes` can move: along the others it starts at 0, whatever was asked."""
    return tuple(d for d, (size, of) in enumerate(zip(sizes, shape, strict=True)) if size != of)


@rule("dynamic_slice", anywhere=True)
def dynamic_slice(axis: Axis, eqn: Any, operand: Any, *starts: Any) -> list:
    """[*s], () -> [*t]   lifts to   [B, *s], () -> [B, *t]; with starts (B) it is a gather that clips as the slice does."""
    sizes = eqn.params["slice_sizes"]
    dims = moving(eqn.invars[0].aval.shape, sizes)
    if not dims:
        return [operand]
    if not any(map(is_batched, starts)):
        value, bdim = operand
        starts = inserted(starts, bdim, lax.full_like(starts[0], 0))
        return lifted(axis, eqn, bdim, value, *starts, slice_sizes=inserted(sizes, bdim, axis.size))
    batched = is_batched(operand)
    numbers = lax.GatherDimensionNumbers(tuple(range(len(sizes))), (), dims)
    out = lax.gather(
        front(operand) if batched else operand,
        stacked(axis, [starts[d] for d in dims]),
        lift(numbers, batched, True),
        (1, *sizes) if batched else sizes,
        unique_indices=batched,  # one slice a lane
        mode="clip",
    )
    return [Batched(out, 0)]


@rule("dynamic_update_slice", anywhere=True)
def dynamic_update_slice(axis: Axis, eqn: Any, operand: Any, update: Any, *starts: Any) -> list:
    """[*s], [*u], () -> [*s]   lifts to   [B, *s], [B, *u], () -> [B, *s]; with starts (B) to a scatter that clips alike."""
    shape, sizes = (atom.aval.shape for atom in eqn.invars[:2])
    dims = moving(shape, sizes)
    if not dims:
        return [update]
    if not any(map(is_batched, starts)):
        bdim = operand.bdim if is_batched(operand) else update.bdim
        starts = inserted(starts, bdim, lax.full_like(starts[0], 0))
        return lifted(axis, eqn, bdim, lanes(axis, operand, bdim), lanes(axis, update, bdim), *starts)
    numbers = lax.ScatterDimensionNumbers(tuple(range(len(sizes))), (), dims)
    out = lax.scatter(
        lanes(axis, operand),
        stacked(axis, [starts[d] for d in dims]),
        lanes(axis, update),
        lift(numbers, True, True),
        unique_indices=True,  # one update a lane
        mode="clip",
    )
    return [Batched(out, 0)]
