"""Where arrays lie: a dimension for the lanes in every spec, over the mesh axes that the map was given or unsaid."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from minibatch import _jax
from minibatch._batched import Axis, Batched, apart, is_batched, shift, together
from minibatch._interpreter import batch_jaxpr
from minibatch._jax import rebind
from minibatch._registry import rule


def over(axis: Axis) -> tuple:
    """The mesh axes over which the lanes lie."""
    names = axis.spmd_name or axis.mesh_name or ()
    return names if isinstance(names, tuple) else (names,)


def lifted(sharding: Any, bdim: int, entry: Any) -> Any:
    """`sharding` of one lane's array as that of all; a device, or nothing said, holds for all."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=_jax.with_lanes(sharding.spec, bdim, entry))


def layered(layout: Layout | None, bdim: int) -> Layout | None:
    """`layout` of one lane's array as that of all, lane after lane."""
    if layout is None:
        return None
    order = (bdim, *shift(layout.major_to_minor, bdim))
    return Layout(order, layout.tiling, layout.sub_byte_element_size_in_bits)


@rule("sharding_constraint", anywhere=True)
def sharding_constraint(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*s] lifts to [B, *s] -> [B, *s], nothing said of B unless the lanes lie over mesh axes.

    Raises:
      ValueError: the lanes lie over mesh axes, and a lane on a device.
    """
    free, target = not over(axis), eqn.params["sharding"]
    if not free and isinstance(target, Sharding) and not isinstance(target, NamedSharding):
        raise ValueError(
            "If you are using spmd_axis_name parameter of jax.vmap, please make sure to run your jitted function inside the "
            f"mesh context manager. The lanes lie over {over(axis)!r} and each is constrained to {target!r}: give "
            "jax.lax.with_sharding_constraint a jax.sharding.NamedSharding."
        )
    dims = shift(eqn.params["unconstrained_dims"], x.bdim)
    changed = {
        "sharding": lifted(target, x.bdim, P.UNCONSTRAINED if free else over(axis)),
        "layout": layered(eqn.params["layout"], x.bdim),
        "unconstrained_dims": frozenset([*dims, x.bdim] if free else dims),
    }
    return [Batched(out, x.bdim) for out in rebind(eqn, x.value, **changed)]


@rule("reshard", anywhere=True)
def reshard(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*s] lifts to [B, *s] -> [B, *s], B as it lies."""
    target = lifted(eqn.params["dst_sharding"], x.bdim, over(axis))
    return [Batched(out, x.bdim) for out in rebind(eqn, x.value, dst_sharding=target)]


@rule("layout_constraint", anywhere=True)
def layout_constraint(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*s] lifts to [B, *s] -> [B, *s]."""
    return [Batched(out, x.bdim) for out in rebind(eqn, x.value, layout=layered(eqn.params["layout"], x.bdim))]


@rule("relayout", anywhere=True)
def relayout(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> [*s] lifts to [B, *s] -> [B, *s]; a layout left to XLA stays so."""
    target = eqn.params["dst_layout"]
    target = layered(target, x.bdim) if isinstance(target, Layout) else target
    return [Batched(out, x.bdim) for out in rebind(eqn, x.value, dst_layout=target)]


@rule("device_put", anywhere=True)
def device_put(axis: Axis, eqn: Any, *operands: Any) -> list:
    """Each [*s] -> [*s] lifts to [B, *s] -> [B, *s]."""
    arrays, bdims = apart(operands)

    def each(targets: Sequence[Any]) -> tuple:
        return tuple(x if d is None else lifted(x, d, over(axis)) for x, d in zip(targets, bdims, strict=True))

    return together(rebind(eqn, *arrays, devices=each(eqn.params["devices"]), srcs=each(eqn.params["srcs"])), bdims)


@rule("shard_map", anywhere=True, always=True)
def shard_map(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f on shards of [*s]   lifts to   the lifted f on shards of [B, *s], which hold all lanes or some.

    Raises:
      ValueError: the lanes lie over a mesh axis that the specs of one lane use.
    """
    if not any(map(is_batched, operands)) and not _jax.names_axis(eqn, axis.name):
        return rebind(eqn, *operands)
    mesh, manual, jaxpr = (eqn.params[name] for name in ("mesh", "newly_manual_axes", "jaxpr"))
    taken = _jax.names_given_up([*eqn.params["in_specs"], *eqn.params["out_specs"]])  # there each shard holds all lanes
    entry = tuple(name for name in over(axis) if name in manual and name not in taken)
    arrays, bdims = apart(operands)
    out_bdims: list[int | None] = []

    def spread(specs: Sequence[P], bdims: Sequence[int | None]) -> tuple:
        lifted = [_jax.with_lanes(spec, d or 0, entry) for spec, d in zip(specs, bdims, strict=True)]  # or raises
        return tuple(x if d is None else y for x, y, d in zip(specs, lifted, bdims, strict=True))

    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=spread(eqn.params["in_specs"], bdims),
        axis_names=set(manual),
        check_vma=eqn.params["check_vma"],
    )
    inside = within(axis, eqn, entry, math.prod(mesh.shape[name] for name in entry))

    def body(*shards: Any) -> tuple:
        outs, out_bdims[:] = apart(batch_jaxpr(inside, jaxpr, together(shards, bdims)))
        return tuple(outs)

    def nothing(*shards: Any) -> None:
        body(*shards)

    jax.eval_shape(mapped(nothing, out_specs=P()), *arrays)  # says which outputs have lanes
    return together(mapped(body, out_specs=spread(eqn.params["out_specs"], out_bdims))(*arrays), out_bdims)


def within(axis: Axis, eqn: Any, entry: tuple, shards: int) -> Axis:
    """The axis as one shard sees it, which holds all lanes, or where they lie over mesh axes those of its own."""
    if axis.size % shards:
        raise ValueError(f"minibatch: {axis.size} lanes cannot lie over mesh axes {entry!r} in {shards} shards of one size.")
    met = [name for name in (axis.name, *entry) if _jax.names_axis(_jax.open_jaxpr(eqn.params["jaxpr"]), name)]
    if entry and met:
        raise NotImplementedError(
            f"minibatch: a shard_map over mesh axes {entry!r}, over which the lanes lie, may not act across axis {met[0]!r}."
        )
    return axis._replace(
        size=axis.size // shards,
        spmd_name=tuple(name for name in axis.spmd_name if name not in entry),
        mesh_name=None if entry else axis.mesh_name,
        manual=(*axis.manual, *entry) if eqn.params["check_vma"] else (),
    )
