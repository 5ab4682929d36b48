"""The table of rules, and the words that declare them.

A rule is a function `(axis, eqn, *operands) -> list`. An operand or result is a `Batched`, or a bare array
that all lanes share. Arrays are positional; everything else is in `eqn.params`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minibatch import _jax
from minibatch._batched import Axis, Batched, expand, is_batched, lanes, lifted, move, shift


class Rule(NamedTuple):
    """How one primitive goes from one lane to many.

    `anywhere`: the rule takes batch dims wherever they are, rather than in front.
    `always`: the rule is asked also where every operand is shared.
    `inside`: it is asked then if what is inside the equation speaks of the axis, or of references.
    `module`: where it was declared.
    """

    apply: Callable[..., list]
    family: str
    anywhere: bool = False
    always: bool = False
    inside: bool = False
    module: str = ""


RULES: dict[str | _jax.Primitive, Rule] = {}
_generation = 0  # counts registrations


def context() -> Any:
    """What a batched program depends on beside its arguments: JAX's configuration, and the rules there are."""
    return _jax.trace_context(), _generation


def register(names: str | _jax.Primitive, entry: Rule, replace: bool = False) -> None:
    """Enter a rule under each name in `names` (separated by spaces), or under a primitive that is not JAX's."""
    global _generation
    _generation += 1
    _found.clear()
    entry = entry._replace(module=_declaring_module())
    for key in names.split() if isinstance(names, str) else [names]:
        if key in RULES and not replace:
            raise ValueError(f"minibatch: {key} has a rule already ({RULES[key].family}); pass replace=True to replace it")
        RULES[key] = entry
    _jax.forget_dispatch()


def _declaring_module() -> str:
    """The module that declares a rule just now: the first caller that is no word of this file, nor the public door."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") in (__name__, "minibatch.extend"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def rule(names: str | _jax.Primitive, *, anywhere: bool = False, always: bool = False, inside: bool = False) -> Callable:
    """Declare the function below as the rule of the primitives in `names`."""

    def declare(apply: Callable[..., list]) -> Callable[..., list]:
        family = apply.__module__.rsplit(".", 1)[-1]
        register(names, Rule(apply, family, anywhere, always, inside))
        return apply

    return declare


def find(primitive: _jax.Primitive) -> Rule:
    """The rule of `primitive`: by its name if JAX defined it, by identity if somebody else did, else the fallback."""
    found = _found.get(primitive)
    if found is None:
        found = RULES.get(primitive) or (_jax.is_own_primitive(primitive) and RULES.get(primitive.name)) or RULES["fallback"]
        _found[primitive] = found
    return found


_found: dict[_jax.Primitive, Rule] = {}  # what `find` found


def fallback(apply: Callable[..., list]) -> Callable[..., list]:
    """Declare the function below as the rule of every primitive that has none: it is asked of what lanes share too."""
    RULES["fallback"] = Rule(apply, "fallback", anywhere=True, always=True)
    return apply


def elementwise(names: str | _jax.Primitive) -> None:
    """[*s], [*s] -> [*s] lifts to [B, *s], [B, *s] -> [B, *s]; a scalar or shared operand is expanded, not repeated."""
    register(names, Rule(lift_elementwise, "elementwise", anywhere=True))


def lift_elementwise(axis: Axis, eqn: Any, *operands: Any) -> list:
    """One lane to many for `elementwise`."""
    ranks = [len(v.aval.shape) for v in eqn.invars]
    rank, bdim = max(ranks), 0
    for x, own in zip(operands, ranks, strict=True):
        if own == rank and is_batched(x):
            bdim = x.bdim
            break
    return lifted(axis, eqn, bdim, *[beside(x, r, bdim, rank) for x, r in zip(operands, ranks, strict=True)])


def beside(x: Any, own: int, bdim: int, rank: int) -> Any:
    """`x`, of rank `own` in one lane, beside lanes of `rank` at `bdim`: of size 1 there if shared, elsewhere if scalar.

    A shared scalar stays.
    """
    if not is_batched(x):
        return expand(x, (bdim,)) if own else x
    if own == rank:
        return move(x.value, x.bdim, bdim)
    return expand(x.value, [d for d in range(rank + 1) if d != bdim])


def reduction(names: str, param: str = "axes") -> None:
    """[*s] -> [*s without axes] lifts to [B, *s] -> [B, *s without axes]."""
    register(names, Rule(partial(_along, param, True), "reduction", anywhere=True))


def along(names: str, param: str = "axis") -> None:
    """[*s] -> [*t], the same number of dims, acting on those in `param`, lifts to [B, *s] -> [B, *t]."""
    register(names, Rule(partial(_along, param, False), "along", anywhere=True))


def _along(param: str, drops: bool, axis: Axis, eqn: Any, x: Batched) -> list:
    dims = eqn.params[param]
    each = [int(d) % (np.ndim(x.value) - 1) for d in (dims if np.iterable(dims) else [dims])]
    here = shift(each, x.bdim)
    bdim = x.bdim - drops * sum(d < x.bdim for d in each)
    return lifted(axis, eqn, bdim, x.value, **{param: here if np.iterable(dims) else here[0]})


def leading(names: str) -> None:
    """[n, m] -> [n, k] lifts to [B, n, m] -> [B, n, k]: the primitive is defined on any leading dims."""
    register(names, Rule(lift_leading, "leading"))


def lift_leading(axis: Axis, eqn: Any, *operands: Any) -> list:
    """One lane to many for `leading`."""
    return lifted(axis, eqn, 0, *(lanes(axis, x) for x in operands))
