"""What a branch or a step does beside computing, done for the lanes that take part in it and for no others.

A callback with an operand more, which says whether this lane is live, is still one equation for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched
from minibatch._host import Again, IfLive
from minibatch._interpreter import remembered, walk
from minibatch._jax import rebind
from minibatch.schedule.updates import UPDATES, buffers, detached, looks_at


def acts(x: Any) -> bool:
    """Whether an equation or jaxpr does something beside computing, or asks the host lane by lane."""
    if _jax.side_effects(x):
        return True
    if hasattr(x, "primitive"):
        alone = x.primitive.name == "pure_callback" and x.params["vmap_method"] in ONE_BY_ONE
        return alone or any(map(acts, _jax.inner_jaxprs(x)))
    return any(map(acts, _jax.open_jaxpr(x).eqns))


ONE_BY_ONE = (None, "sequential", "sequential_unrolled")


def can_be_told(x: Any) -> bool:
    """Whether all that acts in an equation or jaxpr can be told which lanes are live."""
    if not hasattr(x, "primitive"):
        return all(map(can_be_told, _jax.open_jaxpr(x).eqns))
    if not acts(x):
        return True
    return x.primitive.name in TOLD and not x.params.get("partitioned") and all(map(can_be_told, _jax.inner_jaxprs(x)))


def taking_part(
    axis: Axis, jaxpr: Any, taking: Array, aval: Any, operands: Sequence[Any], kept: Sequence[int] = ()
) -> tuple[Any, list]:
    """`jaxpr` and its operands; if it acts, told of the lanes `taking` [B] part, of which one's is of `aval`.

    So it is if there are outputs `kept`: buffers that it updates, which those that take no part get back unchanged.
    """
    if not kept and not (acts(jaxpr) and can_be_told(jaxpr)):
        return jaxpr, list(operands)
    with _jax.axis_env(axis):
        return told(jaxpr, aval, tuple(kept)), [Batched(taking, 0), *operands]


def told(jaxpr: Any, aval: Any, kept: tuple[int, ...]) -> Any:
    """`jaxpr` with a first input of this aval: false where it may compute but not act, nor change the outputs `kept`."""
    aval = aval.update(dtype=np.dtype(bool), weak_type=False)
    avals = [aval, *(v.aval for v in _jax.open_jaxpr(jaxpr).invars)]

    def evaluated(live: Any, *args: Any) -> list:
        return act_if(live, jaxpr, args, kept)

    return remembered(jaxpr, ("told", aval, kept), lambda: _jax.trace_jaxpr(evaluated, avals))


def act_if(live: Any, jaxpr: Any, args: Sequence[Any], kept: Sequence[int] = ()) -> list:
    """Evaluate `jaxpr`; it acts, and changes the outputs `kept`, only if `live`."""
    held = buffers(jaxpr, kept)

    def apply(eqn: Any, values: list) -> list:
        places = tuple(i for i, v in enumerate(eqn.outvars) if v in held)
        seen = looks_at(eqn, held) if held else ()
        if seen and eqn.primitive.name in ("gather", "dynamic_slice"):  # what is seen is less than the buffer
            return [detached(live, out) for out in rebind(eqn, *values)]
        values = [detached(live, x) if i in seen else x for i, x in enumerate(values)]
        return TOLD[eqn.primitive.name](live, eqn, places, *values) if places or acts(eqn) else rebind(eqn, *values)

    return walk(jaxpr, args, apply)


def callback(live: Any, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A callback that is told."""
    return rebind(eqn, live, *values, callback=IfLive(eqn.params["callback"], tuple(eqn.params.get("result_avals", ()))))


def printing(live: Any, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A debug print, as a callback that is told."""
    jax.debug.callback(IfLive(Again(eqn)), live, *values, ordered=eqn.params["ordered"])  # pyright: ignore[reportArgumentType] - what it returns is dropped
    return []


def check(live: Any, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A check, which fails only if live."""
    kinds = eqn.params["err_tree"].children()[0].num_leaves
    return rebind(eqn, *(lax.bitwise_and(failed, live) for failed in values[:kinds]), *values[kinds:])


def branches(live: Any, eqn: Any, kept: Sequence[int], index: Any, *values: Any) -> list:
    """A cond whose branches are told."""
    changed = tuple(told(branch, jax.typeof(live), tuple(kept)) for branch in eqn.params["branches"])
    return rebind(eqn, index, live, *values, branches=changed)


def steps(live: Any, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A while whose condition and body are told."""
    count = eqn.params["cond_nconsts"]
    changed = {f"{part}_jaxpr": told(eqn.params[f"{part}_jaxpr"], jax.typeof(live), ()) for part in ("cond", "body")}
    counts = {f"{part}_nconsts": eqn.params[f"{part}_nconsts"] + 1 for part in ("cond", "body")}
    return rebind(eqn, live, *values[:count], live, *values[count:], **changed, **counts)


def rows(live: Any, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A scan whose body is told."""
    consts, carries = _jax.scan_counts(eqn.params)
    start = consts + carries

    def step(carry: tuple, x: tuple) -> tuple[tuple, tuple]:
        outs = act_if(live, eqn.params["jaxpr"], [*values[:consts], *carry, *x])
        return tuple(outs[:carries]), tuple(outs[carries:])

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, tuple(values[consts:start]), tuple(values[start:]), **how)
    return [*carry, *ys]


def called(live: Any, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A call, whose equations are told where it stands."""
    return act_if(live, next(_jax.inner_jaxprs(eqn)), values, kept)


TOLD: dict[str, Callable[..., list]] = {
    "cond": branches,
    "while": steps,
    "scan": rows,
    "check": check,
    "debug_print": printing,
    **dict.fromkeys(("debug_callback", "io_callback", "pure_callback"), callback),
    **dict.fromkeys(("jit", "closed_call", "eval_jaxpr"), called),
    **UPDATES,
}
