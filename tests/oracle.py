"""Two oracles for every mapped function: the stack of per-lane calls, and `jax.vmap`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import minibatch


class Draw(NamedTuple):
    """One lane's argument: how to draw it. Integers lie in [low, high), floats are uniform there."""

    shape: tuple[int, ...]
    dtype: Any = np.float32
    low: float = -2.0
    high: float = 2.0
    make: Callable[[np.random.Generator, int], Any] | None = None

    def lanes(self, rng: np.random.Generator, size: int) -> Any:
        """Lanes [size, *shape] of this argument."""
        if self.make is not None:
            return self.make(rng, size)
        shape, dtype = (size, *self.shape), jnp.dtype(self.dtype)
        if dtype.kind == "b":
            return jnp.asarray(rng.random(shape) < 0.5)
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.asarray(rng.integers(int(self.low), int(self.high), shape), dtype)
        values = rng.uniform(self.low, self.high, shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            values = values + 1j * rng.uniform(self.low, self.high, shape)
        return jnp.asarray(values, dtype)


def f32(*shape: int, low: float = -2.0, high: float = 2.0) -> Draw:
    """A float32 argument."""
    return Draw(shape, np.float32, low, high)


def c64(*shape: int) -> Draw:
    """A complex64 argument."""
    return Draw(shape, np.complex64)


def i32(*shape: int, low: int = -4, high: int = 5) -> Draw:
    """An int32 argument in [low, high)."""
    return Draw(shape, np.int32, low, high)


def u32(*shape: int, low: int = 0, high: int = 2**31) -> Draw:
    """A uint32 argument in [low, high)."""
    return Draw(shape, np.uint32, low, high)


def bools(*shape: int) -> Draw:
    """A bool argument."""
    return Draw(shape, np.bool_)


def keys(*shape: int, impl: str = "threefry2x32") -> Draw:
    """Typed random keys."""

    def make(rng: np.random.Generator, size: int) -> Any:
        return jax.random.split(jax.random.key(int(rng.integers(2**31)), impl=impl), (size, *shape))

    return Draw(shape, make=make)


class Case(NamedTuple):
    """A small program that must map.

    `primitives` names those it is here to exercise (separated by spaces). `grad` also checks jvp, vjp and
    vmap(grad). `jax` is False where jax.vmap cannot do it, so that only the stack of lanes is asked.
    """

    name: str
    fun: Callable
    args: tuple[Draw, ...]
    primitives: str = ""
    grad: bool = False
    jax: bool = True
    tol: float = 1e-4


def bdims_of(case: Case, most: int = 6) -> Iterator[tuple[int | None, ...]]:
    """Front, last and shared for each argument, in all combinations (a spread of at most `most`) with a mapped one."""
    choices = [[0, None] if not draw.shape else [0, len(draw.shape), None] for draw in case.args]
    combos = [c for c in itertools.product(*choices) if any(d is not None for d in c)]
    step = max(1, -(-len(combos) // most))
    yield from combos[::step]


def arguments(case: Case, bdims: Sequence[int | None], size: int, seed: int = 0) -> tuple[list, list[list]]:
    """The mapped arguments, and the list of each lane's own."""
    rng = np.random.default_rng(seed)
    stacked, per_lane = [], []
    for draw, bdim in zip(case.args, bdims, strict=True):
        drawn = draw.lanes(rng, max(size, 1))
        if bdim is None:
            stacked.append(drawn[0])
            per_lane.append([drawn[0]] * size)
        else:
            stacked.append(jnp.moveaxis(drawn[:size], 0, bdim))
            per_lane.append([drawn[i] for i in range(size)])
    return stacked, [list(lane) for lane in zip(*per_lane, strict=True)]


def assert_close(found: Any, wanted: Any, tol: float, what: str = "") -> None:
    """Same structure, shapes, dtypes, weak types, and values to `tol`."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted), what
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype, what
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), (what, x.shape, x.dtype, y.shape, y.dtype)
        if x.dtype == jax.dtypes.float0:  # a tangent of an integer, which has no value
            continue
        exact = not jnp.issubdtype(x.dtype, jnp.inexact)
        x, y = (np.asarray(a, None if exact or a.dtype.kind == "c" else np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=0 if exact else tol, atol=0 if exact else tol, err_msg=what)


def stack_of_lanes(fun: Callable, per_lane: Sequence[Sequence[Any]]) -> Any:
    """The definition of a mapped call: each lane by itself, results stacked in front."""
    once = jax.jit(fun)
    return jax.tree.map(lambda *xs: jnp.stack(xs), *[once(*lane) for lane in per_lane])


def assert_lanes_agree(case: Case, bdims: Sequence[int | None], size: int, out_axes: int = 0) -> None:
    """`minibatch.vmap` gives what the stack of lanes gives, and what `jax.vmap` gives."""
    stacked, per_lane = arguments(case, bdims, size)
    found = minibatch.vmap(case.fun, tuple(bdims), out_axes)(*stacked)
    if size:
        wanted = stack_of_lanes(case.fun, per_lane)
        wanted = jax.tree.map(lambda x: jnp.moveaxis(x, 0, out_axes), wanted)
        assert_close(found, wanted, case.tol, "stack of lanes")
    if case.jax:
        assert_close(found, jax.jit(jax.vmap(case.fun, tuple(bdims), out_axes))(*stacked), case.tol, "jax.vmap")


def assert_derivatives_agree(case: Case, bdims: Sequence[int | None], size: int = 3) -> None:
    """jvp and vjp of the mapped function, and the map of its gradient, agree with the lanes."""
    stacked, per_lane = arguments(case, bdims, size)
    floats = [i for i, x in enumerate(stacked) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def scalar(fun: Callable) -> Callable:
        def total(*args: Any) -> Any:
            leaves = [x for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum((jnp.sin(jnp.abs(x) if jnp.iscomplexobj(x) else x).sum() for x in leaves), start=0.0)

        return total

    mapped = minibatch.vmap(case.fun, tuple(bdims))
    lane_grad = jax.jit(jax.grad(scalar(case.fun), floats))
    lanes = [lane_grad(*lane) for lane in per_lane]
    summed = []
    for k, i in enumerate(floats):
        each = jnp.stack([g[k] for g in lanes])
        summed.append(each.sum(0) if bdims[i] is None else jnp.moveaxis(each, 0, bdims[i]))
    assert_close(jax.grad(scalar(mapped), floats)(*stacked), tuple(summed), 10 * case.tol, "grad(vmap)")
    per = minibatch.vmap(jax.grad(scalar(case.fun), floats), tuple(bdims))(*stacked)
    assert_close(per, tuple(jnp.stack([g[k] for g in lanes]) for k in range(len(floats))), 10 * case.tol, "vmap(grad)")

    def along(fun: Callable, args: Sequence[Any]) -> Any:
        def line(t: Any) -> Any:
            moved = [x + t * jnp.ones_like(x) if i in floats else x for i, x in enumerate(args)]
            return [y for y in jax.tree.leaves(fun(*moved)) if jnp.issubdtype(y.dtype, jnp.inexact)]

        return jax.jvp(line, (jnp.float32(0),), (jnp.float32(1),))[1]

    tangents = [jax.jit(lambda *lane: along(case.fun, lane))(*lane) for lane in per_lane]
    wanted = jax.tree.map(lambda *ts: jnp.stack(ts), *tangents)
    assert_close(jax.jit(lambda *a: along(mapped, a))(*stacked), wanted, 10 * case.tol, "jvp(vmap)")


def assert_nested_agrees(case: Case) -> None:
    """vmap of vmap agrees with the lanes of lanes, arguments mapped on different axes in each."""
    rng = np.random.default_rng(1)
    drawn = [draw.lanes(rng, 6) for draw in case.args]
    grids = [x.reshape((2, 3, *x.shape[1:])) for x in drawn]
    inner = [len(draw.shape) for draw in case.args]
    moved = [jnp.moveaxis(x, 1, d + 1) for x, d in zip(grids, inner, strict=True)]
    found = minibatch.vmap(minibatch.vmap(case.fun, tuple(inner)))(*moved)
    rows = [stack_of_lanes(case.fun, [[g[i, j] for g in grids] for j in range(3)]) for i in range(2)]
    assert_close(found, jax.tree.map(lambda *xs: jnp.stack(xs), *rows), case.tol, "vmap(vmap)")
