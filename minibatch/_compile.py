"""From a traced call to a batched program: run where it stands, or compiled by jax.jit and kept."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_unflatten

from minibatch import _axes, _errors, _jax, _lanes, _operands
from minibatch._batched import Axis, Batched, apart, is_batched, lanes
from minibatch._captured import Captured, changed
from minibatch._closure import Closure
from minibatch._hoist import with_numbers
from minibatch._interpreter import batch_jaxpr
from minibatch._keys import Latest, leaf_keys, static_key
from minibatch._lanes import lane_keys, sizeless
from minibatch._operands import Number
from minibatch._registry import context
from minibatch._structure import is_number, structure
from minibatch._trace import Call, Computed, Given, Returned, Traced, parts, trace


class Program:
    """The batched program of one traced call: the arguments' leaves in, what `fun` returned out.

    The arrays that `fun` captured are arguments of it like the others. It keeps no argument of the call alive.
    """

    def __init__(self, call: Call, traced: Traced) -> None:
        self.outputs, self.out_tree = traced.outputs, traced.out_tree
        self._own_consts = [_jax.as_argument(const) for const in traced.consts]
        self.consts = self._own_consts
        self.batched = BatchedFunction(call, traced.jaxpr, traced.outputs)
        self._infers = any(spec is _jax.INFER for spec in tree_leaves(call.out_axes))
        does = bool(self.batched.specs or _jax.open_jaxpr(traced.jaxpr).eqns) and not self._infers
        self.compiles = does and _jax.can_be_lowered(traced.jaxpr) and not any(_jax.is_tracer(x) for x in self.consts)
        self._in_axes = call.axes
        self._takes_all = all(call.traced) and not any(map(_jax.is_vmappable, call.leaves))
        self._takes = [i for i, traced in enumerate(call.traced) if traced]
        self._static = [i for i, traced in enumerate(call.traced) if not traced]
        self._gives_all = all(isinstance(out, Computed) and out.rebuild is None for out in self.outputs)

    @functools.cached_property
    def compiled(self) -> Callable:
        """`batched`, compiled by XLA once for all programs of the same structure. What it takes beside is in `consts`."""
        found, numbers = compiled(self.batched)
        self.consts = [*numbers, *self.consts]
        return found

    def with_numbers(self, compiled: Callable, numbers: list) -> Program:
        """The same program as `compiled`, which takes these numbers first."""
        other = copy.copy(self)
        other.compiled, other.consts = compiled, [*numbers, *self._own_consts]
        return other

    def __call__(self, leaves: list) -> Any:
        """Run compiled; equation by equation if there is none, `fun` captured a tracer, or only Python can have its effects."""
        if not self.compiles:
            return self.emit(leaves)
        compiled = self.compiled
        return self._assemble(leaves, compiled(self.consts, self._arrays(leaves)))

    def with_entry(self, leaves: list, held: int, watches: Callable[[Captured], bool]) -> tuple[Any, Any, bool]:
        """As a call; with what a dispatcher is to remember of it, if it tells all that the program depends on.

        The first `held` leaves are no arguments of the call. `watches` is asked whether it tells what static leaves see.
        """
        static = [leaves[i] for i in self._static]
        told = self.compiles and self._gives_all and all(map(_jax.is_told, static))
        if not (told and watches(Captured(*static))):
            return self(leaves), None, False
        _jax.learn_nodes(leaves)
        compiled, self.consts = self.compiled, list(map(_jax.as_argument, self.consts))
        return *_jax.run_with_entry(compiled, self.consts, self._arrays(leaves), held, self.out_tree), False

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

    def key(self) -> tuple[Hashable, list]:
        """What the compiled program depends on, but for the numbers in it; and those."""
        numbers: list = []
        return (structure(self.jaxpr, numbers), self.axis, self.axes, self.specs, context()), numbers

    def taking(self, which: Collection[int]) -> BatchedFunction:
        """The same function with these of its numbers as first consts."""
        other = copy.copy(self)
        other.jaxpr = with_numbers(self.jaxpr, which, is_number)
        return other


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
    """Programs by what they depend on, each with checks on what else could be seen when it was traced."""

    def __init__(self, capacity: int) -> None:
        self.kept = Latest(capacity)
        self.lanes = Latest(capacity)
        self._anew: deque[tuple] = deque(maxlen=capacity)  # calls that were new: closure, structure and axes, avals

    def clear(self) -> None:
        """Forget them."""
        self.kept.clear()
        self.lanes.clear()
        self._anew.clear()

    def differences(self, names: Sequence[str]) -> list[str]:
        """In what each call that was compiled anew differed from the one compiled before. `names`: of the arguments."""
        return [_difference(before, after, names) for before, after in itertools.pairwise(self._anew)]

    def find(
        self, closure: Closure, numbers: Sequence[Number], how: Hashable, in_tree: Any, axes: tuple, leaves: list,
        bind: Callable[[], Call],
    ) -> Any:  # fmt: skip
        """The program for a call, and whether it was there already.

        `numbers` are those that are operands only; `how` is what else the program depends on; `bind` gives the call in full,
        to be traced if the program is new.
        """
        axes, leaves = (None,) * len(closure.arrays) + axes, [*closure.arrays, *leaves]
        where = closure.key, tuple([static_key(number.value) for number in numbers]), how, in_tree, axes, context()

        def key_of(concrete: bool) -> tuple:
            return *where, concrete, leaf_keys(leaves, axes, concrete)

        key = key_of(concrete=False)
        found = self._known("kept", key)
        concrete = found is NEEDS_CONCRETE
        if concrete:
            key = key_of(concrete=True)
            found = self._known("kept", key)
        if found is not None and not changed(found[0]):
            return found[1], True
        anyhow = _for_any_numbers(where, numbers, leaves, axes, len(closure.arrays)) if numbers else None
        tried = self._known("kept", anyhow) if anyhow else None
        tried = None if tried is None or changed(tried.checks) else tried
        other = tried.program.over([number.value for number in numbers]) if tried and tried.program else None
        if other is not None:
            return other
        bare = call = bind()
        if closure.arrays:
            call = call.over(closure.arrays, closure)
        captured, used, traced = self._trace(closure, where, call, concrete)
        if used is not call and not concrete:
            (shared if captured.is_of_modules() else self).kept.put(key, NEEDS_CONCRETE)
            key = key_of(concrete=True)
        program = Program(used, traced)
        held = len(closure.arrays)
        self._anew.append(((where[:2], key[-1][:held]), (in_tree, axes), key[-1][held:]))
        kept = (shared if _sharable(captured, traced) else self).kept
        kept.put(key, (captured.checks, program))
        if anyhow and used is call and (tried is None or not tried.over):
            elsewhere = _operands.seen_elsewhere(closure.fun, numbers, captured)
            places = None if elsewhere or not tried else _operands.places(bare, closure, numbers, traced)
            kept.put(anyhow, Tried.once(captured.checks, program) if tried is None else tried.again(program, places))
        return program, False

    def _known(self, cache: str, key: Hashable) -> Any:
        return getattr(shared, cache).get(key) or getattr(self, cache).get(key)

    def _trace(self, closure: Closure, where: Hashable, call: Call, concrete: bool) -> tuple[Captured, Call, Traced]:
        """What `fun` does to one lane: known already if it was traced for another number of lanes."""
        key = None if concrete or not sizeless(call) else (where, lane_keys(call))
        found = self._known("lanes", key) if key else None
        if found is not None and not changed(found[0].checks):
            return found[0], call, found[1]
        static = (x for x, traced in zip(call.leaves, call.traced, strict=True) if not traced)
        captured = Captured(closure.fun, *static, but=closure.spoken_for())
        used, traced = trace(call, concrete)
        captured.settle()
        if key and used is call:
            (shared if _sharable(captured, traced) else self).lanes.put(key, (captured, traced))
        return captured, used, traced


def _for_any_numbers(where: tuple, numbers: Sequence[Number], leaves: list, axes: tuple, held: int) -> tuple:
    """The key of a call whatever its numbers are. The first `held` leaves are no arguments."""
    leaves = list(leaves)
    for number in numbers:
        if number.leaf is not None:
            leaves[held + number.leaf] = type(number.value)
    kinds = tuple([(number.name, type(number.value)) for number in numbers])
    return "numbers", where[0], kinds, *where[2:], leaf_keys(leaves, axes)


shared = Programs(capacity=1024)


def _sharable(captured: Captured, traced: Traced) -> bool:
    """Whether a program holds nothing alive that its function would not: what modules hold at most."""
    held = [const for const in traced.consts if isinstance(const, jax.Array)]
    held += [out.value for out in traced.outputs if isinstance(out, Given) and not _jax.is_told(out.value)]
    return captured.is_of_modules() and all(map(captured.sees, held))


def _difference(before: tuple, after: tuple, names: Sequence[str]) -> str:
    """In what two calls that were new differ, in words."""
    if before[1] != after[1]:
        return "the arguments had another structure, or other axes"
    for name, old, new in zip(names, before[2], after[2], strict=False):
        if old != new:
            return f"{name} was {_errors.describe_key(old)} and then {_errors.describe_key(new)}"
    if before[0] != after[0]:
        return "what the function closes over was another"
    return "JAX's configuration, the rules, or what the function sees elsewhere had changed"


NEEDS_CONCRETE = object()  # stands for a call whose shared leaves are needed concretely: the program is under that call's key

_compiled = Latest(capacity=1024)


def compiled(batched: BatchedFunction) -> tuple[Callable, list]:
    """`batched` under jax.jit, and numbers to pass before its consts: the one of an equal `batched` if there was one."""
    alike, numbers = alike_of(batched)
    return alike.compiled(batched, numbers)


def alike_of(batched: BatchedFunction) -> tuple[Alike, list]:
    """The programs that differ from `batched` in its numbers alone; and those."""
    key, numbers = batched.key()
    alike = _compiled.get(key)
    if alike is None:
        _compiled.put(key, alike := Alike(numbers))
    return alike, numbers


class Alike:
    """Compiled programs that differ in numbers alone. The first has its own built in, and serves for those; the next takes
    those that have been seen to differ as arguments, so that the third is not compiled."""

    def __init__(self, numbers: list) -> None:
        self._numbers = [_bits(x) for x in numbers]
        self._which: tuple[int, ...] = ()
        self._first: Callable | None = None
        self._other: Callable | None = None
        self._lock = threading.Lock()

    def compiled(self, batched: BatchedFunction, numbers: list) -> tuple[Callable, list]:
        """A program that does for `batched` with these numbers, and those of them that it takes."""
        differing = {i for i, (x, old) in enumerate(zip(numbers, self._numbers, strict=True)) if _bits(x) != old}
        with self._lock:
            if not differing:
                self._first = self._first or jax.jit(batched)
                return self._first, []
            if self._other is None or not differing <= set(self._which):
                self._which = tuple(sorted(differing.union(self._which)))
                self._other = jax.jit(batched.taking(self._which))
            return self._other, [_jax.number(numbers[i]) for i in self._which]


class Tried(NamedTuple):
    """What is known of a call whatever its numbers are: the scalars of the program that was the first to be traced.

    `program`: one for any numbers, if there is one; with `over` no other is looked for.
    """

    checks: tuple
    alike: Alike
    scalars: list[bytes]
    program: Numbered | None = None
    over: bool = False

    @classmethod
    def once(cls, checks: tuple, program: Program) -> Tried:
        """After the first."""
        alike, scalars = alike_of(program.batched)
        return cls(checks, alike, list(map(_bits, scalars)))

    def again(self, program: Program, places: dict[int, int] | None) -> Tried:
        """After the second: it does for all numbers if it differs from the first in the scalars at `places` alone."""
        alike, scalars = alike_of(program.batched)
        differing = {i for i, (x, old) in enumerate(zip(map(_bits, scalars), self.scalars, strict=False)) if x != old}
        does = program.compiles and places is not None and alike is self.alike and differing <= places.keys()
        return self._replace(program=Numbered(program, places) if does and places else None, over=True)


class Numbered:
    """A program for any numbers that its function has as operands. `places`: which of its scalars are which of them."""

    def __init__(self, program: Program, places: dict[int, int]) -> None:
        self._program, self._places = program, places
        self._alike, self._scalars = alike_of(program.batched)
        self._met = Latest(capacity=128)

    def over(self, values: Sequence[Any]) -> tuple[Program, bool] | None:
        """The program with these numbers, and whether it was asked for before; None where it is not the same for them."""
        scalars = list(self._scalars)
        for place, number in self._places.items():
            scalars[place] = _operands.literal(values[number], scalars[place].aval)
            if scalars[place] is None:
                return None
        key = tuple(map(_bits, scalars))
        met = self._met.get(key) is not None
        self._met.put(key, True)
        return self._program.with_numbers(*self._alike.compiled(self._program.batched, scalars)), met


def _bits(x: Any) -> bytes:
    return np.asarray(x.val).tobytes()


def clear_caches() -> None:
    """Forget the compiled programs that mapped functions share. Each mapped function keeps those that it has run.

    Examples:
      >>> import minibatch
      >>> minibatch.clear_caches()
    """
    shared.clear()
    _lanes.clear()
    _compiled.clear()
    _jax.forget_dispatch()
