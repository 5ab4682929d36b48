"""What a lane computes with while it sits out: the values of a lane that takes part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, front, is_batched, laid, lanes
from minibatch._interpreter import fact
from minibatch._registry import elementwise, rule
from minibatch.schedule.live import acts
from minibatch.schedule.updates import detached, lend_p


def choose(which: Array, *cases: Array) -> Array:
    """[B], [B, *s], [B, *s], … -> [B, *s]: of each lane the case that `which` (bool or int32) says.

    `which` may also be [B, *p], where p begins s.
    """
    like = cases[0]
    which = lax.broadcast_in_dim(which, np.shape(like), range(np.ndim(which)), out_sharding=jax.typeof(like).sharding)
    return lax.select_n(which, *cases)


def borrow(axis: Axis, taking: Array, operands: Sequence[Any], used: Sequence[bool]) -> list:
    """The operands, where lanes that are not `taking` [B] part have what the first lane that does was given.

    No derivative flows back to the lender. If no lane takes part, the values are those of any lane. What all lanes
    share stays shared. Operands that are not `used` are left alone.
    """
    lending = [use and is_batched(x) for x, use in zip(operands, used, strict=True)]
    if not any(lending) or (isinstance(axis.size, int) and axis.size == 0):
        return list(operands)
    first = lax.argmax(taking, 0, np.int32)

    def lent(x: Batched) -> Batched:
        value = front(x)
        starts = first, *[np.int32(0)] * (value.ndim - 1)
        one = (1, *value.shape[1:])
        row = lax.dynamic_slice(laid(axis, _jax.detach(value), None), starts, one, allow_negative_indices=False)
        rows = lax.broadcast_in_dim(row, np.shape(value), range(value.ndim), out_sharding=jax.typeof(value).sharding)
        return Batched(choose(taking, rows, value), 0)

    return [lent(x) if lend else x for x, lend in zip(operands, lending, strict=True)]


@rule(lend_p, anywhere=True)
def lend(axis: Axis, eqn: Any, live: Any, x: Any) -> list:
    """[*s] of a lane that may sit out   lifts to   `borrow` for those that do."""
    return borrow(axis, lanes(axis, live), [x], [True])


elementwise(_jax.detach_p)


def meant(axis: Axis, jaxpr: Any, taking: Array, operands: Sequence[Any], spared: Collection[int]) -> list:
    """The operands for a `jaxpr` that runs for all lanes, but is meant for those `taking` [B] part.

    Lanes that do not are borrowed for, if that matters. Otherwise no derivative flows back to them. Operands `spared` stay
    as they are.
    """
    if must_borrow(jaxpr, operands):
        return borrow(axis, taking, operands, [use and i not in spared for i, use in enumerate(reads(jaxpr))])

    def of_those(x: Batched) -> Batched:
        value = front(x)
        return Batched(choose(taking, _jax.detach(value), value), 0)

    differ = [is_batched(x) and _differentiable(x.value) and i not in spared for i, x in enumerate(operands)]
    return [of_those(x) if differs else x for x, differs in zip(operands, differ, strict=True)]


def must_borrow(jaxpr: Any, operands: Sequence[Any]) -> bool:
    """Whether lanes that it is not meant for might send NaN to what all lanes share, or `jaxpr` is careful."""
    shared = (use and not is_batched(x) and _differentiable(x) for x, use in zip(operands, reads(jaxpr), strict=True))
    return careful(jaxpr) or any(shared)


def _differentiable(x: Any) -> bool:
    return _jax.is_tracer(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def differentiable_if_any(taking: Array, operands: Sequence[Any], used: Sequence[bool]) -> list:
    """The operands, where those that all lanes share get a cotangent only if some lane is `taking` [B] part.

    What no lane takes part in may run on values that it was not meant for, and send NaN back to them.
    """
    masked = [use and not is_batched(x) and _differentiable(x) for x, use in zip(operands, used, strict=True)]
    if not any(masked):
        return list(operands)
    taken = jnp.any(taking)
    return [detached(taken, x) if mask else x for x, mask in zip(operands, masked, strict=True)]


def to_each_lane(axis: Axis, index: Array, operands: Sequence[Any], used: Sequence[bool]) -> tuple[Axis, list]:
    """The axis and the operands for branches of which devices of a mesh may take different ones, as `index` [B] varies.

    The cotangent of an operand that lies alike on all devices is summed over them where it is used: in a branch that not
    all of them take, some would wait for ever. So every lane gets a copy of it, whose cotangent is summed outside.
    """
    names = _jax.varying(index)
    if not names:
        return axis, list(operands)
    axis = axis._replace(manual=(*axis.manual, *sorted(names - {*axis.manual}, key=str)))

    def copied(x: Any) -> Any:
        if is_batched(x):
            return x._replace(value=_jax.vary(x.value, axis.manual))
        return Batched(lanes(axis, x), 0) if _differentiable(x) and not names <= _jax.varying(x) else x

    return axis, [copied(x) if use else x for x, use in zip(operands, used, strict=True)]


def reads(jaxpr: Any) -> list[bool]:
    """Whether some equation of `jaxpr` reads each of its inputs."""
    jaxpr = _jax.open_jaxpr(jaxpr)
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)}
    return [v in read for v in jaxpr.invars]


def hands_through(jaxpr: Any) -> list[int | None]:
    """For each output of `jaxpr` the number of the input that it is, untouched, or None."""
    jaxpr = _jax.open_jaxpr(jaxpr)
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    return [None if isinstance(v, _jax.Literal) else numbers.get(v) for v in jaxpr.outvars]


# --- what must not run on values that were not meant for it -----------------------------------------------------------

CALLS_OUT_OF_XLA = frozenset(
    ["pure_callback", "io_callback", "debug_callback", "debug_print", "ffi_call", "pallas_call", "call_exported"]
)


def careful(jaxpr: Any) -> bool:
    """Whether `jaxpr` must only see values that were meant for it: it may not end on others, or is seen to run, or checks them.

    So is everything if JAX watches for NaN.
    """
    return may_not_end(jaxpr) or _jax.watches_nans() or acts(jaxpr) or _holds(jaxpr, CALLS_OUT_OF_XLA)


def may_not_end(jaxpr: Any) -> bool:
    """Whether `jaxpr` holds a loop that may go on for ever on values that were not meant for it."""
    return _holds(jaxpr, frozenset(["while"]))


@fact
def _holds(jaxpr: Any, names: frozenset[str]) -> bool:
    eqns = _jax.open_jaxpr(jaxpr).eqns
    return any(eqn.primitive.name in names or any(_holds(inner, names) for inner in _jax.inner_jaxprs(eqn)) for eqn in eqns)
