"""What runs where no rule of ours is known: a rule its author brought along, or the lanes one after another."""

from __future__ import annotations

import warnings
from typing import Any

from jax import lax

from minibatch import _jax, _registry
from minibatch._batched import Axis, Batched, apart, front, is_batched, laid, together
from minibatch._errors import MissingRuleWarning
from minibatch._jax import rebind

DELEGATED = {
    "call_hi_primitive": "a hijax primitive is a type with methods, and `batch` is the one that says what many of it are",
    "call_hi_primitive_linearized": "the linear half of the above: its object refuses batching in its own words",
    "pallas_call": "a kernel is compiled by its grid and block specs, Pallas's own format; lanes are one more grid dimension",
}
"""JAX's primitives that bring their own batching by design, each with the reason."""

SHOWN: dict = {}  # where Python's warnings keep which of ours they have shown


def delegated(axis: Axis, eqn: Any, *operands: Any) -> list:
    """The rule that the primitive's author registered with JAX; one by one where that declines.

    Of what all lanes share it is asked if the axis has a name: only its author knows whether the lanes meet inside.
    """
    mapped = any(map(is_batched, operands))
    if not mapped and axis.name is None:
        return rebind(eqn, *operands)
    try:
        return together(*_jax.apply_registered(axis, eqn, *apart(operands)))
    except NotImplementedError as declined:
        if not mapped:
            return rebind(eqn, *operands)
        return with_warning(axis, eqn, operands, f"declines ({declined})" if str(declined) else "declines")


for _name in DELEGATED:
    _registry.register(_name, _registry.Rule(delegated, "delegated", anywhere=True, always=True))


@_registry.fallback
def fallback(axis: Axis, eqn: Any, *operands: Any) -> list:
    """A primitive without a rule of ours: by the rule that a third party gave it, else one by one."""
    if _jax.has_third_party_rule(eqn.primitive):
        return delegated(axis, eqn, *operands)
    if not any(map(is_batched, operands)):
        return rebind(eqn, *operands)
    return with_warning(axis, eqn, operands, "has no batching rule")


def with_warning(axis: Axis, eqn: Any, operands: Any, why: str) -> list:
    """One by one, with a warning at the user's line that says why."""
    if axis.name is not None and _jax.names_axis(eqn, axis.name):
        raise NotImplementedError(
            f"minibatch: {eqn.primitive} {why} and acts across the lanes of axis {axis.name!r}, so they cannot run one by one."
        )
    line = _jax.user_line(eqn)
    message = MissingRuleWarning(
        f"minibatch: {eqn.primitive} {why} and runs lane by lane, in a loop over {axis.size} lanes"
        f"{f', for {line}' if line else ''}. Register a rule for it with minibatch.extend.rule."
    )
    file, number = _jax.user_file_and_line(eqn) or (__file__, 0)
    warnings.warn_explicit(message, MissingRuleWarning, file, number, registry=SHOWN)
    return one_by_one(axis, eqn, *operands)


def one_by_one(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s] -> [*t] lifts to [B, *s] -> [B, *t] by a loop over B."""
    batched = [laid(axis, front(x), None) for x in operands if is_batched(x)]

    def lane(values: list) -> list:
        rest = iter(values)
        return rebind(eqn, *(next(rest) if is_batched(x) else x for x in operands))

    return [Batched(laid(axis, out, axis.mesh_name), 0) for out in lax.map(lane, batched)]
