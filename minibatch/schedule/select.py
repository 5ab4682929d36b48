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
from minibatch.schedule.borrow import choose, differentiable_if_any, hands_through, meant, must_borrow, reads, to_each_lane
from minibatch.schedule.choose import guarded, plan
from minibatch.schedule.live import NOTHING, Telling, acts, taking_part
from minibatch.schedule.partition import look_up, partition
from minibatch.schedule.updates import looked_up, updated


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

    buffers = {j: i for j, i in _buffers(branches).items() if j not in made}
    operands = [Batched(lanes(axis, x), 0) if i in buffers.values() else x for i, x in enumerate(operands)]
    current = list(operands)  # what buffers have become, branch by branch

    def outputs(k: int, branch: Any) -> list:
        outs: Any = [None] * len(origins[k])
        if k not in own and (None in origins[k] or acts(branch)):
            changed = {j: i for j, i in buffers.items() if origins[k][j] is None}
            outs = _branch(axis, eqn, branch, lax.eq(index, np.int32(k)), current, changed)
            for j, i in changed.items():
                current[i] = outs[j]
        handed = [operands[origin] if origin is not None else out for origin, out in zip(origins[k], outs, strict=True)]
        return [None if k in own and j in made else out for j, out in enumerate(handed)]

    cases = zip(*[outputs(k, branch) for k, branch in enumerate(branches)], strict=True)
    outs = [current[buffers[j]] if j in buffers else _picked(axis, index, each) for j, each in enumerate(cases)]
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


def _buffers(branches: Sequence[Any]) -> dict[int, int]:
    """Which outputs are one operand, but for a few elements that some branches change, and the number of that operand."""
    if any(_jax.lanes_meet(branch) for branch in branches):
        return {}
    each = enumerate(zip(*map(updated, branches), strict=True))
    found = {j: origins[0] for j, origins in each if origins[0] is not None and len({*origins}) == 1}
    once = [*found.values()]
    changed = [any(origin is None for origin in origins) for origins in zip(*map(hands_through, branches), strict=True)]
    return {j: i for j, i in found.items() if once.count(i) == 1 and changed[j]}


def _branch(axis: Axis, eqn: Any, branch: Any, taking: Array, operands: Sequence[Any], buffers: dict[int, int]) -> list:
    """All outputs of one branch, of which only those of lanes `taking` [B] it matter; the `buffers` of others are unchanged.

    Those are the outputs for which the branch updates an operand, and the number of that.
    """
    meet, skipped = _jax.lanes_meet(branch), guarded(axis, branch, [*map(is_batched, operands)])
    count, telling = len(operands), NOTHING
    if not meet:  # where they do each has values of its own
        lent = must_borrow(branch, operands)
        telling = Telling(tuple(buffers), looked_up(branch, operands) if lent else (), lent)
        operands = meant(axis, branch, taking, operands, {*buffers.values(), *telling.read})
    if not meet and not skipped:
        operands = differentiable_if_any(taking, operands, reads(branch))
    branch, operands = taking_part(axis, branch, taking, eqn.invars[0].aval, operands, telling)
    if meet or not skipped:
        return batch_jaxpr(axis, branch, operands)
    arrays, bdims = apart(operands)
    run, _ = batch_closed(axis, branch, bdims, [True] * len(eqn.outvars))
    told = len(operands) - count
    unchanged = {j: told + i for j, i in buffers.items()}
    return [Batched(out, 0) for out in _run_or_skip(eqn, run, jnp.any(taking), arrays, unchanged)]


def _run_or_skip(eqn: Any, run: Any, taken: Array, arrays: Sequence[Any], unchanged: dict[int, int]) -> list:
    """The outputs of `run` if it is `taken` [] by anybody, else what is `unchanged`, and zeros."""

    def skipping(*args: Array) -> list:
        return [args[unchanged[j]] if j in unchanged else _jax.zeros(aval) for j, aval in enumerate(run.out_avals)]

    skip = remembered(run, ("skip", *unchanged.items()), lambda: _jax.trace_jaxpr(skipping, run.in_avals))
    return rebind(eqn, lax.select_n(taken, np.int32(1), np.int32(0)), *arrays, branches=(run, skip))
