"""Numbers that are operands and nothing else: one program does for all of them, and the function is not called for each.

A number cannot be traced in general, for Python may do anything with it. It can where all that a function does with it is to
add, subtract, multiply or divide it with values of the trace. Three things together show that:

- By its code, a variable of the mapped function itself is loaded only as an operand of such operations, outside any loop.
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
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from minibatch import _jax
from minibatch._captured import Captured, codes
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


def operands(fun: Any) -> dict[str, frozenset[int]]:
    """The variables of `fun` that are loaded as operands only, each with the places in its code of the operations."""
    return _operands(fun.__code__) if type(fun) is types.FunctionType else {}


@functools.lru_cache(maxsize=1024)
def _operands(code: types.CodeType) -> dict[str, frozenset[int]]:
    ops = [op for op in dis.get_instructions(code) if op.opname not in SILENT]
    inner = {name for inside in codes(code) if inside is not code for name in (*inside.co_freevars, *inside.co_names)}
    if code.co_flags & SUSPENDED or LOOKING & set(code.co_names) or any("BACKWARD" in op.opname for op in ops):
        return {}
    found = {}
    loaded = {op.argval for op in ops if op.opname in LOADS}
    for name in loaded - inner - set(code.co_cellvars) - {*code.co_varnames[code.co_argcount :]}:
        uses = [i for i, op in enumerate(ops) if op.argval == name or (isinstance(op.argval, tuple) and name in op.argval)]
        uses = [i for i in uses if ops[i].opname not in NAMING]
        sites = [_consumer(ops[i:]) if ops[i].opname in LOADS else None for i in uses]
        if sites and None not in sites:
            found[name] = frozenset(sites)
    return found


LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")
NAMING = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")  # instructions that may speak of something else by the same name
SILENT = ("CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PRECALL", "KW_NAMES")
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
LOOKING = frozenset({"locals", "vars", "dir", "eval", "exec"})  # at variables, by other ways than loading them
ARITHMETIC = frozenset(["+", "-", "*", "/", "+=", "-=", "*=", "/="])
TAKES: dict[str, Callable[[int], int]] = {
    "LOAD_FAST": lambda n: 0, "LOAD_DEREF": lambda n: 0, "LOAD_GLOBAL": lambda n: 0, "LOAD_CONST": lambda n: 0,
    "PUSH_NULL": lambda n: 0, "LOAD_ATTR": lambda n: 1, "LOAD_METHOD": lambda n: 1, "UNARY_NEGATIVE": lambda n: 1,
    "BINARY_OP": lambda n: 2, "BINARY_SUBSCR": lambda n: 2, "CALL": lambda n: n + 2, "BUILD_TUPLE": lambda n: n,
}  # fmt: skip
"""How many values instructions take from the stack."""


def _consumer(ops: Sequence[dis.Instruction]) -> int | None:
    """Where the arithmetic stands that takes what the first instruction loads; None if something else does, or may."""
    above = 0
    for op in ops[1:]:
        takes = TAKES[op.opname](op.arg or 0) if op.opname in TAKES else None
        if takes is None:
            return None
        if takes > above:
            return op.offset if op.opname == "BINARY_OP" and op.argrepr in ARITHMETIC else None
        above += dis.stack_effect(op.opcode, op.arg) if op.opname != "CALL" else 1 - takes
    return None


# --- by what it asks --------------------------------------------------------------------------------------------------


def _asks(operation: Callable, *, reflected: bool) -> Callable:
    """The method of `Handed` for an operation, from the right if `reflected`."""
    return lambda self, other: self._ask(operation, other, reflected=reflected)


class Handed:
    """Stands for a number in the call of a function. Only arithmetic can be asked of it, and it notes from where."""

    __array_ufunc__ = None  # NumPy leaves the operation to it

    def __init__(self, tracer: Any, code: types.CodeType) -> None:
        self._tracer, self._code = tracer, code
        self.asked: set[int] = set()

    def _ask(self, operation: Callable, other: Any, *, reflected: bool) -> Any:
        frame = sys._getframe(2)
        if not _jax.is_tracer(other) or frame.f_code is not self._code:
            raise TypeError("minibatch: a number was used otherwise than its function's code says")
        self.asked.add(frame.f_lasti)
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
        fun, count = self.closure.fun, len(self.numbers)
        self.handed = [Handed(tracer, fun.__code__) for tracer in tracers[:count]]
        given = list(zip(self.numbers, self.handed, strict=True))
        named = {number.name: handed for number, handed in given if number.leaf is not None}
        args = tuple([named.get(name, x) for name, x in zip_longest(parameters(fun)[: len(args)], args)])
        inside = over_variables(fun, {number.name: handed for number, handed in given if number.leaf is None})
        return self.closure._replace(fun=inside)(tracers[count:], *args, **kwargs)

    def asked_everywhere(self) -> bool:
        """Whether each operation that the code has was asked of what was handed."""
        sites = operands(self.closure.fun)
        return all(sites[number.name] == handed.asked for number, handed in zip(self.numbers, self.handed, strict=True))


# --- by what was traced -----------------------------------------------------------------------------------------------


def seen_elsewhere(fun: types.FunctionType, numbers: Sequence[Number], captured: Captured) -> bool:
    """Whether another function than `fun` may see one of its numbers, or there is no telling."""
    cells = dict(zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True))
    places = [(cells[x.name], None) if x.name in cells else (fun.__globals__, x.name) for x in numbers if x.leaf is None]
    return not captured.is_whole() or not all(captured.met_once(*place) for place in places)


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
