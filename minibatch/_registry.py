"""The table of rules, and the words that declare them.

A rule is a function `(axis, eqn, *operands) -> list`. An operand or result is a `Batched`, or a bare array
that all lanes share. Arrays are positional; everything else is in `eqn.params`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Axis, Batched, front, is_batched, shift
from minibatch._jax import rebind


class Rule(NamedTuple):
    """How one primitive goes from one lane to many.

    `anywhere`: the rule takes batch dims wherever they are, rather than in front.
    `always`: the rule is asked also where every operand is shared (axis names, inner jaxprs that hold them).
    """

    apply: Callable[..., list]
    family: str
    anywhere: bool = False
    always: bool = False


RULES: dict[str | _jax.Primitive, Rule] = {}


def register(names: str | _jax.Primitive, entry: Rule, replace: bool = False) -> None:
    """Enter a rule under each name in `names` (separated by spaces), or under a primitive that is not JAX's."""
    for key in names.split() if isinstance(names, str) else [names]:
        if key in RULES and not replace:
            raise ValueError(f"minibatch: {key} has a rule already ({RULES[key].family}); pass replace=True to replace it")
        RULES[key] = entry


def rule(names: str, *, anywhere: bool = False, always: bool = False) -> Callable:
    """Declare the function below as the rule of the primitives in `names`."""

    def declare(apply: Callable[..., list]) -> Callable[..., list]:
        family = apply.__module__.rsplit(".", 1)[-1]
        register(names, Rule(apply, family, anywhere, always))
        return apply

    return declare


def find(primitive: _jax.Primitive) -> Rule | None:
    """The rule of `primitive`, by its name if JAX defined it and by identity if somebody else did."""
    found = RULES.get(primitive)
    if found is None and _jax.is_own_primitive(primitive):
        found = RULES.get(primitive.name)
    return found


def fallback(apply: Callable[..., list]) -> Callable[..., list]:
    """Declare the function below as the rule of every primitive that has none."""
    RULES["fallback"] = Rule(apply, "fallback")
    return apply


def elementwise(names: str) -> None:
    """[*s], [*s] -> [*s] lifts to [B, *s], [B, *s] -> [B, *s]; a scalar or shared operand is expanded, not repeated."""
    register(names, Rule(_elementwise, "elementwise", anywhere=True))


def _elementwise(axis: Axis, eqn: Any, *operands: Any) -> list:
    mapped = [x for x in operands if is_batched(x)]
    bdim, rank = mapped[0].bdim, mapped[0].value.ndim
    if all(x.bdim == bdim and x.value.ndim == rank if is_batched(x) else np.ndim(x) == 0 for x in operands):
        return [Batched(out, bdim) for out in rebind(eqn, *(x.value if is_batched(x) else x for x in operands))]
    rank = max(np.ndim(x.value) - 1 if is_batched(x) else np.ndim(x) for x in operands)
    return [Batched(out, 0) for out in rebind(eqn, *(aligned(x, rank) for x in operands))]


def aligned(x: Any, rank: int) -> Any:
    """[B, *s] with size-1 dims after B where `s` is of lower rank; shared [*s] as [1, *s]; scalars as they are."""
    if not is_batched(x):
        return x if np.ndim(x) == 0 else lax.expand_dims(x, (0,))
    value = front(x)
    return lax.expand_dims(value, range(1, 1 + rank - (value.ndim - 1))) if value.ndim - 1 < rank else value


def reduction(names: str, param: str = "axes") -> None:
    """[*s] -> [*s without axes] lifts to [B, *s] -> [B, *s without axes]."""

    def apply(axis: Axis, eqn: Any, x: Batched) -> list:
        dims = eqn.params[param]
        lifted = shift(dims, 0) if np.iterable(dims) else dims + 1
        return [Batched(out, 0) for out in rebind(eqn, x.value, **{param: lifted})]

    register(names, Rule(apply, "reductions"))


def leading(names: str) -> None:
    """[n, m] -> [n, k] lifts to [B, n, m] -> [B, n, k]: the primitive is defined on any leading dims."""
    register(names, Rule(_leading, "leading"))


def _leading(axis: Axis, eqn: Any, *operands: Any) -> list:
    from minibatch._batched import lanes

    return [Batched(out, 0) for out in rebind(eqn, *(lanes(axis, x) for x in operands))]
