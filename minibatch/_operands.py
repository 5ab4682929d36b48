"""Numbers that are operands and nothing else: one program does for all of them, and the function is not called for each.

A number cannot be traced in general, for Python may do anything with it. It can where all that a function does with it is to
add, subtract, multiply or divide it with values of the trace. Three things together show that:

- By its code, a variable of the mapped function is loaded only as an operand of such operations, outside any loop, or to be
  handed on, once, to a function that is known by a name from outside, of whose parameter the same is true.
- The function was called with something in its place that nobody can look into, and each of these operations was asked of it,
  from that very place in the code, with a value of the trace on the other side.
- What was traced so is what was traced with the number, but for scalars that come from it.

So another number makes another program in these scalars alone. JAX, too, traces Python scalars in such operations.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from minibatch import _jax
from minibatch._captured import Captured, codes, contents
from minibatch._closure import NUMBERS, Closure, over_variables
from minibatch._errors import name_of
from minibatch._structure import is_number, literal_key, params_key
from minibatch._trace import Call, Computed, Traced, trace_abstractly

MOST = 2**31  # JAX refuses to trace a Python int as large


class Number(NamedTuple):
    """A number in the function's variable `name`: leaf number `leaf` of its arguments; None if it is in a cell or global."""

    name: str
    value: Any
    leaf: int | None


def numbers_of(fun: Any, closure: Closure, args: tuple, in_tree: Any, axes: Sequence[Any]) -> list[Number]:
    """The numbers in a call of `fun` that are operands by its code. Those that it closes over are not in the closure's key."""
    found = [Number(name, value, None) for name, value in closure.numbers.items()]
    names = operands(fun)
    if names and any(type(x) in NUMBERS for x in args):
        first = 0
        for name, x, tree in zip(parameters(fun), args, in_tree.children()[0].children(), strict=False):
            if name in names and type(x) in NUMBERS and axes[first] is None:
                found.append(Number(name, x, first))
            first += tree.num_leaves
    return found


def parameters(fun: types.FunctionType) -> tuple[str, ...]:
    """The names of the parameters that are given by their place."""
    return fun.__code__.co_varnames[: fun.__code__.co_argcount]


# --- by its code ------------------------------------------------------------------------------------------------------


Site = tuple[types.CodeType, int]  # an operation, by its place in a function's code


class Uses(NamedTuple):
    """What code does with a variable: where it is an operand, and as which argument of which functions it is handed on."""

    operations: list[int]
    arguments: list[tuple[str, int]]


def operands(fun: Any, callers: tuple[types.CodeType, ...] = ()) -> dict[str, frozenset[Site]]:
    """The variables of `fun` that are operands only, also where they are handed on; each with its operations."""
    if type(fun) is not types.FunctionType or fun.__code__ in callers:
        return {}
    found = {name: _operations(fun, uses, (*callers, fun.__code__)) for name, uses in _uses(fun.__code__).items()}
    return {name: sites for name, sites in found.items() if sites}


def _operations(fun: types.FunctionType, uses: Uses, callers: tuple[types.CodeType, ...]) -> frozenset[Site]:
    """Those on a variable of `fun`: none where there is no telling, or where the same would be done twice."""
    sites = frozenset([(fun.__code__, place) for place in uses.operations])
    for name, number in uses.arguments:
        called = _variable(fun, name)
        inside = operands(called, callers)
        there = inside.get(next(iter(parameters(called)[number:]), ""), frozenset()) if inside else frozenset()
        if not there or there & sites:
            return frozenset()
        sites |= there
    return sites


def _variable(fun: types.FunctionType, name: str) -> Any:
    """What is in the cell or global that `fun` knows by this name."""
    container, key = _place(fun, name)
    return contents(container) if key is None else container.get(key)


def _place(fun: types.FunctionType, name: str) -> tuple[Any, str | None]:
    """Where `fun` has its variable `name` from outside: a cell, or its globals and the name."""
    cells = dict(zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True))
    return (cells[name], None) if name in cells else (fun.__globals__, name)


@functools.lru_cache(maxsize=1024)
def _uses(code: types.CodeType) -> dict[str, Uses]:
    """The variables of `code` that are only ever loaded to be operands, or arguments of functions known by a name."""
    ops = [op for op in dis.get_instructions(code) if op.opname not in SILENT]
    inner = {name for inside in codes(code) if inside is not code for name in (*inside.co_freevars, *inside.co_names)}
    if code.co_flags & SUSPENDED or LOOKING & set(code.co_names) or any("BACKWARD" in op.opname for op in ops):
        return {}
    taken = {op: _taken(ops[i:]) for i, op in enumerate(ops) if op.opname in LOADS}
    changed = inner.union(code.co_cellvars, [op.argval for op in ops if op.opname.startswith(("STORE", "DELETE"))])
    outside = {op.argval for op in taken if op.opname != "LOAD_FAST"} - changed
    called = {by.place: op.argval for op, by in taken.items() if by and by.argument == CALLED and op.argval in outside}
    found = {}
    for name in {op.argval for op in taken} - inner - set(code.co_cellvars) - {*code.co_varnames[code.co_argcount :]}:
        named = [op for op in ops if op.argval == name or (isinstance(op.argval, tuple) and name in op.argval)]
        uses = [taken.get(op) for op in named if op.opname not in NAMING]
        operations = [by.place for by in uses if by and by.argument is None]
        handed_on = [by for by in uses if by and by.place in called]
        arguments = [(called[by.place], by.argument) for by in handed_on if by.argument is not None and by.argument != CALLED]
        if len(operations) + len(arguments) == len(uses):
            found[name] = Uses(operations, arguments)
    return found


LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")
NAMING = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")  # instructions that may speak of something else by the same name
SILENT = ("CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PRECALL")
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
LOOKING = frozenset({"locals", "vars", "dir", "eval", "exec"})  # at variables, by other ways than loading them
ARITHMETIC = frozenset(["+", "-", "*", "/", "+=", "-=", "*=", "/="])
TAKES: dict[str, Callable[[int], int]] = {
    "LOAD_FAST": lambda n: 0, "LOAD_DEREF": lambda n: 0, "LOAD_GLOBAL": lambda n: 0, "LOAD_CONST": lambda n: 0,
    "PUSH_NULL": lambda n: 0, "KW_NAMES": lambda n: 0, "LOAD_ATTR": lambda n: 1, "LOAD_METHOD": lambda n: 1,
    "UNARY_NEGATIVE": lambda n: 1, "BINARY_OP": lambda n: 2, "BINARY_SUBSCR": lambda n: 2, "CALL": lambda n: n + 2,
    "BUILD_TUPLE": lambda n: n,
}  # fmt: skip
"""How many values instructions take from the stack."""


class Taker(NamedTuple):
    """What takes a value, by its place: arithmetic, or a call with the value as an `argument` of this number, or CALLED."""

    place: int
    argument: int | None = None


CALLED = -1


def _taken(ops: Sequence[dis.Instruction]) -> Taker | None:
    """What takes the value that the first instruction loads; None if something else than arithmetic or a call does, or may."""
    above = 0
    for before, op in itertools.pairwise(ops):
        count = op.arg or 0
        takes = TAKES[op.opname](count) if op.opname in TAKES else None
        if takes is None:
            return None
        if takes > above:
            if op.opname == "CALL" and before.opname != "KW_NAMES":
                return Taker(op.offset, max(count - 1 - above, CALLED))
            return Taker(op.offset) if op.opname == "BINARY_OP" and op.argrepr in ARITHMETIC else None
        above += dis.stack_effect(op.opcode, op.arg) if op.opname != "CALL" else 1 - takes
    return None


# --- by what it asks --------------------------------------------------------------------------------------------------


def _asks(operation: Callable, *, reflected: bool) -> Callable:
    """The method of `Handed` for an operation, from the right if `reflected`."""
    return lambda self, other: self._ask(operation, other, reflected=reflected)


class Handed:
    """Stands for a number in the call of a function. Each of these operations can be asked of it, once, and nothing else."""

    __array_ufunc__ = None  # NumPy leaves the operation to it

    def __init__(self, tracer: Any, operations: Collection[Site]) -> None:
        self._tracer = tracer
        self.unasked = set(operations)

    def _ask(self, operation: Callable, other: Any, *, reflected: bool) -> Any:
        frame = sys._getframe(2)
        site = frame.f_code, frame.f_lasti
        if not _jax.is_tracer(other) or site not in self.unasked:
            raise TypeError("minibatch: a number was used otherwise than its function's code says")
        self.unasked.remove(site)
        return operation(other, self._tracer) if reflected else operation(self._tracer, other)

    __add__, __radd__ = _asks(operator.add, reflected=False), _asks(operator.add, reflected=True)
    __sub__, __rsub__ = _asks(operator.sub, reflected=False), _asks(operator.sub, reflected=True)
    __mul__, __rmul__ = _asks(operator.mul, reflected=False), _asks(operator.mul, reflected=True)
    __truediv__, __rtruediv__ = _asks(operator.truediv, reflected=False), _asks(operator.truediv, reflected=True)


class Handing:
    """A function that takes tracers before its arguments, and hands them to itself in the place of numbers."""

    def __init__(self, closure: Closure, numbers: Sequence[Number]) -> None:
        self.closure, self.numbers = closure, numbers
        self.__name__, self.__wrapped__ = name_of(closure.fun), closure.fun
        self.handed: list[Handed] = []

    def __call__(self, tracers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function: the first tracers are for the numbers, the others for the arrays that it closes over."""
        fun, count, sites = self.closure.fun, len(self.numbers), operands(self.closure.fun)
        self.handed = [Handed(tracer, sites[number.name]) for tracer, number in zip(tracers, self.numbers, strict=False)]
        given = list(zip(self.numbers, self.handed, strict=True))
        named = {number.name: handed for number, handed in given if number.leaf is not None}
        args = tuple([named.get(name, x) for name, x in zip_longest(parameters(fun)[: len(args)], args)])
        inside = over_variables(fun, {number.name: handed for number, handed in given if number.leaf is None})
        return self.closure._replace(fun=inside)(tracers[count:], *args, **kwargs)

    def asked_everywhere(self) -> bool:
        """Whether each operation that the code has was asked of what was handed."""
        return not any(handed.unasked for handed in self.handed)


# --- by what was traced -----------------------------------------------------------------------------------------------


def seen_elsewhere(fun: types.FunctionType, numbers: Sequence[Number], captured: Captured) -> bool:
    """Whether another function than `fun` may see one of its numbers, or there is no telling."""
    return not captured.is_whole() or not all(captured.met_once(*_place(fun, x.name)) for x in numbers if x.leaf is None)


def places(call: Call, closure: Closure, numbers: Sequence[Number], traced: Traced) -> dict[int, int] | None:
    """Which scalars of a traced program, by their order, come from which number; None if there is no telling.

    `call` is that of the function by itself, `traced` what one over the arrays that it closes over was.
    """
    handing = Handing(closure, numbers)
    try:
        other = trace_abstractly(call.over([*(number.value for number in numbers), *closure.arrays], handing))
    except Exception:  # whatever comes of it: the function was given something that it may not expect
        return None
    computed = all(isinstance(out, Computed) and out.rebuild is None for out in traced.outputs)
    returned = computed and (other.out_tree, other.outputs) == (traced.out_tree, traced.outputs)
    if not returned or not handing.asked_everywhere() or len(other.consts) != len(traced.consts):
        return None
    return _Beside(traced.jaxpr, other.jaxpr, len(traced.consts), numbers).places()


class Differ(Exception):  # noqa: N818 - never reaches a user
    """Two jaxprs that were to be the same."""


class _Beside:
    """A jaxpr beside another that takes some of its scalars as inputs, which it may convert first."""

    def __init__(self, jaxpr: Any, other: Any, consts: int, numbers: Sequence[Number]) -> None:
        self._jaxpr, self._other, self._numbers = _jax.open_jaxpr(jaxpr), _jax.open_jaxpr(other), numbers
        inputs = list(self._other.invars)
        handed = inputs[consts : consts + len(numbers)]
        self._handed = {var: i for i, var in enumerate(handed)}
        self._same = dict(zip([*inputs[:consts], *inputs[consts + len(numbers) :]], self._jaxpr.invars, strict=True))
        self._count = itertools.count()
        self._places: dict[int, int] = {}

    def places(self) -> dict[int, int] | None:
        """For each scalar that is an input of the other the number that it is; None if the two differ in more."""
        try:
            self._walk()
        except (Differ, ValueError):  # zip: more of something in one of them
            return None
        return self._places

    def _walk(self) -> None:
        eqns = iter(self._jaxpr.eqns)
        for other in self._other.eqns:
            if other.primitive.name == "convert_element_type" and self._handed.get(other.invars[0]) is not None:
                self._handed[other.outvars[0]] = self._handed[other.invars[0]]
                continue
            eqn = next(eqns, None)
            if eqn is None or (eqn.primitive, eqn.ctx, params_key(eqn)) != (other.primitive, other.ctx, params_key(other)):
                raise Differ
            self._atoms(eqn.invars, other.invars)
            for var, twin in zip(eqn.outvars, other.outvars, strict=True):
                if var.aval != twin.aval:
                    raise Differ
                self._same[twin] = var
        if next(eqns, None) is not None:
            raise Differ
        self._atoms(self._jaxpr.outvars, self._other.outvars)

    def _atoms(self, atoms: Sequence[Any], others: Sequence[Any]) -> None:
        for atom, other in zip(atoms, others, strict=True):
            place = next(self._count) if is_number(atom) else None
            if isinstance(other, _jax.Literal):
                same = isinstance(atom, _jax.Literal) and literal_key(atom) == literal_key(other)
            elif other in self._handed:
                number = self._handed[other]
                scalar = literal(self._numbers[number].value, atom.aval) if place is not None else None
                same = scalar is not None and literal_key(scalar) == literal_key(atom)
                self._places[place or 0] = number
            else:
                same = self._same[other] is atom
            if not same:
                raise Differ


def literal(value: Any, aval: Any) -> Any:
    """`value` as a scalar of `aval`, as JAX makes one; None where that is not for all numbers the same."""
    dtype = np.dtype(aval.dtype)
    if dtype.itemsize < 4 or dtype.kind not in "fiu" or (type(value) is int and abs(value) >= MOST):
        return None
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        return None
    scalar = np.asarray(value, np.float64 if type(value) is float else None).astype(dtype)
    return _jax.Literal(scalar, aval) if np.isfinite(scalar) and type(value) in NUMBERS else None
