"""What a branch or a step does beside computing, done for the lanes that take part in it and for no others.

A callback with an operand more, which says whether this lane is live, is still one equation for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched
from minibatch._host import Again, IfLive
from minibatch._interpreter import fact, remembered, walk
from minibatch._jax import rebind
from minibatch.schedule.updates import LOOKS_UP, UPDATES, buffers, detached, lent, looks_at


def acts(x: Any) -> bool:
    """Whether an equation or jaxpr does something beside computing, or asks the host lane by lane."""
    if _jax.side_effects(x):
        return True
    if not hasattr(x, "primitive"):
        return _some_act(x)
    alone = x.primitive.name == "pure_callback" and x.params["vmap_method"] in ONE_BY_ONE
    return alone or any(map(acts, _jax.inner_jaxprs(x)))


@fact
def _some_act(jaxpr: Any) -> bool:
    return any(map(acts, _jax.open_jaxpr(jaxpr).eqns))


ONE_BY_ONE = (None, "sequential", "sequential_unrolled")


def can_be_told(x: Any) -> bool:
    """Whether all that acts in an equation or jaxpr can be told which lanes are live."""
    if not hasattr(x, "primitive"):
        return all(map(can_be_told, _jax.open_jaxpr(x).eqns))
    if not acts(x):
        return True
    return x.primitive.name in TOLD and not x.params.get("partitioned") and all(map(can_be_told, _jax.inner_jaxprs(x)))


class Lane(NamedTuple):
    """One lane that takes part if it is `live`; if not, what it reads of a buffer must be `lent` to it, or need not."""

    live: Any
    lent: bool = False

    def sees(self, x: Any) -> Any:
        """`x`, read of a buffer."""
        return lent(self.live, x) if self.lent else detached(self.live, x)


class Telling(NamedTuple):
    """What a jaxpr is told beside who is live.

    Lanes that take no part get the outputs `kept` back unchanged: buffers, of which it updates a few elements. Of these, and
    of the inputs `read`, they see what is `lent` to them, or their own.
    """

    kept: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    lent: bool = False


NOTHING = Telling()


def taking_part(
    axis: Axis, jaxpr: Any, taking: Array, aval: Any, operands: Sequence[Any], telling: Telling = NOTHING
) -> tuple[Any, list]:
    """`jaxpr` and its operands; if there is anything to tell, told of the lanes `taking` [B] part, one's of this `aval`."""
    if not telling.kept and not telling.read and not (acts(jaxpr) and can_be_told(jaxpr)):
        return jaxpr, list(operands)
    with _jax.axis_env(axis):
        return told(jaxpr, aval, telling), [Batched(taking, 0), *operands]


def told(jaxpr: Any, aval: Any, telling: Telling = NOTHING) -> Any:
    """`jaxpr` with a first input of this aval: false where it may compute, but not act nor change what is kept."""
    aval = aval.update(dtype=np.dtype(bool), weak_type=False)
    avals = [aval, *(v.aval for v in _jax.open_jaxpr(jaxpr).invars)]

    def evaluated(live: Any, *args: Any) -> list:
        return act_if(Lane(live, telling.lent), jaxpr, args, telling)

    return remembered(jaxpr, ("told", aval, telling), lambda: _jax.trace_jaxpr(evaluated, avals))


def act_if(lane: Lane, jaxpr: Any, args: Sequence[Any], telling: Telling = NOTHING) -> list:
    """Evaluate `jaxpr`; it acts, and changes the outputs kept, only if the lane is live."""
    held = buffers(jaxpr, telling.kept) | {_jax.open_jaxpr(jaxpr).invars[i] for i in telling.read}

    def apply(eqn: Any, values: list) -> list:
        kept = tuple(i for i, v in enumerate(eqn.outvars) if v in held)
        seen = looks_at(eqn, held) if held else ()
        if seen == {0} and eqn.primitive.name in LOOKS_UP:  # what is seen is less than the buffer
            return [lane.sees(out) for out in rebind(eqn, *values)]
        values = [lane.sees(x) if i in seen else x for i, x in enumerate(values)]
        tells = TOLD.get(eqn.primitive.name) if kept or acts(eqn) else None  # a reference made inside is nobody else's
        return tells(lane, eqn, kept, *values) if tells else rebind(eqn, *values)

    return walk(jaxpr, args, apply)


def callback(lane: Lane, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A callback that is told."""
    told_of = IfLive(eqn.params["callback"], tuple(eqn.params.get("result_avals", ())))
    return rebind(eqn, lane.live, *values, callback=told_of)


def printing(lane: Lane, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A debug print, as a callback that is told."""
    jax.debug.callback(IfLive(Again(eqn)), lane.live, *values, ordered=eqn.params["ordered"])  # pyright: ignore[reportArgumentType] - what it returns is dropped
    return []


def check(lane: Lane, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A check, which fails only if live."""
    kinds = eqn.params["err_tree"].children()[0].num_leaves
    return rebind(eqn, *(lax.bitwise_and(failed, lane.live) for failed in values[:kinds]), *values[kinds:])


def branches(lane: Lane, eqn: Any, kept: tuple[int, ...], index: Any, *values: Any) -> list:
    """A cond whose branches are told."""
    telling = Telling(kept, lent=lane.lent)
    changed = tuple(told(branch, jax.typeof(lane.live), telling) for branch in eqn.params["branches"])
    return rebind(eqn, index, lane.live, *values, branches=changed)


def steps(lane: Lane, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A while whose condition and body are told."""
    count, live = eqn.params["cond_nconsts"], lane.live
    changed = {f"{part}_jaxpr": told(eqn.params[f"{part}_jaxpr"], jax.typeof(live)) for part in ("cond", "body")}
    counts = {f"{part}_nconsts": eqn.params[f"{part}_nconsts"] + 1 for part in ("cond", "body")}
    return rebind(eqn, live, *values[:count], live, *values[count:], **changed, **counts)


def rows(lane: Lane, eqn: Any, kept: Sequence[int], *values: Any) -> list:
    """A scan whose body is told."""
    consts, carries = _jax.scan_counts(eqn.params)
    start = consts + carries

    def step(carry: tuple, x: tuple) -> tuple[tuple, tuple]:
        outs = act_if(lane, eqn.params["jaxpr"], [*values[:consts], *carry, *x])
        return tuple(outs[:carries]), tuple(outs[carries:])

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, tuple(values[consts:start]), tuple(values[start:]), **how)
    return [*carry, *ys]


def recomputed(lane: Lane, eqn: Any, kept: tuple[int, ...], *values: Any) -> list:
    """A checkpoint of what is told."""
    jaxpr = told(eqn.params["jaxpr"], jax.typeof(lane.live), Telling(kept, lent=lane.lent))
    return _jax.checkpoint_of(eqn, jaxpr, [lane.live, *values])


def called(lane: Lane, eqn: Any, kept: tuple[int, ...], *values: Any) -> list:
    """A call, whose equations are told where it stands."""
    return act_if(lane, _jax.called(eqn), values, Telling(kept))


TOLD: dict[str, Callable[..., list]] = {
    "cond": branches,
    "while": steps,
    "scan": rows,
    "check": check,
    "debug_print": printing,
    "remat2": recomputed,
    **dict.fromkeys(("debug_callback", "io_callback", "pure_callback"), callback),
    **dict.fromkeys(("jit", "closed_call", "eval_jaxpr"), called),
    **UPDATES,
}
