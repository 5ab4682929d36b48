"""A short tour: real programs mapped, checked against their lanes one by one, and timed beside `jax.vmap`."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minibatch
from minibatch.tour.programs import Program, stops

__all__ = ["Program", "stops", "tour"]


def tour() -> bool:
    """Print the versions, the devices and a line for each program; whether every program agreed with its lanes."""
    print(", ".join(f"{name} {release(name)}" for name in ("minibatch", "jax", "jaxlib", "numpy")), end=", ")
    print(f"Python {platform.python_version()}; devices: {', '.join(map(str, jax.devices()))}\n")
    print(f"{'':33}{'lanes':>6}{'error':>9}{'time':>11}{'/ jax.vmap':>13}{'/ jit(jax.vmap)':>18}")
    agreed = [visit(program) for program in stops()]
    print("\nerror: the largest difference from the stack of calls lane by lane, relative to the largest value.")
    print("/: time as a ratio to that of jax.vmap, called as it is and inside jax.jit; below 1, minibatch takes less.")
    print(f"{sum(agreed)} of {len(agreed)} programs agree with their lanes one by one.")
    return all(agreed)


def release(name: str) -> str:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def visit(program: Program, tolerance: float = 1e-3) -> bool:
    """Print the line of one program; whether it agrees with its lanes."""
    mapped = minibatch.vmap(program.fun, program.in_axes)
    off = error(mapped(*program.args), stack_of_lanes(program))
    plain = jax.vmap(program.fun, program.in_axes)  # to compare with; the library itself never calls it
    ours, *theirs = seconds([mapped, plain, jax.jit(plain)], program.args)
    assert ours is not None
    ratios = ["refused" if t is None else f"{ours / t:.3f}" for t in theirs]
    wrong = "" if off <= tolerance else "   differs from its lanes"
    print(f"{program.name:33}{program.lanes:6}{off:9.0e}{ours * 1e3:8.2f} ms{ratios[0]:>13}{ratios[1]:>18}{wrong}", flush=True)
    return off <= tolerance


def stack_of_lanes(program: Program) -> Any:
    """What mapping means: the function called on each lane by itself, the results stacked."""
    one_lane = jax.jit(program.fun)
    return jax.tree.map(lambda *xs: jnp.stack(xs), *[one_lane(*program.lane(i)) for i in range(program.lanes)])


def error(found: Any, wanted: Any) -> float:
    """The largest difference of any leaf, relative to its largest value; infinite where structure or shapes differ."""
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return np.inf
    worst = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return np.inf
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)))
    return worst if np.isfinite(worst) else np.inf


def seconds(functions: Sequence[Callable], args: tuple, budget: float = 1.5) -> list[float | None]:
    """The median time of each function, called in turn so that noise meets all; None for one that refuses."""
    working = [_works(function, args) for function in functions]
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + budget
    while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 200):
        for function, works, taken in zip(functions, working, times, strict=True):
            if works:
                start = time.perf_counter()
                jax.block_until_ready(function(*args))
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) if taken else None for taken in times]


def _works(function: Callable, args: tuple) -> bool:
    try:
        jax.block_until_ready(function(*args))
    except (ValueError, TypeError):
        return False
    return True
