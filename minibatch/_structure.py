"""Which jaxprs are the same program: a key by structure, so that a compiled program is found again across functions."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from minibatch import _jax
from minibatch._keys import Same

# A program compiled outside any transformation is not differentiated again: the rules for that are not part of it.
DERIVATIVE_PARAMS = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})
DERIVATIVE_PRIMITIVES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def structure(jaxpr: Any, literals: list | None = None) -> Hashable:
    """A key that is equal for two jaxprs if they compute the same, given their consts and `literals`.

    Variables are known by the order in which they are bound, literals by their bits; consts count only in inner jaxprs,
    where they are known by identity. Where `literals` is a list, the scalar ones of `jaxpr` itself are put there instead.
    """
    jaxpr = _jax.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        if not isinstance(x, _jax.Literal):
            return numbers[x]
        if literals is None or not is_number(x):
            return literal_key(x)
        literals.append(x)
        return x.aval

    def bind(variables: Any) -> tuple:
        for v in variables:
            numbers[v] = len(numbers)
        return tuple(v.aval for v in variables)

    inputs = bind((*jaxpr.constvars, *jaxpr.invars))
    eqns = []
    for eqn in jaxpr.eqns:
        read = tuple(map(atom, eqn.invars))
        eqns.append((eqn.primitive, read, params_key(eqn), bind(eqn.outvars), eqn.ctx))
    return inputs, tuple(eqns), tuple(map(atom, jaxpr.outvars))


def literal_key(x: Any) -> Hashable:
    """What a literal is, by its bits."""
    return x.aval, np.asarray(x.val).tobytes()


def is_number(x: Any) -> bool:
    """Whether an atom is a literal scalar that could as well be an argument of the program."""
    return isinstance(x, _jax.Literal) and np.ndim(x.val) == 0 and np.asarray(x.val).dtype.kind in "fiub"


def params_key(eqn: Any) -> Hashable:
    """What the params of an equation say, but for those that matter to derivatives alone."""
    ignored = DERIVATIVE_PARAMS if eqn.primitive.name in DERIVATIVE_PRIMITIVES else ()
    return tuple((name, _param(value)) for name, value in eqn.params.items() if name not in ignored)


def _param(x: Any) -> Hashable:
    if isinstance(x, (_jax.Jaxpr, _jax.ClosedJaxpr)):
        return structure(x), tuple(map(Same, _jax.consts_of(x)))
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_param, x))
    if isinstance(x, dict):
        return tuple((key, _param(value)) for key, value in x.items())
    if isinstance(x, (int, str, bool, type(None))):
        return type(x), x
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    try:
        hash(x)
    except TypeError:
        return Same(x)
    return type(x), x
