"""Branches whose number differs by lane: every lane picks its own, of those that run for all and those that are partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, apart, is_batched, lanes
from minibatch._interpreter import batch_closed, batch_jaxpr, remembered
from minibatch._jax import rebind
from minibatch.schedule.borrow import choose, differentiable_if_any, hands_through, meant, reads, to_each_lane
from minibatch.schedule.choose import guarded, plan
from minibatch.schedule.live import acts, taking_part
from minibatch.schedule.partition import look_up, partition


def select(axis: Axis, eqn: Any, index: Array, operands: Sequence[Any]) -> list:
    """[B] of branch numbers, and operands -> outputs, each lane's from its own branch.

    What a branch hands through from an operand is that operand, and nothing is computed for it.
    """
    branches = eqn.params["branches"]
    origins = [hands_through(branch) for branch in branches]
    read = [any(each) for each in zip(*map(reads, branches), strict=True)]
    axis, operands = to_each_lane(axis, index, operands, read)
    parted = plan(axis, branches, index, [is_batched(x) for x in operands])
    own = parted.numbers if parted else ()
    made = [j for j in range(len(eqn.outvars)) if any(origins[k][j] is None for k in own)]  # by the branches of the plan

    def outputs(k: int, branch: Any) -> list:
        outs: Any = [None] * len(origins[k])
        if k not in own and (None in origins[k] or acts(branch)):
            outs = _branch(axis, eqn, branch, index == k, operands)
        handed = [operands[origin] if origin is not None else out for origin, out in zip(origins[k], outs, strict=True)]
        return [None if k in own and j in made else out for j, out in enumerate(handed)]

    cases = zip(*(outputs(k, branch) for k, branch in enumerate(branches)), strict=True)
    outs = [_picked(axis, index, each) for each in cases]
    if parted:
        others = {j: None if outs[j] is None else lanes(axis, outs[j]) for j in made}
        for j, out in partition(axis, eqn, parted, index, operands, others).items():
            outs[j] = Batched(out, 0)
    return outs


def _picked(axis: Axis, index: Array, cases: Sequence[Any]) -> Any:
    """Of each lane the case that `index` [B] says, or any where that is None; without a choice if there is but one."""
    distinct = list({id(case): case for case in cases if case is not None}.values())
    if len(distinct) < 2:
        return distinct[0] if distinct else None
    table = [next((i for i, other in enumerate(distinct) if other is case), 0) for case in cases]
    return Batched(choose(look_up(table, index), *(lanes(axis, case) for case in distinct)), 0)


def _branch(axis: Axis, eqn: Any, branch: Any, taking: Array, operands: Sequence[Any]) -> list:
    """All outputs of one branch, of which only those of lanes `taking` [B] it matter."""
    meet, skipped = _jax.lanes_meet(branch, axis.name), guarded(axis, branch)
    if not meet:  # where they do each has values of its own
        operands = meant(axis, branch, taking, operands)
    if not meet and not skipped:
        operands = differentiable_if_any(taking, operands, reads(branch))
    branch, operands = taking_part(axis, branch, taking, eqn.invars[0].aval, operands)
    if meet or not skipped:
        return batch_jaxpr(axis, branch, operands)
    arrays, bdims = apart(operands)
    run, _ = batch_closed(axis, branch, bdims, [True] * len(eqn.outvars))
    return [Batched(out, 0) for out in _run_or_skip(eqn, run, jnp.any(taking), arrays)]


def _run_or_skip(eqn: Any, run: Any, taken: Array, arrays: Sequence[Any]) -> list:
    """The outputs of `run` if it is `taken` [] by anybody, else zeros."""
    skip = remembered(run, "skip", lambda: _jax.trace_jaxpr(lambda *_: list(map(_jax.zeros, run.out_avals)), run.in_avals))
    return rebind(eqn, lax.select_n(taken, np.int32(1), np.int32(0)), *arrays, branches=(run, skip))
