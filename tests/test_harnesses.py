"""JAX's own list of small programs, one primitive each: a sample of it, and all of it with `--harnesses=all`."""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close

import minibatch

pytestmark = pytest.mark.usefixtures("compiles_quickly")
SIZE = 3
EACH = 4  # ways to map a harness, where all are asked for


def harnesses() -> dict[str, list]:
    """JAX's harnesses that a CPU can run, by primitive."""
    argv, sys.argv = sys.argv, sys.argv[:1]  # the module reads flags of its own
    try:
        from jax._src.internal_test_util import test_harnesses
    finally:
        sys.argv = argv
    found: dict[str, dict] = {}
    for harness in test_harnesses.all_harnesses:
        if harness.filter("cpu"):
            found.setdefault(harness.group_name, {}).setdefault(harness.fullname, harness)
    return {group: [named[name] for name in sorted(named)] for group, named in sorted(found.items())}  # JAX's order varies


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--harnesses") == "all"
    groups = harnesses()
    picked = groups if every else {g: random.Random(g).sample(members, 1) for g, members in groups.items()}
    drawn = [(group, harness) for group, members in picked.items() for harness in members]
    metafunc.parametrize("harness", [h for _, h in drawn], ids=[f"{group}: {h.fullname}" for group, h in drawn])


@pytest.fixture
def most(request: pytest.FixtureRequest) -> int:
    """In how many ways a harness is mapped."""
    return EACH if request.config.getoption("--harnesses") == "all" else 1


def lanes_of(harness: Any) -> list[np.ndarray]:
    """Lanes [SIZE, *s] of each argument that is an array: drawn as the harness draws it, or near the one it names."""
    rng = np.random.RandomState(zlib.crc32(harness.fullname.encode()))
    dynamic = [x for x in harness.arg_descriptors if type(x).__name__ != "StaticArg"]
    return [np.stack([lane_of(harness, x, rng, lane) for lane in range(SIZE)]) for x in dynamic]


def lane_of(harness: Any, descriptor: Any, rng: np.random.RandomState, lane: int) -> np.ndarray:
    """One lane's argument. Integers named by the harness are often indices: they stay in order, and among the values named."""
    if type(descriptor).__name__ in ("RandArg", "CustomArg"):
        return np.asarray(harness._arg_maker(descriptor, rng))
    x = np.asarray(descriptor)
    if x.dtype == bool:
        return x ^ (lane % 2 == 1)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        with np.errstate(invalid="ignore"):  # an infinite complex number times a real one
            return (x * (1 + 0.125 * lane)).astype(x.dtype)
    if x.size == 0 or harness.params.get("unique_indices"):
        return x
    low, high = (x.min(), x.max()) if x.min() < x.max() else (min(x.min(), 0), max(x.max(), 1))
    return np.clip(x.astype(np.int64) + lane, low, high).astype(x.dtype)


def ways(harness: Any, lanes: Sequence[np.ndarray], most: int) -> Iterator[tuple[list, int]]:
    """Some `in_axes` of front, last and shared, at least one of them mapped, each with an `out_axes`."""
    choices = [[0, None] if x.ndim == 1 else [0, x.ndim - 1, None] for x in lanes]
    combos = [combo for combo in itertools.product(*choices) if any(d is not None for d in combo)]
    rng = random.Random(harness.fullname)
    yield from ((list(combo), rng.choice([0, -1])) for combo in rng.sample(combos, min(most, len(combos))))


def tolerance(outs: Any) -> float:
    """What the least precise of these may be off by."""
    floats = [x.dtype for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return max((max(1e-3, 2 * float(jnp.finfo(dtype).eps)) for dtype in floats), default=0.0)


def test_harness_agrees(harness: Any, most: int) -> None:
    lanes = lanes_of(harness)
    once = jax.jit(harness.dyn_fun)
    for in_axes, out_axis in ways(harness, lanes, most):
        own = [[x[lane if d is not None else 0] for x, d in zip(lanes, in_axes, strict=True)] for lane in range(SIZE)]
        try:
            outs = [once(*args) for args in own]
        except Exception as error:
            pytest.skip(f"JAX has an error for one lane: {type(error).__name__}")
        wanted = jax.tree.map(lambda *xs, axis=out_axis: jnp.stack(xs, axis), *outs)
        args = [jnp.asarray(x[0] if d is None else np.moveaxis(x, 0, d)) for x, d in zip(lanes, in_axes, strict=True)]
        found = minibatch.vmap(harness.dyn_fun, tuple(in_axes), out_axis)(*args)
        assert_close(found, wanted, tolerance(outs), f"in_axes={in_axes}, out_axes={out_axis}")
