"""The walk: a jaxpr evaluated on many lanes, one equation at a time, each by its primitive's rule."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from minibatch import _errors, _jax, _registry
from minibatch._batched import Axis, Batched, front, is_batched, lanes


def batch_jaxpr(axis: Axis, jaxpr: Any, args: Sequence[Any]) -> list:
    """Evaluate `jaxpr` on `args`, lanes and all: one output per outvar, batched or shared."""
    jaxpr, consts = _jax.open_jaxpr(jaxpr), _jax.consts_of(jaxpr)
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn, dead in _last_uses(jaxpr):
        outs = batch_eqn(axis, eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
        for var in dead:
            del env[var]
    return [read(atom) for atom in jaxpr.outvars]


def batch_eqn(axis: Axis, eqn: Any, args: Sequence[Any]) -> list:
    """Apply one equation: as written if every operand is shared, else by its primitive's rule."""
    with _jax.emitting(eqn):
        found = _registry.find(eqn.primitive)
        if not any(map(is_batched, args)) and not found.always:
            return _jax.rebind(eqn, *args)
        if not found.anywhere:
            args = [Batched(front(x), 0) if is_batched(x) else x for x in args]
        with _errors.noting(eqn):
            return found.apply(axis, eqn, *args)


def _last_uses(jaxpr: Any) -> list[tuple[Any, list]]:
    """Each equation with the variables that nothing after it reads."""
    alive = {atom for atom in jaxpr.outvars if not isinstance(atom, _jax.Literal)}
    uses = []
    for eqn in reversed(jaxpr.eqns):
        here = {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, _jax.Literal)}
        uses.append((eqn, list(here - alive)))
        alive |= here
    return uses[::-1]


# --- inner jaxprs, batched once and remembered ------------------------------------------------------------------------

_batched: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()


def batch_closed(axis: Axis, jaxpr: Any, bdims: Sequence[int | None], force: Sequence[bool] = ()) -> tuple[Any, tuple]:
    """`jaxpr` on many lanes, as a closed jaxpr again.

    `bdims` says for each input where its batch dim is (None: shared). `force` says for each output whether it must be
    batched, in front; without it an output comes as the rules leave it. Returns the jaxpr and the outputs' bdims.
    """
    memo = _batched.setdefault(jaxpr, {})
    key = (axis, tuple(bdims), tuple(force), _jax.trace_context())
    if key not in memo:
        memo[key] = _batch_closed(axis, jaxpr, bdims, force)
    return memo[key]


def _batch_closed(axis: Axis, jaxpr: Any, bdims: Sequence[int | None], force: Sequence[bool]) -> tuple[Any, tuple]:
    out_bdims: list[int | None] = []
    avals = jaxpr.in_avals
    lifted = [a if d is None else _jax.batched_aval(a, axis.size, d, axis.mesh_name) for a, d in zip(avals, bdims, strict=True)]

    def many(*args: Any) -> list:
        args = [x if d is None else Batched(x, d) for x, d in zip(args, bdims, strict=True)]
        outs = batch_jaxpr(axis, jaxpr, args)
        outs = [Batched(lanes(axis, x), 0) if must else x for x, must in zip(outs, force or [False] * len(outs), strict=True)]
        out_bdims[:] = [x.bdim if is_batched(x) else None for x in outs]
        return [x.value if is_batched(x) else x for x in outs]

    return _jax.trace_jaxpr(many, lifted), tuple(out_bdims)
