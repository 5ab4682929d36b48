"""The one door to JAX's internals and to the differences between its versions."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import operator
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from struct import Struct
from types import BuiltinFunctionType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import tree_util as _tree_util
from jax._src.ad_util import Zero
from jax._src.api_util import fun_sourceinfo
from jax._src.array import ArrayImpl
from jax._src.checkify import FailedCheckError
from jax._src.config import trace_context as _trace_context
from jax._src.core import (
    DebugInfo,
    DropVar,
    ShardingTypeError,
    current_jaxpr_eqn_context,
    is_literalable,
    trace_state_clean,
    valid_jaxtype,
)
from jax._src.custom_batching import custom_vmap_p as _custom_vmap_p
from jax._src.dtypes import canonicalize_value
from jax._src.effects import Effect, JaxprInputEffect
from jax._src.hijax import MappingSpec
from jax._src.indexing import Slice
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.interpreters.partial_eval import (
    DynamicJaxprTrace,
    DynamicJaxprTracer,
    const_fold_rules,
    convert_constvars_jaxpr,
    custom_staging_rules,
    trace_to_jaxpr_dynamic,
)
from jax._src.lax import parallel as _parallel
from jax._src.linear_util import WrappedFun
from jax._src.mesh import get_abstract_mesh
from jax._src.named_sharding import UNSPECIFIED, UnspecifiedValue
from jax._src.pjit import PjitInfo
from jax._src.source_info_util import SourceInfo, is_user_filename, user_frame
from jax._src.source_info_util import _source_info_context as _source_info
from jax._src.source_info_util import current as source_info
from jax._src.state.discharge import discharge_state as _discharge_state
from jax._src.state.indexing import NDIndexer
from jax._src.state.types import TransformedRef
from jax._src.traceback_util import register_exclusion as _hide_frames
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, gensym
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import (
    register_exclusion,
    summarize,
    transform_name_stack,
    user_context,
)
from jax.ref import Ref
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, default_registry

__all__ = [
    "INFER",
    "SUM",
    "ArrayImpl",
    "ClosedJaxpr",
    "DropVar",
    "Jaxpr",
    "Literal",
    "NDIndexer",
    "Primitive",
    "ShardingTypeError",
    "Slice",
    "Surroundings",
    "apply_registered",
    "as_argument",
    "aval_key",
    "aval_of",
    "aval_of_shape",
    "axis_env",
    "batched_aval",
    "called",
    "checkpoint_of",
    "checks_varying",
    "closed",
    "concerns_lanes",
    "consts_of",
    "discharge",
    "discharged",
    "dtype_of",
    "evaluate",
    "failed_check",
    "has_cotangent",
    "has_third_party_rule",
    "has_traced_consts",
    "hide",
    "hoisted",
    "inner_jaxprs",
    "is_key",
    "is_own_primitive",
    "is_placed",
    "is_ref",
    "is_staging",
    "is_under_way",
    "is_view",
    "is_vmappable",
    "is_zero",
    "lane_aval",
    "lanes_meet",
    "lift_sharding",
    "mesh_axis",
    "names_axes",
    "names_axis",
    "names_given_up",
    "no_cotangent",
    "numbers",
    "of_many",
    "open_jaxpr",
    "ordered",
    "passing",
    "plain_aval",
    "primitives_of_jax",
    "pull_back",
    "pulled_back",
    "raised_by_jax",
    "raising_line",
    "random_states",
    "rebind",
    "rebind_as",
    "repeat",
    "reshaped",
    "scan_counts",
    "side_effects",
    "sparse_definition",
    "synchronous",
    "trace_context",
    "trace_jaxpr",
    "trace_state_clean",
    "transform_name_stack",
    "user_file_and_line",
    "user_line",
    "valid_jaxtype",
    "variables_seen",
    "vary",
    "vary_like",
    "varying",
    "varying_aval",
    "vmappable_from_lane",
    "vmappable_to_lane",
    "vmappables",
    "with_captured",
    "with_lanes",
    "wrapped",
    "zero_of_lane",
    "zero_of_lanes",
    "zeros",
]

_xla: Any = importlib.import_module("jaxlib._jax")

ONE_JAXPR_CLASS = ClosedJaxpr is Jaxpr  # since 0.11: a Jaxpr carries its own consts


def trace_context() -> Any:
    """What JAX's configuration says that a traced program depends on, and what it depends on besides."""
    return _trace_context(), _config.debug_nans.value, _config.debug_infs.value, *[state.value for state in random_states]


random_states = (_config.default_prng_impl, _config.enable_custom_prng)  # which `jax.jit` does not look at


def hide(file: str) -> None:
    """Keep the frames of `file` out of source info and of filtered tracebacks."""
    register_exclusion(file)
    _hide_frames(file)


# --- jaxprs -----------------------------------------------------------------------------------------------------------


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its consts, whether it came open or closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The consts that a jaxpr carries: none where it is open."""
    return getattr(jaxpr, "consts", ())


def closed(jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
    """The open `jaxpr` with values for its constvars."""
    return ClosedJaxpr(jaxpr, consts)


def trace_jaxpr(fun: Callable, avals: Sequence[Any], named: Any = None) -> Any:
    """The closed jaxpr of `fun`, from flat arrays to a flat list, at `avals`: traced anew, and kept by nobody.

    JAX's messages know it by the name and file of `named`, a function or a jaxpr. `jax.make_jaxpr` does the same for
    functions in general: it takes six times as long to begin.
    """
    if hasattr(open_jaxpr(named), "debug_info"):
        info = open_jaxpr(named).debug_info.with_unknown_names()
    else:
        info = DebugInfo("vmap", fun_sourceinfo(named or fun), tuple(f"args[{i}]" for i in range(len(avals))), None)
    jaxpr, _, consts = trace_to_jaxpr_dynamic(wrap_init(fun, debug_info=info), avals)
    return closed(jaxpr, consts)


@functools.lru_cache(maxsize=4096)
def batched_aval(aval: Any, size: Any, bdim: int, mesh_name: Any = None) -> Any:
    """The aval of `size` lanes of `aval`, indexed by dimension `bdim`."""
    return _core.unmapped_aval(size, bdim, aval, mesh_name)


def lane_aval(x: Any, axis: Any, size: Any = None) -> Any:
    """The aval of one lane of `x`, whose lanes are on `axis` (None: shared); `size` is needed where `is_map_spec(axis)`."""
    aval = aval_of(x)
    if axis is None:
        return aval
    return _mapped_aval(size if is_map_spec(axis) else aval.shape[axis], axis, aval)


_mapped_aval = functools.lru_cache(maxsize=4096)(_core.mapped_aval)


def aval_of(x: Any) -> Any:
    """The aval of an array, or of a `jax.ShapeDtypeStruct` that stands for one."""
    return _core.shaped_abstractify(x) if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def numbers(size: int, dtype: Any, mesh_name: Any = None) -> Any:
    """The numbers [size] of the lanes, on an explicit mesh laid out as the lanes are."""
    sharding = None if mesh_name is None else jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P(mesh_name))
    return jax.lax.broadcasted_iota(dtype, (size,), 0, out_sharding=sharding)


def aval_key(x: Any) -> Any:
    """A key for the shape, dtype, weak type and sharding of `x`, an array or a container of arrays."""
    if is_vmappable(x):
        return jax.tree.structure(x), tuple(map(aval_key, jax.tree.leaves(x)))
    if is_view(x):  # has none: it is refused where its name is known
        return type(x)
    return x.aval if isinstance(x, jax.Array) else aval_of(x)


def mesh_axis(x: Any, axis: int) -> Any:
    """The explicit mesh axis over which dimension `axis` of `x` is sharded, or None."""
    parts = _spec_parts(x)
    return parts[axis] if axis < len(parts) else None


def varying(x: Any) -> frozenset:
    """The manual mesh axes over which `x` varies."""
    return jax.typeof(x).mat.varying


def vary(x: Any, names: Iterable[Any]) -> Any:
    """`x`, made to vary over these manual mesh axes too."""
    missing = tuple(name for name in names if name not in varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_aval(aval: Any, names: Iterable[Any]) -> Any:
    """The aval of what `vary` makes of an array of `aval`, also of one that was outside of the shard_map under way."""
    if not names or not isinstance(aval, _core.ShapedArray):
        return aval
    mat, sharding = aval.mat, aval.sharding
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), sharding.spec)
    return aval.update(sharding=sharding, manual_axis_type=mat.update(varying=mat.varying | frozenset(names)))


def uses_mesh_axis(x: Any, name: Any) -> bool:
    """Whether some dimension of `x` is sharded over an explicit mesh axis in `name`."""
    return bool({n for part in _spec_parts(x) for n in _names_in(part)} & set(_names_in(name)))


def _spec_parts(x: Any) -> tuple:
    """The mesh axes over which each dimension of `x` is sharded, as far as that is said."""
    aval = x.aval if type(x) is ArrayImpl else aval_of(x) if valid_jaxtype(x) else None
    sharding = getattr(aval, "sharding", None)
    return () if sharding is None or sharding.mesh.empty else sharding.spec.partitions


def of_many(names: tuple) -> tuple:
    """These mesh axes, without those of size one where JAX is told to leave them out of types."""
    if not _config.remove_size_one_mesh_axis_from_type.value:
        return names
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple(name for name in names if shape.get(name) != 1)


def explicit_names(mesh: Any, name: Any) -> tuple:
    """Those of the mesh axes in `name` that are explicit in `mesh`."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(n for n in _names_in(name) if kinds.get(n) == AxisType.Explicit)


def as_argument(const: Any) -> Any:
    """A const of a jaxpr as an argument for a compiled program."""
    return const if isinstance(const, jax.Array) or is_ref(const) else jnp.asarray(const)


def is_tracer(x: Any) -> bool:
    """Whether `x` is a value of a trace under way."""
    return isinstance(x, _core.Tracer)


def is_abstract(x: Any) -> bool:
    """Whether `x` is a value of a trace that not even Python can look at."""
    return is_tracer(x) and x.to_concrete_value() is None


def is_symbolic(x: Any) -> bool:
    """Whether `x` is a value of a trace whose shape has sizes that are not known: those of two exports cannot be compared."""
    return is_tracer(x) and any(not isinstance(size, int) for size in getattr(x.aval, "shape", ()))


def checks_varying() -> bool:
    """Whether JAX keeps account of the manual mesh axes over which each value varies."""
    return bool(_config._check_vma.value)


def watches_nans() -> bool:
    """Whether JAX is told to raise at every NaN or infinity."""
    return _config.debug_nans.value or _config.debug_infs.value


def is_ref(x: Any) -> bool:
    """Whether `x` is a mutable array reference."""
    return isinstance(x, Ref)


def is_view(x: Any) -> bool:
    """Whether `x` is a part of a reference, `ref.at[...]`."""
    return isinstance(x, TransformedRef)


# --- equations --------------------------------------------------------------------------------------------------------


REDUCERS = ("reduce", "scatter", "select_and_scatter")  # first-order all the same: a jaxpr of theirs is of two scalars


UNKNOWN = (None,)  # the avals of results that are to be inferred


def rebind(eqn: Any, /, *operands: Any, **changed: Any) -> list:
    """The same equation on `operands`, with these params changed. Always a list of results."""
    return _rebind(eqn, operands, changed, UNKNOWN)


def rebind_as(avals: Sequence[Any], eqn: Any, /, *operands: Any, **changed: Any) -> list:
    """As `rebind`, where the results are known to be of `avals`; None among them says that they are not known after all."""
    return _rebind(eqn, operands, changed, UNKNOWN if eqn.effects else avals)


def repeat(eqn: Any, /, *operands: Any) -> list:
    """The same equation on operands of the same avals, whose results are so too."""
    return rebind_as([v.aval if _is_plain(v.aval) else None for v in eqn.outvars], eqn, *operands)


def _rebind(eqn: Any, operands: Sequence[Any], changed: dict[str, Any], avals: Sequence[Any]) -> list:
    primitive, params = eqn.primitive, {**eqn.params, **changed} if changed else eqn.params
    if changed and primitive.name in CONSTS_AS_OPERANDS and _takes_consts(changed.values()):
        operands, params = CONSTS_AS_OPERANDS[primitive.name](operands, params)
    if is_staging() and _stages(primitive, params, avals):
        return _stage(primitive, operands, params, avals)
    if _config._check_vma.value and (primitive.name.startswith(REDUCERS) or not any(_core.jaxprs_in_params(params))):
        operands = _core.auto_insert_reshard(*operands)  # a shared operand may vary over fewer manual mesh axes
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def checkpoint_of(eqn: Any, jaxpr: Any, operands: Sequence[Any]) -> list:
    """The same checkpoint of another closed jaxpr, whose operands may have others before those that `eqn` has."""
    consts, jaxpr = hoisted(jaxpr)
    operands, prevent_cse = [*consts, *operands], eqn.params["prevent_cse"]
    if isinstance(prevent_cse, tuple):
        prevent_cse = (False,) * (len(operands) - len(prevent_cse)) + prevent_cse
    return rebind(eqn, *operands, jaxpr=open_jaxpr(jaxpr), prevent_cse=prevent_cse)


def passing(name: str) -> Primitive:
    """A primitive whose value is that of its last operand: what else it does, its rule says."""
    primitive = Primitive(name)
    primitive.def_impl(lambda *operands: operands[-1])
    primitive.def_abstract_eval(lambda *avals: avals[-1])
    _mlir.register_lowering(primitive, lambda ctx, *operands: [operands[-1]])
    return primitive


detach_p = passing("detach")  # stays in what a map leaves behind, and so is known to derivatives, and to `jax.vmap` around
_ad.defjvp_zero(detach_p)
_ad.primitive_transposes[detach_p] = lambda cotangent, x: [Zero(x.aval.to_ct_aval())]
_batching.primitive_batchers[detach_p] = lambda operands, bdims: (detach_p.bind(*operands), bdims[0])


def detach(x: Any) -> Any:
    """`x`, to which no derivative flows back: for what a lane that sits out computes with, whose results nobody reads.

    `lax.stop_gradient` would do, but cannot be transposed, and `x` may be a tangent.
    """
    return detach_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def reshaped(primitive: Primitive, x: Any, shape: tuple, /, **params: Any) -> Any:
    """`primitive.bind(x, **params)`, whose result is as `x` but of this shape; by the short way where there is one."""
    if is_staging() and _stages(primitive, params, UNKNOWN):
        return _stage(primitive, [x], params, [aval_of_shape(jax.typeof(x), shape)])[0]
    return primitive.bind(x, **params)


@functools.lru_cache(maxsize=4096)
def aval_of_shape(aval: Any, shape: tuple) -> Any:
    """`aval` with this shape, away from meshes; None otherwise."""
    return aval.update(shape=shape, sharding=None) if _is_plain(aval) else None


class Surroundings:
    """Where a jaxpr is walked. Its equations are emitted inside it, each with its own source line, name stack and context."""

    def __init__(self) -> None:
        self.around, self.context, self.mesh = _source_info.context, current_jaxpr_eqn_context(), get_abstract_mesh()
        self.inside: Any = None

    def __enter__(self) -> Surroundings:
        return self

    def at(self, eqn: Any) -> None:
        """From here on, what is bound is what `eqn` becomes."""
        if self.inside:
            self.inside.__exit__(None, None, None)
            self.inside = None
        traceback, stack = eqn.source_info.traceback, eqn.source_info.name_stack
        _source_info.context = SourceInfo(traceback, self.around.name_stack + stack if stack.stack else self.around.name_stack)
        if eqn.ctx is not self.context:
            inside = eqn.ctx.manager
            if not {*self.mesh.manual_axes} <= {*eqn.ctx.cur_abstract_mesh.manual_axes}:  # put into a shard_map by us
                inside = _both(inside, jax.sharding.use_abstract_mesh(self.mesh))
            inside.__enter__()
            self.inside = inside

    def __exit__(self, *error: Any) -> None:
        if self.inside:
            self.inside.__exit__(*error)
        line = user_context(_source_info.context.traceback)  # by which an error is told to the user
        _source_info.context = self.around
        line.__enter__()
        line.__exit__(*error)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


# --- equations put straight into a trace ------------------------------------------------------------------------------
#
# A `bind` looks at each operand for what it may be, and infers what its results are. Where a jaxpr is being traced, and
# the operands are values of it, most of that is known: the equation is put into it at less than half the time.


def is_staging() -> bool:
    """Whether what is bound now becomes an equation of a jaxpr, rather than being computed or transformed."""
    return type(_core.trace_ctx.trace) is DynamicJaxprTrace


def _stages(primitive: Primitive, params: dict[str, Any], avals: Sequence[Any]) -> bool:
    """Whether `_stage` does what a bind would: it takes no part in explicit or manual meshes, nor in high-level types."""
    if _config.eager_constant_folding.value or not get_abstract_mesh().empty:
        return False
    if primitive.name in CALLS:
        called = params["jaxpr" if primitive.name == "jit" else "call_jaxpr"]
        bare = not open_jaxpr(called).is_high and (primitive.name == "jit" or not consts_of(called))
        return bare and None not in avals and not _core.trace_ctx.trace.requires_low
    return _binds_plainly(primitive) and params.get("sharding") is None


CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "jit"})  # binding one first makes functions of its jaxprs again


@functools.cache
def _binds_plainly(primitive: Primitive) -> bool:
    """Whether binding `primitive` is only to process it: no functions among its operands, nothing high-level about it."""
    peculiar = {"bind", "is_high"} if primitive.name == "convert_element_type" else {"bind", "bind_with_trace", "is_high"}
    return type(primitive) is Primitive and not (peculiar & set(vars(primitive)) or primitive.ref_allocating)


FORWARDED = frozenset({jax.lax.broadcast_in_dim_p, jax.lax.convert_element_type_p})  # what would be as its operand is it


def _stage(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any], avals: Sequence[Any]) -> list:
    """An equation put into the jaxpr being traced; its results are of `avals` if those are known."""
    trace, info = _core.trace_ctx.trace, source_info()
    tracers = [x if type(x) is DynamicJaxprTracer and x._trace is trace else _tracer(trace, x, info) for x in operands]
    if None not in avals and (primitive in FORWARDED or primitive not in const_fold_rules):
        if primitive in FORWARDED and tracers[0].aval == avals[0]:
            return tracers
        return trace.emit_eqn(tracers, avals, primitive, params, _core.no_effects, info)
    _core.trace_ctx.set_trace(_core.eval_trace)
    try:
        if primitive in custom_staging_rules:
            out = custom_staging_rules[primitive](trace, info, *tracers, **params)
        else:
            out = trace.default_process_primitive(primitive, tracers, params, info)
    finally:
        _core.trace_ctx.set_trace(trace)
    return list(out) if primitive.multiple_results else [out]


def _tracer(trace: Any, x: Any, info: Any) -> Any:
    """`x`, a constant or a value of an outer trace, as a value of `trace`."""
    x = canonicalize_value(x)
    if isinstance(x, _core.Tracer):
        if not x._trace.is_valid():
            raise _core.escaped_tracer_error(x)
    elif is_literalable(x, trace.frame.auto_dce):  # what `to_jaxpr_tracer` does too, in three times as long
        aval = jax.typeof(x)
        return DynamicJaxprTracer(trace, aval, Literal(x, aval), info)
    return trace.to_jaxpr_tracer(x, info)


@functools.lru_cache(maxsize=4096)
def plain_aval(aval: Any, size: Any, bdim: int) -> Any:
    """`batched_aval` away from meshes, and None if there is one, or if the aval is not an array's."""
    return batched_aval(aval, size, bdim) if _is_plain(aval) else None


def _is_plain(aval: Any) -> bool:
    """Whether `aval` is an array's, away from meshes."""
    return type(aval) is _core.ShapedArray and aval.sharding.mesh.empty


def user_line(eqn: Any) -> str:
    """The user's `file:line (function)` that made `eqn`, or '' where none is recorded."""
    if eqn.source_info.traceback is None or user_frame(eqn.source_info.traceback) is None:
        return ""
    return summarize(eqn.source_info)


def user_file_and_line(eqn: Any) -> tuple[str, int] | None:
    """The user's file and line that made `eqn`, or None where none is recorded."""
    frame = user_frame(eqn.source_info.traceback) if eqn.source_info.traceback is not None else None
    return frame and (frame.file_name, frame.start_line)


def raised_by_jax(error: BaseException) -> bool:
    """Whether it was a line of JAX that raised `error`."""
    places = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(places) and places[-1].startswith("jax.")


def raising_line(error: BaseException) -> str:
    """The user's `file:line (function)` that raised `error`, or ''."""
    places = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user_filename(frame.f_code.co_filename)
    ]
    return "{}:{} ({})".format(*places[-1]) if places else ""


def names_axis(x: Any, name: Any) -> bool:
    """Whether an equation or jaxpr uses the axis `name`."""
    return name is not None and name in axes_named(x)


def axes_named(x: Any) -> set:
    """The axes that an equation or jaxpr uses by name: those in its effects, and in its params, for some have no effect."""
    return {effect.name for effect in x.effects if isinstance(effect, _core.NamedAxisEffect)} | _axes_in_params(x)


def _axes_in_params(x: Any) -> Set:
    if isinstance(x, JaxprEqn):
        over = x.params.get("axis_name")
        inside = frozenset().union(over if isinstance(over, (tuple, list)) else (over,), *map(_axes_in_params, inner_jaxprs(x)))
        return inside - {None, *x.params.get("manual_axes", ())}
    jaxpr = open_jaxpr(x)
    if jaxpr not in _named:
        _named[jaxpr] = frozenset().union(*map(_axes_in_params, jaxpr.eqns))
    return _named[jaxpr]


_named: weakref.WeakKeyDictionary[Any, Set] = weakref.WeakKeyDictionary()  # the axes in the params of each jaxpr asked about


def lanes_meet(x: Any) -> bool:
    """Whether lanes, of this map or of one around, or devices exchange values by name in an equation or jaxpr."""
    return bool(_axes_met(x))


def _axes_met(x: Any) -> Set:
    """The axes over which values are exchanged: those named, but where lanes only ask for their number."""
    named = axes_named(x)
    if not named:
        return frozenset()
    if not isinstance(x, JaxprEqn):
        return frozenset().union(*map(_axes_met, open_jaxpr(x).eqns))
    inner = list(inner_jaxprs(x))
    if inner:
        return named.intersection(frozenset().union(*map(_axes_met, inner)))
    return named if x.primitive.name != "axis_index" else frozenset()


def names_axes(jaxpr: Any) -> bool:
    """Whether `jaxpr` uses any axis by its name: of lanes, also of a map further out, or of a mesh."""
    return bool(axes_named(jaxpr))


def concerns_lanes(eqn: Any, name: Any) -> bool:
    """Whether lanes matter in `eqn` though all its operands are shared: they meet over their axis, or reach references."""
    return names_axis(eqn, name) or any(isinstance(effect, JaxprInputEffect) for effect in eqn.effects)


def can_be_lowered(jaxpr: Any) -> bool:
    """Whether XLA can have all effects of `jaxpr`.

    A check that checkify did not functionalize raises in Python; marks for checks of key reuse are seen by Python alone; so
    are the contents of a box, a value whose type says what was put into it.
    """
    if any(type(effect) is Effect or type(effect).__name__ == "ErrorEffect" for effect in jaxpr.effects):
        return False
    jaxpr = open_jaxpr(jaxpr)
    return not (jaxpr.is_high and any(getattr(v.aval, "has_qdd", False) for eqn in jaxpr.eqns for v in eqn.outvars))


def side_effects(jaxpr: Any) -> bool:
    """Whether `jaxpr`, or an equation, does something beside computing its outputs: references of its own are inside it."""
    inside = (_core.NamedAxisEffect, _core.InternalMutableArrayEffect)
    return any(not isinstance(effect, inside) for effect in jaxpr.effects)


def ordered(x: Any) -> bool:
    """Whether an equation or jaxpr has effects whose order matters."""
    return any(map(_effects.ordered_effects.contains, x.effects))


def failed_check(eqn: Any, values: Sequence[Any]) -> tuple[str, tuple, dict] | None:
    """What a `check` equation on `values` would say of a failed `checkify.check`, and with what; None for other errors."""
    error = jax.tree.unflatten(eqn.params["err_tree"], values)
    if len(error._metadata) != 1:
        return None
    (treedef,), (payload,) = error._metadata.values(), error._payload.values()
    said = jax.tree.unflatten(treedef, payload)
    return (said.fmt_string, said.args, said.kwargs) if isinstance(said, FailedCheckError) else None


def discharged(jaxpr: Any) -> Any:
    """The pure closed jaxpr of an open one that takes refs: it takes their values, and gives their new values."""
    return _discharge_state(closed(open_jaxpr(jaxpr)))


def discharge(eqn: Any) -> Any:
    """A pure closed jaxpr for `eqn`: it takes the refs' values, and gives their new values after its other outputs."""
    atoms = [v for v in eqn.invars if not isinstance(v, Literal)]
    info = open_jaxpr(next(inner_jaxprs(eqn))).debug_info.with_unknown_names()
    jaxpr = Jaxpr((), list(dict.fromkeys(atoms)), eqn.outvars, [eqn], eqn.effects, info)
    return _discharge_state(closed(jaxpr))


# --- inner jaxprs and derivative rules --------------------------------------------------------------------------------


def variable_of(x: Any) -> Any:
    """The variable that `x` stands for in the jaxpr that it was traced into, or None."""
    return x.val if isinstance(x, DynamicJaxprTracer) and isinstance(x.val, Var) else None


UNSEEN = (
    _core.Trace, _core.AbstractValue, Jaxpr, ClosedJaxpr, JaxprEqn, jax.Array, np.ndarray, np.generic,
    types.ModuleType, types.CodeType, type, str, bytes, int, float, complex, type(None), DebugInfo, PjitInfo, PyTreeDef,
    type(default_registry), UnspecifiedValue,
)  # fmt: skip


MOST_REACHED = 2000


def _reached(function: Any) -> Iterator[Any]:
    """The tracers that can be reached from `function`, and None for each other object looked at, of which there may be many."""
    level, seen = [function], set()
    while level:
        held, level = list(itertools.chain.from_iterable(map(_held_by, level))), []
        for x in held:
            if id(x) in seen or _is_unseen(type(x)):
                continue
            seen.add(id(x))
            if is_tracer(x):
                yield x
            else:
                level.append(x)
                yield None


def _held_by(x: Any) -> Sequence[Any]:
    """The objects that `x` holds."""
    if type(x) is WrappedFun:
        return [x.f_transformed]
    if type(x) is FunctionType:
        return gc.get_referents(*(x.__closure__ or ()), *filter(None, (x.__defaults__, x.__kwdefaults__, x.__dict__)))
    return () if type(x) in CALLABLES and _is_name_in_jax(x) else gc.get_referents(x)


CALLABLES = frozenset({_xla.PjitFunction, jax.custom_jvp, jax.custom_vjp})


def _is_name_in_jax(x: Any) -> bool:
    """Whether `x` is a function of JAX's own, which has captured nothing."""
    module = sys.modules.get(x.__module__) if str(x.__module__).startswith("jax.") else None
    return getattr(module, x.__name__, None) is x


def variables_seen(function: Any) -> list:
    """The variables of traces whose tracers can be reached from `function`, looking at no more than so many objects."""
    reached = itertools.islice(_reached(function), MOST_REACHED)
    return [variable_of(x) for x in reached if x is not None and variable_of(x)]


def sees_tracers(function: Any) -> bool:
    """Whether a tracer can be reached from `function`, or there is more than can be looked at."""
    reached = list(itertools.islice(_reached(function), MOST_REACHED))
    return len(reached) == MOST_REACHED or any(x is not None for x in reached)


def takes_functions(eqn: Any) -> bool:
    """Whether functions are among the params of `eqn`."""
    return any(callable(x) and not isinstance(x, type) for x in eqn.params.values())


@functools.cache
def _is_unseen(kind: type) -> bool:
    return issubclass(kind, UNSEEN) and not issubclass(kind, _core.Tracer)


def with_captured(jaxpr: Any, variables: Iterable[Any], place: int, unread: Sequence[Any] = ()) -> Any:
    """The closed jaxpr that takes what it captured of `variables` as inputs, from number `place` on.

    Behind all others it takes inputs like the `unread` variables, which it does not read.
    """
    variables = list(variables)
    if not variables:
        return jaxpr
    bare = open_jaxpr(jaxpr)
    consts = [(v, c, variable_of(c)) for v, c in zip(bare.constvars, consts_of(jaxpr), strict=True)]
    inside = {captured: v for v, _, captured in consts if captured in set(variables)}
    fresh = gensym()
    inputs = [inside.get(v) or fresh(v.aval) for v in variables]
    kept = [(v, c) for v, c, captured in consts if captured not in inside]
    invars = [*bare.invars[:place], *inputs, *bare.invars[place:], *(fresh(v.aval.to_tangent_aval()) for v in unread)]
    grown = bare.replace(constvars=[v for v, _ in kept], invars=invars, debug_info=bare.debug_info.with_unknown_names())
    return closed(grown, [c for _, c in kept])


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the params of `eqn`."""
    return _core.jaxprs_in_params(eqn.params)


def called(eqn: Any) -> Any:
    """The jaxpr that a call evaluates, with its consts if it has any."""
    return next(eqn.params[name] for name in ("call_jaxpr", "jaxpr", "call") if name in eqn.params)


def hoisted(jaxpr: Any) -> tuple[Sequence[Any], Any]:
    """The consts of a closed jaxpr, and the closed jaxpr that takes them as its first arguments."""
    consts = consts_of(jaxpr)
    return consts, closed(convert_constvars_jaxpr(open_jaxpr(jaxpr))) if consts else jaxpr


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list:
    """The outputs of `jaxpr` on `args`, equation by equation."""
    return _core.eval_jaxpr(open_jaxpr(jaxpr), consts_of(jaxpr), *args)


def dtype_of(x: Any) -> Any:
    """The dtype of `x` if it is an array, of numbers or keys, else None: of references and tokens too."""
    aval = jax.typeof(x) if valid_jaxtype(x) else None
    return aval.dtype if isinstance(aval, _core.ShapedArray) else None


def is_key(x: Any) -> bool:
    """Whether `x` holds typed random keys, which NumPy cannot."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def has_traced_consts(params: Iterable[Any]) -> bool:
    """Whether a jaxpr among `params` holds values of a trace under way: what a derivative rule in it captured around it."""
    return any(map(is_tracer, itertools.chain.from_iterable(map(consts_of, _among(params)))))


def _among(params: Iterable[Any]) -> Iterator[Any]:
    return (x for param in params for x in (param if type(param) is tuple else (param,)))


def _takes_consts(params: Iterable[Any]) -> bool:
    """Whether the consts of jaxprs among `params` must be operands: traced ones, and any beside references made inside."""
    params = [*_among(params)]
    inside = (effect for x in params if consts_of(x) for effect in x.effects)
    return has_traced_consts(params) or any(isinstance(effect, _core.InternalMutableArrayEffect) for effect in inside)


def _jit_with_consts(operands: Sequence[Any], params: dict[str, Any]) -> tuple[list, dict]:
    consts, jaxpr = hoisted(params["jaxpr"])
    return [*consts, *operands], {**params, **_jit_params(params, len(consts)), "jaxpr": jaxpr}


def _scan_with_consts(operands: Sequence[Any], params: dict[str, Any]) -> tuple[list, dict]:
    consts, jaxpr = hoisted(params["jaxpr"])
    count = scan_counts(params)[0] + len(consts)
    if "num_consts" in params:
        counts = {"num_consts": count}
    else:
        flat = importlib.import_module("jax._src.flattree")
        counts = {"ft_in": flat.pack((flat.nones(count), *params["ft_in"].unpack()[1:]))}
    return [*consts, *operands], {**params, **counts, "jaxpr": jaxpr}


def _while_with_consts(operands: Sequence[Any], params: dict[str, Any]) -> tuple[list, dict]:
    (in_cond, cond), (in_body, body) = hoisted(params["cond_jaxpr"]), hoisted(params["body_jaxpr"])
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    counts = {"cond_nconsts": of_cond + len(in_cond), "body_nconsts": of_body + len(in_body)}
    operands = [*in_cond, *operands[:of_cond], *in_body, *operands[of_cond:]]
    return operands, {**params, **counts, "cond_jaxpr": cond, "body_jaxpr": body}


def _cond_with_consts(operands: Sequence[Any], params: dict[str, Any]) -> tuple[list, dict]:
    every = [consts_of(branch) for branch in params["branches"]]
    consts, fresh = [c for consts in every for c in consts], gensym()
    branches = []
    for branch, own in zip(params["branches"], every, strict=True):
        bare = open_jaxpr(branch)
        inputs = [v for cs in every for v in (bare.constvars if cs is own else [fresh(jax.typeof(c)) for c in cs])]
        info = bare.debug_info.with_unknown_names()
        branches.append(closed(bare.replace(constvars=[], invars=[*inputs, *bare.invars], debug_info=info)))
    return [operands[0], *consts, *operands[1:]], {**params, "branches": tuple(branches)}


CONSTS_AS_OPERANDS = {
    "cond": _cond_with_consts,
    "jit": _jit_with_consts,
    "scan": _scan_with_consts,
    "while": _while_with_consts,
}
"""Primitives whose jaxprs may not hold traced values: how each takes them as operands instead."""


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many consts and how many carries a scan has."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def zeros(aval: Any) -> Any:
    """Zeros of this aval, varying over the same manual mesh axes."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return vary(jax.lax.full(aval.shape, 0, aval.dtype, sharding=sharding), aval.mat.varying)


def vary_like(x: Any, y: Any) -> Any:
    """`x`, varying over the manual mesh axes that `y` varies over."""
    return vary(x, varying(y))


@contextlib.contextmanager
def axis_env(axis: Any) -> Iterator[None]:
    """Make the names of `axis` known to what is traced inside."""
    named = [] if axis.name is None else [(axis.name, axis.size)]
    with _core.extend_axis_env_nd(named), _core.add_spmd_axis_names(axis.spmd_name or None):
        yield


def wrapped(fun: Callable, like: Any) -> Any:
    """`fun` in JAX's dress for the functions among an equation's params, known by the same name as `like`."""
    return wrap_init(fun, debug_info=like.debug_info)


def pull_back(bwd: Any, args: Sequence[Any]) -> tuple[list, Any]:
    """Call the backward rule of a custom_vjp: the cotangents, and what it logs (since 0.11)."""
    out = bwd.call_wrapped(*args)
    return (list(out[0]), out[1]) if ONE_JAXPR_CLASS else (list(out), None)


def pulled_back(cotangents: list, logs: Any) -> Any:
    """What a backward rule returns, in the form that JAX wants."""
    return (cotangents, logs) if ONE_JAXPR_CLASS else cotangents


def has_cotangent(aval: Any) -> bool:
    """Whether values of `aval` can be differentiated: the tangents of integers are nothing."""
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


def no_cotangent(x: Any) -> Zero:
    """What says that no cotangent flows to `x`."""
    return Zero(jax.typeof(x).to_ct_aval())


def is_zero(x: Any) -> bool:
    """Whether `x` stands for an array of zeros, without being one."""
    return isinstance(x, (Zero, SymbolicZero))


def zero_of_lane(x: Any, size: Any, bdim: int | None) -> Any:
    """One lane's zero, of the zero `x` of many."""
    return x if bdim is None else type(x)(_core.mapped_aval(size, bdim, x.aval))


def zero_of_lanes(x: Any, size: Any, bdim: int | None, mesh_name: Any = None) -> Any:
    """The zero of many lanes, of the zero `x` of one."""
    return x if bdim is None else type(x)(batched_aval(x.aval, size, bdim, mesh_name))


def is_placed(params: dict[str, Any]) -> bool:
    """Whether these params of jit say anything about shardings or layouts."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return not all(x is UNSPECIFIED for x in shardings) or not all(x is None for x in layouts)


def lift_sharding(axis: Any, sharding: Any, bdim: int | None) -> Any:
    """A sharding given to jit, with a dimension for the lanes.

    Raises:
      NotImplementedError: it is not a `NamedSharding`, and it matters where it gets one dimension more.
    """
    if bdim is None or isinstance(sharding, UnspecifiedValue) or getattr(sharding, "is_fully_replicated", False):
        return sharding
    if not isinstance(sharding, NamedSharding):
        raise NotImplementedError(f"minibatch: jit with {sharding} on an argument or result that differs by lane")
    free = PartitionSpec.UNCONSTRAINED if isinstance(sharding.mesh, AbstractMesh) else None
    return sharding.update(spec=with_lanes(sharding.spec, bdim, axis.spmd_name or axis.mesh_name or free))


def with_lanes(spec: PartitionSpec, bdim: int, entry: Any) -> PartitionSpec:
    """`spec` of one lane's array as that of all, the lanes at `bdim` laid out by `entry`: mesh axes, or what a spec may hold.

    Raises:
      ValueError: one of the mesh axes is used already.
    """
    entry = (entry or None) if isinstance(entry, tuple) else entry
    if set(_names_in(entry)) & {name for part in spec.partitions for name in _names_in(part)}:
        raise ValueError(f"vmap spmd_axis_name cannot appear in {spec}: the lanes lie over {entry!r}, one lane's array cannot")
    entry = entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry
    parts = [*spec.partitions, *[None] * (bdim - len(spec.partitions))]
    return spec.update(partitions=(*parts[:bdim], entry, *parts[bdim:]))


def names_given_up(specs: Iterable[PartitionSpec]) -> set:
    """The mesh axes in `specs` if JAX is told not to mind (`jax_disable_vmap_shmap_error`) that lanes lie over them too."""
    if not _config.disable_vmap_shmap_error.value:
        return set()
    return {name for spec in specs for part in spec.partitions for name in _names_in(part)}


def _names_in(entry: Any) -> tuple:
    """The mesh axes that an entry of a spec names."""
    return entry if isinstance(entry, tuple) else () if entry in (None, PartitionSpec.UNCONSTRAINED) else (entry,)


def name_of_rule(rule: Any) -> str:
    """The name of the user's rule for a custom_vmap function."""
    return getattr(getattr(rule, "rule", rule), "__name__", "<unnamed rule>")


def _linearize_custom_vmap(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, call: Any, **params: Any) -> tuple:
    """Reverse mode for custom_vmap, which JAX lacks: the primal keeps the user's batching rule, the tangent is `call`'s."""
    outs = _custom_vmap_p.bind(*primals, call=call, **params)
    moving = [x for x, nonzero in zip(primals, nonzeros, strict=True) if nonzero]

    def along(*moving: Any) -> list:
        rest = iter(moving)
        args = [next(rest) if nonzero else x for x, nonzero in zip(primals, nonzeros, strict=True)]
        return _core.eval_jaxpr(open_jaxpr(call), consts_of(call), *args)

    residuals, treedef = jax.tree.flatten(jax.linearize(along, *moving)[1])

    def linearized(residuals: Any, *tangents: Any) -> list:
        tangents = tangents[1:] if ONE_JAXPR_CLASS else tangents
        push = jax.tree.unflatten(treedef, residuals)
        return push(*(t for t, nonzero in zip(tangents, nonzeros, strict=True) if nonzero))

    return (outs, [True] * len(outs), residuals, *([None] if ONE_JAXPR_CLASS else []), linearized)


_ad.primitive_linearizations.setdefault(_custom_vmap_p, _linearize_custom_vmap)


# --- primitives -------------------------------------------------------------------------------------------------------

_own: set[Primitive] = set()
_foreign: set[Primitive] = set()


def is_own_primitive(primitive: Primitive) -> bool:
    """Whether JAX itself defines `primitive`; another library may give its own the same name."""
    if primitive in _own:
        return True
    if primitive in _foreign:
        return False
    _own.update(_primitives_in_modules())
    if primitive not in _own:
        _foreign.add(primitive)
    return primitive in _own


def _primitives_in_modules() -> Iterator[Primitive]:
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] == "jax":
            yield from (x for x in list(vars(module).values()) if isinstance(x, Primitive))


def primitives_of_jax() -> dict[str, bool]:
    """JAX's primitives by name, each with whether `jax.vmap` has a rule for it: what a table of support is held against."""
    for module in ("buffer_callback", "compute_on", "fused", "key_reuse._core", "pallas", "scheduling_groups", "sparse"):
        importlib.import_module(f"jax.experimental.{module}")
    return {primitive.name: primitive in _batching.fancy_primitive_batchers for primitive in _primitives_in_modules()}


def synchronous(eqn: Any) -> Any:
    """The equation of a collective that is only started, as that of the whole of it."""
    return eqn.replace(primitive=getattr(_parallel, f"{eqn.primitive.name.removesuffix('_start')}_p"))


def is_under_way(x: Any) -> bool:
    """Whether `x` stands for the result of a collective that was started."""
    return isinstance(jax.typeof(x), _core.AbstractFuture)


def sparse_definition(primitive: Primitive) -> Callable:
    """What a primitive of jax.experimental.sparse computes, in terms of others: its `impl`, or what its module calls so."""
    if inspect.isfunction(primitive.impl):
        return primitive.impl
    family = primitive.name.partition("_")[0]
    return getattr(sys.modules[f"jax.experimental.sparse.{family}"], f"_{primitive.name}_impl")


def has_third_party_rule(primitive: Primitive) -> bool:
    """Whether somebody outside JAX registered a batching rule for a primitive of their own."""
    return primitive in _batching.fancy_primitive_batchers and not is_own_primitive(primitive)


def apply_registered(axis: Any, eqn: Any, values: Sequence[Any], bdims: Sequence[int | None]) -> tuple[Sequence, Sequence]:
    """Apply the batching rule registered with JAX for a primitive that brings its own: the outputs, and their bdims.

    Raises:
      NotImplementedError: there is none, or it declines.
    """
    if eqn.primitive not in _batching.fancy_primitive_batchers:
        raise NotImplementedError
    data = _batching.AxisData(axis.name, axis.size, axis.spmd_name or None, _as_tuple(axis.mesh_name))
    outs, out_bdims = _batching.fancy_primitive_batchers[eqn.primitive](data, tuple(values), tuple(bdims), **eqn.params)
    return (outs, out_bdims) if eqn.primitive.multiple_results else ([outs], [out_bdims])


def _as_tuple(name: Any) -> tuple | None:
    return name if name is None or isinstance(name, tuple) else (name,)


# --- what is mapped as a whole: containers that registered how (BCOO), and hijax types ---------------------------------

vmappables = _batching.vmappables

# What JAX's own vmap knows besides in out_axes: sum the lanes; leave them where they are, and say where that is.
SUM, INFER = _batching.sum_axis, _batching.infer


def is_vmappable(x: Any) -> bool:
    """Whether the type of `x` registered how one lane of it is made, rather than being mapped leaf by leaf."""
    return type(x) in vmappables


def is_map_spec(x: Any) -> bool:
    """Whether `x` says, where an axis may stand, how a whole value is mapped: in words that the value's type understands."""
    return isinstance(x, MappingSpec) or type(x) in _batching.spec_types - {int, type(SUM), type(INFER)}


def vmappable_axes(x: Any, spec: Any) -> list[int | None]:
    """The axis of each leaf of the container `x`, mapped as `spec` says."""
    axes: list[int | None] = []

    def note(leaf: Any, axis: int | None) -> Any:
        axes.append(axis)
        aval = lane_aval(leaf, axis)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    to_lane: Any = _batching.to_elt_handlers[type(x)]
    to_lane(note, lambda: None, x, spec)
    return axes


def vmappable_out_axes(x: Any, spec: Any, size: int) -> list[int | None]:
    """The axis of each leaf of the container of many lanes that `spec` makes of one lane `x` of it."""
    axes: list[int | None] = []

    def note(size: int, leaf: Any, axis: int | None) -> Any:
        axes.append(axis)
        aval = aval_of(leaf) if axis is None else batched_aval(aval_of(leaf), size, axis)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    _batching.from_elt_handlers[type(x)](note, size, x, spec)
    return axes


def vmappable_to_lane(x: Any, axis: Any, arrays: Iterator[Any]) -> Any:
    """One lane of `x`, made of `arrays`: its leaves as one lane sees them, in order."""
    return _batching.to_elt_handlers[type(x)](lambda leaf, axis: next(arrays), lambda: next(arrays), x, axis)


def vmappable_from_lane(x: Any, axis: Any, size: int, arrays: Iterator[Any]) -> Any:
    """The container of many lanes from one lane `x` of it and `arrays`: its leaves with all their lanes, in order."""
    return _batching.from_elt_handlers[type(x)](lambda size, leaf, axis: next(arrays), size, x, axis)



# --- jaxprs with more inputs ------------------------------------------------------------------------------------------


def new_var(const: Any) -> Var:
    """A variable for the value `const`."""
    return gensym()(jax.typeof(const))


def new_var_of(aval: Any) -> Var:
    """A variable for values of this aval."""
    return gensym()(aval)


def number(literal: Any) -> Any:
    """The value of a scalar literal, of the same aval as an argument."""
    value = np.asarray(literal.val).astype(literal.aval.dtype)
    return value.item() if literal.aval.weak_type else value[()]


def with_leading_operands(eqn: Any, variables: Sequence[Var], jaxpr: Any) -> Any:
    """A jit equation of `jaxpr`, which takes `variables` before the operands that it has."""
    params = {**eqn.params, **_jit_params(eqn.params, len(variables)), "jaxpr": jaxpr}
    return eqn.replace(invars=[*variables, *eqn.invars], params=params)


def _jit_params(params: dict[str, Any], count: int) -> dict[str, tuple]:
    """Those of a jit's params that speak of each operand, where there are so many more before the others."""
    return {
        "in_shardings": (UNSPECIFIED,) * count + params["in_shardings"],
        "in_layouts": (None,) * count + params["in_layouts"],
        "donated_invars": (False,) * count + params["donated_invars"],
    }


def with_leading_inputs(jaxpr: Any, variables: Sequence[Var], eqns: Sequence[Any]) -> Any:
    """The closed `jaxpr`, without consts, with `variables` before its inputs and these equations."""
    bare = open_jaxpr(jaxpr)
    names = bare.debug_info.arg_names
    info = bare.debug_info._replace(arg_names=None if names is None else ("",) * len(variables) + tuple(names))
    return closed(bare.replace(invars=[*variables, *bare.invars], eqns=list(eqns), debug_info=info))


# --- dispatch ---------------------------------------------------------------------------------------------------------
#
# JAX's C++ dispatch tells calls apart by the structure of their arguments and by the avals of the leaves. It flattens them
# by a registry of pytree nodes. In ours, values that are part of a program are nodes too, without children: so they are
# told by that same code, wherever among the arguments they are.

_bits = Struct("d").pack
_told = {
    **dict.fromkeys((bool, int, str, bytes, FunctionType, BuiltinFunctionType, _xla.PjitFunction, type), lambda x: ((), x)),
    float: lambda x: ((), _bits(x)),  # for -0.0 equals 0.0, and a NaN not even itself
}
_nodes = _xla.pytree.PyTreeRegistry(
    enable_none=True, enable_tuple=True, enable_namedtuple=True, enable_list=True, enable_dict=True
)
for _kind, _to_iter in _told.items():
    _nodes.register_node(_kind, _to_iter, lambda aux, parts: aux)  # arguments are not put together again
_known_nodes: set[type] = {tuple, list, dict, type(None), *_told}
_learning = threading.Lock()
_entries = _xla.PjitFunctionCache(capacity=4096)  # one of our own: nobody else's entries are driven out


def is_told(x: Any) -> bool:
    """Whether a `dispatcher` tells `x`, an argument's leaf that is part of the program, from others."""
    return type(x) in _told or isinstance(x, type)


def learn_nodes(leaves: Sequence[Any]) -> None:
    """Have a `dispatcher` see into what users registered as nodes meanwhile, and into these leaves."""
    dispatch = _tree_util.dispatch_registry
    with _learning:
        new = {kind: functions.to_iter for kind, functions in list(_tree_util._registry.items())}
        for kind in set(map(type, leaves)):
            if issubclass(kind, type):
                new[kind] = _told[type]
            elif dispatch.is_node(kind):  # an array that is dispatched by its parts
                new[kind] = dispatch.flatten_one_level
        for kind in new.keys() - _known_nodes:
            _nodes.register_node(kind, new[kind], lambda aux, parts: parts)
            _known_nodes.add(kind)


def dispatcher(name: str, miss: Callable) -> Callable:
    """A function that finds what to run by the signature of its arguments, as `jax.jit` does and in the same C++ code.

    Where it does not know a signature it asks `miss`, which returns the result, an `entry` to remember (or None, to be
    asked again), and whether to forget that it was asked.
    """

    def unjitted(*args: Any, **kwargs: Any) -> Any:  # under jax.disable_jit
        return miss(*args, **kwargs)[0]

    key = _pxla.JitGlobalCppCacheKeys()
    return _xla.pjit(name, unjitted, miss, [], [], key, _nodes, _pxla.cc_shard_arg, _entries)


def run_with_entry(compiled: Callable, consts: list, arrays: list, held: int, out_tree: Any) -> tuple[Any, Any]:
    """The outputs of `compiled(consts, arrays)` in `out_tree`, and the entry that a `dispatcher` remembers.

    The entry holds the consts and the first `held` arrays. It is None where JAX itself would go through Python, or a
    container is made of other leaves than it was given.
    """
    flat, entry, _ = compiled._cache_miss(consts, arrays)  # type: ignore[attr-defined]
    out = jax.tree.unflatten(out_tree, flat)
    flatten = _tree_util.dispatch_registry.flatten
    leaves, tree = flatten(out)
    same = len(leaves) == len(flat) and all(map(operator.is_, leaves, flatten(flat)[0]))
    if entry is None or not same:
        return out, None
    return out, entry._replace(const_args=flatten([consts, arrays[:held]])[0], out_pytree_def=tree)


def forget_dispatch() -> None:
    """Let every `dispatcher` ask again. `jax.clear_caches` does so too."""
    _entries.clear()
