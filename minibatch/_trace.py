"""The single tracing call: what `fun` does to one lane, as a jaxpr, and what it returned, in its own words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten, treedef_tuple

from minibatch import _axes, _errors, _jax
from minibatch._batched import Axis
from minibatch._divergence import mapping
from minibatch._hoist import hoist


class Call(NamedTuple):
    """One call of the mapped function: its arguments as leaves, and where each leaf has its lanes.

    A mapped leaf has an axis (not negative), or a spec for it as a whole. A shared leaf has None, and is `traced` if the
    program takes it as an argument; otherwise it is part of the program, and `fun` gets it unchanged.
    """

    fun: Callable
    leaves: list
    in_tree: Any
    axes: tuple[Any, ...]
    traced: tuple[bool, ...]
    axis: Axis
    out_axes: Any
    sum_match: bool

    def arrays(self) -> list:
        """The leaves that the program takes, flat."""
        return [x for leaf, traced in zip(self.leaves, self.traced, strict=True) if traced for x in parts(leaf)]

    def array_axes(self) -> list[Any]:
        """The axis of each of `arrays`."""
        picked = zip(self.leaves, self.axes, self.traced, strict=True)
        return [axis for leaf, spec, traced in picked if traced for axis in part_axes(leaf, spec)]

    def with_arrays(self, arrays: Sequence[Any]) -> Call:
        """The same call with these in the place of `arrays()`."""
        rest = iter(arrays)
        return self._replace(leaves=list(lane_leaves(self._replace(axes=(None,) * len(self.axes)), rest)))

    def over(self, arrays: list, fun: Callable) -> Call:
        """A call of `fun` with the same arguments and, before them, a list of shared arrays."""
        args, kwargs = self.in_tree.children()
        positional = treedef_tuple([jax.tree.structure(arrays), *args.children()])
        return self._replace(
            fun=fun,
            leaves=[*arrays, *self.leaves],
            in_tree=treedef_tuple([positional, kwargs]),
            axes=(None,) * len(arrays) + self.axes,
            traced=(True,) * len(arrays) + self.traced,
        )

    def concrete(self) -> Call:
        """The same call with every shared leaf part of the program."""
        return self._replace(traced=tuple(axis is not None for axis in self.axes))


def parts(leaf: Any) -> list:
    """The arrays that make up a leaf: itself, or those of a container that is mapped as a whole."""
    return tree_leaves(leaf) if _jax.is_vmappable(leaf) else [leaf]


def part_axes(leaf: Any, spec: Any) -> list:
    """The axis of each of `parts`."""
    if not _jax.vmappables:
        return [spec]
    return _jax.vmappable_axes(leaf, spec) if _jax.is_map_spec(spec) and _jax.is_vmappable(leaf) else [spec] * len(parts(leaf))


class Returned(NamedTuple):
    """An output that is the argument's leaf number `leaf`, untouched and on the same axis."""

    leaf: int


class Given(NamedTuple):
    """An output without lanes that `fun` made of no traced value: it is handed out as it is."""

    value: Any


class Computed(NamedTuple):
    """Outputs of the jaxpr, each with the axis asked for; `rebuild` makes one leaf of the finished arrays."""

    axes: tuple
    path: str
    rebuild: Callable | None = None


class Traced(NamedTuple):
    """What one call of `fun` was: a jaxpr of one lane, and how its outputs make up what `fun` returned.

    The jaxpr holds no consts: it takes them before the arguments.
    """

    jaxpr: Any
    consts: list
    out_tree: Any
    outputs: tuple[Returned | Given | Computed, ...]


def trace(call: Call, concrete: bool = False) -> tuple[Call, Traced]:
    """Call `fun` once, on tracers, and record what it did and returned; with it the call as it was traced.

    Where it asks for the concrete value of something that no lane changes, it is called once more with the shared
    leaves as they are, evaluating whatever does not depend on a lane (`jax.ensure_compile_time_eval`): at once where
    `concrete` says that it is known to.

    Raises:
      Problem: an output is not of a type that JAX knows, or `out_axes` does not fit what `fun` returned.
      jax.errors.ConcretizationTypeError: `fun` asks for the concrete value of something that differs by lane.
    """
    first = None
    try:
        if not concrete:
            return call, _trace(call, contextlib.nullcontext())
    except CONCRETIZATION_ERRORS as error:
        first = error
    call = call.concrete()
    try:
        return call, _trace(call, jax.ensure_compile_time_eval())
    except CONCRETIZATION_ERRORS as error:
        raise _errors.lane_is_abstract(error, call.fun) from first


def trace_abstractly(call: Call) -> Traced:
    """As `trace`, where it will do with no concrete value.

    Raises:
      Exception: it will not, or whatever else `fun` raises.
    """
    return _trace(call, contextlib.nullcontext())


class NeedsConcrete(Exception):  # noqa: N818 - never reaches a user: the function is called again
    """A function cannot be traced but with the shared arrays as they are."""


CONCRETIZATION_ERRORS = (
    NeedsConcrete,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def _trace(call: Call, mode: contextlib.AbstractContextManager) -> Traced:
    record: list = []

    def one_lane(*tracers: Any) -> list:
        leaves = list(lane_leaves(call, iter(tracers)))
        args, kwargs = tree_unflatten(call.in_tree, leaves)
        with mode:
            out = call.fun(*args, **kwargs)
        arrays, out_tree, outputs = read_outputs(call, leaves, out)
        record[:] = out_tree, outputs
        return arrays

    axis = call.axis
    avals = [_jax.lane_aval(x, d, axis.size) for x, d in zip(call.arrays(), call.array_axes(), strict=True)]
    with _jax.axis_env(axis), mapping(True), _errors.named_in_checked_shards(axis.name):
        jaxpr = _jax.trace_jaxpr(one_lane, avals, named=call.fun)
    consts, jaxpr = hoist(jaxpr)
    out_tree, outputs = record
    return Traced(jaxpr, consts, out_tree, tuple(outputs))


def lane_leaves(call: Call, tracers: Iterator[Any]) -> Iterator[Any]:
    """The arguments' leaves as one lane sees them."""
    for leaf, axis, traced in zip(call.leaves, call.axes, call.traced, strict=True):
        if not traced:
            yield leaf
        elif _jax.is_vmappable(leaf) and axis is not None:
            yield _jax.vmappable_to_lane(leaf, axis, tracers)
        elif _jax.is_vmappable(leaf):
            yield tree_unflatten(jax.tree.structure(leaf), [next(tracers) for _ in parts(leaf)])
        else:
            yield next(tracers)


def read_outputs(call: Call, leaves: Sequence[Any], out: Any) -> tuple[list, Any, list]:
    """What `fun` returned: the arrays the jaxpr must compute, the treedef, and how the one makes up the other."""
    whole = _jax.is_vmappable if _jax.vmappables else None
    flat, out_tree = tree_flatten(out, is_leaf=whole)
    axes = iter(_axes.spread(call.out_axes, out, "out_axes", "the output", lane_dims=1))
    paths = [jax.tree_util.keystr(path) for path, _ in tree_flatten_with_path(out, is_leaf=whole)[0]]
    arrays, outputs = [], []
    for leaf, path in zip(flat, paths, strict=True):
        asked = [next(axes) for _ in parts(leaf)]
        axis = asked[0] if asked else None
        output = _read_output(call, leaves, leaf, axis, path)
        if isinstance(output, Computed):
            arrays += parts(leaf)
        outputs.append(output)
    return arrays, out_tree, outputs


def _read_output(call: Call, leaves: Sequence[Any], leaf: Any, axis: Any, path: str) -> Returned | Given | Computed:
    if _jax.is_vmappable(leaf):
        return _computed_container(call, leaf, axis, path)
    if not (_jax.is_tracer(leaf) or _jax.valid_jaxtype(leaf)):  # a tracer may be of strings, which few functions know
        if axis is None or isinstance(axis, _axes.if_batched):
            return Given(leaf)
        raise _errors.not_a_jax_type(leaf, path)
    where = axis.axis if isinstance(axis, _axes.if_batched) else axis
    rank = np.ndim(leaf) + 1 if type(where) is int else 0
    if type(where) is int and not -rank <= where < rank:
        raise _errors.out_axis_out_of_range(where, leaf, path)
    for i, known in enumerate(leaves):
        if known is leaf and _same_axis(call.axes[i], axis, rank):
            return Returned(i)
    if (axis is None or axis is _jax.INFER) and not _jax.is_tracer(leaf):
        return Given(leaf)
    return Computed((_jax.SUM if axis is None and call.sum_match else axis,), path)


def _same_axis(in_axis: Any, out_axis: Any, rank: int) -> bool:
    if out_axis is _jax.INFER:
        return True
    if isinstance(out_axis, _axes.if_batched):
        out_axis = out_axis.axis if in_axis is not None else None
    return in_axis == (out_axis % rank if type(out_axis) is int else out_axis)


def _computed_container(call: Call, leaf: Any, spec: Any, path: str) -> Computed:
    size, treedef = call.axis.size, jax.tree.structure(leaf)
    lane = tree_unflatten(treedef, [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in parts(leaf)])
    axes = _jax.vmappable_out_axes(lane, spec, size) if _jax.is_map_spec(spec) else [spec] * treedef.num_leaves

    def rebuild(arrays: list) -> Any:
        return _jax.vmappable_from_lane(lane, spec, size, iter(arrays))

    return Computed(tuple(axes), path, rebuild)
