"""Consts of inner jaxprs as arguments of the outermost: what an inner `jax.jit` captured is no constant of the program."""

from __future__ import annotations

import weakref
from typing import Any

from minibatch import _jax

_hoisted: weakref.WeakKeyDictionary[Any, tuple[list, Any]] = weakref.WeakKeyDictionary()


def hoist(jaxpr: Any) -> tuple[list, Any]:
    """All consts of a closed jaxpr, also those inside its jit equations, and the jaxpr that takes them as first arguments."""
    if jaxpr not in _hoisted:
        _hoisted[jaxpr] = _hoist(jaxpr)
    return _hoisted[jaxpr]


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
