"""`python -m minibatch explain`."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from minibatch import Vmapped, explain
from minibatch.report.findings import SEVERITIES

DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64", "c128": "complex128",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64", "bool": "bool",
}  # fmt: skip


class Unusable(Exception):  # noqa: N818 - never leaves this file
    """What was written on the command line is of no use, and why."""


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit status."""
    try:
        report = _report(args)
        if args.why is not None:
            print(report.why(int(args.why) if args.why.isdigit() else args.why), end="")
            return 0
    except Unusable as problem:
        print(f"python -m minibatch explain: {problem}", file=sys.stderr)
        return 2
    except Exception:  # the user's own
        traceback.print_exc()
        return 2
    if args.html:
        try:
            report.save(args.html)
        except (ImportError, OSError) as problem:
            print(report.text(args.width))
            print(f"python -m minibatch explain: {problem}", file=sys.stderr)
            return 2
    print(report.to_json() if args.json else report.text(args.width, sys.stdout.isatty()), end="")
    if args.full and not args.json:
        print("\n" + report.full(args.width), end="")
    worst = max((SEVERITIES.index(f.severity) for f in report.findings), default=-1)
    return int(args.fail_on != "never" and worst >= SEVERITIES.index(args.fail_on))


def _report(args: argparse.Namespace) -> Any:
    place, _, name = args.function.rpartition(":")
    if not place:
        raise Unusable(f"{args.function!r} is no FILE_OR_MODULE:FUNCTION, such as model.py:loss")
    module = _load(place)
    fun = _find(module, name)
    given = _made(module, args.args_from) if args.args_from else [argument(text) for text in args.arguments]
    if not given and args.axis_size is None:
        raise Unusable(
            f"say what {name} takes: each argument, with its lanes, as dtype[shape], such as f32[128,3]; or --args-from, with "
            "a function that makes them"
        )
    options = {
        "in_axes": axes(args.in_axes), "out_axes": axes(args.out_axes), "axis_name": args.axis_name,
        "axis_size": args.axis_size, "divergence": args.divergence,
    }  # fmt: skip
    options = {key: value for key, value in options.items() if value is not _UNSAID and value is not None}
    if args.analyze:
        given = [values(x, i) for i, x in enumerate(given)]
    if isinstance(fun, Vmapped):
        if args.analyze:
            raise Unusable(f"{name} is mapped already: --analyze is for the function of one lane")
        if options:
            raise Unusable(f"{name} is mapped already, with axes of its own: leave out --{', --'.join(options)}")
        return fun.explain(*given)
    return explain(fun, **options, memory=args.memory, analyze=args.analyze)(*given)


def _load(place: str) -> Any:
    """The module named `place`, or that of the file."""
    sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place.partition(".")[0] and error.name != place:
                raise
            raise Unusable(f"there is no module {place!r}; a file is written with its ending, {place}.py") from None
    file = pathlib.Path(place)
    if not file.is_file():
        raise Unusable(f"there is no file {place!r}")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _find(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise Unusable(f"{module.__name__} has no function {name!r}")
    return found


def _made(module: Any, name: str) -> tuple:
    made = _find(module, name)()
    return made if isinstance(made, tuple) else (made,)


_UNSAID = object()


def axes(text: str | None) -> Any:
    """`0,None` as the axes that it says."""
    if text is None:
        return _UNSAID
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise Unusable(f"{text!r} says no axes: write them as in Python, 0,None or {{'x': 0}}") from None


def argument(text: str) -> Any:
    """`f32[128,3]` as an array of that shape, without values; `key[4]` for random keys."""
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text.strip())
    if match is None or match[1] not in (*DTYPES, *DTYPES.values(), "key"):
        raise Unusable(f"{text!r} is no argument: write dtype[shape], such as f32[128,3] or i32[], with a dtype of {_dtypes()}")
    shape = tuple(int(d) for d in match[2].split(",") if d.strip())
    dtype = jax.random.key(0).dtype if match[1] == "key" else jnp.dtype(DTYPES.get(match[1], match[1]))
    return jax.ShapeDtypeStruct(shape, dtype)


def values(x: Any, number: int) -> Any:
    """An array in the place of a shape without values: normal numbers, integers from 0 to 9, both truth values, keys."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    key = jax.random.key(number)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, x.shape)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.random.normal(key, x.shape, x.dtype)
    if x.dtype == bool:
        return jax.random.bernoulli(key, 0.5, x.shape)
    return jax.random.randint(key, x.shape, 0, 10, x.dtype)


def _dtypes() -> str:
    return ", ".join([*DTYPES, "key"])
