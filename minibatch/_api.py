"""`vmap`, and the object it returns."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
from jax.tree_util import tree_flatten, tree_leaves

from minibatch import _axes, _errors, _jax, rules
from minibatch._batched import Axis
from minibatch._captured import Captured, changed, configured
from minibatch._closure import taken_apart
from minibatch._compile import Program, Programs
from minibatch._divergence import chosen
from minibatch._keys import Latest, Same, is_traced, static_key
from minibatch._lanes import lane_of
from minibatch._operands import numbers_of, operands
from minibatch._trace import Call, parts, trace

__all__ = ["Vmapped", "check", "explain", "find_nonfinite", "rules", "vmap"]

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")


def _reported(method: Callable[Q, S]) -> Callable[Q, S]:
    """`method`, whose problems are raised to the user, headed by the call of `vmap`."""

    @functools.wraps(method)
    def call(*args: Q.args, **kwargs: Q.kwargs) -> S:
        try:
            return method(*args, **kwargs)
        except _errors.Problem as problem:
            mapped: Any = args[0]
            error = problem.about(_errors.echo(mapped._fun, mapped._options, DEFAULTS))
        raise error

    return call


class Vmapped(Generic[P, R]):
    """A function mapped over an axis of its arguments: what `vmap` returns.

    Call it as `fun` itself is called. It keeps `fun`'s name, documentation and signature, works as a method on a class,
    and pickles where `fun` does.
    """

    __wrapped__: Callable[P, R]

    def __init__(self, fun: Callable[P, R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fun)  # before what follows: `fun` may have attributes of the same names
        self._fun = fun
        self._options = options
        self._in_axes = _axes.check("in_axes", options["in_axes"])
        self._out_axes = _axes.check("out_axes", options["out_axes"])
        chosen(options["divergence"])
        self._key = _key_of(options, self._out_axes) or Same(self)
        self._programs = Programs(capacity=128)
        self._axes_by_tree = Latest(capacity=128)
        self._captured: Captured | None = None
        self._checks: tuple = ()
        self._called = False
        self._dispatch: Any = None  # from the second call on: what finds it again

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Map: compiled outside any other transformation, emitted into it inside one."""
        dispatch, checks = self._dispatch, self._checks
        if dispatch is None or (checks and changed(checks)):
            dispatch = self._anew
        return dispatch(*args, **kwargs)

    def _anew(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._called or (self._dispatch is not None and changed(self._checks)):
            self._dispatch, self._captured, self._called = None, None, False
            return self.answer(args, kwargs)[0]
        self._watch(Captured(self._fun))
        self._dispatch = _dispatcher(self)
        return self._dispatch(*args, **kwargs)

    def _watch(self, captured: Captured) -> None:
        self._captured, self._checks = captured, (*captured.checks, *configured())

    def _watches(self, captured: Captured) -> bool:
        """Whether what static arguments see is watched at every call: of modules alone, so that nothing is kept alive."""
        if not captured.checks:
            return True
        known = self._captured
        if known is None or not (known.is_whole() and captured.is_whole() and captured.is_of_modules()):
            return False
        known.join(captured)
        self._watch(known)
        return True

    @_reported
    def answer(self, args: tuple, kwargs: dict) -> tuple[Any, Any, bool]:
        """The result of a call, and what a `_jax.dispatcher` is to remember of it: see there."""
        if not self._options["compile"] or not _jax.trace_state_clean():
            return self._emit(self._bind(args, kwargs)), None, True
        try:
            closure = taken_apart(self._fun, variables=operands(self._fun))
            leaves, in_tree = _flatten(args, kwargs)
            axes = self._axes_of(args, kwargs, leaves, in_tree)
            numbers = numbers_of(self._fun, closure, args, in_tree, axes)
            bind = functools.partial(self._bind, args, kwargs)
            program, known = self._programs.find(closure, numbers, self._key, in_tree, axes, leaves, bind)
            self._called = True
            leaves = [*closure.arrays, *leaves]
            if known:
                held = len(closure.arrays)
                return program.with_entry(leaves, held, self._watches) if self._dispatch else (program(leaves), None, True)
            if self._captured is not None:
                self._captured.settle()
                self._watch(self._captured)
            return program(leaves), None, True
        except BaseException:
            self._dispatch = None  # which has remembered that it failed
            raise

    @_reported
    def jaxpr(self, *args: Any, annotate: bool = False, **kwargs: Any) -> Any:
        """The batched program for these arguments, as a jaxpr that prints.

        Args:
          *args: as for a call; an array may be a `jax.ShapeDtypeStruct`.
          annotate: True for the program as text, its inputs by name and each variable with its lane axis: `f32[B:3,2]`.
          **kwargs: as for a call.

        Returns:
          A closed jaxpr. Its inputs are the arrays among the arguments, in order; what else was shared is part of it.
          Where it is to be annotated, a string; what the function captured is an input there too.

        Examples:
          >>> import jax.numpy as jnp, minibatch
          >>> print(minibatch.vmap(lambda x, w: x @ w, in_axes=(0, None)).jaxpr(jnp.ones((3, 2)), jnp.ones(2)))
          { lambda ; a:f32[3,2] b:f32[2]. let
              c:f32[3] = dot_general[
                dimension_numbers=(([1], [0]), ([], []))
                preferred_element_type=float32
              ] a b
            in (c,) }

          >>> print(minibatch.vmap(lambda x, w: x @ w, in_axes=(0, None)).jaxpr(jnp.ones((3, 2)), jnp.ones(2), annotate=True))
          { lambda ; x:f32[B:3,2] w:f32[2]. let
              a:f32[B:3] = dot_general[dimension_numbers=(((1,),(0,)),((),())) preferred_element_type=float32] x w
            in (a,) }
        """
        call = self._bind(args, kwargs)
        if annotate:
            from minibatch.report.report import annotated

            return annotated(call, self._names(args, kwargs))
        avals = [_jax.aval_of(x) for x in call.arrays()]
        return _jax.trace_jaxpr(lambda *arrays: tree_leaves(self._emit(call.with_arrays(arrays))), avals)

    @_reported
    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """What batching does to the function, for these arguments: see `explain`, whose options have their defaults here.

        Args:
          *args: as for a call; an array may be a `jax.ShapeDtypeStruct`.
          **kwargs: likewise.

        Returns:
          A report, to be printed. It also knows whether calls so far had to be compiled anew, and why.
        """
        return self._explain(args, kwargs, {})

    def _explain(self, args: tuple, kwargs: dict, options: dict[str, Any]) -> Any:
        from minibatch.report.report import explain  # not needed to map, and not loaded for it

        names = self._names(args, kwargs)
        return explain(self._bind(args, kwargs), names, calls=self._programs.differences(names), **options)

    def _bind_values(self, what: str, args: tuple, kwargs: dict) -> Call:
        """The call, of arrays that have values.

        Raises:
          Problem: some have none.
        """
        call = self._bind(args, kwargs)
        if any(isinstance(x, jax.ShapeDtypeStruct) or _jax.is_tracer(x) for x in call.leaves):
            raise _errors.no_values(what)
        return call

    def _names(self, args: tuple, kwargs: dict) -> list[str]:
        return [name.removeprefix("argument ") for name in _axes.leaf_names(self._fun, args, kwargs)]

    @_reported
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Trace the batched program as `jax.jit(...).trace` does. Arguments without any array are static."""
        return self._jitted(args, kwargs).trace(*args, **kwargs)

    @_reported
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lower the batched program as `jax.jit(...).lower` does. Arguments without any array are static."""
        return self._jitted(args, kwargs).lower(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget the programs compiled so far."""
        self._programs.clear()
        self._dispatch, self._captured, self._checks, self._called = None, None, (), False

    def _jitted(self, args: tuple, kwargs: dict) -> Any:
        static = [i for i, arg in enumerate(args) if _is_static(arg)]
        names = [name for name, arg in kwargs.items() if _is_static(arg)]

        def emitted(*args: Any, **kwargs: Any) -> Any:
            return self._emit(self._bind(args, kwargs))

        emitted.__name__ = _errors.name_of(self._fun)
        return jax.jit(emitted, static_argnums=static, static_argnames=names)

    def _emit(self, call: Call) -> Any:
        """The call inside the transformation under way."""
        call, traced = lane_of(call, self._key) if self._options["compile"] else trace(call)
        return Program(call, traced).emit(call.leaves)

    def _bind(self, args: tuple, kwargs: dict) -> Call:
        """The call in full.

        Raises:
          Problem: the arguments do not fit `in_axes`, or their sizes differ.
        """
        leaves, in_tree = _flatten(args, kwargs)
        axes = self._axes_of(args, kwargs, leaves, in_tree)
        names = functools.partial(_axes.leaf_names, self._fun, args, kwargs)
        _check_references(leaves, names)
        size = _axes.size_of(axes, leaves, self._options["axis_size"], names)
        if size is None and not (args or kwargs):
            raise _errors.nothing_mapped([])
        axes = tuple([d if type(d) is not int or d >= 0 else d + len(x.shape) for d, x in zip(axes, leaves, strict=True)])
        traced = tuple([d is not None or is_traced(x) for d, x in zip(axes, leaves, strict=True)])
        mesh_name = _axes.mesh_name(axes, leaves)
        spmd_name = _axes.spmd_name(self._options["spmd_axis_name"], mesh_name)
        divergence = chosen(self._options["divergence"])
        axis = Axis(size, self._options["axis_name"], spmd_name, mesh_name, divergence=divergence)
        return Call(self._fun, leaves, in_tree, axes, traced, axis, self._out_axes, self._options["sum_match"])

    def _axes_of(self, args: tuple, kwargs: dict, leaves: list, in_tree: Any) -> tuple[int | None, ...]:
        """The axis for each leaf, as the user counts it; remembered by structure unless leaves were asked."""
        known = self._axes_by_tree.get(in_tree)
        if known is not None:
            return known
        specs, by_name = _axes.for_arguments(self._fun, self._in_axes, args, kwargs)
        axes: list[int | None] = []
        for i, (spec, arg) in enumerate(zip(specs, args, strict=True)):
            axes += _axes.spread(spec, arg, f"in_axes[{i}]", f"args[{i}]")
        for name in sorted(kwargs):
            axes += _axes.spread(by_name[name], kwargs[name], f"in_axes[{name!r}]", f"kwargs[{name!r}]")
        found = tuple(_merge_parts(axes, leaves) if _jax.vmappables else axes)
        if not any(map(callable, tree_leaves((specs, by_name)))):
            self._axes_by_tree.put(in_tree, found)
        return found

    @overload
    def __get__(self, instance: None, owner: type) -> Vmapped[P, R]: ...
    @overload
    def __get__(self: Vmapped[Concatenate[Any, Q], S], instance: object, owner: type | None = None) -> Callable[Q, S]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> tuple:
        return type(self), (self._fun, self._options)

    def __repr__(self) -> str:
        return f"<minibatch.vmap of {_errors.name_of(self._fun)}, in_axes={self._in_axes}, out_axes={self._out_axes}>"


DEFAULTS = {
    "in_axes": 0, "out_axes": 0, "axis_name": None, "axis_size": None, "spmd_axis_name": None, "sum_match": False,
    "compile": True, "divergence": None,
}  # fmt: skip


def _key_of(options: dict[str, Any], out_axes: Any) -> Hashable:
    """What a program depends on besides its function and arguments; None if there is no telling."""
    spec, treedef = tree_flatten(out_axes)
    rest = (value for name, value in options.items() if name not in ("in_axes", "out_axes", "compile"))
    key = tuple(map(static_key, spec)), treedef, *rest
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _dispatcher(mapped: Vmapped) -> Callable:
    """What finds the programs of `mapped`. It holds it weakly, being a part of it."""
    known = weakref.ref(mapped)

    def miss(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        mapped: Any = known()
        return mapped.answer(args, kwargs)

    return _jax.dispatcher(_errors.name_of(mapped), miss)


def _flatten(args: tuple, kwargs: dict) -> tuple[list, Any]:
    return tree_flatten((args, kwargs), is_leaf=_jax.is_vmappable if _jax.vmappables else None)


def _check_references(leaves: list, names: Callable[[], Sequence[str]]) -> None:
    met: dict[int, int] = {}
    for i, x in enumerate(leaves):
        if _jax.is_view(x):
            raise _errors.view_of_a_reference(names()[i])
        if _jax.is_ref(x) and met.setdefault(id(x), i) != i:
            raise _errors.reference_passed_twice(names()[met[id(x)]], names()[i])


def _is_static(arg: Any) -> bool:
    return not any(isinstance(x, jax.ShapeDtypeStruct) or hasattr(x, "__array__") for x in tree_leaves(arg))


def _merge_parts(axes: list, leaves: list) -> list:
    """One axis for each leaf, from one for each array: a container mapped as a whole has the same for all its arrays."""
    rest = iter(axes)
    return [[next(rest) for _ in parts(leaf)].pop() for leaf in leaves]


@overload
def vmap(fun: Callable[P, R], in_axes: Any = 0, out_axes: Any = 0, axis_name: Hashable | None = None,
         axis_size: int | None = None, spmd_axis_name: Any = None, sum_match: bool = False, *, compile: bool = True,
         divergence: str | Sequence[str] | None = None) -> Vmapped[P, R]: ...  # fmt: skip
@overload
def vmap(fun: None = None, in_axes: Any = 0, out_axes: Any = 0, axis_name: Hashable | None = None,
         axis_size: int | None = None, spmd_axis_name: Any = None, sum_match: bool = False, *,
         compile: bool = True,
         divergence: str | Sequence[str] | None = None) -> Callable[[Callable[P, R]], Vmapped[P, R]]: ...  # fmt: skip
def vmap(
    fun: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    sum_match: bool = False,
    *,
    compile: bool = True,
    divergence: str | Sequence[str] | None = None,
) -> Any:
    """Map `fun` over an axis of its arguments.

    As `jax.vmap`, with the first seven arguments in the same order and of the same meaning. Outside any other
    transformation the mapped function is compiled by `jax.jit`, and like every compiled function is taken to be pure;
    inside one it is emitted into it.

    Args:
      fun: the function of one lane. Omitted, `vmap(in_axes=...)` is a decorator.
      in_axes: where each argument has its lanes: an int, None (shared by all lanes), a container of those that matches
        the argument node by node (None or an int stands for a whole subtree), or a callable asked for each leaf, such
        as `if_array(0)`. A tuple has one entry for each parameter of `fun`, in order, however it is passed; a dict has
        one by the parameter's name. A keyword argument that neither covers is mapped on axis 0, except leaves that have
        no such axis, which are shared.
      out_axes: likewise where each output gets its lanes; None for an output that no lane changes, `if_batched(0)`
        to have lanes only where one does.
      axis_name: a name for the mapped axis, for collectives in `fun`.
      axis_size: the number of lanes; needed where no argument is mapped.
      spmd_axis_name: mesh axis, or a tuple of them, over which the mapped axis is sharded.
      sum_match: True to sum the lanes of an output that differs by lane where `out_axes` has None, as the derivative for
        something that lanes share is to be. An output that all lanes share stays as it is.
      compile: False to trace afresh at every call and run equation by equation, as `jax.vmap` does.
      divergence: how loops and branches run whose lanes diverge: "lockstep", "compact" or "refill" for loops, "select" or
        "partition" for branches, or a tuple of both; "auto" for whichever should take least time. None: as the region
        says (`divergence`), else "auto".

    Returns:
      A `Vmapped`: callable as `fun` is, with a lane axis in the mapped arguments and in the results.

    Raises:
      TypeError: `fun` is not callable, or `in_axes` or `out_axes` hold something that is no axis.
      ValueError: `divergence` holds a word that is no schedule; at the call, if the arguments do not fit `in_axes`, or
        their sizes differ.

    Examples:
      >>> import jax.numpy as jnp, minibatch
      >>> minibatch.vmap(lambda x, w: x @ w, in_axes=(0, None))(jnp.ones((3, 2)), jnp.ones(2))
      Array([2., 2., 2.], dtype=float32)

      >>> @minibatch.vmap(in_axes={"scale": None})
      ... def scaled(x, scale):
      ...     return x * scale
      >>> scaled(jnp.arange(3.0), scale=2.0)
      Array([0., 2., 4.], dtype=float32)
    """
    options = {
        "in_axes": in_axes,
        "out_axes": out_axes,
        "axis_name": axis_name,
        "axis_size": axis_size,
        "spmd_axis_name": spmd_axis_name,
        "sum_match": sum_match,
        "compile": compile,
        "divergence": divergence,
    }
    if fun is None:
        return lambda fun: vmap(fun, **options)
    if not callable(fun):
        raise _errors.not_callable(fun)
    return Vmapped(fun, options)


def explain(
    fun: Callable,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    *,
    divergence: str | Sequence[str] | None = None,
    memory: int | str = "16GB",
    analyze: bool = False,
) -> Callable[..., Any]:
    """What `vmap(fun, ...)` does to a program: which lines get lanes, what each becomes, what it costs, what to mend.

    The function is traced, never run, unless it is to be analyzed.

    Args:
      fun, in_axes, out_axes, axis_name, axis_size, spmd_axis_name, divergence: as for `vmap`.
      memory: how many bytes there are (`"8GB"`, `"512MiB"`, a number), to say how many lanes fit.
      analyze: True to run it too: once to count the steps of each lane in each loop and the lanes in each branch, once to
        take the time of each line.

    Returns:
      A function of the arguments of `fun`, which may be `jax.ShapeDtypeStruct`s, that returns a report. Print it; its
      `findings` say what to mend, `why(x)` why a value differs by lane, `full()` lists every equation, `to_dict()` is all
      of it as data.

    Raises:
      ValueError: at the call, if the arguments do not fit `in_axes`, or `memory` is no number of bytes. An error that
        `fun` raises while it is traced is raised as it is.

    Examples:
      >>> import jax, minibatch
      >>> report = minibatch.explain(lambda x, w: x @ w, in_axes=(0, None))(
      ...     jax.ShapeDtypeStruct((128, 3), "float32"), jax.ShapeDtypeStruct((3,), "float32")
      ... )
      >>> report.findings
      []
      >>> print(report.why("output"))
      dot_general  (equation 1)  <doctest minibatch._api.explain[1]>:1
        <- argument x, lanes on axis 0
      <BLANKLINE>
    """
    mapped = vmap(fun, in_axes, out_axes, axis_name, axis_size, spmd_axis_name, divergence=divergence)

    def run(mapped: Vmapped, *args: Any, **kwargs: Any) -> Any:
        if analyze:
            mapped._bind_values("explain(..., analyze=True)", args, kwargs)
        return mapped._explain(args, kwargs, {"memory": memory, "analyze": analyze})

    return functools.partial(_reported(run), mapped)


def find_nonfinite(
    fun: Callable,
    in_axes: Any = 0,
    *,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    everywhere: bool = False,
) -> Callable[..., Any]:
    """Which lanes turned NaN or infinite: at which equation and line first, in which step of a loop, and on what.

    It runs the mapped function, with what is watched for beside it. An equation is the first if it makes a NaN of what had
    none, or an infinity of what was finite. Where `fun` is a gradient, equations of the backward pass are watched like any.

    Args:
      fun, in_axes, axis_name, axis_size: as for `vmap`.
      everywhere: False for lanes that return a NaN or an infinity; True also for those in which it comes and goes.

    Returns:
      A function of the arguments of `fun` that returns what it found: true if anything was, to be printed, with `lanes` and
      `events` as data.

    Raises:
      ValueError: at the call, if the arguments do not fit `in_axes`, or are shapes without values.

    Examples:
      >>> import jax.numpy as jnp, minibatch
      >>> found = minibatch.find_nonfinite(lambda x: jnp.log(x) * 2)(jnp.array([1.0, -1.0, 2.0]))
      >>> found.lanes
      (1,)
      >>> found.events[0].primitive
      'log'
    """
    mapped = vmap(fun, in_axes, _axes.if_batched(0), axis_name, axis_size)

    def run(mapped: Vmapped, *args: Any, **kwargs: Any) -> Any:
        from minibatch.report.nonfinite import find

        call = mapped._bind_values("find_nonfinite", args, kwargs)
        return find(call, mapped._names(args, kwargs), everywhere)

    return functools.partial(_reported(run), mapped)


def check(
    fun: Callable,
    in_axes: Any = 0,
    *,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
) -> Callable[..., Any]:
    """Whether each equation of the batched program computes what it computes in each lane by itself.

    For people who write rules. Every equation runs once batched, by its rule, and once for each lane, on the same values, so
    that the first to disagree is found by itself, also inside loops and branches. Slow: use few lanes.

    Args:
      fun, in_axes, axis_name, axis_size: as for `vmap`.

    Returns:
      A function of the arguments of `fun` that returns what it found: true if all equations agree, to be printed, with
      `first`, the first that does not, as data. Equations in which the lanes of a named axis meet mean nothing in a lane by
      itself, and are told apart as `unchecked`.

    Raises:
      ValueError: at the call, if the arguments do not fit `in_axes`, are shapes without values, or have no lanes.

    Examples:
      >>> import jax.numpy as jnp, minibatch
      >>> minibatch.check(lambda x, w: jnp.tanh(w @ x), in_axes=(0, None))(jnp.ones((3, 2)), jnp.ones((4, 2)))
      minibatch.check  <lambda>: 2 equations agree with their lanes
    """
    mapped = vmap(fun, in_axes, _axes.if_batched(0), axis_name, axis_size)

    def run(mapped: Vmapped, *args: Any, **kwargs: Any) -> Any:
        from minibatch.report.checking import check

        return check(mapped._bind_values("check", args, kwargs), mapped._names(args, kwargs))

    return functools.partial(_reported(run), mapped)
