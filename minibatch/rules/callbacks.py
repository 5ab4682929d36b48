"""Calls to the host: one equation stays one, and on the host the lanes follow one another in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify

from minibatch import _jax
from minibatch._batched import Axis, Batched, apart, is_batched, laid, lanes
from minibatch._host import Again, EachLane
from minibatch._jax import rebind
from minibatch._registry import rule
from minibatch.rules.fallback import one_by_one


def call_of_all(axis: Axis, eqn: Any, values: Sequence[Any], **changed: Any) -> list:
    """`eqn` on the values of all lanes, with their results [B, *t]."""
    avals = tuple(_jax.batched_aval(aval, axis.size, 0) for aval in eqn.params["result_avals"])
    return [Batched(laid(axis, out, axis.mesh_name), 0) for out in rebind(eqn, *values, result_avals=avals, **changed)]


@rule("pure_callback")
def pure_callback(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s] -> [*t] lifts to [B, *s] -> [B, *t]: a callback that knows lanes gets them all, another each in turn."""
    values = given(axis, eqn, operands)
    if values is None:
        return each_lane(axis, eqn, *operands)
    return call_of_all(axis, eqn, values)


def given(axis: Axis, eqn: Any, operands: Sequence[Any]) -> list | None:
    """What a host function that knows lanes is given for its operands by its `vmap_method`; None if it knows none."""
    match eqn.params["vmap_method"]:
        case None | "sequential" | "sequential_unrolled":
            return None
        case "expand_dims":
            return [x.value if is_batched(x) else lax.expand_dims(x, (0,)) for x in operands]
        case "broadcast_all":
            return [lanes(axis, x) for x in operands]
        case "legacy_vectorized":
            return apart(operands)[0]
        case other:
            raise NotImplementedError(f"minibatch: {eqn.primitive} with vmap_method={other!r}, which is not known.")


@rule("io_callback")
def each_lane(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s] -> [*t] lifts to [B, *s] -> [B, *t]: each lane in turn, ordered or not."""
    callback = EachLane(eqn.params["callback"], tuple(map(is_batched, operands)), eqn.params["result_avals"])
    return call_of_all(axis, eqn, apart(operands)[0], callback=callback)


@rule("debug_callback")
def debug_callback(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s] -> lifts to [B, *s] ->: each lane in turn. Where each device calls for its shard, a shard need not be lanes."""
    if eqn.params["partitioned"]:
        return one_by_one(axis, eqn, *operands)
    return rebind(eqn, *apart(operands)[0], callback=EachLane(eqn.params["callback"], tuple(map(is_batched, operands))))


@rule("debug_print")
def debug_print(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s] -> lifts to [B, *s] ->: a callback that prints each lane in turn."""
    if eqn.params["partitioned"]:
        return one_by_one(axis, eqn, *operands)
    each = EachLane(Again(eqn), tuple(map(is_batched, operands)))
    jax.debug.callback(each, *apart(operands)[0], ordered=eqn.params["ordered"])  # pyright: ignore[reportArgumentType] - what it returns is dropped
    return []


@rule("inspect_sharding", anywhere=True)
def inspect_sharding(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] -> lifts to [B, *s] ->: of all lanes at once."""
    return rebind(eqn, x.value)


@rule("check")
def check(axis: Axis, eqn: Any, *operands: Any) -> list:
    """Whether, which, and with what payload: of each kind of error, the first lane's that has it."""
    if not axis.size:
        return []
    failed, _, payloads = eqn.params["err_tree"].children()
    kinds = failed.num_leaves
    sizes = [payload.num_leaves for payload in payloads.children()]
    ends = 2 * kinds + np.cumsum([0, *sizes])
    values = list(operands)
    lane: Any = None
    for kind in range(kinds):
        parts = [kind, kinds + kind, *range(ends[kind], ends[kind + 1])]
        lane = lax.argmax(operands[kind].value, 0, np.int32) if is_batched(operands[kind]) else jnp.int32(0)
        for i in parts:
            if is_batched(operands[i]):
                values[i] = lax.dynamic_index_in_dim(operands[i].value, lane, 0, keepdims=False)
    said = _jax.failed_check(eqn, values)
    if said is None:
        return rebind(eqn, *values)
    text, args, kwargs = said
    name = f"mapped_index_{sum(key.startswith('mapped_index_') for key in kwargs)}"
    tell = checkify.debug_check if eqn.params["debug"] else checkify.check
    tell(lax.bitwise_not(values[0]), f"{text} (at mapped index {{{name}}})", *args, **{name: lane}, **kwargs)
    return []


@rule("ffi_call buffer_callback")
def ffi_call(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s] -> [*t] lifts to [B, *s] -> [B, *t] by a call of all lanes if its `vmap_method` allows, else one by one."""
    values = given(axis, eqn, operands)
    if values is None:
        return one_by_one(axis, eqn, *operands)
    for i, _ in eqn.params["input_output_aliases"]:
        values[i] = lanes(axis, operands[i])  # it is overwritten by all lanes
    if "input_layouts" not in eqn.params:
        return call_of_all(axis, eqn, values)
    inputs = [
        layout if layout is None or len(layout) == np.ndim(x) else lifted(layout)
        for layout, x in zip(eqn.params["input_layouts"], values, strict=True)
    ]
    outputs = [layout if layout is None else lifted(layout) for layout in eqn.params["output_layouts"]]
    return call_of_all(axis, eqn, values, input_layouts=tuple(inputs), output_layouts=tuple(outputs))


def lifted(layout: Sequence[int]) -> tuple[int, ...]:
    """A layout, the fastest dim first, with the lanes as the slowest."""
    return (*(dim + 1 for dim in layout), 0)
