"""The exceptions and warnings, and the functions that word them.

What is wrong is found elsewhere and raised as a `Problem`; the call that it spoils is put before it where it is known.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from minibatch import _jax


class MissingRuleWarning(UserWarning):
    """A primitive has no batching rule: it runs lane by lane, in a loop.

    Turn it into an error with `warnings.simplefilter("error", minibatch.MissingRuleWarning)`, or register a rule with
    `minibatch.extend.rule`.
    """


class Problem(Exception):  # noqa: N818 - never reaches a user: it becomes a `kind`
    """Something about a call that the user can mend: the class of exception they get, and what it says."""

    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(text)
        self.kind = kind

    def about(self, call: str) -> Exception:
        """The exception for the user, headed by the call as they wrote it."""
        return self.kind(f"{call}: {self}")


def note(error: Exception, eqn: Any) -> None:
    """Add to an error raised by a rule which primitive it was and the user's line that used it."""
    line = "" if isinstance(error, Problem) else _jax.user_line(eqn)
    if line and not any(said.startswith("while batching") for said in getattr(error, "__notes__", ())):
        error.add_note(f"while batching {eqn.primitive.name} from {line}")


# --- words for things -------------------------------------------------------------------------------------------------


def name_of(fun: Any) -> str:
    """What to call `fun`, or what it wraps."""
    name, wrapped = getattr(fun, "__name__", None), getattr(fun, "__wrapped__", None)
    if isinstance(name, str) and name:
        return name
    return type(fun).__name__ if wrapped is None else name_of(wrapped)


def echo(fun: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The call of `vmap` as the user wrote it, without what they left at its default."""
    given = [f"{name}={value!r}" for name, value in options.items() if value is not defaults[name]]
    return f"vmap({', '.join([name_of(fun), *given])})"


def describe(x: Any) -> str:
    """An array as `f32[3,4]`, a container by its type and children, anything else by its repr and type."""
    with contextlib.suppress(Exception):
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return jax.typeof(x).str_short(short_dtypes=True)
    children = tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    if x is None:
        return "None"
    if len(children) == 1 and children[0][1] is x:
        return f"{x!r} of type {type(x).__name__}"
    keys = ", ".join(keystr(path) for path, _ in children)
    return f"{type(x).__name__} with children {keys}" if children else f"an empty {type(x).__name__}"


def describe_key(key: Any) -> str:
    """What stands for an argument in the key of a program: an aval, or a kind of value."""
    if hasattr(key, "str_short"):
        return key.str_short(short_dtypes=True)
    kind = key[0] if isinstance(key, tuple) and key else key
    if kind is np.ndarray:
        return f"a NumPy array {key[2]}{list(key[1])}"
    return repr(key[1]) if kind in (bool, int, str, float) else f"another {getattr(kind, '__name__', kind)}"


def _type_of(x: Any) -> str:
    try:
        return jax.typeof(x).str_short()
    except TypeError:
        return "unknown"


# --- vmap(...) itself -------------------------------------------------------------------------------------------------


def not_callable(fun: Any) -> TypeError:
    """`vmap(3)`."""
    return TypeError(f"vmap: Expected a callable value, got {fun!r}. The first argument of vmap is the function of one lane.")


def not_an_axis(name: str, spec: Any, leaf: Any) -> TypeError:
    """`vmap(f, in_axes=0.5)`."""
    hint = f" Did you mean {name}={int(leaf)}?" if isinstance(leaf, (bool, np.bool_, np.integer)) and spec is leaf else ""
    if name == "in_axes" and type(leaf).__name__ == "if_batched":
        hint = " if_batched speaks of outputs; for arguments there is if_array."
    return TypeError(
        f"vmap {name} must be an int, None, or (nested) container with those types as leaves (or callables, asked for each "
        f"leaf), but got {leaf!r} of type {type(leaf).__name__} in {name}={spec!r}.{hint}"
    )


def no_schedule(word: Any, loops: Sequence[str], branches: Sequence[str]) -> TypeError | ValueError:
    """`vmap(f, divergence="lockstp")`."""
    kind = ValueError if isinstance(word, str) else TypeError
    return kind(
        f"vmap divergence must be 'auto', a schedule of loops ({', '.join(map(repr, loops))}), one of branches "
        f"({', '.join(map(repr, branches))}), or a tuple of both, but got {word!r}."
    )


def no_values(what: str) -> Problem:
    """`find_nonfinite(f)(jax.ShapeDtypeStruct(...))`."""
    return Problem(
        ValueError,
        f"{what} runs the program, and so needs arrays with values; among the arguments are shapes without (a "
        "jax.ShapeDtypeStruct, or a value of jax.jit). Call it with arrays, outside of jax.jit.",
    )


def no_lanes_to_check() -> Problem:
    """`check(f)(jnp.ones((0, 3)))`."""
    return Problem(ValueError, "check compares what equations do to many lanes and to one; the mapped axis has size 0.")


# --- in_axes against the arguments ------------------------------------------------------------------------------------


def wrong_length(in_axes: tuple, args: tuple, parameters: Sequence[str]) -> Problem:
    """A tuple of axes that is too short or too long."""
    return Problem(
        ValueError,
        "vmap in_axes must be an int, None, or a tuple of entries corresponding to the positional arguments passed to the "
        f"function, but got len(in_axes)={len(in_axes)}, len(args)={len(args)}. "
        f"The function's parameters are ({', '.join(parameters)}): give one entry for each, in order, "
        "or a dict from parameter name to axis.",
    )


def no_such_parameter(in_axes: Mapping, unknown: Sequence[Any], parameters: Sequence[str]) -> Problem:
    """A dict of axes with a name that `fun` does not have."""
    return Problem(
        ValueError,
        f"vmap in_axes, as a dict, goes by parameter name, but no parameter is called {', '.join(map(repr, unknown))}. "
        f"The function's parameters are ({', '.join(parameters)}). "
        "For a single argument that is a dict, wrap it in a tuple: in_axes=({...},).",
    )


def does_not_fit(spec: Any, value: Any, at_spec: str, at_value: str) -> Problem:
    """A container of axes that is not shaped as the value is."""
    kind = at_spec.partition("[")[0].partition(".")[0]
    return Problem(
        ValueError,
        f"vmap {kind} specification must be a tree prefix of the corresponding value; {at_spec} does not fit {at_value}.\n"
        f"  Mismatch details: {'different children' if type(spec) is type(value) else 'different types'}\n"
        f"  {at_spec} is {describe(spec)}\n"
        f"  {at_value} is {describe(value)}\n"
        f"{_what_fits(value, at_spec, at_value)}",
    )


def _what_fits(value: Any, at_spec: str, at_value: str) -> str:
    children = tree_flatten_with_path(value, is_leaf=lambda y: y is not value)[0]
    if len(children) == 1 and children[0][1] is value:
        return f"{at_value} is a leaf: at {at_spec} there may stand an int, None or a callable."
    keys = ", ".join(keystr(path) for path, _ in children)
    return (
        f"At {at_spec} there may stand an int or None for everything below {at_value}, a callable asked for each leaf, "
        f"or a {type(value).__name__} with an axis for each of its children ({keys}). Static fields need not agree."
    )


def bad_answer(spec: Callable, answer: Any, at_spec: str, at_value: str) -> Problem:
    """A callable in a spec that answered with something else than an axis."""
    return Problem(
        TypeError, f"{at_spec} is {spec!r}, which answered {answer!r} for a leaf of {at_value}; an int or None was expected."
    )


def axis_out_of_range(axis: int, leaf: Any, name: str) -> Problem:
    """An argument of too low a rank for its axis."""
    shape = np.shape(leaf)
    return Problem(
        ValueError,
        f"vmap was requested to map its argument along axis {axis}, which implies that its rank should be at least "
        f"{axis + 1 if axis >= 0 else -axis}, but is only {len(shape)} (its shape is {shape}): {name} of type "
        f"{_type_of(leaf)}. Use None in in_axes for what all lanes share.",
    )


@contextlib.contextmanager
def named_in_checked_shards(name: Any) -> Iterator[None]:
    """Say what is wrong where JAX's own assertions fail: its types of values that vary by shard know mesh axes alone."""
    try:
        yield
    except (AssertionError, NotImplementedError, ValueError) as error:
        known = not str(error) or "can only accept axis_name which corresponds to one of" in str(error)
        if name is None or not known or not _jax.checks_varying() or not _jax.raised_by_jax(error):
            raise
        raise Problem(
            NotImplementedError,
            f"inside a shard_map with check_vma=True, JAX's collectives know mesh axes alone, not the mapped axis {name!r}. "
            "Pass check_vma=False to shard_map, or reduce over the lanes after the map instead of inside it.",
        ) from error


def nothing_mapped(names: Sequence[str]) -> Problem:
    """No argument says how many lanes there are."""
    if not names:
        return Problem(
            ValueError,
            "vmap wrapped function must be passed at least one argument containing an array or axis_size must be specified.",
        )
    listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    return Problem(
        ValueError,
        "vmap must have at least one non-None value in in_axes or axis_size must be specified; "
        f"every leaf of the arguments is shared: {listed}.",
    )


def sizes_differ(axes: Sequence[int | None], leaves: Sequence[Any], axis_size: Any, names: Sequence[str]) -> Problem:
    """Mapped axes of different sizes."""
    mapped = [
        (np.shape(x)[d], f"axis {d} of {name} of type {_type_of(x)}")
        for d, x, name in zip(axes, leaves, names, strict=True)
        if d is not None
    ]
    counts = collections.Counter(size for size, _ in mapped).most_common()
    lines = [] if axis_size is None else [f"the `axis_size` argument was {axis_size}"]
    for i, (size, count) in enumerate(counts):
        example = next(place for s, place in mapped if s == size)
        if count == 1:
            lines.append(f"one axis had size {size}: {example}")
        else:
            lines.append(f"{'some' if i else 'most'} axes ({count} of them) had size {size}, e.g. {example}")
    listed = ";\n".join(f"  * {line}" for line in lines)
    return Problem(ValueError, f"vmap got inconsistent sizes for array axes to be mapped:\n{listed}")


def view_of_a_reference(name: str) -> Problem:
    """A part of a reference, `ref.at[1:3]`, as an argument."""
    return Problem(
        TypeError,
        f"TransformedRefs are not allowed as arguments, but {name} is one: pass the whole reference, and index it inside.",
    )


def reference_passed_twice(name: str, other: str) -> Problem:
    """One reference as two arguments, each of which `fun` may write to."""
    return Problem(
        ValueError,
        f"only one reference to a mutable array may be passed as an argument, but {name} and {other} are the same: "
        "pass it once.",
    )


def mesh_axes_differ(names: Sequence[Any]) -> Problem:
    """Arguments whose lanes are sharded over different axes of an explicit mesh."""
    listed = " vs ".join(dict.fromkeys(map(repr, names)))
    return Problem(
        ValueError,
        "Mapped away dimension of inputs passed to vmap should be sharded the same. Got inconsistent axis specs: "
        f"{listed}. Reshard one of them with jax.reshard.",
    )


def mesh_axis_in_use(leaf: Any, name: Any) -> Problem:
    """A shared argument sharded over the mesh axis that the lanes lie over."""
    return Problem(
        ValueError,
        "Unmapped values passed to vmap cannot be sharded along the mesh axis you are vmapping over. "
        f"Got type {describe(leaf)}, and lanes over {name!r}. Reshard it with jax.reshard.",
    )


def mesh_axis_given_twice(given: Any, name: Any) -> Problem:
    """`spmd_axis_name` with arguments that say otherwise."""
    return Problem(
        ValueError,
        "Only one of spmd_axis_name or arrays sharded on `Explicit` mesh axis type is allowed. "
        f"Got spmd_axis_name={given!r}, and arrays whose lanes lie over {name!r}.",
    )


# --- the function and its outputs -------------------------------------------------------------------------------------


def lane_is_abstract(error: Exception, fun: Any) -> Exception:
    """An exception of the class of `error` that says which line asked for the value of a lane."""
    line, lines = _jax.raising_line(error), str(error).splitlines()
    text = (
        f"{name_of(fun)} asked for the concrete value of something that differs by lane{f', at {line}' if line else ''}. "
        "A lane's value is never known in Python: use jnp.where or lax.cond for a choice, lax.while_loop for a loop, jnp "
        "for np functions; what must be known, such as a shape, may come as a shared argument (None in in_axes).\n"
        f"{lines[0]}\n{lines[-1]}"
    )
    reworded = type(error).__new__(type(error))
    reworded.args = (text,)
    return reworded


def not_a_jax_type(leaf: Any, path: str) -> Problem:
    """An output that is no array."""
    return Problem(
        TypeError,
        f"Output from batched function {leaf!r} with type {type(leaf)} is not a valid JAX type"
        f"{f' (the output at {path})' if path else ''}. An output that no array can hold has no lanes: give it None in "
        "out_axes, or use out_axes=if_array(0).",
    )


def out_axis_out_of_range(axis: int, leaf: Any, path: str) -> Problem:
    """An out axis beyond the rank that an output has with its lanes."""
    rank = np.ndim(leaf) + 1
    return Problem(
        ValueError,
        f"at vmap out_axes{path}, axis {axis} is out of bounds for an output of dimension {rank} with its lanes: "
        f"one lane's output is {describe(leaf)}; an axis from {-rank} to {rank - 1} was expected.",
    )


def output_is_batched(path: str, spec: Any, bdim: Any, axis_name: Any) -> Problem:
    """`out_axes=None`, or a spec that says otherwise, for an output that differs by lane."""
    named = f" vmap has mapped output (axis_name={axis_name}) but out_axes is {spec}." if axis_name is not None else ""
    return Problem(
        ValueError,
        f"at vmap out_axes{path}, got axis spec {spec} but output was batched on axis {bdim}.{named} "
        "The output differs by lane: give the axis where its lanes go, or reduce over the lanes first.",
    )
