"""Programs at random: a table of operations, and programs of them that shrink, print, and are checked.

A program is a list of steps. Each names an operation of the table, says by number which values it takes (the inputs are
0, 1, …; each step appends what it returns), and has its params, among them the bodies of loops, branches and calls. What
`repr` gives is Python: `check(Program(…))` runs it again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from oracle import Draw, assert_close, keys

import minibatch

LARGEST, HIGHEST_RANK, DEEPEST, MOST_VALUES = 48, 4, 3, 40
TOLERANCE = 2e-3


class Pick:
    """Choices read off one large number, so that a smaller number means earlier choices."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, choices: Sequence[Any]) -> Any:
        self.number, i = divmod(self.number, len(choices))
        return choices[i]


# --- the table --------------------------------------------------------------------------------------------------------
#
# Kinds are letters: f float32, i int32, u uint8, w uint32, b bool, c complex64, k key. What grows is brought back by
# `tame`; predicates and trip counts are integers, for rounding may not decide which way a lane goes.


class Op(NamedTuple):
    """`takes` has one word of kinds for each operand; `fits` is asked for the avals chosen so far, operand by operand.

    An operation with `bodies` has `given`, which says what each body takes; the body returns values like the first
    `keeps` of those, and up to `adds` more. `grad` is False if it cannot be differentiated in reverse.
    """

    name: str
    takes: tuple[str, ...]
    fun: Callable
    fits: Callable[..., bool]
    params: Callable[..., dict]
    grad: bool
    bodies: tuple[str, ...]
    given: Callable[..., Sequence[Any]]
    keeps: int
    adds: int


OPS: dict[str, Op] = {}


def op(
    name: str,
    takes: str,
    fun: Callable,
    fits: Callable[..., bool] = lambda *avals: True,
    params: Callable[..., dict] = lambda pick, *avals: {},
    grad: bool = True,
    bodies: str = "",
    given: Callable[..., Sequence[Any]] = lambda *avals, **params: avals,
    keeps: int = 0,
    adds: int = 0,
) -> None:
    """Enter an operation in the table."""
    assert name not in OPS
    OPS[name] = Op(name, tuple(takes.split()), fun, fits, params, grad, tuple(bodies.split()), given, keeps, adds)


def kind(x: Any) -> str:
    """The letter of an array's dtype."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "k"
    return {"float32": "f", "int32": "i", "uint8": "u", "uint32": "w", "bool": "b", "complex64": "c"}[str(x.dtype)]


def tame(x: Any) -> Any:
    """`x` brought near [-1, 1] if it is of floats; integers wrap by themselves."""
    if jnp.iscomplexobj(x):
        return x / (1 + jnp.abs(x).max(initial=0))
    return jnp.tanh(x) if x.dtype == jnp.float32 else x


def small(x: Any) -> Any:
    """Integers as floats in [0, 1)."""
    return (x % 8).astype(jnp.float32) / 8


def scalar(x: Any) -> Any:
    """One number from integers."""
    return x.sum(dtype=x.dtype)


def rank(*least: int) -> Callable[..., bool]:
    """Operand by operand, at least so many dims."""
    return lambda *avals: avals[-1].ndim >= least[len(avals) - 1]


def alike(*avals: Any) -> bool:
    """One shape for all."""
    return avals[-1].shape == avals[0].shape


def same_kind(*avals: Any) -> bool:
    """One dtype for all."""
    return kind(avals[-1]) == kind(avals[0])


def broadcastable(*avals: Any) -> bool:
    """Shapes that numpy broadcasts."""
    try:
        np.broadcast_shapes(*(a.shape for a in avals))
    except ValueError:
        return False
    return True


def both(*conditions: Callable[..., bool]) -> Callable[..., bool]:
    """All of these."""
    return lambda *avals: all(fits(*avals) for fits in conditions)


def scalars(*which: int) -> Callable[..., bool]:
    """Operands of these numbers have no dims."""
    return lambda *avals: len(avals) - 1 not in which or avals[-1].shape == ()


def some_axis(pick: Pick, x: Any, *_: Any) -> dict:
    """Any dim of the first operand, at times counted from the end."""
    return {"axis": pick(range(x.ndim)) - x.ndim * pick((0, 1))}


def one_of(name: str, *choices: Any) -> Callable[..., dict]:
    """A param with one of these values."""
    return lambda pick, *avals: {name: pick(choices)}


def some_axes(pick: Pick, x: Any, *_: Any) -> dict:
    """Any dims of the first operand."""
    return {"axis": tuple(i for i in range(x.ndim) if pick((1, 0))), "keepdims": pick((False, True))}


# Elementwise.

for name, fun in {
    "neg": jnp.negative,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "arctan": jnp.arctan,
    "erf": lax.erf,
    "logistic": lax.logistic,
    "bell": lambda x: jnp.exp(-x * x),
    "log1p": lambda x: jnp.log1p(x * x),
    "sqrt": lambda x: jnp.sqrt(x * x + 1),
    "rsqrt": lambda x: lax.rsqrt(x * x + 0.5),
    "cube": lambda x: tame(x**3),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "stopped": lax.stop_gradient,
    "asinh": jnp.arcsinh,
    "clip": lambda x: jnp.clip(x, -0.75, 0.5),
    "lgamma": lambda x: tame(lax.lgamma(x * x + 1)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 23),
    "optimization_barrier": lax.optimization_barrier,
    "expm1": lambda x: jnp.expm1(tame(x)),
    "copy": jnp.copy,
}.items():
    op(name, "f", fun)

for name, fun in {
    "add": lambda x, y: 0.5 * (x + y),
    "sub": lambda x, y: 0.5 * (x - y),
    "mul": lambda x, y: tame(x * y),
    "div": lambda x, y: x / (1 + y * y),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "atan2": lambda x, y: jnp.arctan2(x, y * y + 0.5),
    "pow": lambda x, y: tame((x * x + 0.5) ** jnp.tanh(y)),
    "hypot": lambda x, y: tame(jnp.sqrt(x * x + y * y + 0.1)),
    "logaddexp": jnp.logaddexp,
}.items():
    op(name, "f f", fun, broadcastable)

for name, fun in {
    "int add": lambda x, y: x + y,
    "int mul": lambda x, y: x * y,
    "int sub": lambda x, y: x - y,
    "int max": jnp.maximum,
    "mod": lambda x, y: x % (y % 5 + 1),
    "floor_divide": lambda x, y: x // (y % 5 + 1),
    "rem": lambda x, y: lax.rem(*jnp.broadcast_arrays(x, y % 5 + 1)),
    "and": lambda x, y: x & y,
    "xor": lambda x, y: x ^ y,
    "shift_left": lambda x, y: x << (y % 4),
    "shift_right": lambda x, y: x >> (y % 4),
    "lt": lambda x, y: x < y,
    "eq": lambda x, y: x % 3 == y % 3,
}.items():
    op(name, "iuw iuw", fun, both(broadcastable, same_kind))

for name, fun in {
    "invert": lambda x: ~x,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "popcount": lax.population_count,
    "clz": lax.clz,
    "int to float": small,
    "to uint8": lambda x: x.astype(jnp.uint8),
    "to int": lambda x: x.astype(jnp.int32),
    "odd": lambda x: x % 2 == 1,
    "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int32 if x.dtype == jnp.uint32 else jnp.uint8),
}.items():
    op(name, "iuw", fun)

for name, fun in {
    "not": lambda x: ~x,
    "bool to float": lambda x: x.astype(jnp.float32),
    "bool to int": lambda x: x.astype(jnp.int32),
}.items():
    op(name, "b", fun)
op("or", "b b", lambda x, y: x | y, broadcastable)
op("where", "b f f", jnp.where, broadcastable)
op("where scalar", "b fiuc fiuc", lambda p, x, y: lax.select_n(p, x, y),
   both(scalars(0), lambda *avals: len(avals) < 3 or (alike(*avals[1:]) and kind(avals[1]) == kind(avals[2]))))
op("select_n", "i f f f", lambda i, *xs: lax.select_n(i % 3, *xs), alike)
op("clamp", "f f f", lax.clamp, alike)
op("where zero", "b fc", lambda p, x: jnp.where(p, x, 0), broadcastable)
op("polar", "f f", lambda r, t: r * jnp.exp(1j * t), broadcastable)
op("complex", "f f", lax.complex, alike)
for name, fun in {"real": jnp.real, "imag": jnp.imag, "abs squared": lambda x: tame(jnp.real(x * jnp.conj(x)))}.items():
    op(name, "c", fun)
op("conj", "c", jnp.conj)
op("complex mul", "c fc", lambda x, y: tame(x * y), broadcastable)

# Reductions.

for name, fun in {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "prod": jnp.prod, "var": jnp.var}.items():
    op(f"reduce {name}", "f", lambda x, fun=fun, **params: tame(fun(x, **params)), params=some_axes)
for name, fun in {"logsumexp": jax.nn.logsumexp, "sum where": lambda x, **params: jnp.sum(x, where=x < 9, **params)}.items():
    op(f"reduce {name}", "f", lambda x, fun=fun, **params: tame(fun(x, **params)), params=some_axes)
for name, fun in {"sum": jnp.sum, "max": jnp.max, "prod": jnp.prod}.items():
    op(f"int reduce {name}", "iu", lambda x, fun=fun, **params: fun(x, **params).astype(x.dtype), params=some_axes)
op("reduce xor", "iuw", lambda x, axis, keepdims: lax.reduce_xor(x, axis), params=some_axes)
op("any", "b", jnp.any, params=some_axes)
op("all", "b", jnp.all, params=some_axes)
op("argmax", "fiu", lambda x, axis: jnp.argmax(x, axis), rank(1), some_axis)
op("argmin", "fiu", lambda x, axis: jnp.argmin(x, axis, keepdims=True), rank(1), some_axis)
op("softmax", "f", lambda x, axis: jax.nn.softmax(x, axis), rank(1), some_axis)
op("softmax where", "f b", lambda x, p, axis: jax.nn.softmax(x, axis, where=p | (x < 9)), both(alike, rank(1, 1)), some_axis)
op("norm", "f", lambda x, axis: tame(jnp.sqrt((x * x).sum(axis) + 0.1)), rank(1), some_axis)
op("reduce pair", "f i", lambda x, y, axis: lax.reduce(
    (x, y), (np.float32(9), np.int32(9)), lambda a, b: (lax.min(a[0], b[0]), lax.min(a[1], b[1])), (axis % x.ndim,)),
   both(alike, rank(1, 1)), some_axis, grad=False)

# Cumulative.

for name, fun in {"cumsum": lax.cumsum, "cummax": lax.cummax, "cummin": lax.cummin, "cumprod": lax.cumprod}.items():
    op(name, "f", lambda x, axis, reverse, fun=fun: tame(fun(x, axis % x.ndim, reverse)), rank(1),
       lambda pick, x: {**some_axis(pick, x), "reverse": pick((False, True))})
op("cumlogsumexp", "f", lambda x, axis: tame(lax.cumlogsumexp(x, axis % x.ndim)), rank(1), some_axis)
op("int cumsum", "iub", lambda x, axis: jnp.cumsum(x, axis, jnp.int32), rank(1), some_axis)
op("associative_scan", "f", lambda x, axis: lax.associative_scan(lambda a, b: jnp.tanh(a) * 0.5 + b, x, axis=axis),
   lambda x: x.ndim and max(x.shape) <= 2, some_axis)
op("associative affine", "f f", lambda a, b, axis: lax.associative_scan(
    lambda f, g: (f[0] * g[0], f[1] * g[0] + g[1]), (jnp.sin(a), b), axis=axis)[1], both(alike, rank(1, 1)), some_axis)

# Shapes.


def reshapes(pick: Pick, x: Any) -> dict:
    """A shape of as many elements."""
    divisors = [d for d in range(1, x.size + 1) if x.size % d == 0] or [0]
    d = pick(divisors)
    rest = x.size // d if d else 0
    return {"shape": pick([(x.size,), (d, rest), (d, 1, rest), (1, d, rest)])}


def permutations(pick: Pick, x: Any) -> dict:
    """An order of the dims."""
    return {"axes": pick(list(itertools.permutations(range(x.ndim)))[::-1])}


def joinable(*avals: Any) -> bool:
    """Shapes that can be put one after the other along their last dim."""
    x, y = avals[0], avals[-1]
    return x.ndim > 0 and x.shape[:-1] == y.shape[: max(y.ndim - 1, 0)] and x.ndim == y.ndim and kind(x) == kind(y)


op("transpose", "fiubck", lambda x, axes: jnp.transpose(x, axes), rank(2), permutations)
op("reshape", "fiubck", lambda x, shape: jnp.reshape(x, shape), params=reshapes)
op("broadcast_to", "fibk", lambda x, n: jnp.broadcast_to(x, (n, *x.shape)), params=one_of("n", 2, 1, 3))
op("broadcast_in_dim", "fib", lambda x, n: lax.broadcast_in_dim(x, (*x.shape, n), tuple(range(x.ndim))),
   params=one_of("n", 2, 1, 3))
op("concatenate", "fibc fibc", lambda x, y: jnp.concatenate([x, y], -1), joinable)
op("concatenate first", "fi fi", lambda x, y: jnp.concatenate([x, y, x], 0), both(joinable, alike))
op("stack", "fibk fibk", lambda x, y, axis: jnp.stack([x, y], axis),
   both(alike, same_kind), lambda pick, x, y: {"axis": pick(range(x.ndim + 1))})
op("pad", "fi", lambda x, lo, hi, inside: lax.pad(x, x.dtype.type(1), [(lo, hi, inside)] + [(0, 0, 0)] * (x.ndim - 1)),
   lambda x: x.ndim and x.shape[0] > 2,
   lambda pick, x: {"lo": pick((1, 0, -1)), "hi": pick((0, 1, -1)), "inside": pick((0, 1))})
op("pad value", "f f", lambda x, y: lax.pad(x, y, [(1, 0, 1)] * x.ndim), scalars(1))
op("rev", "fic", lambda x, axis: jnp.flip(x, axis), rank(1), some_axis)
op("expand_dims", "fiubk", lambda x, axis: jnp.expand_dims(x, axis), params=lambda pick, x: {"axis": pick(range(x.ndim + 1))})
op("squeeze", "fiubk", jnp.squeeze, lambda x: 1 in x.shape)
op("tile", "fi", lambda x: jnp.tile(x, 2))
op("repeat", "fi", lambda x, axis: jnp.repeat(x, 2, axis), rank(1), some_axis)
op("roll", "fi", lambda x, axis: jnp.roll(x, 1, axis), rank(1), some_axis)
op("roll by", "fi i", lambda x, n, axis: jnp.roll(x, n, axis), both(rank(1, 0), scalars(1)), some_axis)
op("tril", "fi", jnp.tril, rank(2))
op("diagonal", "fi", lambda x: jnp.diagonal(x), rank(2))
op("diag", "f", lambda x: jnp.diag(x), lambda x: x.ndim == 1)
op("split", "fi", lambda x: tuple(jnp.split(x, [1], -1)), lambda x: x.ndim and x.shape[-1] > 1)
op("unstack", "fi", lambda x: (x[0], x[-1]), rank(1))
op("iota plus", "fi", lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, 0) % 3, rank(1))
op("outer", "f f", lambda x, y: jnp.outer(x, y))
op("meshgrid", "fi fi", lambda x, y: jnp.meshgrid(x, y)[0], lambda *avals: avals[-1].ndim == 1)

# Indexing. An index is taken modulo the dim, or `mode` says what is done with those out of bounds.

first_has_dims = lambda *avals: len(avals) > 1 or (avals[0].ndim > 0 and avals[0].shape[0] > 0)
scatter_mode = one_of("mode", "drop", "clip")


def matching(*avals: Any) -> bool:
    """x, i, v: v broadcasts into x[i]."""
    if len(avals) == 1:
        return avals[0].ndim > 0 and avals[0].shape[0] > 0
    if len(avals) == 2:
        return avals[1].ndim < 2
    x, i, v = avals
    return kind(x) == kind(v) and v.ndim <= i.ndim + x.ndim - 1 and broadcastable(
        v, jax.ShapeDtypeStruct(i.shape + x.shape[1:], x.dtype)) and np.broadcast_shapes(
        v.shape, i.shape + x.shape[1:]) == i.shape + x.shape[1:]


op("slice", "fiubck", lambda x, start, stride: x[start::stride], lambda x: x.ndim and x.shape[0] > 1,
   lambda pick, x: {"start": pick((1, 0)), "stride": pick((1, 2, -1))})
op("slice last", "fib", lambda x: x[..., :-1], lambda x: x.ndim and x.shape[-1] > 1)
op("dynamic_slice", "fiuc i", lambda x, i, n: lax.dynamic_slice_in_dim(x, i, n, 0), both(first_has_dims, scalars(1)),
   lambda pick, x, i: {"n": pick(range(1, x.shape[0] + 1))})
op("dynamic_slice 2", "fi i i", lambda x, i, j: lax.dynamic_slice(x, (i, j), (1, x.shape[1])),
   both(lambda *avals: len(avals) > 1 or (avals[0].ndim == 2 and avals[0].size > 0), scalars(1, 2)))
op("dynamic_index", "fiubk i", lambda x, i, axis: lax.dynamic_index_in_dim(x, i, axis, False), both(rank(1, 0), scalars(1)),
   some_axis)
op("dynamic_update_slice", "fi fi i", lambda x, y, i: lax.dynamic_update_slice(x, y, (i,) + (0,) * (x.ndim - 1)), both(
    lambda *avals: len(avals) != 2 or (kind(avals[0]) == kind(avals[1]) and avals[0].ndim == avals[1].ndim and all(
        a >= b for a, b in zip(avals[0].shape, avals[1].shape, strict=True))),
    lambda *avals: len(avals) > 1 or avals[0].ndim > 0, scalars(2)))
op("dynamic_update_index", "f f i", lambda x, y, i: lax.dynamic_update_index_in_dim(x, y, i, 0), both(
    lambda *avals: len(avals) != 2 or avals[0].shape[1:] == avals[1].shape, first_has_dims, scalars(2)))
op("x[i]", "fiubck i", lambda x, i: x[i % x.shape[0]], both(first_has_dims, lambda *avals: len(avals) < 2 or avals[1].ndim < 3))
op("take", "fiub i", lambda x, i, axis, mode: jnp.take(x, i, axis, mode=mode, fill_value=1),
   both(rank(1, 0), lambda *avals: len(avals) < 2 or avals[1].ndim < 3),
   lambda pick, x, i: {**some_axis(pick, x), "mode": pick(("clip", "wrap", "fill"))})
op("x[i, j]", "fib i i", lambda x, i, j: x[i % x.shape[0], j % x.shape[1]],
   lambda *avals: avals[0].ndim > 1 and avals[0].size > 0 and broadcastable(*avals[1:]))
op("x[:, i]", "fib i", lambda x, i: x[:, i % x.shape[1]], both(rank(2, 0), lambda *avals: avals[0].size > 0))
op("x[i, :, j]", "fi i i", lambda x, i, j: x[i % x.shape[0], :, j % x.shape[2]],
   lambda *avals: avals[0].ndim == 3 and avals[0].size > 0 and broadcastable(*avals[1:]))
op("take_along_axis", "fib i", lambda x, i, axis: jnp.take_along_axis(x, i % x.shape[axis], axis),
   both(alike, lambda *avals: avals[0].ndim > 0 and avals[0].size > 0), some_axis)
op("argsort gather", "f i", lambda x, i: x[jnp.argsort(i, 0)[: x.shape[0]] % x.shape[0]],
   lambda *avals: avals[0].ndim > 0 and avals[0].size > 0 and (len(avals) == 1 or avals[1].ndim == 1))
op("at set", "fiub i fiub", lambda x, i, v: x.at[i % x.shape[0]].set(v), both(matching, scalars(1)))
op("at set permuted", "fi i", lambda x, i: x.at[jnp.argsort(i)].set(x * 2, unique_indices=True),
   lambda *avals: avals[0].ndim > 0 and (len(avals) == 1 or avals[1].shape == avals[0].shape[:1]))
op("at set const", "fib i", lambda x, i: x.at[i % x.shape[0]].set(1), first_has_dims)
op("at add", "fiu i fiu", lambda x, i, v, mode: x.at[i].add(v, mode=mode), matching, scatter_mode)
op("at max", "fiu i fiu", lambda x, i, v, mode: x.at[i].max(v, mode=mode), matching, scatter_mode, grad=False)
op("at min", "fi i fi", lambda x, i, v, mode: x.at[i].min(v, mode=mode), matching, scatter_mode, grad=False)
op("at mul", "fi i fi", lambda x, i, v, mode: tame(x.at[i].mul(v, mode=mode)), matching, scatter_mode, grad=False)
op("at apply", "f i", lambda x, i: x.at[i % x.shape[0]].apply(jnp.sin), both(first_has_dims, scalars(1)), grad=False)
op("at[:, i] add", "f i f", lambda x, i, v: x.at[:, i % x.shape[1]].add(v),
   both(lambda *avals: avals[0].ndim > 1 and avals[0].size > 0, scalars(1, 2)))
op("at[i, j] add", "fi i i", lambda x, i, j: x.at[i % x.shape[0], j % x.shape[1]].add(1),
   lambda *avals: avals[0].ndim > 1 and avals[0].size > 0 and broadcastable(*avals[1:]))
op("segment_sum", "f i", lambda x, i: jax.ops.segment_sum(x, i % 3, 3),
   lambda *avals: avals[0].ndim > 0 and (len(avals) == 1 or avals[1].shape == avals[0].shape[:1]))
op("one_hot", "i", lambda i: jax.nn.one_hot(i % 3, 3))
op("bincount", "i", lambda i: jnp.bincount(i.ravel() % 4, length=4))
op("nonzero", "ib", lambda x: jnp.nonzero(x, size=3, fill_value=0)[0], rank(1))
op("put_along_axis", "f i", lambda x, i: jnp.put_along_axis(x, jnp.argsort(i, -1), 2 * x, -1, inplace=False),
   both(alike, rank(1, 1)), grad=False)

# Products.


def contracts(*avals: Any) -> bool:
    x, y = avals[0], avals[-1]
    if len(avals) == 1 or x.ndim == 0 or y.ndim == 0:
        return x.ndim > 0 and y.ndim > 0
    batch = broadcastable(*(jax.ShapeDtypeStruct(a.shape[:-2], a.dtype) for a in avals))
    return x.shape[-1] == y.shape[max(y.ndim - 2, 0)] and batch


def same_dims(*dims: tuple[int, int], ranks: Sequence[int]) -> Callable[..., bool]:
    """Operands of these ranks, where dim i of the first is as large as dim j of the second."""

    def fits(*avals: Any) -> bool:
        ranked = avals[-1].ndim == ranks[len(avals) - 1]
        return ranked and (len(avals) == 1 or all(avals[0].shape[i] == avals[1].shape[j] for i, j in dims))

    return fits


op("matmul", "fi fi", lambda x, y: tame(x @ y), both(contracts, same_kind))
op("dot", "f f", lambda x, y: tame(jnp.dot(x, y)), same_dims((1, 0), ranks=(2, 1)))
op("x xT", "f", lambda x: tame(x @ jnp.swapaxes(x, -1, -2)), rank(2))
op("vdot", "f f", lambda x, y: tame(jnp.vdot(x, y)), alike)
op("einsum ij,kj->ki", "f f", lambda x, y: tame(jnp.einsum("ij,kj->ki", x, y)), same_dims((1, 1), ranks=(2, 2)))
op("einsum bij,bj->bi", "f f", lambda x, y: tame(jnp.einsum("bij,bj->bi", x, y)), same_dims((0, 0), (2, 1), ranks=(3, 2)))
op("einsum bij,bjk->kbi", "f f", lambda x, y: tame(jnp.einsum("bij,bjk->kbi", x, y)), same_dims((0, 0), (2, 1), ranks=(3, 3)))
op("einsum ii->", "f", lambda x: jnp.einsum("ii->", x), lambda x: x.ndim == 2 and x.shape[0] == x.shape[1])
op("einsum ij,ij->j", "fc fc", lambda x, y: tame(jnp.einsum("ij,ij->j", x, y)), same_dims((0, 0), (1, 1), ranks=(2, 2)))
op("tensordot", "f f", lambda x, y: tame(jnp.tensordot(x, y, ((0,), (0,)))), lambda *avals: avals[-1].ndim > 0
   and avals[-1].shape[0] == avals[0].shape[0])
op("conv", "f f", lambda x, w, stride: tame(lax.conv(x[None, None], w[None, None], (stride, 1), "SAME")[0, 0]),
   lambda *avals: avals[-1].ndim == 2 and min(avals[-1].shape) > 0,
   one_of("stride", 1, 2))
op("conv features", "f f", lambda x, w: tame(lax.conv_general_dilated(
    x[None], w[:, None], (1,), [(1, 1)], feature_group_count=x.shape[0], rhs_dilation=(2,))[0]),
   lambda *avals: avals[-1].ndim == 2 and avals[-1].shape[0] == avals[0].shape[0] and min(avals[-1].shape) > 0 and (
       len(avals) == 1 or 2 * avals[1].shape[1] - 1 <= avals[0].shape[1] + 2))
op("convolve", "f f", lambda x, y: tame(jnp.convolve(x, y)), lambda *avals: avals[-1].ndim == 1 and avals[-1].size > 0)
for name, combine, start in [("sum", lax.add, 0.0), ("max", lax.max, -jnp.inf)]:
    op(f"window {name}", "f", lambda x, combine=combine, start=start: lax.reduce_window(
        x, start, combine, (2,) + (1,) * (x.ndim - 1), (1,) * x.ndim, "SAME"), rank(1))

# Sorting.

op("sort", "fiu", lambda x, axis: jnp.sort(x, axis), rank(1), some_axis)
op("sort descending", "fi", lambda x: jnp.sort(x, descending=True), rank(1))
op("argsort", "iu", lambda x, axis: jnp.argsort(x, axis, stable=True), rank(1), some_axis)
op("sort by", "i f", lambda x, y: tuple(lax.sort((x, y), num_keys=1, is_stable=True)), both(alike, rank(1, 1)))
op("top_k", "f", lambda x: lax.top_k(x, 1)[0], lambda x: x.ndim and x.shape[-1] > 0)
op("top_k ints", "i", lambda x: tuple(lax.top_k(x, x.shape[-1])), lambda x: x.ndim and x.shape[-1] > 0)
op("searchsorted", "i i", lambda x, y: jnp.searchsorted(jnp.sort(x), y), lambda *avals: len(avals) > 1 or avals[0].ndim == 1)
op("unique", "i", lambda x: jnp.unique(x % 5, size=4, fill_value=9), rank(1))
op("median", "f", jnp.median, rank(1))

# Linear algebra.

square = lambda x: x.ndim >= 2 and x.shape[-1] == x.shape[-2] and x.size > 0
gram = lambda x: jnp.tanh(x) @ jnp.swapaxes(jnp.tanh(x), -1, -2) + 2 * jnp.eye(x.shape[-2])
solid = lambda x: 0.3 * jnp.tanh(x) + jnp.diag(1.0 + jnp.arange(x.shape[-1]))
solvable = lambda *avals: square(avals[0]) and (len(avals) < 2 or (
    avals[1].ndim == avals[0].ndim and avals[1].shape[:-1] == avals[0].shape[:-1]))
op("cholesky", "f", lambda x: jnp.linalg.cholesky(gram(x)), square)
op("triangular_solve", "f f", lambda a, b, lower, transpose_a: tame(lax.linalg.triangular_solve(
    solid(a), b, left_side=True, lower=lower, transpose_a=transpose_a)), solvable,
   lambda pick, a, b: {"lower": pick((True, False)), "transpose_a": pick((False, True))})
op("solve", "f f", lambda a, b: tame(jnp.linalg.solve(solid(a), b)), solvable)
op("qr", "f", lambda x: tuple(jnp.linalg.qr(solid(x))), square)
op("det", "f", lambda x: tame(jnp.linalg.det(solid(x))), square)
op("inv", "f", lambda x: tame(jnp.linalg.inv(solid(x))), square)
op("eigvalsh", "f", lambda x: tame(jnp.linalg.eigvalsh(gram(x))), square, grad=False)
op("svdvals", "f", lambda x: jnp.linalg.svdvals(solid(x)), square, grad=False)
op("matrix_power", "f", lambda x: tame(jnp.linalg.matrix_power(0.5 * tame(x), 3)), square)
op("cho_solve", "f f", lambda a, b: tame(jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(gram(a)), True), b)), solvable)

# Random bits.

op("split key", "k", lambda k: tuple(jax.random.split(k)), scalars(0))
op("split keys", "k", lambda k, n: jax.random.split(k, n), scalars(0), one_of("n", 2, 1, 3))
op("fold_in", "k iw", jax.random.fold_in, scalars(0, 1))
op("random bits", "k", lambda k, shape: jax.random.bits(k, shape), scalars(0), one_of("shape", (), (3,), (2, 3)))
op("uniform", "k", lambda k, shape: jax.random.uniform(k, shape), scalars(0), one_of("shape", (), (3,), (2, 3)))
op("normal", "k", lambda k, shape: tame(jax.random.normal(k, shape)), scalars(0), one_of("shape", (), (3,), (3, 3)))
op("randint", "k i", lambda k, i: jax.random.randint(k, (3,), 0, i % 5 + 1), scalars(0, 1))
op("permutation", "k fi", lambda k, x: jax.random.permutation(k, x), both(scalars(0), rank(0, 1)))
op("bernoulli", "k", lambda k: jax.random.bernoulli(k, 0.5, (3,)), scalars(0))
op("key_data", "k", jax.random.key_data)
op("wrap_key_data", "w", jax.random.wrap_key_data, lambda x: x.ndim and x.shape[-1] == 2)

# Fourier transforms.

op("fft", "fc", lambda x: jnp.fft.fft(x, norm="ortho"), lambda x: x.ndim and x.shape[-1] > 0)
op("ifft", "c", lambda x: jnp.fft.ifft(x), lambda x: x.ndim and x.shape[-1] > 0)
op("rfft", "f", lambda x: jnp.fft.rfft(x, norm="ortho"), lambda x: x.ndim and x.shape[-1] > 0)
op("irfft", "c", lambda x: jnp.fft.irfft(x), lambda x: x.ndim and x.shape[-1] > 1)
op("fft2", "fc", lambda x: jnp.fft.fft2(x, norm="ortho"), lambda x: x.ndim > 1 and min(x.shape) > 0)

# Calls, branches and loops. A body is a function of the values it is `given`, and returns a list.


def without(x: Any, axis: int | None) -> Any:
    """The aval of x without this dim."""
    return x if axis is None else jax.ShapeDtypeStruct(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)


@jax.custom_jvp
def halved(x: Any) -> Any:
    """x / 2 + 1, by a derivative of its own."""
    return x / 2 + 1


halved.defjvp(lambda primals, tangents: (halved(*primals), tangents[0] * jnp.cos(primals[0])))


@jax.custom_vjp
def product(x: Any, y: Any) -> Any:
    """tanh(x y), by a derivative of its own."""
    return jnp.tanh(x * y)


product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda kept, t: (t * jnp.sin(kept[1]), t * kept[0] + 1))
op("custom_jvp", "f", halved)
op("custom_vjp", "f f", product, alike)


def own_jvp(body: Callable) -> Callable:
    """`body` under custom_jvp, its derivative halved."""
    fun = jax.custom_jvp(lambda *args: body(*args))

    def rule(primals: Any, tangents: Any) -> Any:
        outs, ts = jax.jvp(lambda *args: body(*args), primals, tangents)
        return outs, [t * 0.5 if t.dtype == jnp.float32 else t for t in ts]

    fun.defjvp(rule)
    return fun


op("own jvp", "f f", lambda x, y, body: own_jvp(body)(x, y), bodies="body", adds=2)
op("jit", "fibk fib", lambda x, y, body: jax.jit(lambda x, y: body(x, y))(x, y), bodies="body", adds=3)
op("checkpoint", "fi f", lambda x, y, body: jax.checkpoint(lambda x, y: body(x, y))(x, y), bodies="body", adds=3)
op("captures", "fi f", lambda x, y, body: jax.jit(lambda x: body(x, y))(x), bodies="body", adds=3)
op("cond", "iu fi fib", lambda i, x, y, one, other: lax.cond(scalar(i) % 2 == 0, one, other, x, y),
   bodies="one other", given=lambda i, x, y: (x, y), keeps=2)
op("cond closed", "b f fik", lambda p, x, y, one, other: lax.cond(p.any(), lambda: one(x, y)[0], lambda: other(x, y)[0]),
   bodies="one other", given=lambda p, x, y: (x, y), keeps=1)
op("switch", "i f fi", lambda i, x, y, one, two, three: lax.switch(scalar(i) % 3, (one, two, three), x, y),
   bodies="one two three", given=lambda i, x, y: (x, y), keeps=2)


def while_(n: Any, x: Any, y: Any, seen: Any, body: Callable) -> Any:
    """At most three rounds, fewer where an integer says so."""

    def more(state: Any) -> Any:
        count, _, y = state
        early = jnp.bool_(False) if y.dtype != jnp.int32 else (y % 7 == 6).any()
        return (count < scalar(n) % 4) & ~early

    return lax.while_loop(more, lambda state: (state[0] + 1, *body(state[1], state[2], seen, state[0])), (0, x, y))


op("while", "i fib fi fib", while_, bodies="body", grad=False,
   given=lambda n, x, y, seen: (x, y, seen, jax.ShapeDtypeStruct((), jnp.int32)), keeps=2)
op("while key", "i k f", lambda n, k, x, body: lax.while_loop(
    lambda s: s[0] < scalar(n) % 4, lambda s: (s[0] + 1, *body(s[1], s[2])), (0, k, x)), bodies="body", grad=False,
   given=lambda n, k, x: (k, x), keeps=2)
op("fori_loop", "i f fib", lambda n, x, y, body: lax.fori_loop(0, scalar(n) % 4, lambda i, s: body(*s, i), [x, y]),
   bodies="body", grad=False, given=lambda n, x, y: (x, y, jax.ShapeDtypeStruct((), jnp.int32)), keeps=2)
op("fori_loop 3", "f fib", lambda x, y, body: lax.fori_loop(0, 3, lambda i, s: body(*s, i), [x, y]),
   bodies="body", given=lambda x, y: (x, y, jax.ShapeDtypeStruct((), jnp.int32)), keeps=2)


def scan(c: Any, d: Any, xs: Any, seen: Any, body: Callable, reverse: bool, unroll: int) -> Any:
    """Two carries, one xs, one captured value, and whatever else the body returns as ys."""

    def step(carry: Any, x: Any) -> Any:
        outs = body(*carry, x, seen)
        return outs[:2], outs[2:]

    carry, ys = lax.scan(step, [c, d], xs, reverse=reverse, unroll=unroll)
    return [*carry, *ys]


op("scan", "fi fibk fi fib", scan, rank(0, 0, 1, 0),
   lambda pick, *avals: {"reverse": pick((False, True)), "unroll": pick((1, 2))}, bodies="body",
   given=lambda c, d, xs, seen, **params: (c, d, without(xs, 0), seen), keeps=2, adds=1)
op("scan length", "f fi", lambda x, y, body: lax.scan(lambda c, _: (body(*c), c[0]), [x, y], length=2)[0],
   bodies="body", keeps=2)
op("map", "fi f", lambda xs, y, body: lax.map(lambda x: body(x, y), xs), rank(1, 0),
   bodies="body", given=lambda xs, y: (without(xs, 0), y), adds=2)


def mappable(*avals: Any) -> bool:
    return avals[0].ndim > 0 and avals[0].size > 0


def map_axes(pick: Pick, *avals: Any) -> dict:
    """Axes of one size for the first and perhaps the others."""
    axis = pick(range(avals[0].ndim))
    others = [[None, *(i for i, n in enumerate(a.shape) if n == avals[0].shape[axis])] for a in avals[1:]]
    return {"axes": (axis, *(pick(choices[::-1]) for choices in others)), "out": pick((0, -1))}


for name, vmap in {"vmap": minibatch.vmap, "jax.vmap": jax.vmap}.items():
    op(name, "fib fib", lambda x, y, body, axes, out, vmap=vmap: vmap(lambda x, y: body(x, y), axes, out)(x, y), mappable,
       map_axes, bodies="body", given=lambda x, y, axes, out: (without(x, axes[0]), without(y, axes[1])), adds=2)


def total(outs: Any) -> Any:
    """One number from the floats among these."""
    floats = [x for x in jax.tree.leaves(outs) if x.dtype == jnp.float32]
    return sum((jnp.sin(x).sum() for x in floats), start=jnp.float32(0))


op("grad", "f f", lambda x, y, body: [tame(g) for g in jax.grad(lambda x, y: total(body(x, y)), (0, 1))(x, y)],
   bodies="body", adds=2)
op("jvp", "f f", lambda x, y, body: [tame(t) for t in jax.tree.leaves(
    jax.jvp(lambda x: body(x, y), (x,), (x,))[1]) if t.dtype == jnp.float32], bodies="body", adds=2)



def integer(x: Any) -> Any:
    """One int32 from integers, bools or keys."""
    return (jax.random.key_data(x) if kind(x) == "k" else x).astype(jnp.int32).sum(dtype=jnp.int32)


op("blend", "f fiubk", lambda x, y: 0.5 * x + 0.5 * (jnp.tanh(y.mean()) if kind(y) == "f" else small(integer(y))),
   lambda *avals: 0 not in avals[-1].shape)
op("int blend", "iub iubk", lambda x, y: x ^ (integer(y) % 2 == 1) if kind(x) == "b" else x + integer(y).astype(x.dtype))

# What one has to be careful about in a body that is differentiated: no loops of unknown length.
DIFFERENTIATES = {"grad", "jvp", "own jvp", "checkpoint"}
NESTS = [name for name, each in OPS.items() if each.bodies]


# --- programs ---------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """An operation of the table, the numbers of the values that it takes, and its params, bodies among them."""

    op: str
    operands: tuple[int, ...]
    params: dict


class Body(NamedTuple):
    """Steps after so many given values, and the numbers of the values that are returned."""

    given: int
    steps: list[Step]
    outs: tuple[int, ...]

    def __repr__(self) -> str:
        lines = [f"Step({s.op!r}, {s.operands}, {s.params}),".replace("\n", "\n    ") for s in self.steps]
        return f"Body({self.given}, [" + "".join(f"\n    {line}" for line in lines) + f"\n], {self.outs})"


class Input(NamedTuple):
    """An argument of one lane by its kind and shape, and the axis on which it is mapped (None: shared)."""

    kind: str
    shape: tuple[int, ...]
    axis: int | None


class Program(NamedTuple):
    """A program of one lane, and how it is mapped: `how` is "called", "jitted" or "traced afresh"."""

    inputs: list[Input]
    body: Body
    out_axes: tuple[int, ...]
    size: int
    how: str = "called"

    def __repr__(self) -> str:
        inputs = "".join(f"\n    Input{tuple(x)}," for x in self.inputs)
        return f"Program([{inputs}\n], {self.body}, {self.out_axes}, {self.size}, {self.how!r})"

    def fun(self, *args: Any) -> list:
        """The program of one lane."""
        return run(self.body, args)


def draw(x: Input) -> Draw:
    """How one lane's argument is drawn."""
    match x.kind:
        case "k":
            return keys(*x.shape)
        case "i":
            return Draw(x.shape, np.int32, -8, 9)
        case "u":
            return Draw(x.shape, np.uint8, 0, 256)
        case other:
            return Draw(x.shape, {"f": np.float32, "b": np.bool_, "c": np.complex64}[other], -1.5, 1.5)


def run(body: Body, args: Sequence[Any], jitter: float = 0.0) -> list:
    """What `body` returns. With `jitter`, every float is off by that much, relatively, as if rounded otherwise."""
    values = list(args)
    for number, step in enumerate(body.steps):
        outs = step_outs(step, [values[i] for i in step.operands], jitter)
        values += [jittered(x, jitter, number) for x in outs] if jitter else outs
    return [values[i] for i in body.outs]


def step_outs(step: Step, operands: Sequence[Any], jitter: float = 0.0) -> list:
    """What one step returns for its operands."""
    params = {k: functools.partial(call, v, jitter) if isinstance(v, Body) else v for k, v in step.params.items()}
    outs = OPS[step.op].fun(*operands, **params)
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def call(body: Body, jitter: float, *args: Any) -> list:
    """`body` as the function that operations take."""
    return run(body, args, jitter)


def jittered(x: Any, jitter: float, number: int) -> Any:
    """x off by `jitter`, each element by another part of it."""
    if kind(x) not in "fc":
        return x
    wave = np.sin(np.arange(1, x.size + 1) * (1 + number) * 1e3).reshape(x.shape)
    return x * np.float32(1 + jitter * wave)


# --- drawing them -----------------------------------------------------------------------------------------------------
#
# What hypothesis draws is a list of (operation, number). Every such list is a program: what an operation takes and its
# params are read off the number, among what fits; an operation for which nothing fits is left out; one with bodies takes
# its next few neighbours into them. So a shorter list and smaller numbers are a simpler program.

SHAPES = [(), (3,), (2, 3), (3, 3), (2,), (2, 3, 3), (3, 1), (4,)]
KINDS = "ffffiiubk"
NAMES = ["nothing", *OPS, *NESTS * 2]
Raw = tuple[str, int]


def decode(inputs: Sequence[tuple], raw: Sequence[Raw], how: int, size: int, grad: bool = False) -> Program:
    """The program that these draws stand for."""
    pick = Pick(how)
    found = []
    for number, (letter, shape, place) in enumerate(inputs):
        letter = letter if number > 4 else "fikbc"[number]
        shape = (2,) * (len(shape) == 1) if letter == "k" else shape
        axes = [*range(len(shape) + 1), None, None, *range(-1 - len(shape), 0)]
        axis = axes[place % len(axes)]
        found.append(Input(letter, shape, 0 if axis is None and number == 0 else axis))
    avals = [jax.eval_shape(lambda x=x: draw(x).lanes(np.random.default_rng(0), 1)[0]) for x in found]
    body, outs = decode_body(iter(raw), pick, avals, grad, 0, limit=len(raw), adds=4)
    out_axes = tuple(pick([*range(a.ndim + 1), *range(-a.ndim - 1, 0)]) for a in outs)
    return Program(found, body, out_axes, size, pick(("called", "jitted", "traced afresh")))


def decode_body(
    raw: Iterator[Raw], pick: Pick, given: Sequence[Any], grad: bool, depth: int, limit: int, adds: int, keeps: int = 0
) -> tuple[Body, list[Any]]:
    """A body of at most `limit` steps: it returns values like the first `keeps`, and `adds` that nothing else reads."""
    avals, steps, read = list(given), [], set()
    for name, number in raw:
        if name == "nothing" or len(avals) > MOST_VALUES:
            continue
        step, outs = decode_step(OPS[name], Pick(number), raw, avals, grad, depth)
        if step is None or any(math.prod(a.shape) > LARGEST or len(a.shape) > HIGHEST_RANK for a in outs):
            continue
        steps.append(step)
        read.update(step.operands)
        avals += outs
        if len(steps) == limit:
            break
    newest = list(range(len(avals) - 1, -1, -1))
    kept = [next(i for i in newest if like(avals[i], x)) for x in given[:keeps]]
    for place, i in enumerate(kept):  # a body that hands everything through is a dull one
        changes = "blend" if kind(avals[i]) == "f" else "int blend"
        others = [j for j in newest if j != i and kind(avals[j]) in OPS[changes].takes[1]]
        if i < keeps and kind(avals[i]) in OPS[changes].takes[0] and others and pick((True, True, True, False)):
            steps.append(Step(changes, (i, others[0]), {}))
            kept[place] = len(avals)
            avals.append(avals[i])
    added = [i for i in newest if i not in read and i not in kept and i >= len(given)][:adds]
    if adds and not added:
        added = [len(avals) - 1]
    outs = (*kept, *added)
    return Body(len(given), steps, outs), [avals[i] for i in outs]


def like(x: Any, y: Any) -> bool:
    """Whether they have one shape and dtype."""
    return (x.shape, x.dtype) == (y.shape, y.dtype)


def decode_step(
    chosen: Op, pick: Pick, raw: Iterator[Raw], avals: Sequence[Any], grad: bool, depth: int
) -> tuple[Step | None, list[Any]]:
    """One step and the avals of what it returns; None if nothing fits."""
    if (grad and not chosen.grad) or (chosen.bodies and depth == DEEPEST):
        return None, []
    operands: list[int] = []
    for kinds in chosen.takes:
        so_far = [avals[i] for i in operands]
        fitting = [i for i, x in enumerate(avals) if kind(x) in kinds and chosen.fits(*so_far, x)]
        if not fitting:
            return None, []
        nearness = pick(range(64)) / 64
        operands.append(fitting[len(fitting) - 1 - int(nearness**1.5 * len(fitting))])
    taken = [avals[i] for i in operands]
    params = chosen.params(pick, *taken)
    given = list(chosen.given(*taken, **params))
    for name in chosen.bodies:
        inner = grad or chosen.name in DIFFERENTIATES
        params[name], _ = decode_body(raw, pick, given, inner, depth + 1, pick((3, 1, 5, 8)), chosen.adds, chosen.keeps)
    step = Step(chosen.name, tuple(operands), params)
    try:
        outs = jax.eval_shape(lambda *args: step_outs(step, args), *taken)
    except Exception as error:
        if refused(lambda: jax.eval_shape(lambda *args: step_outs(by_jax(step), args), *taken)):
            return None, []
        error.add_note(f"on {taken}: {step}")
        raise
    return step, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs]


def by_jax(part: Any) -> Any:
    """The same body or step, mapped by `jax.vmap` where it has `minibatch.vmap` inside."""
    match part:
        case Body(given, steps, outs):
            return Body(given, [by_jax(step) for step in steps], outs)
        case Step(name, operands, params):
            return Step("jax.vmap" if name == "vmap" else name, operands, {k: by_jax(v) for k, v in params.items()})
    return part


def refused(make: Callable) -> bool:
    """Whether JAX has an error for this too."""
    try:
        make()
    except Exception:
        return True
    return False


def programs(steps: int = 40, grad: bool = False) -> st.SearchStrategy[Program]:
    """Programs drawn from about so many steps."""
    number = st.binary(min_size=7, max_size=7).map(int.from_bytes)
    raw = st.tuples(st.sampled_from(NAMES), number)
    inputs = st.tuples(st.sampled_from(KINDS), st.sampled_from(SHAPES), st.integers(0, 11))
    return st.builds(
        decode,
        st.lists(inputs, min_size=5, max_size=8),
        st.lists(raw, min_size=steps // 2, max_size=3 * steps // 2),
        number,
        st.sampled_from([3, 2] if grad else [3, 3, 2, 1, 0]),
        st.just(grad),
    )


# --- checking them ----------------------------------------------------------------------------------------------------


def arguments(program: Program) -> tuple[list, list[list]]:
    """The mapped arguments, and each lane's own, which numpy slices without compiling."""
    rng = np.random.default_rng(0)
    stacked, each = [], []
    for x in program.inputs:
        drawn = draw(x).lanes(rng, max(program.size, 1))
        drawn = drawn if x.kind == "k" else np.asarray(drawn)
        own = [drawn[i] if x.axis is not None else drawn[0] for i in range(program.size)]
        each.append(own)
        stacked.append(jnp.asarray(drawn[0] if x.axis is None else moved(drawn[: program.size], x.axis)))
    return stacked, [list(lane) for lane in zip(*each, strict=True)]


def moved(x: Any, axis: int) -> Any:
    """The lanes of `x`, in front, at `axis`."""
    return (np if isinstance(x, np.ndarray) else jnp).moveaxis(x, 0, axis)


def plain(x: Any) -> np.ndarray:
    """`x` as numpy has it: keys as what they are made of."""
    return np.asarray(jax.random.key_data(x) if kind(x) == "k" else x)


def agree(program: Program, found: Callable[[], Any], lanes: Sequence[Any], of: Callable, place: Callable) -> None:
    """What is found is what `of` the lanes gives, stacked and placed: or that depends on how floats are rounded."""
    body = by_jax(program.body)

    def wanted(jitter: float = 0) -> list:
        once = jax.jit(of(lambda *args: run(body, args, jitter)))
        outs = [[plain(x) for x in jax.tree.leaves(once(*lane))] for lane in lanes]
        return place([np.stack(xs) for xs in zip(*outs, strict=True)])

    try:
        expected = wanted()
    except Exception:
        return  # JAX refuses it
    try:
        outs = [plain(x) for x in jax.tree.leaves(found())]
    except jax.errors.JaxRuntimeError as error:
        if "RET_CHECK" in str(error):  # XLA contradicts itself, as its Fourier transforms on CPUs do for some layouts
            return
        raise
    try:
        assert_close(outs, expected, TOLERANCE, "stack of lanes")
    except AssertionError:
        if all(close(wanted(jitter), expected) for jitter in (1e-6, -1e-6, 3e-6, -3e-6)):
            raise


def close(found: list, wanted: list) -> bool:
    """Whether these differ by much less than the tolerance."""
    try:
        assert_close(found, wanted, TOLERANCE / 3)
    except AssertionError:
        return False
    return True


def check(program: Program) -> None:
    """The mapped program gives what its lanes give one by one; if there are none, what `jax.vmap` gives."""
    args, lanes = arguments(program)
    axes, out_axes = tuple(x.axis for x in program.inputs), list(program.out_axes)
    mapped = minibatch.vmap(program.fun, axes, out_axes, compile=program.how != "traced afresh")
    found = lambda: (mapped if program.how == "called" else jax.jit(mapped))(*args)

    def place(each: list) -> list:  # an axis counted from the end does not count what a key is made of
        ranks = [len(x.shape) for x in jax.eval_shape(mapped, *args)]
        return [moved(x, a % n) for x, a, n in zip(each, out_axes, ranks, strict=True)]

    if program.size:
        agree(program, found, lanes, lambda fun: fun, place)
        return
    try:
        expected = jax.jit(jax.vmap(lambda *args: run(by_jax(program.body), args), axes, out_axes))(*args)
    except Exception:
        return  # JAX refuses it
    assert_close(found(), expected, TOLERANCE, "jax.vmap")


def check_derivatives(program: Program) -> None:
    """The derivative of the mapped program, or the mapped derivative, is that of the lanes."""
    args, lanes = arguments(program)
    fun, axes, outs = program.fun, tuple(x.axis for x in program.inputs), list(program.out_axes)
    floats = [i for i, x in enumerate(program.inputs) if x.kind == "f"]
    slopes = lambda fun: jax.grad(lambda *args: total(fun(*args)), floats)
    if program.how == "called":
        agree(program, lambda: minibatch.vmap(slopes(fun), axes)(*args), lanes, slopes, lambda each: each)
    elif program.how == "jitted":

        def place(each: list) -> list:
            return [x.sum(0) if axes[i] is None else moved(x, axes[i]) for i, x in zip(floats, each, strict=True)]

        agree(program, lambda: jax.jit(slopes(minibatch.vmap(fun, axes, outs)))(*args), lanes, slopes, place)
    else:

        def along(fun: Callable) -> Callable:
            def tangents(*args: Any) -> list:
                line = lambda t: [y for y in fun(*(x + t if i in floats else x for i, x in enumerate(args))) if kind(y) == "f"]
                return jax.jvp(line, (jnp.float32(0),), (jnp.float32(1),))[1]

            return tangents

        agree(program, lambda: jax.jit(along(minibatch.vmap(fun, axes)))(*args), lanes, along, lambda each: each)
