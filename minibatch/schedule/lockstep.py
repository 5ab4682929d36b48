"""A loop whose lanes stop at different times: all step together until the last has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from minibatch import _jax
from minibatch._batched import Axis, Batched, apart, lanes, together
from minibatch._interpreter import batch_jaxpr, remembered
from minibatch._jax import rebind
from minibatch.schedule.borrow import borrow, choose, hands_through, may_not_end, reads
from minibatch.schedule.live import taking_part


def lockstep(axis: Axis, eqn: Any, cond_consts: Sequence[Any], body_consts: Sequence[Any], carry: Sequence[Any]) -> list:
    """while pred(c): c = f(c)   lifts to   while any(live): c = where(live, f(c), c); live &= pred(c).

    A lane that has stopped is never changed. A carry that the body only hands through stays as it is. A predicate [*p]
    is that of lanes mapped before, by JAX: each of its elements stops by itself, and p begins the shape of every carry.
    """
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    changes = [origin != len(body_consts) + i for i, origin in enumerate(hands_through(body))]
    carry = [Batched(lanes(axis, x), 0) if change else x for x, change in zip(carry, changes, strict=True)]
    live = _live(axis, cond, [*cond_consts, *carry])
    carry = [x._replace(value=_jax.vary_like(x.value, live)) if change else x for x, change in zip(carry, changes, strict=True)]

    consts, const_bdims = apart([*cond_consts, *body_consts])
    state, bdims = apart(carry)
    avals = [jax.typeof(x) for x in (*consts, live, *state)]
    lifted = (axis, avals, len(cond_consts), const_bdims, bdims, changes)
    go, step = remembered(body, ("lockstep", cond, *map(_hashable, lifted)), lambda: _loop(cond, body, *lifted))
    params = {"cond_jaxpr": go, "body_jaxpr": step, "cond_nconsts": 0, "body_nconsts": len(consts)}
    return together(rebind(eqn, *consts, live, *state, **params)[1:], bdims)


def _hashable(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x


def _live(axis: Axis, cond: Any, operands: Sequence[Any]) -> Any:
    """[B, *p]: which lanes go on."""
    return lanes(axis, *batch_jaxpr(axis, cond, operands))


def _loop(
    cond: Any, body: Any, axis: Axis, avals: list, cond_count: int, const_bdims: list, bdims: list, changes: list
) -> tuple[Any, Any]:
    """The condition and the body of the loop over all lanes, on `live` [B] and the carries."""
    count, aval = len(const_bdims), _jax.open_jaxpr(cond).outvars[0].aval

    def go(live: Any, *state: Any) -> list:
        return [jnp.any(live)]

    def step(*args: Any) -> list:
        consts, live, carry = together(args[:count], const_bdims), args[count], together(args[count + 1 :], bdims)
        given = [*consts[cond_count:], *carry]
        if (may_not_end(body) or _jax.watches_nans()) and not _jax.lanes_meet(body, axis.name):
            given = borrow(axis, jnp.any(live, axis=range(1, live.ndim)), given, reads(body))
        new = batch_jaxpr(axis, *taking_part(axis, body, live, aval, given))
        carry = [
            Batched(choose(live, x.value, lanes(axis, y)), 0) if change else x
            for x, y, change in zip(carry, new, changes, strict=True)
        ]
        live = lax.bitwise_and(live, _live(axis, *taking_part(axis, cond, live, aval, [*consts[:cond_count], *carry])))
        return [live, *apart(carry)[0]]

    return _jax.trace_jaxpr(go, avals[count:]), _jax.trace_jaxpr(step, avals)
