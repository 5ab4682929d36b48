"""Constants as arguments: what an inner `jax.jit` captured, and numbers that are others every time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection
from typing import Any

from minibatch import _jax

_hoisted: weakref.WeakKeyDictionary[Any, tuple[list, Any | None]] = weakref.WeakKeyDictionary()


def hoist(jaxpr: Any) -> tuple[list, Any]:
    """All consts of a closed jaxpr, also those inside its jit equations, and the jaxpr that takes them as first arguments."""
    if jaxpr not in _hoisted:
        consts, found = _hoist(jaxpr)
        _hoisted[jaxpr] = consts, None if found is jaxpr else found  # for a key that its value holds would never be freed
    consts, found = _hoisted[jaxpr]
    return consts, found or jaxpr


def _hoist(jaxpr: Any) -> tuple[list, Any]:
    consts, jaxpr = _jax.hoisted(jaxpr)
    inner_consts: list[Any] = []
    variables: list[Any] = []
    eqns = []
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        found, inner = hoist(eqn.params["jaxpr"]) if eqn.primitive.name == "jit" else ([], None)
        if found:
            new = [_jax.new_var(const) for const in found]
            eqn = _jax.with_leading_operands(eqn, new, inner)
            variables += new
            inner_consts += found
        eqns.append(eqn)
    if inner_consts:
        jaxpr = _jax.with_leading_inputs(jaxpr, variables, eqns)
    return [*inner_consts, *consts], jaxpr


def with_numbers(jaxpr: Any, which: Collection[int], is_number: Callable[[Any], bool]) -> Any:
    """The closed `jaxpr`, without consts, with those of its numbers in `which` as first arguments, in order.

    They are counted as they come in the operands of its equations, and then among its outputs.
    """
    bare = _jax.open_jaxpr(jaxpr)
    count, variables = itertools.count(), []

    def atom(x: Any) -> Any:
        if not is_number(x) or next(count) not in which:
            return x
        variables.append(_jax.new_var_of(x.aval))
        return variables[-1]

    eqns = [eqn.replace(invars=list(map(atom, eqn.invars))) for eqn in bare.eqns]
    outvars = list(map(atom, bare.outvars))
    return _jax.with_leading_inputs(_jax.closed(bare.replace(outvars=outvars)), variables, eqns)
