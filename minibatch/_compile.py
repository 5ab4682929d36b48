"""From a traced call to a batched program: run where it stands, or compiled by jax.jit and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_unflatten

from minibatch import _axes, _errors, _jax
from minibatch._batched import Axis, Batched, is_batched, lanes
from minibatch._interpreter import batch_jaxpr
from minibatch._trace import Call, Computed, Given, Returned, Traced, trace


class Program:
    """The batched program of one traced call: arrays in, arrays out.

    The arrays that `fun` captured are arguments of it like the others. It keeps no argument of the call alive.
    """

    def __init__(self, call: Call, traced: Traced) -> None:
        jaxpr, self.outputs, self.out_tree = traced.jaxpr, traced.outputs, traced.out_tree
        self.consts = [_jax.as_argument(const) for const in _jax.consts_of(jaxpr)]
        self.batched = batched_function(call, jaxpr, traced.outputs)
        self.compiled = jax.jit(self.batched)

    def __call__(self, call: Call) -> Any:
        """Run compiled, on the leaves of `call`."""
        return self.assemble(call, self.compiled(self.consts, call.arrays()))

    def emit(self, call: Call) -> Any:
        """Run equation by equation, into whatever trace is under way."""
        return self.assemble(call, self.batched(self.consts, call.arrays()))

    def assemble(self, call: Call, arrays: Sequence[Any]) -> Any:
        """What `fun` returned, with all lanes."""
        rest = iter(arrays)
        leaves = []
        for output in self.outputs:
            match output:
                case Returned(i):
                    leaves.append(call.leaves[i])
                case Given(value):
                    leaves.append(value)
                case Computed(rebuild=None):
                    leaves.append(next(rest))
                case Computed(count=count, rebuild=rebuild):
                    leaves.append(rebuild([next(rest) for _ in range(count)]))
        return tree_unflatten(self.out_tree, leaves)


def batched_function(call: Call, jaxpr: Any, outputs: Sequence[Any]) -> Callable:
    """The function from consts and arrays to the arrays that `outputs` wants, each with its lanes where asked."""
    axis, axes, name = call.axis, call.array_axes(), _errors.name_of(call.fun)
    specs = [(out.axis, out.path) for out in outputs if isinstance(out, Computed) for _ in range(out.count)]
    bare = _jax.open_jaxpr(jaxpr)

    def batched(consts: Sequence[Any], arrays: Sequence[Any]) -> list:
        args = [x if d is None else Batched(x, d) for x, d in zip(arrays, axes, strict=True)]
        with _jax.transform_name_stack("vmap"):
            outs = batch_jaxpr(axis, _jax.closed(bare, consts), args)
        return [place(axis, out, spec, path) for out, (spec, path) in zip(outs, specs, strict=True)]

    batched.__name__ = name
    return batched


def place(axis: Axis, out: Any, spec: Any, path: str) -> Any:
    """An output with its lanes on the axis that `spec` asks for."""
    if isinstance(spec, _axes.if_batched):
        spec = spec.axis if is_batched(out) else None
    if spec is None:
        if is_batched(out):
            raise _errors.output_is_batched(path, out.bdim, axis.name)
        return out
    if axis.size is None:
        raise _errors.nothing_mapped([])
    rank = np.ndim(out.value) if is_batched(out) else np.ndim(out) + 1
    return lanes(axis, out, spec % rank)


# --- programs, found again --------------------------------------------------------------------------------------------


class Programs:
    """The compiled programs of one mapped function, the latest used `capacity` of them.

    None is kept for a call whose shared leaves are needed concretely: the program is under the key of that call.
    """

    def __init__(self, capacity: int = 128) -> None:
        self._kept: OrderedDict[Hashable, Program | None] = OrderedDict()
        self._capacity = capacity
        self._lock = threading.Lock()

    def find(self, call: Call) -> tuple[Program, Call]:
        """The program for `call`, traced if it is new, and the call as that program takes it."""
        key = key_of(call)
        program = self._get(key)
        concrete = program is None and key in self._kept
        if concrete:
            call = call.concrete()
            key = key_of(call)
            program = self._get(key)
        if program is None:
            used, traced = trace(call, concrete)
            program = Program(used, traced)
            if used is not call:
                self._put(key, None)
                call, key = used, key_of(used)
            self._put(key, program)
        return program, call

    def clear(self) -> None:
        """Forget all programs."""
        with self._lock:
            self._kept.clear()

    def _get(self, key: Hashable) -> Program | None:
        with self._lock:
            program = self._kept.get(key)
            if key in self._kept:
                self._kept.move_to_end(key)
            return program

    def _put(self, key: Hashable, program: Program | None) -> None:
        with self._lock:
            self._kept[key] = program
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)


def key_of(call: Call) -> Hashable:
    """What a program depends on: structure, avals of what it takes as arguments, the rest by value or identity."""
    leaves = [
        _jax.aval_key(leaf) if traced else static_key(leaf)
        for leaf, traced in zip(call.leaves, call.traced, strict=True)
    ]
    return (call.in_tree, call.axes, call.traced, call.axis, tuple(leaves), _jax.trace_context())


SMALL = 64  # elements up to which a jax.Array that is part of a program is known by value
IDENTITIES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, jax.Array)


def static_key(x: Any, depth: int = 4) -> Hashable:
    """A key that is equal just where `x` may be taken for the same: by value where that can be told, else by identity.

    It holds no object of the user's alive. Of other objects the attributes are looked at too, to some depth, so that
    one changed between two calls is noticed.
    """
    match x:
        case None | bool() | int() | str() | bytes():
            return type(x), x
        case float() | complex():
            return type(x), repr(x)
        case np.ndarray() | np.generic() if x.dtype != object:
            return type(x), np.shape(x), x.dtype.str, hashlib.blake2b(np.ascontiguousarray(x).tobytes()).digest()
        case jax.Array() if x.size <= SMALL and jax.numpy.isdtype(x.dtype, "numeric"):
            return type(x), x.aval, np.asarray(x).tobytes()
        case tuple() | list() if depth:
            return type(x), tuple(static_key(y, depth - 1) for y in x)
        case dict() if depth:
            return type(x), tuple((static_key(k, depth - 1), static_key(v, depth - 1)) for k, v in x.items())
        case types.MethodType():
            return type(x), static_key(x.__func__), static_key(x.__self__, depth - 1)
    attributes = () if isinstance(x, IDENTITIES) or not depth else getattr(x, "__dict__", {}).items()
    inside = tuple((name, static_key(value, depth - 1)) for name, value in attributes)
    by_value = dataclasses.is_dataclass(x) and type(x).__dataclass_params__.frozen and type(x).__hash__ is not None
    return type(x), None if by_value else Same(x), inside


class Same:
    """Equal to another `Same` of the same living object; holds the object weakly where it can."""

    def __init__(self, x: Any) -> None:
        self._hash = id(x)
        try:
            self._get = weakref.ref(x)
        except TypeError:
            self._get = lambda: x

    def __eq__(self, other: object) -> bool:
        x = self._get()
        return isinstance(other, Same) and x is not None and other._get() is x

    def __hash__(self) -> int:
        return self._hash
