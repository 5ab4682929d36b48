"""A loop whose lanes stop at different times: all step together until the last has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from minibatch import _jax
from minibatch._batched import Array, Axis
from minibatch._interpreter import remembered
from minibatch._jax import rebind
from minibatch.schedule.loop import Loop


def lockstep(axis: Axis, eqn: Any, loop: Loop, consts: Sequence[Array], live: Array, state: Sequence[Array]) -> list:
    """while pred(c): c = f(c)   lifts to   while any(live): step."""
    avals = [jax.typeof(x) for x in (*consts, live, *state)]
    key = ("lockstep", loop.key, axis, *avals)
    go, step = remembered(loop.body, key, lambda: _jaxprs(axis, loop, avals))
    params = {"cond_jaxpr": go, "body_jaxpr": step, "cond_nconsts": 0, "body_nconsts": len(consts)}
    return rebind(eqn, *consts, live, *state, **params)[1:]


def _jaxprs(axis: Axis, loop: Loop, avals: Sequence[Any]) -> tuple[Any, Any]:
    """The condition and the body of the loop over all lanes, on `live` [B, *p] and the state."""
    count = len(loop.bdims)

    def go(live: Array, *state: Array) -> list:
        return [jnp.any(live)]

    def step(*args: Array) -> list:
        live, state = loop.step(axis, args[:count], args[count], args[count + 1 :])
        return [live, *state]

    return _jax.trace_jaxpr(go, avals[count:]), _jax.trace_jaxpr(step, avals)
