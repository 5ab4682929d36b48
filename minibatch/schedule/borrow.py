"""What a lane computes with while it sits out: the values of a lane that takes part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, front, is_batched, laid


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
        row = lax.dynamic_index_in_dim(laid(axis, lax.stop_gradient(value), None), first, 0, allow_negative_indices=False)
        rows = lax.broadcast_in_dim(row, np.shape(value), range(value.ndim), out_sharding=jax.typeof(value).sharding)
        return Batched(choose(taking, rows, value), 0)

    return [lent(x) if lend else x for x, lend in zip(operands, lending, strict=True)]


def differentiable_if_any(taking: Array, operands: Sequence[Any], used: Sequence[bool]) -> list:
    """The operands, where those that all lanes share get a cotangent only if some lane is `taking` [B] part.

    What no lane takes part in may run on values that it was not meant for, and send NaN back to them.
    """
    masked = [use and _jax.is_tracer(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x, use in zip(operands, used, strict=True)]
    if not any(masked):
        return list(operands)
    taken = jnp.any(taking)
    return [lax.select_n(taken, lax.stop_gradient(x), x) if mask else x for x, mask in zip(operands, masked, strict=True)]


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


# --- what must not run for nobody -------------------------------------------------------------------------------------

LOOPS = "while scan for"
FACTORIZATIONS = (
    "cholesky cholesky_update custom_linear_solve eig eigh hessenberg householder_product lu qr schur svd "
    "triangular_solve tridiagonal tridiagonal_solve"
)
CALLS_OUT_OF_XLA = "pure_callback io_callback debug_callback debug_print ffi_call pallas_call call_exported"
HEAVY = frozenset(f"{LOOPS} {FACTORIZATIONS} {CALLS_OUT_OF_XLA}".split())
MANY = 64  # equations


def guarded(jaxpr: Any) -> bool:
    """Whether `jaxpr` may only run on values meant for it, and not at all if there are none.

    So it is if it holds a loop, a factorization or a call out of XLA, if it has many equations, or if JAX watches for
    every NaN. Other branches are cheaper run than skipped.
    """
    return _weight(jaxpr) > MANY or _jax.watches_nans()


def may_not_end(jaxpr: Any) -> bool:
    """Whether `jaxpr` holds a loop that may go on for ever on values that were not meant for it."""
    eqns = _jax.open_jaxpr(jaxpr).eqns
    return any(eqn.primitive.name == "while" or any(map(may_not_end, _jax.inner_jaxprs(eqn))) for eqn in eqns)


def _weight(jaxpr: Any) -> int:
    eqns = _jax.open_jaxpr(jaxpr).eqns
    return sum(1 + MANY * (eqn.primitive.name in HEAVY) + sum(map(_weight, _jax.inner_jaxprs(eqn))) for eqn in eqns)
