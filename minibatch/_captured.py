"""What a function sees besides its arguments, and whether any of it was set anew.

A compiled program is stale once a variable that the function captured is rebound. The identities of what can be seen
cheaply are therefore checked at every call: closure variables, defaults and globals of the function and of the user's
functions it refers to, entries of captured dicts and lists, attributes of captured objects and their classes, level by
level, as far as `MOST` slots go. What lies deeper, or in a library, is taken to be constant.

A function may itself set anew what it sees. If it only ever writes it (`calls += 1`, `log.append(x)`), that is a count
kept on the side, and no reason to trace again; its code tells.
"""

from __future__ import annotations

import dis
import enum
import functools
import os
import sys
import sysconfig
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from minibatch import _jax

MOST = 256
MISSING = object()
SIZE = object()
CONTENTS = object()
LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.dirname(__file__),
)
OPAQUE = (enum.Enum, enum.EnumMeta, jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex, type(None))


class Slot(NamedTuple):
    """A place: what is at `key` of `container` (a cell, dict or list), or how long that is (SIZE). Code calls it `name`.

    Of a set or a deque it is all of it (CONTENTS), `value` a copy.
    Of a function, class or another object `key` is the name of an attribute.
    """

    container: Any
    key: Any
    value: Any
    name: str

    def now(self) -> Any:
        """What is there now."""
        if isinstance(self.container, types.CellType):
            return contents(self.container)
        if self.key is SIZE:
            return len(self.container)
        if self.key is CONTENTS:
            return self.container.copy()
        if not isinstance(self.container, (dict, list)):
            return getattr(self.container, self.key, MISSING)
        try:
            return self.container[self.key]
        except LookupError:
            return MISSING

    def changed(self) -> bool:
        """Whether something else is there now."""
        return self.now() != self.value if self.key in (SIZE, CONTENTS) else self.now() is not self.value


class Captured:
    """The state that `roots`, functions or other objects, can see, as it is when this is made.

    What is in a container whose id is in `but`, or at a key of one if both are, is not watched, only looked into.
    """

    def __init__(self, *roots: Any, but: Collection = ()) -> None:
        self._but = but
        self._slots: dict[tuple[int, Any], Slot] = {}
        self._codes: list[types.CodeType] = []
        self._met: Counter[tuple[int, Any]] = Counter()  # how often it was come to each place
        queue, seen = deque(("", root) for root in roots if not isinstance(root, OPAQUE)), set(map(id, roots))
        while queue and len(self._slots) < MOST:
            try:
                for name, value in self._look_into(*queue.popleft()):
                    if id(value) not in seen and not isinstance(value, OPAQUE):
                        seen.add(id(value))
                        queue.append((name, value))
            except Exception:  # what resists being looked at is not watched
                continue
        self.checks: tuple[Check, ...] = ()
        self._arrange()

    def is_of_modules(self) -> bool:
        """Whether all that is watched are globals of modules."""
        return all(_is_of_module(slot.container) for slot in self._slots.values())

    def is_whole(self) -> bool:
        """Whether there was nothing more to watch."""
        return len(self._slots) < MOST

    def met_once(self, container: Any, key: Any) -> bool:
        """Whether one function alone sees what is at `key` of `container`, as far as can be told."""
        return self._met[id(container), key] == 1

    def values(self) -> list:
        """What is in the places watched."""
        return [slot.value for slot in self._slots.values()]

    def sees(self, x: Any) -> bool:
        """Whether `x` is in one of the places watched."""
        return any(slot.value is x for slot in self._slots.values())

    def join(self, other: Captured) -> None:
        """Watch also what `other` watches."""
        self._slots = {**other._slots, **self._slots}
        self._codes += other._codes
        self._arrange()

    def settle(self) -> None:
        """Called after `fun` ran: no longer watch what it set anew itself without ever reading it."""
        written = {slot.name for slot in self._slots.values() if slot.name and slot.changed()}
        if written:
            unread = {name for name in written if not any(is_read(code, name) for code in self._codes)}
            self._slots = {at: slot for at, slot in self._slots.items() if slot.name not in unread}
            self._arrange()

    def _arrange(self) -> None:
        """The slots as checks, container by container."""
        by_container: dict[Any, list[Slot]] = {}
        for slot in self._slots.values():
            is_cell = isinstance(slot.container, types.CellType)
            by_container.setdefault(types.CellType if is_cell else id(slot.container), []).append(slot)
        self.checks = tuple(check for slots in by_container.values() for check in _checks(slots))

    def _watch(self, container: Any, key: Any, value: Any, name: str) -> None:
        self._met[id(container), key] += 1
        if id(container) not in self._but and (id(container), key) not in self._but:
            self._slots.setdefault((id(container), key), Slot(container, key, value, name))

    def _look_into(self, name: str, x: Any) -> Iterator[tuple[str, Any]]:
        """Enter the slots of `x`, known as `name`, and give what is in them."""
        match x:
            case types.FunctionType():
                yield from self._function(x)
            case types.MethodType():
                yield from ((name, x.__func__), (name, x.__self__))
            case functools.partial():
                yield from ((name, y) for y in (x.func, *x.args, *x.keywords.values()))
            case dict():
                yield from self._entries(x, name)
            case list():
                self._watch(x, SIZE, len(x), name)
                for i, y in enumerate(x[:MOST]):
                    self._watch(x, i, y, name)
                    yield name, y
            case set() | deque():
                if len(x) <= MOST:
                    self._watch(x, CONTENTS, x.copy(), name)
                    yield from ((name, y) for y in x)
            case tuple():
                yield from ((name, y) for y in x[:MOST])
            case types.ModuleType():
                pass
            case type():
                yield from self._class(x)
            case _ if type(x).__module__.partition(".")[0] in ("minibatch", "jax", "jaxlib", "numpy"):
                yield name, getattr(x, "__wrapped__", None)  # a mapped or compiled function of the user's
            case _:
                if hasattr(x, "__dict__"):
                    yield from self._entries(x.__dict__, None)
                for key in _slots_of(type(x)):
                    if hasattr(x, key):
                        self._watch(x, key, getattr(x, key), key)
                        yield key, getattr(x, key)
        if type(x).__module__ != "builtins":
            yield name, type(x)

    def _function(self, fun: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if in_library(fun):  # which may wrap one of the user's
            yield from (("", contents(cell)) for cell in fun.__closure__ or () if callable(contents(cell)))
            return
        self._codes += codes(fun.__code__)
        for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
            self._watch(cell, None, contents(cell), name)
            yield name, contents(cell)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(fun, name):
                self._watch(fun, name, getattr(fun, name), "")
        yield from (("", default) for default in fun.__defaults__ or ())
        if fun.__kwdefaults__:
            yield from self._entries(fun.__kwdefaults__, "")
        if fun.__dict__:
            yield from self._entries(fun.__dict__, None, {name for code in self._codes for name in code.co_names})
        names, globals_ = _names(fun.__code__), fun.__globals__
        for name in names:
            if name in globals_:
                value = globals_[name]
                self._watch(globals_, name, value, name)
                if _from_library(value):
                    continue
                if isinstance(value, types.ModuleType):
                    yield from self._entries(vars(value), None, names)
                yield name, value

    def _class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """The attributes of a class and what its methods see, as far as the user wrote it."""
        for base in kind.__mro__:
            if _from_library(base):
                continue
            for name, value in list(vars(base).items()):
                if not name.startswith("__"):
                    self._watch_attribute(kind, name)
                yield name, getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))

    def _watch_attribute(self, kind: type, name: str) -> None:
        value = getattr(kind, name, MISSING)  # some attributes are of objects alone
        if value is not MISSING and getattr(kind, name) is value:  # a class method is made anew whenever it is looked at
            self._watch(kind, name, value, name)

    def _entries(self, mapping: dict, name: str | None, keys: Any = None) -> Iterator[tuple[str, Any]]:
        """The entries of a dict known as `name`; with None, the attributes of an object, each known by its own."""
        if keys is None:
            keys = list(mapping)[:MOST]
            self._watch(mapping, SIZE, len(mapping), name or "")
        for key in keys:
            if key in mapping:
                known_as = str(key) if name is None else name
                self._watch(mapping, key, mapping[key], known_as)
                yield known_as, mapping[key]


class Check(NamedTuple):
    """`read(container)` is `old` as long as nothing was set anew there."""

    read: Callable[[Any], Any]
    container: Any
    old: Any


def changed(checks: Sequence[Check]) -> bool:
    """Whether anything was set anew since these checks were made."""
    try:
        for read, container, old in checks:
            if read(container) is not old:
                return True
    except (LookupError, ValueError, AttributeError):  # an entry or attribute is gone, or a variable unbound
        return True
    return False


def configured() -> tuple[Check, ...]:
    """Checks on what programs depend on in JAX's configuration though its dispatch does not look there."""
    return tuple(Check(attrgetter("value"), state, state.value) for state in _jax.random_states)


FEW = 8
_contents = attrgetter("cell_contents")


def _checks(slots: Sequence[Slot]) -> Iterator[Check]:
    """Checks on slots of one container, or on cells: one for each, or one for all if they are many. Reading runs in C."""
    entries = [slot for slot in slots if slot.key not in (SIZE, CONTENTS)]
    container, keys, old = slots[0].container, [slot.key for slot in entries], [slot.value for slot in entries]
    for size in (slot.value for slot in slots if slot.key is SIZE):
        small = size <= 256  # there is one object of each small int
        yield Check(len, container, size) if small else Check(lambda x, size=size: len(x) == size, container, True)
    for whole in (slot.value for slot in slots if slot.key is CONTENTS):
        yield Check(whole.__eq__, container, True)
    if isinstance(container, types.CellType):
        cells = [slot.container for slot in slots]
        if len(cells) > FEW:
            yield Check(lambda cells: all(map(is_, map(_contents, cells), old)), cells, True)
        else:
            yield from map(Check, repeat(_contents), cells, old)
        return
    getter = itemgetter if isinstance(container, (dict, list)) else attrgetter
    if len(keys) > FEW:
        read = getter(*keys)
        yield Check(lambda x: all(map(is_, read(x), old)), container, True)
    else:
        yield from map(Check, map(getter, keys), repeat(container), old)


def _slots_of(kind: type) -> list[str]:
    """The names of the attributes that objects of this type keep in slots."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in found for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _is_of_module(container: Any) -> bool:
    if isinstance(container, type):
        return getattr(sys.modules.get(container.__module__), container.__qualname__, None) is container
    module = sys.modules.get(container.get("__name__", "")) if isinstance(container, dict) else None
    return module is not None and vars(module) is container


def contents(cell: types.CellType) -> Any:
    """What a closure variable holds now."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return MISSING


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code` and that of the functions defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes(const)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> list[str]:
    """The names of globals and attributes in `code` and in that of the functions defined in it."""
    return [name for inner in codes(code) for name in inner.co_names]


def is_read(code: types.CodeType, name: str) -> bool:
    """Whether `code` may use what is called `name`, rather than count it up, assign to it or append to it."""
    ops = [(op.opname, op.argval) for op in dis.get_instructions(code) if op.opname not in ("CACHE", "PRECALL", "NOP")]
    for i, (op, argument) in enumerate(ops):
        if argument != name or not op.startswith("LOAD_") or op in ("LOAD_CLOSURE", "LOAD_CONST"):
            continue
        before, after = [op for op, _ in ops[max(i - 1, 0) : i]], [op for op, _ in ops[i + 1 : i + 5]]
        counted_up = after[1:2] == ["BINARY_OP"] and any(ops[j] == (op.replace("LOAD", "STORE"), name) for j in _next(i, ops))
        attribute_counted_up = op == "LOAD_ATTR" and before == ["COPY"] and ("STORE_ATTR", name) in ops[i + 1 : i + 5]
        entry_counted_up = after[1:4] == ["COPY", "COPY", "BINARY_SUBSCR"]
        entry_assigned = after[1:2] == ["STORE_SUBSCR"]
        appended = ops[i + 1 : i + 2] and ops[i + 1][0] in ("LOAD_ATTR", "LOAD_METHOD") and ops[i + 1][1] in ("append", "add")
        if not (counted_up or attribute_counted_up or entry_counted_up or entry_assigned or appended):
            return True
    return False


def _next(i: int, ops: list) -> range:
    return range(i + 1, min(i + 4, len(ops)))


@functools.lru_cache(maxsize=4096)
def _is_library_file(file: str) -> bool:
    return file.startswith(LIBRARIES) or file.startswith("<frozen")


def in_library(x: types.FunctionType | types.ModuleType) -> bool:
    """Whether a function or module comes with Python or an installed package rather than from the user's program."""
    if isinstance(x, types.FunctionType):
        return _is_library_file(x.__code__.co_filename)
    file = getattr(x, "__file__", None)
    built_in = file is None and getattr(x, "__spec__", None) is not None
    return x.__name__ != "__main__" and (built_in or (file is not None and _is_library_file(file)))


def _from_library(x: Any) -> bool:
    """Whether `x`, found under a global name, is a library's module, function or class: what those hold stays as it is."""
    if isinstance(x, (types.FunctionType, types.ModuleType)):
        return in_library(x)
    if isinstance(x, type) or (callable(x) and hasattr(x, "__module__")):
        return _is_library_module(x.__module__ or "")
    return False


_library_modules: set[str] = set()


def _is_library_module(name: str) -> bool:
    """Whether the module of this name is a library's. Once it is, it stays one."""
    module = None if name in _library_modules else sys.modules.get(name)
    if module is not None and in_library(module):
        _library_modules.add(name)
    return name in _library_modules
