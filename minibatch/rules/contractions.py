"""Products that sum over dimensions: dot, ragged dot, convolution."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, front, is_batched, lanes, lifted, move, shardings, shift
from minibatch._jax import rebind, rebind_as
from minibatch._registry import rule

# --- dot --------------------------------------------------------------------------------------------------------------


def lift(numbers: Any, dx: int | None, dy: int | None) -> Any:
    """The dimension numbers of a dot of x, with lanes at `dx`, and y, with lanes at `dy` (None: without).

    Lanes of both are one more batch dimension, the first; lanes of one are one more free dimension of it.
    """
    (x_contract, y_contract), (x_batch, y_batch) = numbers
    if dx is not None:
        x_contract, x_batch = shift(x_contract, dx), shift(x_batch, dx)
    if dy is not None:
        y_contract, y_batch = shift(y_contract, dy), shift(y_batch, dy)
    if dx is not None and dy is not None:
        x_batch, y_batch = (dx, *x_batch), (dy, *y_batch)
    return (tuple(x_contract), tuple(y_contract)), (tuple(x_batch), tuple(y_batch))


def free(rank: int, *taken: Any) -> list[int]:
    """The dimensions below `rank` that are in none of `taken`."""
    return [d for d in range(rank) if not any(d in dims for dims in taken)]


def result_bdim(numbers: Any, x_rank: int, dx: Any, dy: Any) -> int:
    """Where the result, [*batch, *free of x, *free of y], of a dot of one lane's x and y gets the lanes from `lift`."""
    (x_contract, y_contract), (x_batch, y_batch) = numbers
    match dx, dy:
        case int(), int():
            return 0
        case int(), None:
            return len(x_batch) + len(free(dx, x_contract, x_batch))
        case _:
            return x_rank - len(x_contract) + len(free(dy, y_contract, y_batch))


def parted(x: Any) -> tuple[Array, int | None]:
    """The array of `x`, and where it has its lanes; None if it is shared."""
    return x if is_batched(x) else (x, None)


@rule("dot_general", anywhere=True)
def dot_general(axis: Axis, eqn: Any, x: Any, y: Any) -> list:
    """[*x] . [*y] -> [*z]   lifts to   [B, *x] . [B, *y] -> [B, *z],   and   [B, *x] . [*y] with B among the free dims."""
    (x, dx), (y, dy), precision = parted(x), parted(y), eqn.params["precision"]
    ranks = len(eqn.invars[0].aval.shape), len(eqn.invars[1].aval.shape)
    two_sided = precision is None or type(precision) is tuple
    swapped, numbers, bdim = lifted_numbers(eqn.params["dimension_numbers"], ranks, dx, dy, two_sided)
    if swapped:
        x, y, precision = y, x, precision and precision[::-1]
    return lifted(axis, eqn, bdim, x, y, dimension_numbers=numbers, precision=precision)


@functools.lru_cache(maxsize=4096)
def lifted_numbers(numbers: Any, ranks: tuple[int, int], dx: Any, dy: Any, two_sided: bool) -> tuple[bool, Any, int]:
    """Whether to swap the sides of a dot, its dimension numbers with lanes at `dx` and `dy`, and where its result has them."""
    swapped = two_sided and dx is None and dy == 0 and lanes_alone(numbers, ranks[1])
    if swapped:  # [B, k] . [n, k]: lanes stay in front
        numbers, ranks, dx, dy = tuple(sides[::-1] for sides in numbers), (ranks[1], ranks[0]), dy, dx
    return swapped, lift(numbers, dx, dy), result_bdim(numbers, ranks[0], dx, dy)


def lanes_alone(numbers: Any, y_rank: int) -> bool:
    """Whether y has no free dimension but its lanes, so that the free dimensions of the result keep their order either way."""
    (_, y_contract), (_, y_batch) = numbers
    return not free(y_rank, y_contract, y_batch)


@rule("ragged_dot_general")
def ragged_dot_general(axis: Axis, eqn: Any, x: Any, y: Any, sizes: Any) -> list:
    """[*x] . [*y], [*p, g] -> [*z]   lifts to a dot as above, B among the `p` if B divides the groups.

    `p`, the dimensions with group sizes for every index, are the batch dimensions, then those of the ragged one's kind
    that come before it: free dimensions of x, contracted ones or, again, batch dimensions.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (x_contract, _), (x_batch, y_batch) = dot = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    shape = eqn.invars[0].aval.shape
    x_free = free(len(shape), x_contract, x_batch)
    kind = next(dims for dims in (x_batch, x_contract, x_free) if ragged in dims)
    outer = kind[: kind.index(ragged)]

    if is_batched(sizes):  # then so is what they divide: x, in a free dimension, or x and y, in a batch dimension
        x = Batched(lanes(axis, x), 0)
        y = y if kind is x_free else Batched(lanes(axis, y), 0)
    (_, dx), (_, dy) = parted(x), parted(y)
    if dx is not None and (dy is not None or kind is x_free):
        prefix = [shape[d] for d in (outer if kind is x_batch else (*x_batch, *outer))]
        sizes = group_sizes(axis, sizes, prefix, bdim=0 if dy is not None else len(x_batch))
    if dx is not None and dy is not None and kind is x_contract and x_batch:
        # XLA on CPU cannot contract raggedly with several batch dimensions: they share the first one.
        sizes = fold(Batched(sizes, 0), 0) if np.ndim(sizes) > 1 else sizes
        return folded(axis, eqn, 1, fold(x, x_batch[0]), fold(y, y_batch[0]), sizes)

    bdim = result_bdim(dot, len(shape), dx, dy) + (kind is x_contract)  # then the groups come first
    numbers = lax.RaggedDotDimensionNumbers(
        lift(dot, dx, dy),
        numbers.lhs_ragged_dimensions if dx is None else shift(numbers.lhs_ragged_dimensions),
        numbers.rhs_group_dimensions if dy is None else shift(numbers.rhs_group_dimensions),
    )
    values = (operand.value if is_batched(operand) else operand for operand in (x, y))
    return lifted(axis, eqn, bdim, *values, sizes, ragged_dot_dimension_numbers=numbers)


def group_sizes(axis: Axis, sizes: Any, prefix: list, bdim: int) -> Array:
    """Group sizes [*prefix, g] with lanes at `bdim`; as they are if they are the same everywhere, [g]."""
    if not is_batched(sizes) and np.ndim(sizes) == 1:
        return sizes
    value = lanes(axis, sizes)
    if value.ndim == 2:
        value = lax.broadcast_in_dim(value, (axis.size, *prefix, value.shape[1]), (0, 1 + len(prefix)))
    return move(value, 0, bdim)


@rule("scaled_dot")
def scaled_dot(axis: Axis, eqn: Any, x: Any, y: Any, x_scale: Any, y_scale: Any) -> list:
    """[*x] . [*y] -> [*z]   lifts to   [B, *x] . [B, *y] -> [B, *z]   or, ranks being equal,   [B, *x] . [1, *y]."""
    numbers = eqn.params["dimension_numbers"]
    of_x, of_y = (any(map(is_batched, pair)) for pair in ((x, x_scale), (y, y_scale)))
    x, x_scale, y, y_scale = (
        lanes(axis, operand) if mapped else lax.expand_dims(operand, (0,))
        for operand, mapped in ((x, of_x), (x_scale, of_x), (y, of_y), (y_scale, of_y))
    )
    contract, batch = lift(numbers, 0, 0)
    if not (of_x and of_y):  # the first dimension of each is free
        batch = tuple(dims[1:] for dims in batch)
    [out] = rebind(eqn, x, y, x_scale, y_scale, dimension_numbers=(contract, batch))
    if of_x and of_y:
        return [Batched(out, 0)]
    at_x, at_y = (result_bdim(numbers, x.ndim - 1, *one) for one in ((0, None), (None, 0)))
    return [Batched(lax.squeeze(out, (at_y + 1,)), at_x) if of_x else Batched(lax.squeeze(out, (at_x,)), at_y)]


# --- convolution: lanes folded into a dimension that is there ---------------------------------------------------------


def fold(x: Batched, dim: int, groups: int = 1) -> Array:
    """Lanes of [*s] folded into dimension `dim` of s, outside its n indices but inside its groups: [g, B, n/g]."""
    value, bdim = x
    if groups > 1:
        value, bdim = move(value, bdim, dim), dim + 1
        before, (size, n), after = value.shape[:dim], value.shape[dim : dim + 2], value.shape[dim + 2 :]
        value = move(reshaped(value, (*before, size, groups, n // groups, *after)), dim, dim + 1)
        return reshaped(value, (*before, size * n, *after))
    order = [d for d in range(value.ndim) if d != bdim]
    order.insert(dim, bdim)
    shape = [value.shape[d] for d in order]
    shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    return reshaped(value, shape, None if bdim == dim else order)


def folded(axis: Axis, eqn: Any, dim: int, /, *values: Array, groups: int = 1, **changed: Any) -> list:
    """`eqn` on values with their lanes folded into a dimension; those of the result come in `dim`, and are unfolded there."""
    aval = eqn.outvars[0].aval
    before, n, after = aval.shape[:dim], aval.shape[dim], aval.shape[dim + 1 :]
    [out] = rebind_as([_jax.aval_of_shape(aval, (*before, axis.size * n, *after))], eqn, *values, **changed)
    if groups > 1:
        out = move(reshaped(out, (*before, groups, axis.size, n // groups, *after)), dim + 1, dim)
    sharding = shardings(axis, eqn, dim).get("out_sharding")
    return [Batched(reshaped(out, (*before, axis.size, n, *after), sharding=sharding), dim)]


def reshaped(x: Array, shape: Sequence[int], order: Sequence[int] | None = None, sharding: Any = None) -> Array:
    """`x`, its dimensions taken in this order, in another shape."""
    dims = None if order is None else tuple(order)
    return _jax.reshaped(lax.reshape_p, x, tuple(shape), new_sizes=tuple(shape), dimensions=dims, sharding=sharding)


@rule("conv_general_dilated", anywhere=True)
def conv_general_dilated(axis: Axis, eqn: Any, x: Any, kernel: Any) -> list:
    """[N, C] * [O, C] -> [N, O]   lifts to   [BN, C] * [O, C] -> [BN, O]   or   [N, C] * [BO, C] -> [N, BO].

    Lanes of both are groups:   [N, BC] * [BO, C] -> [N, BO]   or, where there are groups of batches already,
    [BN, C] * [BO, C] -> [N, BO].   On CPU they take turns where that is faster.
    """
    (batch, feature, *_), (out_feature, *_), result = eqn.params["dimension_numbers"]
    result_batch, result_feature = map(int, result[:2])
    batch_groups, feature_groups = eqn.params["batch_group_count"], eqn.params["feature_group_count"]
    if not is_batched(kernel):
        return folded(axis, eqn, result_batch, fold(x, batch, batch_groups), kernel)
    if not is_batched(x):
        groups = batch_groups * feature_groups
        return folded(axis, eqn, result_feature, x, fold(kernel, out_feature, groups), groups=groups)
    if axis.size == 0:  # groups of none are not allowed
        aval = eqn.outvars[0].aval
        return [Batched(lax.full((0, *aval.shape), 0, aval.dtype), 0)]

    def in_groups(x: Array, kernel: Array) -> list:
        x, kernel = Batched(x, dx), Batched(kernel, dk)
        kernel = fold(kernel, out_feature)
        if batch_groups > 1:
            return folded(axis, eqn, result_feature, fold(x, batch), kernel, batch_group_count=axis.size * batch_groups)
        return folded(axis, eqn, result_feature, fold(x, feature), kernel, feature_group_count=axis.size * feature_groups)

    (x, dx), (kernel, dk) = x, kernel
    if not takes_turns(axis, eqn, eqn.invars[0].aval.shape[feature]):
        return in_groups(x, kernel)
    x, kernel, dx, dk = move(x, dx, 0), move(kernel, dk, 0), 0, 0
    out = lax.platform_dependent(
        x, kernel, cpu=lambda x, kernel: in_turn(eqn, x, kernel), default=lambda x, kernel: front(*in_groups(x, kernel))
    )
    return [Batched(out, 0)]


def takes_turns(axis: Axis, eqn: Any, features: int) -> bool:
    """Whether a convolution of lanes' own kernels is better run lane by lane on CPU.

    XLA's groups are slow there, above all their derivatives; but not where a lane has a single feature, as in the gradient
    of a kernel from one sample.
    """
    alone = axis.size == 1 or axis.spmd_name or axis.mesh_name or axis.manual or eqn.params["batch_group_count"] > 1
    return not alone and features > eqn.params["feature_group_count"]


def in_turn(eqn: Any, x: Array, kernel: Array) -> Array:
    """[B, *x] * [B, *kernel] -> [B, *out], lane by lane, features last: the one layout that XLA on CPU has fast code for."""
    (batch, feature, *space), (out_feature, in_feature, *window), result = eqn.params["dimension_numbers"]
    last = len(space) + 1
    middle = tuple(range(1, last))
    x = lax.transpose(x, (0, *shift((batch, *space, feature))))
    kernel = lax.transpose(kernel, (0, *shift((*window, in_feature, out_feature))))
    numbers = lax.ConvDimensionNumbers((0, last, *middle), (last, last - 1, *range(last - 1)), (0, last, *middle))
    out = lax.map(lambda lane: rebind(eqn, *lane, dimension_numbers=numbers)[0], (x, kernel))
    back = np.argsort((result[0], *result[2:], result[1]))
    return lax.transpose(out, (0, *shift(back)))


@rule("scaled_matmul scaled_matmul_wrapper")
def scaled_matmul(axis: Axis, eqn: Any, x: Any, y: Any, x_scale: Any, y_scale: Any) -> list:
    """[N, m, k], [N, n, k] -> [N, m, n]   lifts to   [BN, m, k], [BN, n, k] -> [BN, m, n]   or   [N, Bm, k] -> [N, Bm, n]."""
    of_x, of_y = (any(map(is_batched, pair)) for pair in ((x, x_scale), (y, y_scale)))
    dim = 0 if of_x and of_y else 1
    x, y, x_scale, y_scale = (
        fold(Batched(lanes(axis, operand), 0), dim) if mapped else operand
        for operand, mapped in ((x, of_x), (y, of_y), (x_scale, of_x), (y_scale, of_y))
    )
    return folded(axis, eqn, dim if of_x else 2, x, y, x_scale, y_scale)
