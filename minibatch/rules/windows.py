"""Reductions over sliding windows."""

from __future__ import annotations

from typing import Any

from minibatch._batched import Axis, is_batched, lanes, lifted
from minibatch._registry import rule
from minibatch.rules.fallback import one_by_one

ALONG_LANES = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def lift(params: dict, bdim: int) -> dict:
    """The params of a window that takes one lane at a time."""
    here = {name: one for name, one in ALONG_LANES.items() if name in params}
    return {name: (*params[name][:bdim], one, *params[name][bdim:]) for name, one in here.items()}


@rule("reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add", anywhere=True)
def windowed(axis: Axis, eqn: Any, *arrays: Any, inits: tuple = ()) -> list:
    """[*s] -> [*t]   lifts to   [B, *s] -> [B, *t]: a window of one along the lanes."""
    bdim = next(x.bdim for x in arrays if is_batched(x))
    return lifted(axis, eqn, bdim, *(lanes(axis, x, bdim) for x in arrays), *inits, **lift(eqn.params, bdim))


@rule("reduce_window select_and_scatter", anywhere=True)
def windowed_from(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s], () -> [*t]   lifts to   [B, *s], () -> [B, *t]; from an initial value (B) of each lane's own, one by one.

    How often an initial value enters a window depends on the padding, so that it cannot be put in afterwards.
    """
    arrays = len(operands) - len(eqn.outvars)
    if any(map(is_batched, operands[arrays:])):
        return one_by_one(axis, eqn, *operands)
    return windowed(axis, eqn, *operands[:arrays], inits=operands[arrays:])
