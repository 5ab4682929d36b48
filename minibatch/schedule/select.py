"""Branches whose number differs by lane: each runs for all lanes, and every lane picks its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, apart, lanes
from minibatch._interpreter import batch_closed, batch_jaxpr, remembered
from minibatch._jax import rebind
from minibatch.schedule.borrow import borrow, choose, differentiable_if_any, guarded, hands_through, reads
from minibatch.schedule.live import taking_part


def select(axis: Axis, eqn: Any, index: Array, operands: Sequence[Any]) -> list:
    """[B] of branch numbers, and operands -> outputs, each lane's from its own branch.

    An output that every branch hands through from the same operand is that operand, and needs no choice.
    """
    branches = eqn.params["branches"]
    outs = zip(*(_branch(axis, eqn, branch, index == k, operands) for k, branch in enumerate(branches)), strict=True)
    origins = zip(*map(hands_through, branches), strict=True)
    return [
        operands[origin[0]] if origin[0] is not None and len(set(origin)) == 1 else Batched(choose(index, *cases), 0)
        for origin, cases in zip(origins, outs, strict=True)
    ]


def _branch(axis: Axis, eqn: Any, branch: Any, taking: Array, operands: Sequence[Any]) -> list:
    """All outputs of one branch as [B, *s], of which only those of lanes `taking` it matter."""
    if _jax.lanes_meet(branch, axis.name):  # each with values of its own
        return _lifted(axis, *taking_part(axis, branch, taking, eqn.invars[0].aval, operands))
    used = reads(branch)
    operands = borrow(axis, taking, operands, used)
    if guarded(branch):
        return _run_or_skip(axis, eqn, *taking_part(axis, branch, taking, eqn.invars[0].aval, operands), jnp.any(taking))
    operands = differentiable_if_any(taking, operands, used)
    return _lifted(axis, *taking_part(axis, branch, taking, eqn.invars[0].aval, operands))


def _lifted(axis: Axis, branch: Any, operands: Sequence[Any]) -> list:
    return [lanes(axis, out) for out in batch_jaxpr(axis, branch, operands)]


def _run_or_skip(axis: Axis, eqn: Any, branch: Any, operands: Sequence[Any], taken: Array) -> list:
    """The outputs if the branch is `taken` [] at all, else zeros."""
    arrays, bdims = apart(operands)
    run, _ = batch_closed(axis, branch, bdims, [True] * len(eqn.outvars))
    skip = remembered(run, "skip", lambda: _jax.trace_jaxpr(lambda *_: list(map(_jax.zeros, run.out_avals)), run.in_avals))
    return rebind(eqn, lax.select_n(taken, np.int32(1), np.int32(0)), *arrays, branches=(run, skip))
