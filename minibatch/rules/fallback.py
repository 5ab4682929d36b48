"""What runs where no rule is known: the lanes one after another."""

from __future__ import annotations

import warnings
from typing import Any

from jax import lax

from minibatch import _jax, _registry
from minibatch._batched import Axis, Batched, front, is_batched
from minibatch._errors import MissingRuleWarning
from minibatch._jax import rebind


def one_by_one(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s] -> [*t] lifts to [B, *s] -> [B, *t] by a loop over B."""
    batched = [front(x) for x in operands if is_batched(x)]

    def lane(values: list) -> list:
        rest = iter(values)
        return rebind(eqn, *(next(rest) if is_batched(x) else x for x in operands))

    return [Batched(out, 0) for out in lax.map(lane, batched)]


@_registry.fallback
def fallback(axis: Axis, eqn: Any, *operands: Any) -> list:
    """A primitive without a rule: one by one, with a warning that says so."""
    line = _jax.user_line(eqn)
    warnings.warn(
        f"minibatch: {eqn.primitive} has no batching rule and runs lane by lane, in a loop over {axis.size} lanes"
        f"{f', for {line}' if line else ''}. Register a rule for it with minibatch.extend.rule.",
        MissingRuleWarning,
        stacklevel=2,
    )
    return one_by_one(axis, eqn, *operands)
