"""From a traced call to a batched program: run where it stands, or compiled by jax.jit and kept."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_unflatten

from minibatch import _axes, _errors, _jax
from minibatch._batched import Axis, Batched, apart, is_batched, lanes
from minibatch._captured import Captured, Check, changed
from minibatch._hoist import hoist
from minibatch._interpreter import batch_jaxpr
from minibatch._keys import Latest, leaf_keys, static_key
from minibatch._registry import context
from minibatch._structure import structure
from minibatch._trace import Call, Computed, Given, Returned, Traced, parts, trace


class Program:
    """The batched program of one traced call: the arguments' leaves in, what `fun` returned out.

    The arrays that `fun` captured are arguments of it like the others. It keeps no argument of the call alive.
    """

    def __init__(self, call: Call, traced: Traced) -> None:
        self.outputs, self.out_tree = traced.outputs, traced.out_tree
        consts, jaxpr = hoist(traced.jaxpr)
        self.consts = [_jax.as_argument(const) for const in consts]
        self.batched = BatchedFunction(call, jaxpr, traced.outputs)
        self._infers = any(spec is _jax.INFER for spec in tree_leaves(call.out_axes))
        does = bool(self.batched.specs or _jax.open_jaxpr(jaxpr).eqns) and not self._infers
        self._compiles = does and _jax.can_be_lowered(jaxpr) and not any(_jax.is_tracer(x) for x in self.consts)
        self._in_axes = call.axes
        self._takes_all = all(call.traced) and not any(map(_jax.is_vmappable, call.leaves))
        self._takes = [i for i, traced in enumerate(call.traced) if traced]
        self._static = [i for i, traced in enumerate(call.traced) if not traced]
        self._gives_all = all(isinstance(out, Computed) and out.rebuild is None for out in self.outputs)

    @functools.cached_property
    def compiled(self) -> Callable:
        """`batched`, compiled by XLA once for all programs of the same structure."""
        return compiled(self.batched)

    def __call__(self, leaves: list) -> Any:
        """Run compiled; equation by equation if there is none, `fun` captured a tracer, or only Python can have its effects."""
        if not self._compiles:
            return self.emit(leaves)
        return self._assemble(leaves, self.compiled(self.consts, self._arrays(leaves)))

    def with_entry(self, leaves: list) -> tuple[Any, Any, bool]:
        """As a call; with what a dispatcher is to remember of it, if it tells all that the program depends on."""
        static = [leaves[i] for i in self._static]
        if not (self._compiles and self._gives_all and all(map(_jax.is_told, static))) or Captured(*static).checks:
            return self(leaves), None, False
        _jax.learn_nodes(leaves)
        return *_jax.run_with_entry(self.compiled, self.consts, self._arrays(leaves), self.out_tree), False

    def emit(self, leaves: list) -> Any:
        """Run equation by equation, into whatever trace is under way."""
        outs = self.batched.outputs(self.consts, self._arrays(leaves))
        result = self._assemble(leaves, self.batched.placed(outs))
        return (result, self._axes_of(outs)) if self._infers else result

    def _axes_of(self, outs: list) -> Any:
        """Where each output has its lanes, asked for or inferred."""
        computed = zip(outs, self.batched.specs, strict=True)
        axes = iter([spec if spec is not _jax.INFER else apart([out])[1][0] for out, (spec, _) in computed])

        def axis(output: Returned | Given | Computed) -> Any:
            match output:
                case Returned(i):
                    return self._in_axes[i]
                case Given():
                    return None
                case Computed():
                    first, *_ = [next(axes) for _ in output.axes]
                    return first

        return tree_unflatten(self.out_tree, list(map(axis, self.outputs)))

    def _arrays(self, leaves: list) -> list:
        return leaves if self._takes_all else [x for i in self._takes for x in parts(leaves[i])]

    def _assemble(self, leaves: list, arrays: list) -> Any:
        if self._gives_all:
            return tree_unflatten(self.out_tree, arrays)
        rest = iter(arrays)
        return tree_unflatten(self.out_tree, [_finish(out, leaves, rest) for out in self.outputs])


def _finish(output: Returned | Given | Computed, leaves: list, arrays: Iterator[Any]) -> Any:
    match output:
        case Returned(i):
            return leaves[i]
        case Given(value):
            return value
        case Computed(rebuild=rebuild):
            return rebuild([next(arrays) for _ in output.axes]) if rebuild else next(arrays)


class BatchedFunction:
    """The function from consts and arrays to the arrays that the outputs want, each with its lanes where asked.

    Two are equal, and so are compiled once, if their jaxprs have the same structure and are batched alike.
    """

    def __init__(self, call: Call, jaxpr: Any, outputs: Sequence[Returned | Given | Computed]) -> None:
        self.jaxpr, self.axis, self.axes = jaxpr, call.axis, tuple(call.array_axes())
        computed = [out for out in outputs if isinstance(out, Computed)]
        self.specs = tuple((axis, out.path) for out in computed for axis in out.axes)
        self.__name__ = _errors.name_of(call.fun)

    def __call__(self, consts: Sequence[Any], arrays: Sequence[Any]) -> list:
        return self.placed(self.outputs(consts, arrays))

    def outputs(self, consts: Sequence[Any], arrays: Sequence[Any]) -> list:
        """The outputs as the rules leave them."""
        args = [x if d is None else Batched(x, d) for x, d in zip(arrays, self.axes, strict=True)]
        with _jax.transform_name_stack("vmap"):
            return batch_jaxpr(self.axis, self.jaxpr, [*consts, *args])

    def placed(self, outs: Sequence[Any]) -> list:
        """The outputs with their lanes where asked."""
        return [place(self.axis, out, *spec) for out, spec in zip(outs, self.specs, strict=True)]

    @functools.cached_property
    def key(self) -> Hashable:
        """What the compiled program depends on."""
        return structure(self.jaxpr), self.axis, self.axes, self.specs, context()


def place(axis: Axis, out: Any, spec: Any, path: str) -> Any:
    """An output with its lanes on the axis that `spec` asks for."""
    if isinstance(spec, _axes.if_batched):
        spec = spec.axis if is_batched(out) else None
    if spec is _jax.SUM:
        return jnp.sum(out.value, out.bdim) if is_batched(out) else out
    if spec is None or spec is _jax.INFER or _jax.is_map_spec(spec):
        [array], [bdim] = apart([out])
        if bdim != spec and spec is not _jax.INFER:
            raise _errors.output_is_batched(path, spec, bdim, axis.name)
        return array
    if axis.size is None:
        raise _errors.nothing_mapped([])
    rank = np.ndim(out.value) if is_batched(out) else np.ndim(out) + 1
    return lanes(axis, out, spec % rank)


# --- programs, found again --------------------------------------------------------------------------------------------


class Programs:
    """The programs of one mapped function, each with checks on what its static arguments saw when it was traced."""

    def __init__(self, capacity: int = 128) -> None:
        self.kept = Latest(capacity)
        self._lanes = Latest(capacity)

    def clear(self) -> None:
        """Forget them."""
        self.kept.clear()
        self._lanes.clear()

    def differences(self, names: Sequence[str]) -> list[str]:
        """In what each call that was compiled anew differed from the one compiled before. `names`: of the arguments."""
        return [_difference(before, after, names) for before, after in itertools.pairwise(self.kept.keys())]

    def find(self, in_tree: Any, axes: tuple, leaves: list, bind: Callable[[], Call]) -> tuple[Program, bool]:
        """The program for a call, and whether it was there already; `bind` gives the call in full."""
        now = context()
        key = in_tree, axes, leaf_keys(leaves, axes), now
        found = self.kept.get(key)
        concrete = found is NEEDS_CONCRETE
        if concrete:
            key = in_tree, axes, leaf_keys(leaves, axes, concrete=True), now
            found = self.kept.get(key)
        if found is not None and not changed(found[0]):
            return found[1], True
        call = bind()
        checks, used, traced = self._trace(call, concrete, now)
        if used is not call and not concrete:
            self.kept.put(key, NEEDS_CONCRETE)
            key = in_tree, axes, leaf_keys(leaves, axes, concrete=True), now
        program = Program(used, traced)
        self.kept.put(key, (checks, program))
        return program, False

    def _trace(self, call: Call, concrete: bool, now: Hashable) -> tuple[tuple[Check, ...], Call, Traced]:
        """What `fun` does to one lane: known already if it was traced for another number of lanes.

        With it checks on what the leaves that are part of the program can see.
        """
        key = None if concrete or not _sizeless(call) else (call.in_tree, call.axes, lane_keys(call), now)
        found = self._lanes.get(key) if key else None
        if found is not None and not changed(found[0]):
            return found[0], call, found[1]
        captured = Captured(*(x for x, traced in zip(call.leaves, call.traced, strict=True) if not traced))
        used, traced = trace(call, concrete)
        captured.settle()
        if key and used is call:
            self._lanes.put(key, (captured.checks, traced))
        return captured.checks, used, traced


def _sizeless(call: Call) -> bool:
    """Whether one lane's program cannot tell how many lanes there are: the axis has no name, and no container a length."""
    whole = any(map(_jax.is_vmappable, call.leaves)) or any(map(_jax.is_map_spec, call.axes))
    return call.axis.name is None and not whole


def lane_keys(call: Call) -> tuple:
    """A key for each leaf of the arguments as one lane sees it."""
    leaves = zip(call.leaves, call.axes, call.traced, strict=True)
    return tuple([_jax.lane_aval(x, d) if traced else static_key(x) for x, d, traced in leaves])


def _difference(before: tuple, after: tuple, names: Sequence[str]) -> str:
    """In what two keys of programs differ, in words."""
    if before[:2] != after[:2]:
        return "the arguments had another structure, or other axes"
    for name, old, new in zip(names, before[2], after[2], strict=False):
        if old != new:
            return f"{name} was {_errors.describe_key(old)} and then {_errors.describe_key(new)}"
    return "JAX's configuration or the rules had changed"


NEEDS_CONCRETE = object()  # stands for a call whose shared leaves are needed concretely: the program is under that call's key

_compiled = Latest(capacity=1024)


def compiled(batched: BatchedFunction) -> Callable:
    """`batched` under jax.jit: the one of an equal `batched` from before if there is one."""
    found = _compiled.get(batched.key)
    if found is None:
        found = jax.jit(batched)
        _compiled.put(batched.key, found)
    return found


def clear_caches() -> None:
    """Forget the compiled programs that mapped functions share. Each mapped function keeps those that it has run.

    Examples:
      >>> import minibatch
      >>> minibatch.clear_caches()
    """
    _compiled.clear()
    _jax.forget_dispatch()
