"""Buffers of which a branch or a step changes but a few elements, and that a lane which sits out gets back unchanged.

To choose between the whole buffer before and after takes as long as the buffer is, at every step of the loop around it.
Instead the update itself chooses: for a lane that sits out it writes what is there already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from minibatch import _jax
from minibatch._batched import is_batched
from minibatch._interpreter import fact

PAYS = 2  # times as long as what is written, at least, is a buffer that is better not chosen as a whole

SCATTERS = {
    "scatter": None,  # what an update must be to change nothing; None: what is there
    "scatter-add": 0,
    "scatter-sub": 0,
    "scatter-mul": 1,
    "scatter-min": None,
    "scatter-max": None,
}
CALLS = ("jit", "closed_call")
LOOKS_UP = ("gather", "dynamic_slice")


def updated(jaxpr: Any) -> tuple[int | None, ...]:
    """For each output of `jaxpr` the number of the input that it is, but for a few elements; None if it is no such thing."""
    numbers = {v: i for i, v in enumerate(_jax.open_jaxpr(jaxpr).invars)}
    return tuple(numbers[way[-1]] if way else None for way in _ways(jaxpr))


def buffers(jaxpr: Any, kept: Sequence[int]) -> set:
    """The variables that the outputs `kept` of `jaxpr` have been, from the input on."""
    ways = _ways(jaxpr) if kept else ()
    return {v for i in kept for v in ways[i]}


def looks_at(eqn: Any, held: set) -> set[int]:
    """Which operands of `eqn` are a buffer `held` that it does not update."""
    places = {_operand(eqn, i) for i, v in enumerate(eqn.outvars) if v in held}
    read = {i for i, v in enumerate(eqn.invars) if not isinstance(v, _jax.Literal) and v in held}
    return read - places


def looked_up(jaxpr: Any, operands: Sequence[Any]) -> tuple[int, ...]:
    """The inputs of `jaxpr` of which it only reads a few elements, where lanes have their own."""
    jaxpr = _jax.open_jaxpr(jaxpr)

    def few(v: Any) -> bool:
        reading = [(eqn, [i for i, x in enumerate(eqn.invars) if x is v]) for eqn in jaxpr.eqns]
        reading = [(eqn, places) for eqn, places in reading if places]
        return bool(reading) and all(
            eqn.primitive.name in LOOKS_UP and places == [0] and _few(eqn.outvars[0].aval, v.aval) for eqn, places in reading
        )

    return tuple(i for i, (v, x) in enumerate(zip(jaxpr.invars, operands, strict=True)) if is_batched(x) and few(v))


@fact
def _ways(jaxpr: Any) -> list[list]:
    """For each output of `jaxpr` the variables back to the input that it is but for a few elements; none if there is none."""
    jaxpr = _jax.open_jaxpr(jaxpr)
    made = {out: (eqn, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    inputs = {*jaxpr.invars}

    def way(v: Any) -> list:
        found = []
        while not isinstance(v, _jax.Literal):
            found.append(v)
            if v in inputs:
                return found
            if v not in made:
                break
            eqn, i = made[v]
            operand = _operand(eqn, i)
            if operand is None:
                break
            v = eqn.invars[operand]
        return []

    return [way(v) for v in jaxpr.outvars]


def _operand(eqn: Any, i: int) -> int | None:
    """The number of the operand that output `i` is, but for a few elements."""
    name, params = eqn.primitive.name, eqn.params
    if name in SCATTERS or name == "dynamic_update_slice":
        buffer, update = eqn.invars[0].aval, eqn.invars[2 if name in SCATTERS else 1].aval
        return 0 if _few(update, buffer) else None
    if name == "cond":
        origins = {updated(branch)[i] for branch in params["branches"]}
        return 1 + origin if len(origins) == 1 and (origin := origins.pop()) is not None else None
    if name in CALLS:
        return updated(_jax.called(eqn))[i]
    return None


def _few(update: Any, buffer: Any) -> bool:
    """Whether an update of these avals is of but a few elements, of a kind that can be read back."""
    numeric = jnp.issubdtype(buffer.dtype, jnp.number) or buffer.dtype == bool
    whole = all(isinstance(n, int) for n in (*update.shape, *buffer.shape)) and not any(buffer.sharding.spec)
    return numeric and whole and PAYS * math.prod(update.shape) <= math.prod(buffer.shape)


# --- while a lane may sit out -----------------------------------------------------------------------------------------


def slice_update(lane: Any, eqn: Any, kept: Sequence[int], operand: Any, update: Any, *starts: Any) -> list:
    """operand[i:i+n] = update if live."""
    there = lax.dynamic_slice(operand, starts, update.shape, allow_negative_indices=False)
    return _jax.rebind(eqn, operand, lax.select_n(lane.live, there, update), *starts)


def scatter(lane: Any, eqn: Any, kept: Sequence[int], operand: Any, indices: Any, updates: Any) -> list:
    """operand[i] = update, or += and so on, if live."""
    nothing = SCATTERS[eqn.primitive.name]
    there = _there(eqn, operand, indices) if nothing is None else lax.full_like(updates, nothing)
    return _jax.rebind(eqn, operand, indices, lax.select_n(lane.live, there, updates))


def _there(eqn: Any, operand: Any, indices: Any) -> Any:
    """What the places that a scatter writes to hold."""
    numbers, updates = eqn.params["dimension_numbers"], eqn.invars[2].aval
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(numbers.update_window_dims)
    sizes = [1 if d in inserted else updates.shape[next(window)] for d in range(operand.ndim)]
    read = lax.GatherDimensionNumbers(
        numbers.update_window_dims,
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    return lax.gather(operand, indices, read, sizes, mode=eqn.params["mode"])


UPDATES = {"dynamic_update_slice": slice_update, **dict.fromkeys(SCATTERS, scatter)}


def detached(live: Any, x: Any) -> Any:
    """`x`, to which no derivative flows back unless live."""
    return lax.select_n(live, _jax.detach(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


lend_p = _jax.passing("lend")


def lent(live: Any, x: Any) -> Any:
    """`x` of a lane that is live, and of the first that is for others: one that sits out must not see what is its own."""
    return lend_p.bind(live, x)
