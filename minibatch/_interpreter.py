"""The walk: a jaxpr evaluated on many lanes, one equation at a time, each by its primitive's rule."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from minibatch import _errors, _jax, _registry
from minibatch._batched import Axis, Batched, apart, front, is_batched, lanes, sharding_of_lanes, together


def batch_jaxpr(axis: Axis, jaxpr: Any, args: Sequence[Any]) -> list:
    """Evaluate `jaxpr` on `args`, lanes and all: one output per outvar, batched or shared."""
    return _watched.by.jaxpr(axis, jaxpr, args) if _watched.by else _batch_jaxpr(axis, jaxpr, args)


def _batch_jaxpr(axis: Axis, jaxpr: Any, args: Sequence[Any]) -> list:
    return walk(jaxpr, args, functools.partial(_watched.by.eqn if _watched.by else _batch_eqn, axis))


def walk(jaxpr: Any, args: Sequence[Any], apply: Callable[[Any, list], list]) -> list:
    """Evaluate `jaxpr` on `args`, each equation by `apply(eqn, values)`."""
    jaxpr, consts = _jax.open_jaxpr(jaxpr), _jax.consts_of(jaxpr)
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if type(atom) is _jax.Literal else env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    with _walking(env), _jax.Surroundings() as around:
        for eqn, dead in _last_uses(jaxpr) if not _jax.is_staging() else zip(jaxpr.eqns, itertools.repeat(())):
            around.at(eqn)
            outs = apply(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in dead:
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]


def batch_eqn(axis: Axis, eqn: Any, args: Sequence[Any]) -> list:
    """Apply one equation: as written if every operand is shared, else by its primitive's rule."""
    return _watched.by.eqn(axis, eqn, args) if _watched.by else _batch_eqn(axis, eqn, args)


def _batch_eqn(axis: Axis, eqn: Any, args: Sequence[Any]) -> list:
    found = _registry.find(eqn.primitive)
    asked = Batched in map(type, args) or found.always  # looking inside comes last: it is the one that costs
    if not asked and not (found.inside and _jax.concerns_lanes(eqn, axis.name)):
        return _jax.repeat(eqn, *args)
    if not found.anywhere:
        args = [Batched(front(x), 0) if is_batched(x) else x for x in args]
    try:
        return found.apply(axis, eqn, *args)
    except _jax.ShardingTypeError:  # one lane of it can be told, or there would be no equation
        return _left_to_the_compiler(axis, eqn, found, args)
    except Exception as error:
        _errors.note(error, eqn)
        raise


def _left_to_the_compiler(axis: Axis, eqn: Any, found: _registry.Rule, args: Sequence[Any]) -> list:
    """The rule where JAX cannot tell how the result lies on an explicit mesh: as one lane's does, with the lanes in front."""
    arrays, bdims = apart(args)
    free = axis._replace(mesh_name=None)

    def lift(*arrays: Any) -> list:
        return [lanes(free, x) for x in found.apply(free, eqn, *together(arrays, bdims))]

    targets = [sharding_of_lanes(axis, v.aval.sharding, 0) for v in eqn.outvars]
    outs: Any = jax.sharding.auto_axes(lift, out_sharding=targets)(*arrays)
    return [Batched(x, 0) for x in outs]


def _last_uses(jaxpr: Any) -> list[tuple[Any, list]]:
    """Each equation with the variables that nothing after it reads: none where a derivative rule may have captured them."""
    if _captures(jaxpr):
        return [(eqn, []) for eqn in jaxpr.eqns]
    alive = {atom for atom in jaxpr.outvars if not isinstance(atom, _jax.Literal)}
    uses = []
    for eqn in reversed(jaxpr.eqns):
        here = {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, _jax.Literal)}
        uses.append((eqn, list(here - alive)))
        alive |= here
    return uses[::-1]


# --- what derivative rules capture ------------------------------------------------------------------------------------
#
# The rules of a custom_jvp or custom_vjp function are traced when it is differentiated. If they close over a value of the
# mapped function, what they find is a tracer of a trace that has ended: it stands for a variable of the jaxpr walked.

CAPTURING = frozenset({"custom_jvp_call", "custom_vjp_call"})


def _captures(jaxpr: Any) -> bool:
    """Whether `jaxpr` holds a derivative rule, at any depth."""
    if any(eqn.primitive.name in CAPTURING for eqn in jaxpr.eqns):
        return True
    inner = (inner for eqn in jaxpr.eqns for inner in _jax.inner_jaxprs(eqn))
    return any(_remembered(jaxpr, "captures", functools.partial(_captures, jaxpr)) for jaxpr in map(_jax.open_jaxpr, inner))


def self_contained(jaxpr: Any) -> bool:
    """Whether no value of a trace can be reached from `jaxpr`: it has none as a const, and no derivative rule may see one."""
    if any(map(_jax.is_tracer, _jax.consts_of(jaxpr))):
        return False
    eqns = _jax.open_jaxpr(jaxpr).eqns
    if any(_jax.sees_tracers(eqn.params) for eqn in eqns if eqn.primitive.name in CAPTURING or _jax.takes_functions(eqn)):
        return False
    inner = (inner for eqn in eqns for inner in _jax.inner_jaxprs(eqn))
    return all(remembered(jaxpr, "self-contained", functools.partial(self_contained, jaxpr)) for jaxpr in inner)


class _Walks(threading.local):
    """The values in the walks under way, innermost last."""

    def __init__(self) -> None:
        self.envs: list[dict] = []


_walks = _Walks()


@contextlib.contextmanager
def _walking(env: dict) -> Iterator[None]:
    _walks.envs.append(env)
    try:
        yield
    finally:
        _walks.envs.pop()


def captured_by(*functions: Any) -> tuple[list, list]:
    """The variables of the walks under way that `functions` may see, and what the walks know for them."""
    variables = [v for function in functions for v in _jax.variables_seen(function)]
    found = {v: env[v] for v in variables for env in reversed(_walks.envs) if v in env}
    return list(found), list(found.values())


# --- inner jaxprs, batched once and remembered ------------------------------------------------------------------------

_kept: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()


def remembered(jaxpr: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` makes of `jaxpr`, made once for each `key` and kept for as long as `jaxpr` is.

    What holds values of a trace under way, which a derivative rule inside captured, is not kept.
    """
    return _watched.by.remembered(jaxpr, key, make) if _watched.by else _remembered(jaxpr, key, make)


def recalled(jaxpr: Any, key: Hashable) -> Any:
    """What `remembered` has for this key, or None."""
    return _watched.by.recalled(jaxpr, key) if _watched.by else _recalled(jaxpr, key)


def _recalled(jaxpr: Any, key: Hashable) -> Any:
    return _kept.get(jaxpr, {}).get((key, _registry.context()))


def _remembered(jaxpr: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    memo = _kept.setdefault(jaxpr, {})
    key = (key, _registry.context())
    if key in memo:
        return memo[key]
    made = make()
    if not _jax.has_traced_consts([made]):
        memo[key] = made
    return made


def fact(about: Callable[..., Any]) -> Callable[..., Any]:
    """`about`, a function of a jaxpr and of nothing else but its other arguments, asked once for each of them."""

    @functools.wraps(about)
    def known(jaxpr: Any, *rest: Hashable) -> Any:
        return _remembered(jaxpr, (about, *rest), lambda: about(jaxpr, *rest))

    return known


def batch_closed(
    axis: Axis, jaxpr: Any, bdims: Sequence[int | None], force: Sequence[bool | int | None] = ()
) -> tuple[Any, tuple]:
    """`jaxpr` on many lanes, as a closed jaxpr again.

    `bdims` says for each input where its batch dim is (None: shared). `force` says for each output where it must have one
    (True: in front); with False or None, and without it, an output comes as the rules leave it. Returns the jaxpr and the
    outputs' bdims.
    """
    key = "batched", axis, tuple(bdims)
    places = tuple((0 if must else None) if isinstance(must, bool) else must for must in force)
    if set(places) <= {None}:
        return remembered(jaxpr, key, lambda: _batch_closed(axis, jaxpr, bdims, ()))

    def make() -> tuple[Any, tuple]:
        found = recalled(jaxpr, key)
        if found and all(place in (None, d) for d, place in zip(found[1], places, strict=True)):
            return found  # what is asked for came by itself
        return _batch_closed(axis, jaxpr, bdims, places)

    return remembered(jaxpr, (*key, places), make)


def _batch_closed(axis: Axis, jaxpr: Any, bdims: Sequence[int | None], places: Sequence[int | None]) -> tuple[Any, tuple]:
    out_bdims: list[int | None] = []

    def many(*args: Any) -> list:
        outs = batch_jaxpr(axis, jaxpr, together(args, bdims))
        asked = zip(outs, places or [None] * len(outs), strict=True)
        outs = [x if place is None else Batched(lanes(axis, x, place), place) for x, place in asked]
        arrays, out_bdims[:] = apart(outs)
        return arrays

    return _jax.trace_jaxpr(many, lifted_avals(axis, jaxpr, bdims), named=jaxpr), tuple(out_bdims)


MOST_KNOWN = 256
_known: dict[Hashable, Any] = {}


def known(jaxpr: Any) -> Any:
    """A jaxpr of the same equations that was seen before, or `jaxpr`: an activation is traced anew at each of its calls."""
    key = _equations(_jax.open_jaxpr(jaxpr))
    try:
        if key is None or _jax.consts_of(jaxpr):
            return jaxpr
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        return _known.setdefault(key, jaxpr)
    except TypeError:  # a param that cannot be hashed
        return jaxpr


def _equations(jaxpr: Any) -> Hashable:
    """What `jaxpr` computes, with inner jaxprs by identity; None where it holds what is better not kept."""
    numbers = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    eqns = []
    for eqn in jaxpr.eqns:
        inner = list(_jax.inner_jaxprs(eqn))
        if eqn.primitive.name in CAPTURING or any(map(_jax.consts_of, inner)):
            return None
        read = tuple(_atom(x, numbers) for x in eqn.invars)
        numbers |= {v: len(numbers) + i for i, v in enumerate(eqn.outvars)}
        avals = tuple(v.aval for v in eqn.outvars)
        params = tuple((name, repr(x) if type(x) in (bool, int, float) else x) for name, x in eqn.params.items())
        eqns.append((eqn.primitive, read, params, avals, eqn.ctx, eqn.source_info.name_stack))
    return tuple(v.aval for v in jaxpr.invars), tuple(eqns), tuple(_atom(x, numbers) for x in jaxpr.outvars)


def _atom(x: Any, numbers: dict[Any, int]) -> Hashable:
    return (x.aval, np.asarray(x.val).tobytes()) if isinstance(x, _jax.Literal) else numbers[x]


def lifted_avals(axis: Axis, jaxpr: Any, bdims: Sequence[int | None]) -> list:
    """The avals of what `jaxpr` takes, with lanes at `bdims`."""
    avals = [v.aval for v in _jax.open_jaxpr(jaxpr).invars]
    lifted = [a if d is None else _jax.batched_aval(a, axis.size, d, axis.mesh_name) for a, d in zip(avals, bdims, strict=True)]
    return [a if d is None else _jax.varying_aval(a, axis.manual) for a, d in zip(lifted, bdims, strict=True)]


# --- somebody who looks on --------------------------------------------------------------------------------------------


class Watch:
    """Looks on while programs are batched. Each method does what would be done without it; a subclass also remembers."""

    def jaxpr(self, axis: Axis, jaxpr: Any, args: Sequence[Any]) -> list:
        """`batch_jaxpr`."""
        return _batch_jaxpr(axis, jaxpr, args)

    def eqn(self, axis: Axis, eqn: Any, args: Sequence[Any]) -> list:
        """`batch_eqn`."""
        return _batch_eqn(axis, eqn, args)

    def remembered(self, jaxpr: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """`remembered`."""
        return _remembered(jaxpr, key, make)

    def recalled(self, jaxpr: Any, key: Hashable) -> Any:
        """`recalled`."""
        return _recalled(jaxpr, key)


class _Watched(threading.local):
    """Who looks on in this thread, if anybody does."""

    by: Watch | None = None


_watched = _Watched()


@contextlib.contextmanager
def watched(by: Watch) -> Iterator[None]:
    """Have `by` look on at what is batched inside."""
    before, _watched.by = _watched.by, by
    try:
        yield
    finally:
        _watched.by = before
