"""From a traced call to a batched program: run where it stands, or compiled by jax.jit and kept."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_unflatten

from minibatch import _axes, _errors, _jax
from minibatch._batched import Axis, Batched, is_batched, lanes
from minibatch._captured import Captured, contents
from minibatch._interpreter import batch_jaxpr
from minibatch._structure import Same, structure
from minibatch._trace import Call, Computed, Given, Returned, Traced, trace


class Program:
    """The batched program of one traced call: arrays in, arrays out.

    The arrays that `fun` captured are arguments of it like the others. It keeps no argument of the call alive.
    """

    def __init__(self, call: Call, traced: Traced, captured: Captured | None = None) -> None:
        self.captured, self.outputs, self.out_tree = captured, traced.outputs, traced.out_tree
        self.consts = [_jax.as_argument(const) for const in _jax.consts_of(traced.jaxpr)]
        self.batched = BatchedFunction(call, traced)

    @functools.cached_property
    def compiled(self) -> Callable:
        """`batched`, compiled by XLA once for all programs of the same structure."""
        return compiled(self.batched)

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


class BatchedFunction:
    """The function from consts and arrays to the arrays that the outputs want, each with its lanes where asked.

    Two are equal, and so are compiled once, if their jaxprs have the same structure and are batched alike.
    """

    def __init__(self, call: Call, traced: Traced) -> None:
        _, self.jaxpr = _jax.hoisted(traced.jaxpr)
        self.axis, self.axes = call.axis, tuple(call.array_axes())
        outputs = [out for out in traced.outputs if isinstance(out, Computed)]
        self.specs = tuple((out.axis, out.path) for out in outputs for _ in range(out.count))
        self.__name__ = _errors.name_of(call.fun)

    def __call__(self, consts: Sequence[Any], arrays: Sequence[Any]) -> list:
        args = [x if d is None else Batched(x, d) for x, d in zip(arrays, self.axes, strict=True)]
        with _jax.transform_name_stack("vmap"):
            outs = batch_jaxpr(self.axis, self.jaxpr, [*consts, *args])
        return [place(self.axis, out, *spec) for out, spec in zip(outs, self.specs, strict=True)]

    @functools.cached_property
    def key(self) -> Hashable:
        """What the compiled program depends on."""
        return structure(self.jaxpr), self.axis, self.axes, self.specs, _jax.trace_context()


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


class Latest:
    """A cache of the `capacity` entries used last, safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._capacity = capacity
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Any:
        """What was put under `key`, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        """Keep `value`, and forget what was not used for longest."""
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()


class Programs:
    """The programs of one mapped function."""

    def __init__(self, capacity: int = 128) -> None:
        self._kept = Latest(capacity)
        self.clear = self._kept.clear

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, call: Call) -> tuple[Program, Call]:
        """The program for `call`, traced if it is new, and the call as that program takes it."""
        key = key_of(call)
        program = self._kept.get(key)
        concrete = program is NEEDS_CONCRETE
        if concrete:
            call = call.concrete()
            key = key_of(call)
            program = self._kept.get(key)
        if program is None or program is NEEDS_CONCRETE or program.captured.changed():
            captured = Captured(call.fun)  # before the call: the function may itself set anew what it sees
            used, traced = trace(call, concrete)
            captured.settle()
            program = Program(used, traced, captured)
            if used is not call:
                self._kept.put(key, NEEDS_CONCRETE)
                call, key = used, key_of(used)
            self._kept.put(key, program)
        return program, call


NEEDS_CONCRETE = object()  # stands for a call whose shared leaves are needed concretely: the program is under that call's key

_compiled = Latest(capacity=1024)


def compiled(batched: BatchedFunction) -> Callable:
    """`batched` under jax.jit: the one of an equal `batched` from before if there is one."""
    try:
        found = _compiled.get(batched.key)
    except TypeError:  # a param that cannot be compared
        return jax.jit(batched)
    if found is None:
        found = jax.jit(batched)
        _compiled.put(batched.key, found)
    return found


def clear_caches() -> None:
    """Forget the programs that all mapped functions compiled; each mapped function keeps what it is using."""
    _compiled.clear()


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
        case types.FunctionType() if depth and x.__closure__:
            return type(x), Same(x), tuple(static_key(contents(cell), depth - 1) for cell in x.__closure__)
        case types.MethodType():
            return type(x), static_key(x.__func__), static_key(x.__self__, depth - 1)
    attributes = () if isinstance(x, IDENTITIES) or not depth else getattr(x, "__dict__", {}).items()
    inside = tuple((name, static_key(value, depth - 1)) for name, value in attributes)
    by_value = dataclasses.is_dataclass(x) and type(x).__dataclass_params__.frozen and type(x).__hash__ is not None
    return type(x), None if by_value else Same(x), inside
