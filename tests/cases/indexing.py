"""Cases for rules/indexing.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from oracle import Case, Draw, f32, i32, keys

ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
INTO_ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
# The window dims around the dims of the indices; index components in another order than the dims they index.
WINDOWS = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(1,), start_index_map=(2, 1))
INTO_WINDOWS = lax.ScatterDimensionNumbers((0, 2), (1,), (2, 1))
# A batching pair of the program's own, the second of the indices' dims.
PAIRED = lax.GatherDimensionNumbers((1,), (), (0,), operand_batching_dims=(1,), start_indices_batching_dims=(1,))
INTO_PAIRED = lax.ScatterDimensionNumbers((1,), (), (0,), (1,), (1,))


def some(n: int, low: int, high: int, in_order: bool = False) -> Draw:
    """Indices [n, 1], none twice, in [low, high)."""

    def make(rng: np.random.Generator, size: int) -> Any:
        drawn = rng.permuted(np.tile(np.arange(low, high), (size, 1)), axis=1)[:, :n]
        return jnp.asarray(np.sort(drawn, 1) if in_order else drawn, np.int32)[:, :, None]

    return Draw((n, 1), np.int32, make=make)


def modes(op: Callable, names: str = "clip fill promise_in_bounds") -> Callable:
    """`op` in each of these modes, on indices that are in bounds where they are promised to be."""

    def each(x: Any, i: Any, *rest: Any) -> list:
        return [op(x, i % 5 if mode == "promise_in_bounds" else i, *rest, mode=mode) for mode in names.split()]

    return each


def into_rows(op: Callable, **flags: bool) -> Callable:
    """A scatter into rows, as a function of operand, indices and updates."""
    return lambda x, i, u, mode="fill": op(x, i, u, INTO_ROWS, mode=mode, **flags)


def starting(op: Callable) -> Callable:
    """A dynamic slice or update that starts where it is told, out of bounds too."""
    return lambda *args: op(*args, allow_negative_indices=False)


CASES = [
    Case("slice", lambda x: lax.slice(x, (1, 0), (4, 3)), (f32(4, 5),), "slice"),
    Case("slice-strided", lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)), (f32(4, 5),), "slice", grad=True),
    Case("slice-scalar", lambda x: 2 * lax.slice(x, (), (), ()), (f32(),), "slice"),
    Case(
        "dynamic_slice",
        lambda x, i, j: starting(lax.dynamic_slice)(x, (i, j), (2, 3)),
        (f32(4, 5), i32(low=-3, high=7), i32(low=-3, high=7)),
        "dynamic_slice",
        grad=True,
    ),
    Case(
        "dynamic_slice-row",
        lambda x, i: (lax.dynamic_slice(x, (i, jnp.uint8(0)), (1, 5)), lax.dynamic_slice(x, (i, i), (4, 5))),
        (f32(4, 5), Draw((), np.uint8, 0, 200)),
    ),
    Case("dynamic_slice-scalar", lambda x: lax.dynamic_slice(x, (), ()), (f32(),)),
    Case("dynamic_slice-keys", lambda k, i: lax.dynamic_slice(k, (i,), (2,)), (keys(4), i32())),
    Case(
        "dynamic_update_slice",
        lambda x, u, i, j: starting(lax.dynamic_update_slice)(x, u, (i, j)),
        (f32(4, 5), f32(2, 3), i32(low=-3, high=7), i32(low=-3, high=7)),
        "dynamic_update_slice",
        grad=True,
    ),
    Case(
        "dynamic_update_slice-row",
        lambda x, u, i: lax.dynamic_update_slice(lax.dynamic_update_slice(x, x * 2, (i, i)), u, (i, jnp.uint8(3))),
        (f32(4, 5), f32(1, 5), Draw((), np.uint8, 0, 200)),
    ),
    Case(
        "gather",
        modes(lambda x, i, mode: lax.gather(x, i, ROWS, (1, 4), mode=mode)),
        (f32(5, 4), i32(3, 1, low=-3, high=8)),
        "gather",
        grad=True,
    ),
    Case(
        "gather-fill_value",
        lambda x, i: lax.gather(x, i, ROWS, (1, 2), mode="fill", fill_value=7),
        (i32(5, 4), i32(3, 1, low=-3, high=8)),
    ),
    Case(
        "gather-flags",
        lambda x, i: lax.gather(x, i, ROWS, (1, 4), indices_are_sorted=True, unique_indices=True, mode="clip"),
        (f32(6, 4), some(4, 0, 6, in_order=True)),
    ),
    Case(
        "gather-windows",
        modes(lambda x, i, mode: lax.gather(x, i, WINDOWS, (2, 1, 3), mode=mode), "clip fill"),
        (f32(2, 3, 5), i32(4, 2, low=-2, high=5)),
    ),
    Case(
        "gather-paired",
        modes(lambda x, i, mode: lax.gather(x, i, PAIRED, (2, 1), mode=mode), "clip fill"),
        (f32(4, 2), i32(3, 2, 1, low=-2, high=5)),
    ),
    Case("gather-keys", lambda k, i: k[i], (keys(4), i32(3, low=-4, high=4))),
    Case(
        "scatter",
        modes(into_rows(lax.scatter, unique_indices=True), "fill promise_in_bounds"),
        (f32(5, 2), some(3, 0, 5), f32(3, 2)),
        "scatter",
        grad=True,
    ),
    Case("scatter-out", into_rows(lax.scatter), (i32(5, 2), some(4, -2, 8), i32(4, 2))),
    Case(
        "scatter-apply",
        lambda x, i: lax.scatter_apply(x, i, lax.sin, INTO_ROWS, update_shape=(3, 2)),
        (f32(5, 2), some(3, -1, 7)),
    ),
    Case(
        "scatter-add",
        modes(into_rows(lax.scatter_add)),
        (f32(5, 2), i32(4, 1, low=-2, high=7), f32(4, 2)),
        "scatter-add",
        grad=True,
    ),
    Case(
        "scatter-add-flags",
        into_rows(lax.scatter_add, unique_indices=True, indices_are_sorted=True),
        (f32(6, 2), some(4, 0, 6, in_order=True), f32(4, 2)),
    ),
    Case(
        "scatter-add-windows",
        modes(lambda x, i, u, mode: lax.scatter_add(x, i, u, INTO_WINDOWS, mode=mode), "clip fill"),
        (f32(2, 3, 5), i32(4, 2, low=-2, high=5), f32(2, 4, 3)),
    ),
    Case(
        "scatter-add-paired",
        modes(lambda x, i, u, mode: lax.scatter_add(x, i, u, INTO_PAIRED, mode=mode), "clip fill"),
        (f32(4, 2), i32(3, 2, 1, low=-2, high=5), f32(3, 2, 2)),
        grad=True,
    ),
    Case(
        "scatter-sub",
        modes(into_rows(lax.scatter_sub), "clip fill"),
        (f32(5, 2), i32(4, 1, low=-2, high=7), f32(4, 2)),
        "scatter-sub",
    ),
    Case(
        "scatter-mul",
        into_rows(lax.scatter_mul, unique_indices=True),
        (f32(5, 2), some(3, 0, 5), f32(3, 2)),
        "scatter-mul",
        grad=True,
    ),
    Case(
        "scatter-min",
        modes(into_rows(lax.scatter_min), "clip fill"),
        (i32(5, 2), i32(4, 1, low=-2, high=7), i32(4, 2)),
        "scatter-min",
    ),
    Case("scatter-max", into_rows(lax.scatter_max), (f32(5, 2), some(3, 0, 5), f32(3, 2)), "scatter-max", grad=True),
    Case(
        "segments",
        lambda x, i: (jax.ops.segment_sum(x, i, 3), x.at[i].set(1.0, mode="drop"), jnp.take_along_axis(x, i, 0)),
        (f32(4), i32(4, low=-1, high=4)),
    ),
]
