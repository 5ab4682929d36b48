"""Primitives that call a jaxpr."""

from __future__ import annotations

from typing import Any

from minibatch._batched import Axis, Batched, is_batched
from minibatch._interpreter import batch_closed
from minibatch._jax import rebind
from minibatch._registry import rule


@rule("jit", anywhere=True, always=True)
def jit(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f(x) lifts to jit of the lifted f."""
    bdims = [x.bdim if is_batched(x) else None for x in operands]
    jaxpr, out_bdims = batch_closed(axis, eqn.params["jaxpr"], bdims)
    outs = rebind(eqn, *(x.value if is_batched(x) else x for x in operands), jaxpr=jaxpr)
    return [x if d is None else Batched(x, d) for x, d in zip(outs, out_bdims, strict=True)]
