"""Branches and loops."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from minibatch import _jax
from minibatch._batched import Axis, Batched, apart, is_batched, lanes, move, together
from minibatch._interpreter import batch_closed, batch_jaxpr
from minibatch._jax import rebind
from minibatch._registry import rule
from minibatch.rules.fallback import one_by_one
from minibatch.schedule.diverging import branching, diverging
from minibatch.schedule.fixpoint import fixpoint
from minibatch.schedule.live import can_be_told


@rule("cond", anywhere=True, inside=True)
def cond(axis: Axis, eqn: Any, index: Any, *operands: Any) -> list:
    """cond(i, branches, x)   lifts to   cond(i, lifted branches, x), or to a choice where i differs by lane."""
    if is_batched(index):
        if _jax.side_effects(eqn) and not can_be_told(eqn):
            return in_turn(axis, eqn, [index, *operands])
        return branching(axis, eqn, index.value, operands)
    arrays, bdims = apart(operands)
    branches, out_bdims = _alike(axis, eqn.params["branches"], bdims)
    return together(rebind(eqn, index, *arrays, branches=branches), out_bdims)


def _alike(axis: Axis, branches: Sequence[Any], bdims: Sequence[int | None]) -> tuple[tuple, tuple]:
    """The lifted branches, with lanes in the same outputs at the same place: an output is batched if a branch makes it so."""
    lifted = [batch_closed(axis, branch, bdims) for branch in branches]
    found = {out_bdims for _, out_bdims in lifted}
    if len(found) > 1:
        force = [any(d is not None for d in each) for each in zip(*found, strict=True)]
        lifted = [batch_closed(axis, branch, bdims, force) for branch in branches]
    return tuple(branch for branch, _ in lifted), lifted[0][1]


@rule("while", anywhere=True, inside=True)
def while_(axis: Axis, eqn: Any, *operands: Any) -> list:
    """while p(c): c = f(c)   lifts to   the same with the carries batched that differ by lane; by a schedule if p(c) does."""
    counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = _split(operands, *counts)

    def step(batched: tuple) -> tuple[Any, Sequence[int | None]]:
        return batch_closed(axis, eqn.params["body_jaxpr"], [*apart(body_consts)[1], *_in_front(batched)], batched)

    body, batched = fixpoint(step, [*map(is_batched, carry)])
    condition, (bdim,) = batch_closed(axis, eqn.params["cond_jaxpr"], [*apart(cond_consts)[1], *_in_front(batched)])
    if bdim is not None or _jax.open_jaxpr(condition).outvars[0].aval.shape:
        mapped_before = _jax.open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0].aval.shape
        if _jax.side_effects(eqn) and (mapped_before or _jax.ordered(eqn) or not can_be_told(eqn)):
            return in_turn(axis, eqn, operands)
        return diverging(axis, eqn, cond_consts, body_consts, carry)
    start = [lanes(axis, x) if b else x for x, b in zip(carry, batched, strict=True)]
    consts, _ = apart([*cond_consts, *body_consts])
    return together(rebind(eqn, *consts, *start, cond_jaxpr=condition, body_jaxpr=body), _in_front(batched))


@rule("scan", anywhere=True, inside=True)
def scan(axis: Axis, eqn: Any, *operands: Any) -> list:
    """c, [*s] -> c, [*t] over xs [n, *s]   lifts to   [B, c], [B, *s] -> [B, c], [B, *t] over xs [n, B, *s]."""
    consts, carry, xs = _split(operands, *_jax.scan_counts(eqn.params))
    xs = [Batched(move(x.value, 0, 1), 1) if is_batched(x) and x.bdim == 0 else x for x in xs]
    slices = [None if d is None else d - 1 for d in apart(xs)[1]]
    ys = [False] * (len(eqn.outvars) - len(carry))

    def step(batched: tuple) -> tuple[Any, Sequence[int | None]]:
        given = [*apart(consts)[1], *_in_front(batched), *slices]
        body, bdims = batch_closed(axis, eqn.params["jaxpr"], given, [*batched, *ys])
        return (body, bdims[len(carry) :]), bdims[: len(carry)]

    (body, y_slices), batched = fixpoint(step, [*map(is_batched, carry)])
    start = [lanes(axis, x) if b else x for x, b in zip(carry, batched, strict=True)]
    outs = rebind(eqn, *apart(consts)[0], *start, *apart(xs)[0], jaxpr=body)
    return together(outs, [*_in_front(batched), *(None if d is None else d + 1 for d in y_slices)])


def _split(operands: Sequence[Any], *counts: int) -> list[list]:
    """The operands in groups of these sizes, and the rest."""
    ends = np.cumsum([0, *counts])
    return [*(list(operands[i:j]) for i, j in itertools.pairwise(ends)), list(operands[ends[-1] :])]


def _in_front(batched: Sequence[bool]) -> list[int | None]:
    return [0 if b else None for b in batched]


# --- lanes that diverge, and do more than compute ---------------------------------------------------------------------


def in_turn(axis: Axis, eqn: Any, operands: Sequence[Any]) -> list:
    """One lane after the other, where what happens beside the computation cannot be told which lanes come to it."""
    if any(map(_jax.is_ref, apart(operands)[0])):
        return on_values(axis, eqn, operands)
    if _jax.names_axis(eqn, axis.name):
        raise NotImplementedError(
            f"minibatch: lanes take different ways through this {eqn.primitive}, in which they both meet over axis "
            f"{axis.name!r} and have side effects. Move one of the two out of it."
        )
    return one_by_one(axis, eqn, *operands)


def on_values(axis: Axis, eqn: Any, operands: Sequence[Any]) -> list:
    """Refs read before and written after, in between the same on values.

    Raises:
      ValueError: lanes would write different values to a ref that they share.
    """
    known = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, _jax.Literal)}
    refs: list[Any] = [x for x in known.values() if _jax.is_ref(x.value if is_batched(x) else x)]
    before = [Batched(x.value[...], x.bdim) if is_batched(x) else x[...] for x in refs]
    values = iter(before)
    outs = batch_jaxpr(axis, _jax.discharge(eqn), [next(values) if any(x is r for r in refs) else x for x in known.values()])
    for ref, old, new in zip(refs, before, outs[len(eqn.outvars) :], strict=True):
        if new is not old:
            write(axis, ref, new)
    return outs[: len(eqn.outvars)]


def write(axis: Axis, ref: Any, new: Any) -> None:
    """Store `new` in the whole of `ref`."""
    if is_batched(ref):
        ref.value[...] = lanes(axis, new, ref.bdim)
    elif is_batched(new):
        raise ValueError(
            "performing a set/swap operation with vmapped value on an unbatched array reference of type "
            f"{jax.typeof(ref)}. The lanes share it and take different ways, on some of which it is stored into: move the "
            "array reference to be an argument of the mapped function, with an axis for the lanes."
        )
    else:
        ref[...] = new
