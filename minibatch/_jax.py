"""The one door to JAX's internals and to the differences between its versions."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core as _core
from jax._src.config import trace_context
from jax._src.core import DropVar, trace_state_clean, valid_jaxtype
from jax._src.interpreters import batching as _batching
from jax._src.source_info_util import is_user_filename, user_frame
from jax._src.traceback_util import register_exclusion as _hide_frames
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.source_info_util import (
    current_name_stack,
    register_exclusion,
    summarize,
    transform_name_stack,
    user_context,
)

__all__ = [
    "ClosedJaxpr", "DropVar", "Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var",
    "as_argument", "apply_registered", "aval_key", "aval_of", "batched_aval", "closed", "consts_of", "emitting", "has_third_party_rule", "hide", "is_own_primitive", "is_ref", "is_vmappable", "lane_aval", "mesh_axis", "names_axis", "open_jaxpr", "primitives_of_jax", "raising_line",
    "rebind", "trace_context", "trace_jaxpr", "trace_state_clean", "transform_name_stack",
    "user_file_and_line", "user_line", "valid_jaxtype", "vmappable_from_lane", "vmappable_to_lane", "vmappables",
]  # fmt: skip

ONE_JAXPR_CLASS = ClosedJaxpr is Jaxpr  # since 0.11: a Jaxpr carries its own consts


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


def trace_jaxpr(fun: Callable, avals: Sequence[Any], axis_env: Sequence[tuple[Any, int]] = ()) -> Any:
    """The closed jaxpr of `fun`, a fresh function from flat arrays to a flat list, at `avals`."""
    return jax.make_jaxpr(fun, axis_env=list(axis_env))(*avals)


def batched_aval(aval: Any, size: Any, bdim: int, mesh_name: Any = None) -> Any:
    """The aval of `size` lanes of `aval`, indexed by dimension `bdim`."""
    return _core.unmapped_aval(size, bdim, aval, mesh_name)


def lane_aval(x: Any, axis: int | None) -> Any:
    """The aval of one lane of the array `x`, whose lanes are on `axis` (None: shared)."""
    aval = aval_of(x)
    return aval if axis is None else _core.mapped_aval(aval.shape[axis], axis, aval)


def aval_of(x: Any) -> Any:
    """The aval of an array, or of a `jax.ShapeDtypeStruct` that stands for one."""
    return _core.shaped_abstractify(x) if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def aval_key(x: Any) -> Any:
    """A key for the shape, dtype, weak type and sharding of `x`, an array or a container of arrays."""
    if is_vmappable(x):
        return jax.tree.structure(x), tuple(map(aval_key, jax.tree.leaves(x)))
    return x.aval if isinstance(x, jax.Array) else aval_of(x)


def mesh_axis(x: Any, axis: int) -> Any:
    """The explicit mesh axis over which dimension `axis` of `x` is sharded, or None."""
    spec = getattr(getattr(aval_of(x), "sharding", None), "spec", ())
    return spec[axis] if axis < len(spec) else None


def as_argument(const: Any) -> Any:
    """A const of a jaxpr as an argument for a compiled program."""
    return const if isinstance(const, (jax.Array, jax.core.Tracer)) or is_ref(const) else jnp.asarray(const)


def is_ref(x: Any) -> bool:
    """Whether `x` is a mutable array reference."""
    return isinstance(x, jax.ref.Ref)


# --- equations --------------------------------------------------------------------------------------------------------


def rebind(eqn: Any, *values: Any, **changed: Any) -> list:
    """The same equation on `values`, with these params changed. Always a list of results."""
    params = {**eqn.params, **changed} if changed else eqn.params
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def emitting(eqn: Any) -> Iterator[None]:
    """Give what is bound inside the source line, name stack and context of `eqn`."""
    info = eqn.source_info
    stack = current_name_stack() + info.name_stack
    with user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def user_line(eqn: Any) -> str:
    """The user's `file:line (function)` that made `eqn`, or '' where none is recorded."""
    if eqn.source_info.traceback is None or user_frame(eqn.source_info.traceback) is None:
        return ""
    return summarize(eqn.source_info)


def user_file_and_line(eqn: Any) -> tuple[str, int] | None:
    """The user's file and line that made `eqn`, or None where none is recorded."""
    frame = user_frame(eqn.source_info.traceback) if eqn.source_info.traceback is not None else None
    return frame and (frame.file_name, frame.start_line)


def raising_line(error: BaseException) -> str:
    """The user's `file:line (function)` that raised `error`, or ''."""
    places = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user_filename(frame.f_code.co_filename)
    ]
    return "{}:{} ({})".format(*places[-1]) if places else ""


def names_axis(jaxpr: Any, name: Any) -> bool:
    """Whether `jaxpr` says that it uses the axis `name`."""
    return any(getattr(effect, "name", None) == name for effect in jaxpr.effects)


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
    for module in ("jax.experimental.pallas", "jax.experimental.sparse"):
        importlib.import_module(module)
    return {primitive.name: primitive in _batching.fancy_primitive_batchers for primitive in _primitives_in_modules()}


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


# --- containers that JAX maps as a whole (BCOO) -----------------------------------------------------------------------

vmappables = _batching.vmappables


def is_vmappable(x: Any) -> bool:
    """Whether the type of `x` registered how one lane of it is made, rather than being mapped leaf by leaf."""
    return type(x) in vmappables


def vmappable_to_lane(x: Any, axis: int, arrays: Iterator[Any]) -> Any:
    """One lane of `x`, made of `arrays`: its leaves as one lane sees them, in order."""
    return _batching.to_elt_handlers[type(x)](lambda leaf, axis: next(arrays), None, x, axis)


def vmappable_from_lane(x: Any, axis: int | None, size: int, arrays: Iterator[Any]) -> Any:
    """The container of many lanes from one lane `x` of it and `arrays`: its leaves with all their lanes, in order."""
    return _batching.from_elt_handlers[type(x)](lambda size, leaf, axis: next(arrays), size, x, axis)

