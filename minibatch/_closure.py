"""A function as one more argument: the arrays that it closes over, and a key for all else that it closes over.

Two closures of the same code over arrays of the same avals are the same program with other arguments. So a function that is
made anew at every turn of a loop is traced once, and a captured array set anew is no reason to trace again.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import jax
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from minibatch import _jax
from minibatch._captured import MISSING, codes, contents, in_library, is_read
from minibatch._keys import Same, static_key
from minibatch._trace import CONCRETIZATION_ERRORS, NeedsConcrete


class Closure(NamedTuple):
    """A function, the arrays that it closes over, and a key for `rest`. `places`: where it found them, see `Parts`.

    `numbers`: those in its cells and globals that were asked for, which the key leaves out.
    """

    fun: Callable
    arrays: list
    rest: list
    key: Hashable
    places: list[tuple[Any, Any]]
    numbers: dict[str, Any]

    @property
    def __wrapped__(self) -> Callable:  # by which its name is found, and JAX finds the line
        return self.fun

    def __call__(self, arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function with these arrays in the place of its own.

        Raises:
          NeedsConcrete: it cannot do with other arrays, or changes a container that holds some.
        """
        if all(map(is_, arrays, self.arrays)):
            return self.fun(*args, **kwargs)
        remade = _Remade(self.fun, arrays)
        try:
            out = remade.fun(*args, **kwargs)
        except CONCRETIZATION_ERRORS:
            raise
        except Exception as error:  # perhaps not with its own: an array of a trace is not known by its devices
            raise NeedsConcrete from error
        if remade.changed():
            raise NeedsConcrete
        return out

    def spoken_for(self) -> set:
        """What need not be watched, its contents being in `arrays` or `key`: ids of containers, and places in a container."""
        found: set = set()
        for container, key in self.places:
            if key is not None:
                found.add((id(container), key))
            elif isinstance(container, types.CellType):
                found.add(id(container))
            else:
                tree_flatten(container, is_leaf=lambda x: bool(found.add(id(x))))  # the containers inside it too
        return found


def taken_apart(fun: Callable, tracers: bool = False, variables: Collection[str] = ()) -> Closure:
    """`fun` as a `Closure`; known by its identity, and without arrays, where its parts depend on one another.

    With `tracers` values of a trace under way are taken for arrays too. Numbers in these `variables` are taken out.
    """
    try:
        apart = _Apart(fun, is_any_array if tracers else is_array, variables)
    except Exception:  # or where something in there resists being looked at
        return Closure(fun, [], [fun], Same(fun), [], {})
    return Closure(fun, apart.arrays, apart.rest, apart.key, apart.places, apart.numbers)


class Inseparable(Exception):  # noqa: N818 - never reaches a user
    """Functions that refer to each other in a circle, or set anew what they also read."""


class _Apart:
    """What is found by walking from a function through all that it closes over."""

    def __init__(self, fun: Callable, is_array: Callable[[Any], bool], variables: Collection[str]) -> None:
        self.arrays: list = []
        self.rest: list = []
        self.numbers: dict[str, Any] = {}
        self._is_array = is_array
        self.places: list[tuple[Any, Any]] = []
        self._functions: dict[int, int] = {}  # by id: how many were met before
        self._entered: set[int] = set()
        self._read: set[str] = set()
        self._stored: set[str] = set()
        self.key = self._of_function(fun, self._without_numbers(fun, variables)) if variables else self._of(fun)
        if self._read & self._stored:
            raise Inseparable

    def _without_numbers(self, fun: Any, variables: Collection[str]) -> Parts:
        """The parts of `fun`, with their types in the place of numbers in these variables."""
        parts, names = parts_of_function(fun), _cell_names(fun)
        outside = set(variables) - set(fun.__code__.co_varnames)
        found = {name: fun.__globals__.get(name) for name in outside} | dict(zip(names, parts.children, strict=False))
        self.numbers = {name: x for name, x in found.items() if name in outside and type(x) in NUMBERS}
        self.places += [(fun.__globals__, name) for name in self.numbers if name not in names]
        return parts.over(names, {name: type(x) for name, x in self.numbers.items()})

    def _of(self, x: Any) -> Hashable:
        if self._is_array(x):
            self.arrays.append(x)
            return None
        parts = parts_of(x)
        if parts is None:
            self.rest.append(x)
            return static_key(x)
        if isinstance(x, types.FunctionType):
            return self._of_function(x, parts)
        return self._of_parts(parts)

    def _of_function(self, fun: types.FunctionType, parts: Parts) -> Hashable:
        if id(fun) in self._entered:
            raise Inseparable
        if id(fun) in self._functions:
            return types.FunctionType, self._functions[id(fun)]
        self._functions[id(fun)] = len(self._functions)
        names = names_of(fun.__code__)
        self._read |= names.read.union(fun.__code__.co_freevars[i] for i, _ in _cells(fun))
        self._stored |= names.stored
        self._entered.add(id(fun))
        key = self._of_parts(parts)
        self._entered.remove(id(fun))
        return key

    def _of_parts(self, parts: Parts) -> Hashable:
        self.places += parts.places
        return parts.kind, tuple([self._of(child) for child in parts.children])


class _Remade:
    """`fun` made of its own parts and of other arrays, which come in the order in which `_Apart` finds its own."""

    def __init__(self, fun: Callable, arrays: Sequence[Any]) -> None:
        self._arrays = iter(arrays)
        self._made: dict[int, tuple[Any, Any]] = {}  # by id: the original, which must not be freed, and what was made of it
        self._containers: list[tuple[Any, list, Any]] = []
        self.fun = self._of(fun)

    def _of(self, x: Any) -> Any:
        if is_array(x):
            return next(self._arrays)
        if id(x) in self._made and isinstance(x, types.FunctionType):
            return self._made[id(x)][1]
        parts = parts_of(x)
        if parts is None:
            return x
        children = [self._of(child) for child in parts.children]
        made = x if all(map(is_, children, parts.children)) else parts.together(children)
        if made is not x and not callable(x):
            self._containers.append((made, children, parts.kind))
        self._made[id(x)] = x, made
        return made

    def changed(self) -> bool:
        """Whether the function changed a container that was made for it, and would have changed the user's own."""
        return any(
            kind != now or not all(map(is_, leaves, children))
            for made, children, kind in self._containers
            for leaves, now in [tree_flatten(made)]
        )


def is_array(x: Any) -> bool:
    """Whether `x` is an array that can be an argument of a compiled program."""
    return type(x) is _jax.ArrayImpl or (isinstance(x, jax.Array) and not _jax.is_tracer(x))


def is_any_array(x: Any) -> bool:
    """As `is_array`, or a value of a trace under way."""
    return isinstance(x, jax.Array)


# --- what something is made of ----------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """The children of something, `together` which makes it of others, and `kind` which tells it from what is made otherwise.

    `places`: where the children are, as containers, or as a container and a key in it.
    """

    kind: Hashable
    children: list
    together: Callable[[list], Any]
    places: list[tuple[Any, Any]]

    def over(self, names: Sequence[str], named: Mapping[str, Any]) -> Parts:
        """The same with some of its first children replaced, which are known by `names`."""
        first = [named.get(name, x) for name, x in zip(names, self.children, strict=False)]
        return self._replace(children=[*first, *self.children[len(first) :]])


SIMPLE = frozenset({int, float, bool, str, bytes, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType})


def parts_of(x: Any) -> Parts | None:
    """The parts of `x`, None where it has none that can be put together again."""
    match x:
        case _ if type(x) in SIMPLE:
            return None
        case types.FunctionType():
            return parts_of_function(x)
        case types.MethodType():
            return Parts(types.MethodType, [x.__func__, x.__self__], lambda parts: types.MethodType(*parts), [])
        case functools.partial():
            return _parts_of_partial(x)
    children, treedef = tree_flatten(x)
    if len(children) == 1 and children[0] is x:
        return None
    return Parts(treedef, children, functools.partial(tree_unflatten, treedef), [(x, None)])


def _parts_of_partial(x: functools.partial) -> Parts:
    names, count = tuple(x.keywords), 1 + len(x.args)

    def together(parts: list) -> functools.partial:
        return functools.partial(*parts[:count], **dict(zip(names, parts[count:], strict=True)))

    return Parts((functools.partial, count, names), [x.func, *x.args, *x.keywords.values()], together, [])


def over_variables(fun: types.FunctionType, named: Mapping[str, Any]) -> types.FunctionType:
    """`fun` over other contents of the cells and globals that it knows by these names."""
    names = _cell_names(fun)
    parts = parts_of_function(fun).over(names, named)
    made = parts.together(parts.children)
    if named.keys() <= set(names):
        return made
    return _function_like(made, {**made.__globals__, **named}, made.__defaults__, made.__kwdefaults__, made.__closure__)


def _function_like(fun: types.FunctionType, globals_: dict, defaults: Any, keywords: Any, closure: Any) -> types.FunctionType:
    made = types.FunctionType(fun.__code__, globals_, fun.__name__, defaults, closure)
    made.__kwdefaults__ = keywords
    made.__dict__.update(fun.__dict__)
    made.__qualname__ = fun.__qualname__
    return made


def parts_of_function(fun: types.FunctionType) -> Parts:
    """Those of a function: what is in its cells comes first."""
    names = names_of(fun.__code__)
    cells = _cells(fun)
    space = {} if in_library(fun) else {name: fun.__globals__[name] for name in names.loaded if name in fun.__globals__}
    space = {name: x for name, x in space.items() if _holds_arrays(x)}
    defaults, keywords = fun.__defaults__ or (), fun.__kwdefaults__ or {}
    children = [*(contents(cell) for _, cell in cells), *space.values(), *defaults, *keywords.values()]

    def together(parts: list) -> types.FunctionType:
        rest = iter(parts)
        closure = list(fun.__closure__ or ())
        for i, _ in cells:
            closure[i] = _cell(next(rest))
        globals_ = {**fun.__globals__, **{name: next(rest) for name in space}} if space else fun.__globals__
        given = tuple(next(rest) for _ in defaults), {name: next(rest) for name in keywords} or None
        return _function_like(fun, globals_, *given, tuple(closure))

    kind = types.FunctionType, fun.__code__, id(fun.__globals__), tuple(space), len(defaults), tuple(keywords)
    places = [*((cell, None) for _, cell in cells), *((fun.__globals__, name) for name in space), (keywords, None)]
    places += [(fun, "__defaults__"), (fun, "__kwdefaults__")]
    return Parts(kind, children, together, places)


NUMBERS = (int, float)
TALLIES = frozenset({int, float, list, set, dict})  # what may be counted up or added to, which tells nothing if nobody reads it


def _cells(fun: types.FunctionType) -> list[tuple[int, types.CellType]]:
    """The cells of `fun` that matter to what it does, each with its number."""
    read, names = names_of(fun.__code__).read, fun.__code__.co_freevars
    cells = enumerate(fun.__closure__ or ())
    return [(i, cell) for i, cell in cells if names[i] in read or type(contents(cell)) not in TALLIES]


def _cell_names(fun: types.FunctionType) -> list[str]:
    return [fun.__code__.co_freevars[i] for i, _ in _cells(fun)]


def _cell(x: Any) -> types.CellType:
    return types.CellType() if x is MISSING else types.CellType(x)


def _holds_arrays(x: Any) -> bool:
    return type(x) not in SIMPLE and not callable(x) and any(map(is_array, tree_leaves(x)))


class Names(NamedTuple):
    """What code calls its variables from outside: those it reads, those of them that are globals, and those it sets."""

    read: frozenset[str]
    loaded: tuple[str, ...]
    stored: frozenset[str]


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> Names:
    """The names in `code` and in the functions defined in it."""
    instructions = [op for inner in codes(code) for op in dis.get_instructions(inner)]
    loaded = dict.fromkeys(op.argval for op in instructions if op.opname == "LOAD_GLOBAL")
    stored = {op.argval for op in instructions if op.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    stored |= {op.argval for op in instructions if op.opname in ("STORE_DEREF", "DELETE_DEREF")} & set(code.co_freevars)
    read = {name for name in (*code.co_freevars, *loaded) if any(is_read(inner, name) for inner in codes(code))}
    return Names(frozenset(read), tuple(loaded), frozenset(stored))
