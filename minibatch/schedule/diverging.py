"""A loop whose predicate differs by lane, by the schedule that is asked for or should take least time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minibatch import _jax
from minibatch._batched import Axis, apart, front, is_batched, lanes
from minibatch.schedule import choose
from minibatch.schedule.borrow import hands_through
from minibatch.schedule.lockstep import lockstep
from minibatch.schedule.loop import Loop
from minibatch.schedule.stages import staged


def diverging(axis: Axis, eqn: Any, cond_consts: Sequence[Any], body_consts: Sequence[Any], carry: Sequence[Any]) -> list:
    """while pred(c): c = f(c)   lifts to   the same over lanes of which each stops by itself."""
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    changes = tuple(origin != len(body_consts) + i for i, origin in enumerate(hands_through(body)))
    kept = [x for x, change in zip(carry, changes, strict=True) if not change]
    state = [lanes(axis, x) for x, change in zip(carry, changes, strict=True) if change]
    consts, bdims = apart(map(_in_front, [*cond_consts, *body_consts, *kept]))
    loop = Loop(cond, body, (len(cond_consts), len(body_consts)), changes, tuple(bdims))
    live = loop.live(axis, consts, state)
    state = [_jax.vary_like(x, live) for x in state]
    stages = choose.stages(axis, loop, consts, live, state)
    if stages:
        state = staged(axis, loop, stages, consts, live, state)
    else:
        state = lockstep(axis, eqn, loop, consts, live, state)
    return loop.carry(kept, state)


def _in_front(x: Any) -> Any:
    return x._replace(value=front(x), bdim=0) if is_batched(x) else x
