"""Loops and branches that lanes take different ways through, by the schedule that is asked for or should take least time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, apart, front, is_batched, lanes, together
from minibatch._interpreter import batch_jaxpr
from minibatch.schedule import choose
from minibatch.schedule.borrow import hands_through
from minibatch.schedule.lockstep import lockstep
from minibatch.schedule.loop import Loop
from minibatch.schedule.select import select
from minibatch.schedule.stages import staged


def diverging(axis: Axis, eqn: Any, cond_consts: Sequence[Any], body_consts: Sequence[Any], carry: Sequence[Any]) -> list:
    """while pred(c): c = f(c)   lifts to   the same over lanes of which each stops by itself."""
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    live = lanes(axis, *batch_jaxpr(axis, cond, [*cond_consts, *carry]))  # before the carry is repeated: XLA may fold it
    changes = tuple(origin != len(body_consts) + i for i, origin in enumerate(hands_through(body)))
    kept = [x for x, change in zip(carry, changes, strict=True) if not change]
    state = [lanes(axis, x) for x, change in zip(carry, changes, strict=True) if change]
    consts, bdims = apart(map(_in_front, [*cond_consts, *body_consts, *kept]))
    loop = Loop(cond, body, (len(cond_consts), len(body_consts)), changes, tuple(bdims))
    state = [_jax.vary_like(x, live) for x in state]
    return loop.carry(kept, _on_each_device(axis, eqn, loop, consts, live, state))


def _on_each_device(axis: Axis, eqn: Any, loop: Loop, consts: list, live: Array, state: list) -> Sequence[Array]:
    """The state once all lanes have stopped; where they lie over a mesh, each device steps its own, and waits for no other."""
    over = choose.mesh_axes(axis, (loop.cond, loop.body))
    if not over:
        return _scheduled(axis, eqn, loop, consts, live, state)
    run = partial(_scheduled, _own(axis, over), eqn, loop)
    return _mapped(over, run, [*loop.bdims], consts, live, state)


def branching(axis: Axis, eqn: Any, index: Array, operands: Sequence[Any]) -> list:
    """cond(i, branches, x)   lifts to   the same over lanes, whose numbers `index` [B] of branches differ.

    Where they lie over a mesh and branches are worth it, each device partitions its own.
    """
    branches = eqn.params["branches"]
    over = choose.mesh_axes(axis, branches)
    own = _own(axis, over)
    if not over or not choose.plan(own, branches, index, [*map(is_batched, operands)]):
        return select(axis, eqn, index, operands)
    arrays, bdims = apart(map(_in_front, operands))
    origins = [*zip(*map(hands_through, branches), strict=True)]
    made = [j for j, each in enumerate(origins) if None in each or len({*each}) > 1]

    def run(arrays: list, index: Array) -> list:
        outs = select(own, eqn, index, together(arrays, bdims))
        return [lanes(own, outs[j]) for j in made]

    found = dict(zip(made, _mapped(over, run, bdims, arrays, index), strict=True))
    return [Batched(found[j], 0) if j in found else operands[each[0]] for j, each in enumerate(origins)]


def _own(axis: Axis, over: tuple) -> Axis:
    """The axis of those lanes that one device has of the mesh axes `over` which they lie."""
    if not over:
        return axis
    shards = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in over)
    return axis._replace(size=axis.size // shards, mesh_name=None, spmd_name=(), manual=(*axis.manual, *over))


def _mapped(over: tuple, run: Callable, bdims: Sequence[int | None], arrays: list, *own: Any) -> Any:
    """`run` on each device of the mesh axes `over`, with its part of those arrays that have lanes, and of all in `own`."""
    lie = P(over)
    specs = [P() if d is None else lie for d in bdims], *(lie for _ in own)
    return jax.shard_map(run, in_specs=specs, out_specs=lie, axis_names={*over})(arrays, *own)


def _scheduled(axis: Axis, eqn: Any, loop: Loop, consts: list, live: Array, state: list) -> list:
    stages = choose.stages(axis, loop, consts, live, state)
    return list(staged(axis, loop, stages, consts, live, state) if stages else lockstep(axis, eqn, loop, consts, live, state))


def _in_front(x: Any) -> Any:
    return x._replace(value=front(x), bdim=0) if is_batched(x) else x
