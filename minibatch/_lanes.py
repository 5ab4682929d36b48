"""What a function does to one lane, remembered: inside another transformation it is called once for all numbers of lanes.

The jaxpr of one lane does not depend on how many lanes there are, nor on which axes they lie. It is kept for as long as the
function lives, and found again if nothing that the function can see was set anew. Arrays that the function closes over, also
values of a trace under way, are no part of what is kept: it says where they were found, and others may be there by then.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import inspect
import random
import threading
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minibatch import _jax
from minibatch._captured import Captured, changed
from minibatch._closure import SIMPLE, Closure, taken_apart
from minibatch._interpreter import self_contained
from minibatch._keys import Latest, Same, static_key
from minibatch._registry import context
from minibatch._trace import Call, Given, Returned, Traced, trace


class Place(NamedTuple):
    """Stands for the array number `number` of those that a function closes over."""

    number: int


class Remembered(NamedTuple):
    """What was traced, its consts as values or places; what the function could see, and the contents of NumPy arrays there."""

    traced: Traced
    captured: Captured
    contents: list[tuple[Any, Hashable]]

    def changed(self) -> bool:
        """Whether the function may do something else by now."""
        return changed(self.captured.checks) or any(static_key(x) != old for x, old in self.contents)

    def over(self, arrays: Sequence[Any]) -> Traced:
        """What was traced, of a function over these arrays."""
        return self.traced._replace(consts=[arrays[c.number] if type(c) is Place else c for c in self.traced.consts])


PLAIN = (bool, int, float, complex, str, bytes, type)
UNWATCHED = (
    set, bytearray, array.array, collections.deque, contextvars.ContextVar, threading.local, random.Random,
    np.random.Generator, np.random.RandomState,
)  # fmt: skip
"""What may give something else at each look, which no check would notice."""

AXES_MATTER = object()  # stands for a call that returns an argument untouched if its lanes are where they are asked for

_kept = Latest(capacity=256)  # by id: functions, held weakly, each with a cache of its own

IN_VAIN = 2
_in_vain = Latest(capacity=256)  # by id of a code: how many functions of it came since one was found again


def lane_of(call: Call, how: Hashable) -> tuple[Call, Traced]:
    """`trace(call)`, without calling the function if it is known what it does. `how`: what else that depends on."""
    kept, met = _kept_of(call.fun)
    code = id(_code_of(call.fun))
    vain = 0 if met else _in_vain.get(code) or 0
    if vain >= IN_VAIN or not sizeless(call):  # functions made anew at each call: one is worth it when it comes again
        return trace(call)
    closure = taken_apart(call.fun, tracers=True)
    if any(map(_jax.is_symbolic, closure.arrays)):
        return trace(call)
    laid_out = call.axis._replace(size=None, divergence=None)
    key = closure.key, _array_keys(closure.arrays), how, call.in_tree, lane_keys(call), laid_out, context()
    found = kept.get(key)
    if found is AXES_MATTER:
        found = kept.get((key, call.axes))
    if found is not None and not found.changed():
        _in_vain.drop(code)
        return call, found.over(closure.arrays)
    captured = Captured(call.fun, *_static(call), but=closure.spoken_for())
    used, traced = trace(call)
    captured.settle()
    remembered = _remembered(call, closure, captured, traced) if used is call else None
    if remembered is not None:
        if any(isinstance(out, Returned) for out in traced.outputs):
            kept.put(key, AXES_MATTER)
            key = key, call.axes
        kept.put(key, remembered)
    if not met:
        _in_vain.put(code, vain + 1)
    return used, traced


def clear() -> None:
    """Forget everything."""
    _kept.clear()
    _in_vain.clear()


def _code_of(fun: Any) -> Any:
    """The code of `fun`, or of the function that it wraps; an object without any for itself."""
    fun = inspect.unwrap(fun)
    return getattr(fun, "__code__", fun)


def _kept_of(fun: Any) -> tuple[Latest, bool]:
    """The cache of `fun`, or of the object whose method it is, and whether it was there already.

    It is a new one where there is no telling how long the function lives.
    """
    owner = fun.__self__ if isinstance(fun, types.MethodType) else fun
    key = id(owner)
    found = _kept.get(key)
    if found is not None and found[0]() is owner:
        return found[1], True
    kept = Latest(capacity=16)
    with contextlib.suppress(TypeError):
        _kept.put(key, (weakref.ref(owner, lambda _, drop=_kept.drop: drop(key)), kept))
    return kept, False


def _remembered(call: Call, closure: Closure, captured: Captured, traced: Traced) -> Remembered | None:
    """What to remember; None where it would hold an argument or a value of a trace, or where more was seen than is known."""
    if not captured.is_whole() or changed(captured.checks):
        return None
    if not (all(call.traced) or Captured(*_static(call)).is_of_modules()):
        return None
    seen = captured.values()
    if any(x is call.fun or _jax.is_tracer(x) for x in seen) or any(map(_is_unwatched, (*seen, *closure.rest))):
        return None
    plain = not any(map(_jax.is_tracer, closure.arrays)) and all(type(x) in SIMPLE for x in closure.rest)
    if not plain and not self_contained(traced.jaxpr):
        return None
    places = {id(x): Place(i) for i, x in reversed([*enumerate(closure.arrays)])}
    consts = [places.get(id(x), x) for x in traced.consts]
    held = [x for x in consts if not isinstance(x, (Place, np.ndarray, np.generic))]
    held += [out.value for out in traced.outputs if isinstance(out, Given) and not isinstance(out.value, PLAIN)]
    if not all(map(captured.sees, held)):
        return None
    return Remembered(traced._replace(consts=consts), captured, [(x, static_key(x)) for x in seen if isinstance(x, np.ndarray)])


def _is_unwatched(x: Any) -> bool:
    return isinstance(x, UNWATCHED) or hasattr(type(x), "__next__")


def _static(call: Call) -> list:
    return [x for x, traced in zip(call.leaves, call.traced, strict=True) if not traced]


def _array_keys(arrays: Sequence[Any]) -> tuple:
    """A key for each array that a function closes over: its aval if Python cannot look at its value, else the array itself."""
    first: dict[int, int] = {}
    return tuple([(first.setdefault(id(x), i), _array_key(x)) for i, x in enumerate(arrays)])


def _array_key(x: Any) -> Hashable:
    return (type(x), x.aval) if _jax.is_abstract(x) else Same(x)


def sizeless(call: Call) -> bool:
    """Whether one lane's program cannot tell how many lanes there are: the axis has no name, and no container a length.

    Sizes that are no numbers yet can only be compared with others of the same export.
    """
    whole = any(map(_jax.is_vmappable, call.leaves)) or any(map(_jax.is_map_spec, call.axes))
    return call.axis.name is None and not whole and not any(map(_jax.is_symbolic, call.leaves))


def lane_keys(call: Call) -> tuple:
    """A key for each leaf of the arguments as one lane sees it."""
    leaves = zip(call.leaves, call.axes, call.traced, strict=True)
    return tuple([_jax.lane_aval(x, d) if traced else static_key(x) for x, d, traced in leaves])
