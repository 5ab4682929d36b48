"""The public door for people who add rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minibatch._batched import Axis, Batched, front, is_batched, lanes, shift
from minibatch._jax import rebind
from minibatch._registry import Rule, register

__all__ = ["Axis", "Batched", "front", "is_batched", "lanes", "rebind", "rule", "shift"]


def rule(primitive: Any, *, anywhere: bool = False, replace: bool = False) -> Callable:
    """Declare the function below as the batching rule of `primitive`.

    The rule is called as `rule(axis, eqn, *operands)`, for an equation with at least one batched operand. An operand is
    a `Batched(value, bdim)`, or a bare array that all lanes share; what else the equation says is in `eqn.params`. It
    returns a list with one result for each output, likewise batched or shared.

    Args:
      primitive: a `jax.extend.core.Primitive`, or the name of one of JAX's.
      anywhere: the rule takes batch dims wherever they are; by default they come in front.
      replace: allow replacing a rule that is there.

    Raises:
      ValueError: the primitive has a rule and `replace` is False.

    Examples:
      >>> import jax, jax.numpy as jnp, minibatch
      >>> from jax.extend.core import Primitive
      >>> double_p = Primitive("double")
      >>> _ = double_p.def_abstract_eval(lambda x: x)
      >>> _ = double_p.def_impl(lambda x: x * 2)
      >>> @minibatch.extend.rule(double_p)
      ... def double(axis, eqn, x):  # [*s] -> [*s] lifts to [B, *s] -> [B, *s]
      ...     return [minibatch.extend.Batched(out, 0) for out in minibatch.extend.rebind(eqn, x.value)]
      >>> minibatch.vmap(double_p.bind, compile=False)(jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """

    def declare(apply: Callable[..., list]) -> Callable[..., list]:
        register(primitive, Rule(apply, "extended", anywhere), replace)
        return apply

    return declare
