"""in_axes and out_axes against pytrees: one axis (or None) for each leaf, and the one axis size."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, treedef_is_leaf

from minibatch import _errors, _jax

Spec = Any  # int, None, a callable asked for each leaf, or a container of those


@dataclasses.dataclass(frozen=True)
class if_array:  # noqa: N801 - used as a word in a spec, `in_axes=if_array(0)`
    """Spec leaf: map arrays that have this axis, share everything else.

    An array is anything with a `shape` and a `dtype`; an argument of too low a rank for `axis` is shared.

    Args:
      axis: the axis that holds the lanes: of an argument in `in_axes`, of a finished output in `out_axes`.

    Examples:
      >>> import jax.numpy as jnp, minibatch
      >>> model = {"w": jnp.ones((3, 2)), "activation": jnp.tanh}
      >>> minibatch.vmap(lambda m: m["activation"](m["w"]).sum(), in_axes=minibatch.if_array(0))(model).shape
      (3,)
    """

    axis: int = 0

    def __call__(self, leaf: Any, lane_dims: int = 0) -> int | None:
        """The axis for `leaf`, which will have `lane_dims` more dimensions than it has now."""
        rank = len(leaf.shape) + lane_dims if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else 0
        return self.axis if -rank <= self.axis < rank else None


@dataclasses.dataclass(frozen=True)
class if_batched:  # noqa: N801
    """Spec leaf for `out_axes`: put the lanes on this axis if any lane changes the output, else leave it as one lane's.

    Args:
      axis: where the lane axis goes in an output that differs by lane.

    Examples:
      >>> import jax.numpy as jnp, minibatch
      >>> f = minibatch.vmap(lambda x, w: (x * w, w.sum()), in_axes=(0, None), out_axes=minibatch.if_batched(0))
      >>> [y.shape for y in f(jnp.ones(3), jnp.ones(2))]
      [(3, 2), ()]
    """

    axis: int = 0


def is_axis(spec: Any) -> bool:
    """Whether `spec` says where the lanes are for every leaf below it."""
    return says_all(spec) or (callable(spec) and _is_leaf(spec))


def says_all(spec: Any) -> bool:
    """Whether `spec` says it of everything below at once, without asking each leaf."""
    return spec is None or type(spec) is int or is_out_spec(spec) or _jax.is_map_spec(spec)


def is_out_spec(spec: Any) -> bool:
    """Whether `spec` speaks of an output: what becomes of its lanes depends on whether it has any."""
    return isinstance(spec, if_batched) or spec is _jax.SUM or spec is _jax.INFER


def check(name: str, spec: Spec) -> Spec:
    """`spec` with a list at the top as a tuple.

    Raises:
      TypeError: something in it is not an int, None or callable.
    """
    spec = tuple(spec) if isinstance(spec, list) else spec
    for leaf in tree_leaves(spec):
        if not is_axis(leaf) or (name == "in_axes" and is_out_spec(leaf)):
            raise _errors.not_an_axis(name, spec, leaf)
    return spec


# --- arguments --------------------------------------------------------------------------------------------------------


def parameters(fun: Callable) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of `fun` by name, or None where Python cannot tell."""
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return None


def for_arguments(fun: Callable, in_axes: Spec, args: tuple, kwargs: dict) -> tuple[list[Spec], dict[str, Spec]]:
    """The spec for each positional and each keyword argument of one call.

    Raises:
      Problem: `in_axes` has entries for parameters that `fun` lacks, or lacks some for arguments given.
    """
    uncovered = if_array(0)
    if isinstance(in_axes, tuple) and not kwargs and len(in_axes) == len(args) and not hasattr(in_axes, "_fields"):
        return list(in_axes), {}
    if isinstance(in_axes, tuple):
        return _in_order(fun, in_axes, args, kwargs, uncovered)
    if isinstance(in_axes, dict):
        return _by_name(fun, in_axes, args, kwargs, uncovered)
    return [in_axes] * len(args), dict.fromkeys(kwargs, uncovered)


def _in_order(fun: Callable, in_axes: tuple, args: tuple, kwargs: dict, uncovered: Spec) -> tuple[list, dict]:
    params = parameters(fun) or {}
    names = [n for n, p in params.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [n for n in names if params[n].kind != inspect.Parameter.KEYWORD_ONLY]
    star = next((n for n, p in params.items() if p.kind is p.VAR_POSITIONAL), None)
    rest = max(0, len(args) - len(positional)) if star else 0  # entries that speak of *args
    order = [*positional, *[None] * rest, *(n for n in names if n not in positional)]
    left_out = [n for n in order[len(in_axes) :] if n is None or n in order[: len(args)]]
    optional = [n for n in order if n and params[n].default is not inspect.Parameter.empty]
    missing = [n for n in order[: len(in_axes)] if n and n not in kwargs and n not in order[: len(args)] and n not in optional]
    if len(in_axes) < len(args) or len(in_axes) > max(len(order), len(args)) or left_out or missing:
        raise _errors.wrong_length(in_axes, args, list(params))
    by_name = dict(zip(order, in_axes, strict=False))
    return list(in_axes[: len(args)]), {name: by_name.get(name, uncovered) for name in kwargs}


def _by_name(fun: Callable, in_axes: dict, args: tuple, kwargs: dict, uncovered: Spec) -> tuple[list, dict]:
    params = parameters(fun) or {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in params.values())
    unknown = [name for name in in_axes if name not in params and not (takes_any and name in kwargs)]
    if unknown:
        raise _errors.no_such_parameter(in_axes, unknown, list(params))
    names = [n for n, p in params.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = next((n for n, p in params.items() if p.kind is p.VAR_POSITIONAL), None)
    names += [star] * max(0, len(args) - len(names))
    return (
        [in_axes.get(name, uncovered) for name in names[: len(args)]],
        {name: in_axes.get(name, uncovered) for name in kwargs},
    )


def argument_name(fun: Callable, position: int) -> str:
    """How `fun` calls its argument at `position`: its parameter's name, or `args[position]`."""
    params = list((parameters(fun) or {}).values())
    if position < len(params) and all(p.kind is not p.VAR_POSITIONAL for p in params[: position + 1]):
        return params[position].name
    return f"args[{position}]"


# --- a spec against a value -------------------------------------------------------------------------------------------


def spread(spec: Spec, value: Any, at_spec: str, at_value: str, lane_dims: int = 0) -> list:
    """The axis (or None, or `if_batched`) for each leaf of `value`, which `spec` describes node by node.

    Outputs are described while they are those of one lane: then `lane_dims` is 1.

    Node types and child keys must agree; static fields (aux data) are not compared.

    Raises:
      Problem: `spec` does not fit, with the place on both sides.
    """
    if says_all(spec):
        return [spec] * len(tree_leaves(value))
    if _is_leaf(spec):
        return [_ask(spec, leaf, at_spec, at_value, lane_dims) for leaf in tree_leaves(value)]
    if value is None:
        return []
    pairs = _children(spec, value)
    if pairs is None:
        raise _errors.does_not_fit(spec, value, at_spec, at_value)
    return [axis for below, child, key in pairs for axis in spread(below, child, at_spec + key, at_value + key, lane_dims)]


def _ask(spec: Callable, leaf: Any, at_spec: str, at_value: str, lane_dims: int) -> Any:
    axis = spec(leaf, lane_dims) if isinstance(spec, if_array) else spec(leaf)
    if not (axis is None or type(axis) is int or isinstance(axis, if_batched)):
        raise _errors.bad_answer(spec, axis, at_spec, at_value)
    return axis


def _children(spec: Any, value: Any) -> list[tuple[Any, Any, str]] | None:
    """Pairs of children of the two nodes, with the key that leads to them; None where they do not fit."""
    if type(spec) is not type(value) and not _both_sequences(spec, value):
        return None
    specs, values = _one_level(spec), _one_level(value)
    fits = [key for key, _ in specs] == [key for key, _ in values] or (len(specs) == len(values) and _keyless(values))
    if hasattr(spec, "__dict__") and (not fits or _hides_axes(spec)):
        by_attribute = _attributes(spec, value, [child for _, child in values])
        if by_attribute is not None:
            return by_attribute
    return [(a, b, key) for (_, a), (key, b) in zip(specs, values, strict=True)] if fits else None


def _both_sequences(spec: Any, value: Any) -> bool:
    return type(spec) in (list, tuple) and type(value) in (list, tuple)


def _one_level(node: Any) -> list[tuple[str, Any]]:
    """The children of a pytree node, each with its key as it is written after the node."""
    return [(keystr(path), child) for path, child in tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]]


def _keyless(children: list[tuple[str, Any]]) -> bool:
    return all(key.startswith("[<flat index") for key, _ in children)


def _hides_axes(spec: Any) -> bool:
    """Whether flattening `spec` loses ints that its attributes hold (a class that flattens by looking at its leaves)."""
    return sum(type(x) is int for x in tree_leaves(vars(spec))) > sum(type(x) is int for x in tree_leaves(spec))


def _attributes(spec: Any, value: Any, children: list) -> list[tuple[Any, Any, str]] | None:
    """The children paired by the attribute that holds them; None where that is not one attribute for each child."""
    held = {id(child): name for name, child in vars(value).items()}
    names = [held.get(id(child)) for child in children]
    if len(set(names)) != len(names) or not all(name in vars(spec) for name in names):
        return None
    return [(vars(spec)[name], child, f".{name}") for name, child in zip(names, children, strict=True)]


def _is_leaf(x: Any) -> bool:
    return treedef_is_leaf(jax.tree.structure(x)) and x is not None


# --- the one axis size ------------------------------------------------------------------------------------------------


def size_of(axes: Sequence[int | None], leaves: Sequence[Any], axis_size: Any, names: Callable[[], list[str]]) -> Any:
    """The one size of all mapped axes; None where there is no leaf that could say.

    Args:
      axes: for each leaf the mapped axis or None.
      leaves: the arguments' leaves.
      axis_size: what the user gave, or None.
      names: called for an error: how the user calls each leaf.

    Raises:
      Problem: an axis is out of range, sizes differ, or leaves are there and none is mapped.
    """
    sizes: list[Any] = [] if axis_size is None else [axis_size]
    for i, (axis, leaf) in enumerate(zip(axes, leaves, strict=True)):
        if type(axis) is not int:  # None, or a spec for a whole value, which has no shape to tell
            continue
        shape = np.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise _errors.axis_out_of_range(axis, leaf, names()[i])
        if not any(shape[axis] is size or shape[axis] == size for size in sizes):
            sizes.append(shape[axis])
    if len(sizes) > 1:
        raise _errors.sizes_differ(axes, leaves, axis_size, names())
    if leaves and not sizes:
        raise _errors.nothing_mapped(names())
    return sizes[0] if sizes else None


def mesh_name(axes: Sequence[int | None], leaves: Sequence[Any]) -> Any:
    """The axis of an explicit mesh that the lanes lie over, or None.

    Raises:
      Problem: mapped leaves lie over different ones, or a shared leaf over the same.
    """
    mapped = [x for d, leaf in zip(axes, leaves, strict=True) if type(d) is int for x in [_jax.mesh_axis(leaf, d)]]
    if len(set(mapped)) > 1:
        raise _errors.mesh_axes_differ(mapped)
    name = mapped[0] if mapped else None
    for d, leaf in zip(axes, leaves, strict=True):
        if name is not None and d is None and _jax.uses_mesh_axis(leaf, name):
            raise _errors.mesh_axis_in_use(leaf, name)
    return name


def spmd_name(given: Any, mesh_name: Any) -> tuple[Hashable, ...]:
    """`spmd_axis_name` as a tuple; empty where the arguments say the same.

    Raises:
      Problem: they say something else.
    """
    name = () if given is None else given if isinstance(given, tuple) else (given,)
    if name and mesh_name is not None:
        if _jax.of_many(name) != (mesh_name if isinstance(mesh_name, tuple) else (mesh_name,)):
            raise _errors.mesh_axis_given_twice(given, mesh_name)
        return ()
    return name


def leaf_names(fun: Callable, args: tuple, kwargs: dict) -> list[str]:
    """How to call each leaf of the arguments: `argument x['w']`, `kwargs['scale']`."""
    names = [argument_name(fun, i) for i in range(len(args))]
    names = [name if name.startswith("args[") else f"argument {name}" for name in names]
    found = [f"{names[i]}{keystr(path)}" for i, arg in enumerate(args) for path, _ in _paths(arg)]
    return found + [f"kwargs{keystr(path)}" for path, _ in _paths(kwargs)]


def _paths(tree: Any) -> list:
    return tree_flatten_with_path(tree, is_leaf=_jax.is_vmappable)[0]
