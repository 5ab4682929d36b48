"""A loop whose predicate differs by lane, by the schedule that is asked for or should take least time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from minibatch import _jax
from minibatch._batched import Array, Axis, apart, front, is_batched, lanes
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
    return loop.carry(kept, _on_each_device(axis, eqn, loop, consts, live, state))


def _on_each_device(axis: Axis, eqn: Any, loop: Loop, consts: list, live: Array, state: list) -> Sequence[Array]:
    """The state once all lanes have stopped; where they lie over a mesh, each device steps its own, and waits for no other."""
    over = choose.mesh_axes(axis, loop)
    if not over:
        return _scheduled(axis, eqn, loop, consts, live, state)
    shards = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in over)
    own = axis._replace(size=axis.size // shards, mesh_name=None, spmd_name=(), manual=(*axis.manual, *over))
    lanes, shared = P(over), P()
    specs = [lanes if d is not None else shared for d in loop.bdims], lanes, lanes
    run = partial(_scheduled, own, eqn, loop)
    return jax.shard_map(run, in_specs=specs, out_specs=lanes, axis_names={*over})(consts, live, state)


def _scheduled(axis: Axis, eqn: Any, loop: Loop, consts: list, live: Array, state: list) -> list:
    stages = choose.stages(axis, loop, consts, live, state)
    return list(staged(axis, loop, stages, consts, live, state) if stages else lockstep(axis, eqn, loop, consts, live, state))


def _in_front(x: Any) -> Any:
    return x._replace(value=front(x), bdim=0) if is_batched(x) else x
