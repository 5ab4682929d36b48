"""Primitives that speak of axes by name: across this axis the lanes are a dimension like another, other axes stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Axis, Batched, apart, is_batched, laid, lanes, move, together
from minibatch._jax import rebind
from minibatch._registry import elementwise, find, rule
from minibatch.rules.fallback import one_by_one

elementwise("preduced vary_unreduced_cast vary_unreduced_cast_p reduced_vary_cast reduced_vary_cast_p")

REDUCE = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
DIMS = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")


@rule("pvary", anywhere=True, always=True)
def pvary(axis: Axis, eqn: Any, x: Any) -> list:
    """[*s] -> [*s] lifts to [B, *s] -> [B, *s], where what it was computed with does not make it vary already."""
    (value,), bdims = apart([x])
    return together([_jax.vary(value, eqn.params["axes"])], bdims)


@rule("axis_index", always=True)
def axis_index(axis: Axis, eqn: Any) -> list:
    """[] -> [] lifts to [B]: each lane its own number."""
    if eqn.params["axis_name"] != axis.name:
        return rebind(eqn)
    return [Batched(_jax.numbers(axis.size, eqn.outvars[0].aval.dtype, axis.mesh_name), 0)]


@rule("psum psum_invariant unreduced_psum pmax pmin unreduced_pmax unreduced_pmin", always=True)
def reduction(axis: Axis, eqn: Any, x: Any) -> list:
    """[*s] -> [*s] lifts to [B, *s] -> [*s], which all lanes share; in groups to [B, *s]. Then the other axes, if any."""
    names = eqn.params["axes"]
    rest = tuple(name for name in names if name != axis.name)
    if len(rest) < len(names):
        x = lie(axis, x, None) if eqn.params.get("axis_index_groups") is not None else x
        x = lie(axis, in_groups(axis, eqn, x, reduced, alone=not rest), axis.mesh_name)
    return in_place(eqn, x, axes=rest) if rest else [x]


def reduced(axis: Axis, eqn: Any, x: Any) -> Any:
    """[B, *s] -> [*s]; of what all lanes share, the sum is a multiple and the extremum the thing itself."""
    kind = eqn.primitive.name.removeprefix("unreduced_").removesuffix("_invariant")
    if is_batched(x):
        return REDUCE[kind](x.value, (0,))
    return lax.mul(x, lax.full_like(x, axis.size)) if kind == "psum" else x


def across(names: str) -> Callable:
    """Declare the function below as what these primitives do across the lanes, where this axis is the only one."""

    def declare(apply: Callable) -> Callable:
        @rule(names, always=True)
        def collective(axis: Axis, eqn: Any, x: Any) -> list:
            names = names_of(eqn)
            if axis.name not in names:
                return in_place(eqn, x)
            if len(names) > 1 and (apply not in EACH or eqn.params.get("axis_index_groups") is not None):
                raise not_over(eqn)
            x = lie(axis, x, None)
            out = in_groups(axis, eqn, x, apply) if len(names) == 1 else EACH[apply](axis, eqn, x)
            return [lie(axis, out, axis.mesh_name)]

        return apply

    return declare


def lie(axis: Axis, x: Any, entry: Any) -> Any:
    """On an explicit mesh: `x` with its lanes over the mesh axis `entry`, or on every device."""
    return Batched(laid(axis, x.value, entry), 0) if is_batched(x) else x


def names_of(eqn: Any) -> tuple:
    """The axes over which `eqn` acts, the slowest first."""
    names = eqn.params.get("axis_name", eqn.params.get("axes"))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def in_place(eqn: Any, x: Any, **changed: Any) -> list:
    """Over axes that are not this one: the same on [B, *s], dims shifted."""
    if not is_batched(x):
        return rebind(eqn, x, **changed)
    axes = changed.get("axes", eqn.params.get("axes"))
    shifted = {} if axes is None else {"axes": tuple(a + 1 if isinstance(a, int) else a for a in axes)}
    return [Batched(out, 0) for out in rebind(eqn, x.value, **shift_dims(eqn), **shifted)]


def shift_dims(eqn: Any) -> dict[str, int]:
    """The params of `eqn` that are dims, one further."""
    return {dim: eqn.params[dim] + 1 for dim in DIMS if dim in eqn.params}


def with_params(eqn: Any, **changed: Any) -> Any:
    """The equation with these params changed."""
    return eqn.replace(params={**eqn.params, **changed})


def in_groups(axis: Axis, eqn: Any, x: Any, apply: Callable, alone: bool = True) -> Any:
    """`apply` across all lanes, or within each of G groups of K: as across K lanes of [G, *s]."""
    groups = eqn.params.get("axis_index_groups")
    if groups is None:
        return apply(axis, eqn, x)
    if not alone or len({len(group) for group in groups}) > 1:
        raise not_over(eqn)
    table = np.asarray(groups)  # [G, K]
    count, size = table.shape
    order = np.argsort(table.reshape(-1))
    group, place = np.divmod(order, size)  # of each lane
    few = axis._replace(size=size)
    if not is_batched(x):
        out = apply(few, eqn, x)
        return Batched(take(out.value, place), 0) if is_batched(out) else out
    out = apply(few, with_params(eqn, **shift_dims(eqn)), Batched(take(x.value, table.T), 0))
    if is_batched(out):
        return Batched(take(merge(out.value, 0, 2), place * count + group), 0)
    return Batched(take(out, group), 0)


def take(x: Any, index: Any) -> Any:
    """`x[index]`, for an index known to be in bounds."""
    return x.at[index].get(mode="promise_in_bounds")


def merge(x: Any, dim: int, count: int) -> Any:
    """`x` with `count` dims from `dim` on as one."""
    shape = np.shape(x)
    return lax.reshape(x, (*shape[:dim], math.prod(shape[dim : dim + count]), *shape[dim + count :]))


def split(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    """`x` with dimension `dim` as dims of `sizes` and what remains."""
    shape = np.shape(x)
    return lax.reshape(x, (*shape[:dim], *sizes, shape[dim] // math.prod(sizes), *shape[dim + 1 :]))


# --- across this axis alone -------------------------------------------------------------------------------------------


@across("all_gather all_gather_invariant all_gather_reduced")
def all_gather(axis: Axis, eqn: Any, x: Any) -> Any:
    """[*s] -> [*s with B at a dimension, or multiplied into it] lifts to [B, *s] -> the same, which all lanes share."""
    dim = eqn.params["all_gather_dimension"]
    out = lanes(axis, x, dim)
    return merge(out, dim, 2) if eqn.params["tiled"] else out


@across("reduce_scatter unreduced_reduce_scatter")
def reduce_scatter(axis: Axis, eqn: Any, x: Any) -> Batched:
    """[.., B m, ..] -> [.., m, ..] lifts to [B, .., B m, ..] -> [B, .., m, ..]: each lane its piece of the sum."""
    dim = eqn.params["scatter_dimension"]
    total = lax.reduce_sum(x.value, (0,)) if is_batched(x) else lax.mul(x, lax.full_like(x, axis.size))
    pieces = split(total, dim, [axis.size]) if eqn.params["tiled"] else total
    return Batched(move(pieces, dim, 0), 0)


@across("all_to_all")
def all_to_all(axis: Axis, eqn: Any, x: Any) -> Batched:
    """[.., B m, .., n, ..] -> [.., m, .., B n, ..] lifts to the swap of two dims of size B, the lanes and the pieces."""
    source, target = eqn.params["split_axis"], eqn.params["concat_axis"]
    pieces = split(lanes(axis, x), source + 1, [axis.size])  # [B, .., B, m, .., n, ..]
    pieces = move(pieces, source + 1, 0)  # [B to, B from, .., m, .., n, ..]
    return Batched(merge(move(pieces, 1, target + 1), target + 1, 2), 0)


@across("ppermute")
def ppermute(axis: Axis, eqn: Any, x: Any) -> Batched:
    """[*s] -> [*s] lifts to [B, *s] -> [B, *s], lanes exchanged; zeros where none is sent."""
    source = np.full(axis.size, axis.size)
    for sender, receiver in eqn.params["perm"]:
        source[receiver] = sender
    if (source < axis.size).all():
        return Batched(take(lanes(axis, x), source), 0)
    return Batched(lanes(axis, x).at[source].get(mode="fill", fill_value=0), 0)


@across("pbroadcast")
def pbroadcast(axis: Axis, eqn: Any, x: Any) -> Any:
    """[*s] -> [*s] lifts to [B, *s] -> [*s]: one lane's."""
    return lax.index_in_dim(x.value, eqn.params["source"], 0, keepdims=False) if is_batched(x) else x


@rule("pbroadcast_dynamic", always=True)
def pbroadcast_dynamic(axis: Axis, eqn: Any, x: Any, source: Any) -> list:
    """[*s], [] -> [*s] lifts to [B, *s], [] -> [*s], or with a source for each lane to [B, *s]."""
    if names_of(eqn) != (axis.name,):
        return elsewhere(axis, eqn, x, source)
    if not is_batched(x):
        return [x]
    return [Batched(take(x.value, source.value), 0) if is_batched(source) else take(x.value, source)]


@rule("ragged_all_to_all", always=True)
def ragged_all_to_all(axis: Axis, eqn: Any, operand: Any, output: Any, *tables: Any) -> list:
    """[R, *s], [T, *s], four [B k] -> [T, *s] lifts to one scatter of the rows that each lane sends to each."""
    if names_of(eqn) != (axis.name,) or eqn.params["axis_index_groups"] is not None:
        return elsewhere(axis, eqn, operand, output, *tables)
    operand, output = lanes(axis, operand), lanes(axis, output)
    start, size, place, _ = (split(lanes(axis, table), 1, [axis.size])[..., None] for table in tables)  # [B from, B to, k, 1]
    row = jnp.arange(operand.shape[1])
    sender, receiver = (index[..., None, None] for index in np.ogrid[: axis.size, : axis.size])
    sent = operand.at[sender, start + row].get(mode="clip")  # [B from, B to, k, R, *s]
    target = jnp.where(row < size, place + row, output.shape[1])  # beyond the end is dropped
    return [Batched(output.at[receiver, target].set(sent, mode="drop"), 0)]


def elsewhere(axis: Axis, eqn: Any, *operands: Any) -> list:
    """Over other axes, where several operands may have lanes: one by one."""
    if axis.name in names_of(eqn):
        raise not_over(eqn)
    return one_by_one(axis, eqn, *operands) if any(map(is_batched, operands)) else rebind(eqn, *operands)


@rule(
    """
    all_gather_reduced_start all_gather_start all_to_all_start pbroadcast_start ppermute_start psum_invariant_start psum_start
    reduce_scatter_start unreduced_psum_start unreduced_reduce_scatter_start
    """,
    always=True,
)
def started(axis: Axis, eqn: Any, x: Any) -> list:
    """[*s] -> future of [*t]   lifts to   the collective itself: across lanes there is nothing to wait for."""
    if axis.name not in names_of(eqn):
        return in_place(eqn, x)
    eqn = _jax.synchronous(eqn)
    return find(eqn.primitive).apply(axis, eqn, x)


@rule("all_gather_done all_to_all_done pbroadcast_done ppermute_done psum_done reduce_scatter_done", always=True, anywhere=True)
def done(axis: Axis, eqn: Any, x: Any) -> list:
    """future of [*s] -> [*s]   lifts to   future of [B, *s] -> [B, *s], or what is there already."""
    (value,), bdims = apart([x])
    return together(rebind(eqn, value) if _jax.is_under_way(value) else [value], bdims)


def not_over(eqn: Any) -> NotImplementedError:
    """The error for a collective that cannot be taken apart by axis."""
    groups = eqn.params.get("axis_index_groups")
    over = eqn.params.get("axes", eqn.params.get("axis_name"))
    where = f"over {over!r}" if groups is None else f"over {over!r} in groups {groups}"
    return NotImplementedError(f"minibatch: {eqn.primitive} {where}: not over several axes one of which is mapped"
                               f"{'' if groups is None else ', nor in groups that differ in size'}.")


# --- across this axis and others: one after another -------------------------------------------------------------------


def each_gathers(axis: Axis, eqn: Any, x: Any) -> Any:
    """[*s] -> [*s with A B C at a dimension], the axes in order, the last gathered first."""
    dim, names = eqn.params["all_gather_dimension"], names_of(eqn)
    for name in reversed(names):
        x = over_one(axis, eqn, x, all_gather, name, axis_size=size_of(axis, name), tiled=False)
    return logically(x, merge, dim, len(names) + eqn.params["tiled"])


def each_scatters(axis: Axis, eqn: Any, x: Any) -> Any:
    """[.., A B C m, ..] -> [.., m, ..], the first axis scattered first."""
    dim, names = eqn.params["scatter_dimension"], names_of(eqn)
    x = logically(x, split, dim, [size_of(axis, name) for name in names])
    for name in names:
        x = over_one(axis, eqn, x, reduce_scatter, name, axis_size=size_of(axis, name), tiled=False)
    return x if eqn.params["tiled"] else logically(x, lambda value, dim: lax.squeeze(value, (dim,)), dim)


def each_swaps(axis: Axis, eqn: Any, x: Any) -> Any:
    """[.., A B C m, .., n, ..] -> [.., m, .., A B C n, ..]: each axis swapped where it stands, then all of them moved."""
    source, target, names = eqn.params["split_axis"], eqn.params["concat_axis"], names_of(eqn)
    x = logically(x, split, source, [size_of(axis, name) for name in names])
    for dim, name in enumerate(names, source):
        x = over_one(axis, eqn, x, all_to_all, name, split_axis=dim, concat_axis=dim)
    x = logically(x, move_block, source, len(names), target - source)
    return logically(x, merge, target, len(names) + 1)


def move_block(x: Any, dim: int, count: int, by: int) -> Any:
    """`x` with the `count` dims from `dim` on moved by `by` places."""
    order = list(range(np.ndim(x)))
    block, order[dim : dim + count] = order[dim : dim + count], []
    order[dim + by : dim + by] = block
    return lax.transpose(x, order)


def each_broadcasts(axis: Axis, eqn: Any, x: Any) -> Any:
    """[*s] -> [*s]: from the one place that has the source's number on every axis."""
    names = names_of(eqn)
    places = np.unravel_index(eqn.params["source"], [size_of(axis, name) for name in names])
    for name, place in zip(names, places, strict=True):
        x = over_one(axis, eqn, x, pbroadcast, name, source=int(place))
    return x


EACH = {all_gather: each_gathers, reduce_scatter: each_scatters, all_to_all: each_swaps, pbroadcast: each_broadcasts}


def over_one(axis: Axis, eqn: Any, x: Any, apply: Callable, name: Any, **changed: Any) -> Any:
    """The part of `eqn` over the axis `name`, this one or another."""
    eqn = with_params(eqn, axis_name=name if apply is all_to_all else (name,), **changed)
    return apply(axis, eqn, x) if name == axis.name else in_place(eqn, x)[0]


def size_of(axis: Axis, name: Any) -> int:
    """The size of this axis or another."""
    return axis.size if name == axis.name else lax.axis_size(name)


def logically(x: Any, f: Callable, dim: int, *args: Any) -> Any:
    """`f(x, dim, *args)` on each lane of `x`."""
    return Batched(f(x.value, dim + 1, *args), 0) if is_batched(x) else f(x, dim, *args)
