"""Programs at random: a table of operations, and programs of them that shrink, print, and are checked.

A program is a list of steps. Each names an operation of the table, says by number which values it takes (the inputs are
0, 1, …; each step appends what it returns), and has its params, among them the bodies of loops, branches and calls. What
`repr` gives is Python: `check(Program(…))` runs it again. One that fails is made smaller by `shrunk`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.experimental import sparse
from oracle import Draw, assert_close

import minibatch

LARGEST, HIGHEST_RANK, DEEPEST, MOST_VALUES = 48, 4, 3, 40


class Pick:
    """Choices read off one large number, so that a smaller number means earlier choices."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, choices: Sequence[Any]) -> Any:
        self.number, i = divmod(self.number, len(choices))
        return choices[i]


# --- the table --------------------------------------------------------------------------------------------------------
#
# Kinds are letters: f float32, h bfloat16, i int32, u uint8, w uint32, b bool, c complex64, k key. What grows is brought
# back by `tame`; predicates and trip counts are integers, for rounding may not decide which way a lane goes.


class Op(NamedTuple):
    """`takes` has one word of kinds for each operand; `fits` is asked for the avals chosen so far, operand by operand.

    An operation with `bodies` has `given`, which says what each body takes; the body returns values like the first
    `keeps` of those, and up to `adds` more. `grad` is False if it cannot be differentiated in reverse. If lanes `meet` in
    it, it has a param `over`: the names of their axes.
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
    meet: bool


OPS: dict[str, Op] = {}
LETTERS = {
    "float32": "f", "bfloat16": "h", "int32": "i", "uint8": "u", "uint32": "w", "bool": "b", "complex64": "c",
}  # fmt: skip


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
    meet: bool = False,
) -> None:
    """Enter an operation in the table."""
    assert name not in OPS
    OPS[name] = Op(name, tuple(takes.split()), fun, fits, params, grad, tuple(bodies.split()), given, keeps, adds, meet)


def kind(x: Any) -> str:
    """The letter of an array's dtype."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "k"
    return LETTERS[str(x.dtype)]


def tame(x: Any) -> Any:
    """`x` brought near [-1, 1] if it is of floats; integers wrap by themselves."""
    if jnp.iscomplexobj(x):
        return x / (1 + jnp.abs(x).max(initial=0))
    return jnp.tanh(x) if kind(x) in "fh" else x


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
    op(name, "fh" if name in ("neg", "sin", "tanh", "relu", "stopped", "clip", "copy") else "f", fun)

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
    op(name, "fh fh", fun, both(broadcastable, same_kind))
op("from bf16", "h", lambda x: x.astype(jnp.float32))
op("promoted", "fh fhi", lambda x, y: tame(x + y), broadcastable)

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
op("where scalar", "b fhiuc fhiuc", lambda p, x, y: lax.select_n(p, x, y),
   both(scalars(0), lambda *avals: len(avals) < 3 or (alike(*avals[1:]) and kind(avals[1]) == kind(avals[2]))))
op("select_n", "i f f f", lambda i, *xs: lax.select_n(i % 3, *xs), alike)
op("clamp", "fh fh fh", lambda low, x, high: lax.clamp(low - 0.25, x, high + 0.125), both(alike, same_kind))
op("clamp scalars", "fhi fhi fhi", lax.clamp, both(scalars(0, 2), same_kind))
op("where zero", "b fhc", lambda p, x: jnp.where(p, x, 0), broadcastable)
op("polar", "f f", lambda r, t: r * jnp.exp(1j * t), broadcastable)
op("complex", "f f", lax.complex, alike)
for name, fun in {"real": jnp.real, "imag": jnp.imag, "abs squared": lambda x: tame(jnp.real(x * jnp.conj(x)))}.items():
    op(name, "c", fun)
op("conj", "c", jnp.conj)
op("complex mul", "c fc", lambda x, y: tame(x * y), broadcastable)

# Reductions.

for name, fun in {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "prod": jnp.prod, "var": jnp.var}.items():
    op(f"reduce {name}", "f", lambda x, fun=fun, **params: tame(fun(x, **params)), params=some_axes)
op("reduce sum bf16", "hc", lambda x, **params: tame(jnp.sum(x, **params)), params=some_axes)
for name, fun in {"logsumexp": jax.nn.logsumexp, "sum where": lambda x, **params: jnp.sum(x, where=x < 9, **params)}.items():
    op(f"reduce {name}", "f", lambda x, fun=fun, **params: tame(fun(x, **params)), params=some_axes)
for name, fun in {"sum": jnp.sum, "max": jnp.max, "prod": jnp.prod}.items():
    op(f"int reduce {name}", "iu", lambda x, fun=fun, **params: fun(x, **params).astype(x.dtype), params=some_axes)
op("reduce xor", "iuw", lambda x, axis, keepdims: lax.reduce_xor(x, axis), params=some_axes)
op("any", "b", jnp.any, params=some_axes)
op("all", "b", jnp.all, params=some_axes)
op("argmax", "fhiu", lambda x, axis: jnp.argmax(x, axis), rank(1), some_axis)
op("argmin", "fiu", lambda x, axis: jnp.argmin(x, axis, keepdims=True), rank(1), some_axis)
op("softmax", "fh", lambda x, axis: jax.nn.softmax(x, axis), rank(1), some_axis)
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


op("transpose", "fhiubck", lambda x, axes: jnp.transpose(x, axes), rank(2), permutations)
op("reshape", "fhiubck", lambda x, shape: jnp.reshape(x, shape), params=reshapes)
op("broadcast_to", "fhibck", lambda x, n: jnp.broadcast_to(x, (n, *x.shape)), params=one_of("n", 2, 1, 3))
op("broadcast_in_dim", "fhib", lambda x, n: lax.broadcast_in_dim(x, (*x.shape, n), tuple(range(x.ndim))),
   params=one_of("n", 2, 1, 3))
op("concatenate", "fhibc fhibc", lambda x, y: jnp.concatenate([x, y], -1), joinable)
op("concatenate first", "fhic fhic", lambda x, y: jnp.concatenate([x, y, x], 0), both(joinable, alike))
op("stack", "fhibck fhibck", lambda x, y, axis: jnp.stack([x, y], axis),
   both(alike, same_kind), lambda pick, x, y: {"axis": pick(range(x.ndim + 1))})
op("pad", "fhic", lambda x, lo, hi, inside: lax.pad(x, x.dtype.type(1), [(lo, hi, inside)] + [(0, 0, 0)] * (x.ndim - 1)),
   lambda x: x.ndim and x.shape[0] > 2,
   lambda pick, x: {"lo": pick((1, 0, -1)), "hi": pick((0, 1, -1)), "inside": pick((0, 1))})
op("pad value", "f f", lambda x, y: lax.pad(x, y, [(1, 0, 1)] * x.ndim), scalars(1))
op("rev", "fhic", lambda x, axis: jnp.flip(x, axis), rank(1), some_axis)
op("expand_dims", "fhiubck", lambda x, axis: jnp.expand_dims(x, axis), params=lambda pick, x: {"axis": pick(range(x.ndim + 1))})
op("squeeze", "fhiubck", jnp.squeeze, lambda x: 1 in x.shape)
op("tile", "fhi", lambda x: jnp.tile(x, 2))
op("repeat", "fhi", lambda x, axis: jnp.repeat(x, 2, axis), rank(1), some_axis)
op("roll", "fhic", lambda x, axis: jnp.roll(x, 1, axis), rank(1), some_axis)
op("roll by", "fi i", lambda x, n, axis: jnp.roll(x, n, axis), both(rank(1, 0), scalars(1)), some_axis)
op("tril", "fhi", jnp.tril, rank(2))
op("diagonal", "fhic", lambda x: jnp.diagonal(x), rank(2))
op("diag", "f", lambda x: jnp.diag(x), lambda x: x.ndim == 1)
op("split", "fhi", lambda x: tuple(jnp.split(x, [1], -1)), lambda x: x.ndim and x.shape[-1] > 1)
op("unstack", "fhi", lambda x: (x[0], x[-1]), rank(1))
op("iota plus", "fi", lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, 0) % 3, rank(1))
op("outer", "fh fh", lambda x, y: jnp.outer(x, y), same_kind)
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


op("slice", "fhiubck", lambda x, start, stride: x[start::stride], lambda x: x.ndim and x.shape[0] > 1,
   lambda pick, x: {"start": pick((1, 0)), "stride": pick((1, 2, -1))})
op("slice last", "fhib", lambda x: x[..., :-1], lambda x: x.ndim and x.shape[-1] > 1)
op("dynamic_slice", "fhiuc i", lambda x, i, n: lax.dynamic_slice_in_dim(x, i, n, 0), both(first_has_dims, scalars(1)),
   lambda pick, x, i: {"n": pick(range(1, x.shape[0] + 1))})
op("dynamic_slice 2", "fi i i", lambda x, i, j: lax.dynamic_slice(x, (i, j), (1, x.shape[1])),
   both(lambda *avals: len(avals) > 1 or (avals[0].ndim == 2 and avals[0].size > 0), scalars(1, 2)))
op("dynamic_index", "fiubk i", lambda x, i, axis: lax.dynamic_index_in_dim(x, i, axis, False), both(rank(1, 0), scalars(1)),
   some_axis)
op("dynamic_update_slice", "fhic fhic i", lambda x, y, i: lax.dynamic_update_slice(x, y, (i,) + (0,) * (x.ndim - 1)), both(
    lambda *avals: len(avals) != 2 or (kind(avals[0]) == kind(avals[1]) and avals[0].ndim == avals[1].ndim and all(
        a >= b for a, b in zip(avals[0].shape, avals[1].shape, strict=True))),
    lambda *avals: len(avals) > 1 or avals[0].ndim > 0, scalars(2)))
op("dynamic_update_index", "f f i", lambda x, y, i: lax.dynamic_update_index_in_dim(x, y, i, 0), both(
    lambda *avals: len(avals) != 2 or avals[0].shape[1:] == avals[1].shape, first_has_dims, scalars(2)))
op("x[i]", "fhiubck i", lambda x, i: x[i % x.shape[0]],
   both(first_has_dims, lambda *avals: len(avals) < 2 or avals[1].ndim < 3))
op("take", "fhiub i", lambda x, i, axis, mode: jnp.take(x, i, axis, mode=mode, fill_value=1),
   both(rank(1, 0), lambda *avals: len(avals) < 2 or avals[1].ndim < 3),
   lambda pick, x, i: {**some_axis(pick, x), "mode": pick(("clip", "wrap", "fill"))})
op("x[i, j]", "fib i i", lambda x, i, j: x[i % x.shape[0], j % x.shape[1]],
   lambda *avals: avals[0].ndim > 1 and avals[0].size > 0 and broadcastable(*avals[1:]))
op("x[:, i]", "fib i", lambda x, i: x[:, i % x.shape[1]], both(rank(2, 0), lambda *avals: avals[0].size > 0))
op("x[i, :, j]", "fi i i", lambda x, i, j: x[i % x.shape[0], :, j % x.shape[2]],
   lambda *avals: avals[0].ndim == 3 and avals[0].size > 0 and broadcastable(*avals[1:]))
op("take_along_axis", "fhib i", lambda x, i, axis: jnp.take_along_axis(x, i % x.shape[axis], axis),
   both(alike, lambda *avals: avals[0].ndim > 0 and avals[0].size > 0), some_axis)
op("argsort gather", "f i", lambda x, i: x[jnp.argsort(i, 0)[: x.shape[0]] % x.shape[0]],
   lambda *avals: avals[0].ndim > 0 and avals[0].size > 0 and (len(avals) == 1 or avals[1].ndim == 1))
op("at set", "fhiubc i fhiubc", lambda x, i, v: x.at[i % x.shape[0]].set(v), both(matching, scalars(1)))
op("at set permuted", "fi i", lambda x, i: x.at[jnp.argsort(i)].set(x * 2, unique_indices=True),
   lambda *avals: avals[0].ndim > 0 and (len(avals) == 1 or avals[1].shape == avals[0].shape[:1]))
op("at set const", "fib i", lambda x, i: x.at[i % x.shape[0]].set(1), first_has_dims)
op("at add", "fhiuc i fhiuc", lambda x, i, v, mode: x.at[i].add(v, mode=mode), matching, scatter_mode)
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


op("matmul", "fhic fhic", lambda x, y: tame(x @ y), both(contracts, same_kind))
op("dot", "f f", lambda x, y: tame(jnp.dot(x, y)), same_dims((1, 0), ranks=(2, 1)))
op("x xT", "fc", lambda x: tame(x @ jnp.swapaxes(x, -1, -2)), rank(2))
op("vdot", "fc fc", lambda x, y: tame(jnp.vdot(x, y)), both(alike, same_kind))
op("einsum ij,kj->ki", "fhc fhc", lambda x, y: tame(jnp.einsum("ij,kj->ki", x, y)),
   both(same_dims((1, 1), ranks=(2, 2)), same_kind))
op("einsum bij,bj->bi", "f f", lambda x, y: tame(jnp.einsum("bij,bj->bi", x, y)), same_dims((0, 0), (2, 1), ranks=(3, 2)))
op("einsum bij,bjk->kbi", "f f", lambda x, y: tame(jnp.einsum("bij,bjk->kbi", x, y)), same_dims((0, 0), (2, 1), ranks=(3, 3)))
op("einsum ii->", "f", lambda x: jnp.einsum("ii->", x), lambda x: x.ndim == 2 and x.shape[0] == x.shape[1])
op("einsum ij,ij->j", "fc fc", lambda x, y: tame(jnp.einsum("ij,ij->j", x, y)), same_dims((0, 0), (1, 1), ranks=(2, 2)))
op("tensordot", "fh fh", lambda x, y: tame(jnp.tensordot(x, y, ((0,), (0,)))), both(
    same_kind, lambda *avals: avals[-1].ndim > 0 and avals[-1].shape[0] == avals[0].shape[0]))
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

op("max_pool", "f", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,) * x.ndim, (2,) * x.ndim, "SAME"), rank(1))
op("window any op", "f", lambda x: lax.reduce_window(
    x, np.float32(0), lambda a, b: a + b - a * b * 0.5, (2,) + (1,) * (x.ndim - 1), (1,) * x.ndim, "VALID"),
   lambda x: x.ndim and x.shape[0] > 1, grad=False)
op("conv dimension numbers", "f f", lambda x, w, spec: tame(lax.conv_general_dilated(
    x[None], w[None], (1,), "SAME", dimension_numbers=spec)[0]), both(
        lambda *avals: avals[-1].ndim == 2 and min(avals[-1].shape) > 0,
        lambda *avals: len(avals) == 1 or avals[0].shape[0] == avals[1].shape[0]), one_of("spec", ("NCH", "OIH", "NCH")))
op("conv_transpose", "f f", lambda x, w: tame(lax.conv_transpose(x[None], w[None], (2,), "SAME")[0]), both(
    lambda *avals: avals[-1].ndim == 2 and min(avals[-1].shape) > 0,
    lambda *avals: len(avals) == 1 or avals[0].shape[1] == avals[1].shape[0]))
groups = lambda i, n: jnp.stack([scalar(i) % (n + 1), n - scalar(i) % (n + 1)])
op("ragged_dot", "f f i", lambda x, y, i: tame(lax.ragged_dot(x, jnp.stack([y, 2 * y]), groups(i, x.shape[0]))),
   lambda *avals: len(avals) == 3 or same_dims((1, 0), ranks=(2, 2))(*avals))
op("sparse product", "f f", lambda x, y: tame(sparse.BCOO.fromdense(x, nse=3) @ y), both(
    same_dims((1, 0), ranks=(2, 1)), lambda x, *_: x.size > 0), grad=False)  # JAX has no entries of an empty matrix
op("sparse to dense", "f", lambda x: sparse.bcoo_transpose(sparse.BCOO.fromdense(x, nse=4), permutation=(1, 0)).todense(),
   lambda x: x.ndim == 2 and x.size > 3, grad=False)

# Sorting.

op("sort", "fhiu", lambda x, axis: jnp.sort(x, axis), rank(1), some_axis)
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
op("lu", "f", lambda x: (jax.scipy.linalg.lu_factor(solid(x))[0], jax.scipy.linalg.lu_factor(solid(x))[1]), square)
op("triangular_solve right", "f f", lambda a, b: tame(lax.linalg.triangular_solve(
    solid(a), jnp.swapaxes(b, -1, -2), left_side=False, unit_diagonal=True)), solvable)
op("eigh", "f", lambda x: tame(jnp.abs(jnp.linalg.eigh(gram(x) + jnp.diag(3.0 * jnp.arange(x.shape[-1])))[1])), square,
   grad=False)
op("tridiagonal_solve", "f f", lambda a, b: tame(lax.linalg.tridiagonal_solve(
    jnp.sin(a[0]), 3 + jnp.cos(a[0]), jnp.cos(a[0]), b.T)), lambda *avals: avals[-1].ndim == 2 and avals[0].size > 0
   and avals[0].shape[1] > 2 and avals[-1].shape[1] == avals[0].shape[1])
op("linear_solve", "f f", lambda a, b: tame(lax.custom_linear_solve(
    lambda v: solid(a) @ v, b, lambda _, v: jnp.linalg.solve(solid(a), v), lambda _, v: jnp.linalg.solve(solid(a).T, v))),
   lambda *avals: square(avals[0]) and avals[0].ndim == 2 and (len(avals) == 1 or avals[1].shape == avals[0].shape[:1]))
op("cho_solve", "f f", lambda a, b: tame(jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(gram(a)), True), b)), solvable)

# Special functions, and the host.

op("igamma", "f f", lambda x, y: lax.igamma(*jnp.broadcast_arrays(x * x + 0.5, y * y)), broadcastable, grad=False)
op("betainc", "f f", lambda x, y: jax.scipy.special.betainc(x * x + 0.5, 1.5, jax.nn.sigmoid(y)), broadcastable, grad=False)
op("digamma", "f", lambda x: tame(lax.digamma(x * x + 0.5)))
op("i0e", "f", lax.bessel_i0e)
op("on the host", "f f", lambda x, y, method: jax.pure_callback(
    lambda x, y: np.asarray(np.sin(x) + np.cos(y), np.float32), x, x, y, vmap_method=method), alike,
   one_of("method", "sequential", "expand_dims", "broadcast_all"), grad=False)

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

# Where lanes meet over their axis.


def around(x: Any, over: str, last: int) -> Any:
    """Each lane's value handed to the next; the last one's to nobody, unless `last` is 0."""
    size = lax.axis_size(over)
    return lax.ppermute(x, over, [(i, (i + 1) % size) for i in range(size - last)])


def one_axis(pick: Pick, *avals: Any, names: Sequence[str]) -> dict:
    """One of the axes there are, the innermost first."""
    return {"over": pick(names[::-1])}


def some_names(pick: Pick, *avals: Any, names: Sequence[str]) -> dict:
    """One of the axes there are, or all."""
    return {"over": pick((names[-1], tuple(names), names[0]))}


for name, fun in {"psum": lax.psum, "pmean": lax.pmean}.items():
    op(name, "fc", lambda x, over, fun=fun: tame(fun(x, over)), params=some_names, meet=True)
for name, fun in {"pmax": lax.pmax, "pmin": lax.pmin}.items():
    op(name, "fhi", fun, params=some_names, grad=False, meet=True)
op("psum ints", "i", lax.psum, params=some_names, meet=True)
op("axis_index", "fi", lambda x, over: x + lax.axis_index(over).astype(x.dtype), params=one_axis, meet=True)
op("ppermute", "fibk", around, meet=True,
   params=lambda pick, *avals, names: {**one_axis(pick, names=names), "last": pick((0, 1))})
op("all_gather", "fib", lambda x, over, axis, tiled: lax.all_gather(x, over, axis=axis, tiled=tiled), rank(1),
   lambda pick, x, names: {**one_axis(pick, names=names), "axis": pick(range(x.ndim)), "tiled": pick((False, True))}, meet=True)
op("psum_scatter", "f", lambda x, over, axis, tiled: tame(lax.psum_scatter(
    x, over, scatter_dimension=axis, tiled=tiled)), rank(1),
   lambda pick, x, names: {**one_axis(pick, names=names), "axis": pick(range(x.ndim)), "tiled": pick((False, True))}, meet=True)
def to_all(x: Any, over: str, source: int, target: int, tiled: bool) -> Any:
    return lax.all_to_all(x, over, source, target, tiled=tiled)


def to_all_of_its_own(x: Any, over: str, source: int, target: int, tiled: bool) -> Any:
    """The same, for `jax.vmap`, whose result has a dim too many where x is the same for all lanes."""
    return to_all(x + 0 * lax.axis_index(over).astype(x.dtype), over, source, target, tiled)


for name, fun in {"all_to_all": to_all, "jax.all_to_all": to_all_of_its_own}.items():
    op(name, "fi", fun, rank(1),
       lambda pick, x, names: {**one_axis(pick, names=names), "source": pick(range(x.ndim)), "target": pick(range(x.ndim)),
                               "tiled": pick((True, False))}, meet=True)

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


product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda kept, t: (t * jnp.sin(kept[1]), t * kept[0] * 2))


@jax.custom_batching.custom_vmap
def told(x: Any, y: Any) -> Any:
    """x + sin(y), batched by a rule of its own."""
    return x + jnp.sin(y)


@told.def_vmap
def told_lanes(size: int, batched: Sequence[bool], x: Any, y: Any) -> Any:
    """Lanes in front."""
    return jax.vmap(lambda x, y: x + jnp.sin(y), [0 if b else None for b in batched])(x, y), True


op("custom_vmap", "f f", told, alike, grad=False)
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


def through_ref(x: Any, i: Any, v: Any, body: Callable) -> Any:
    """A reference read, written and added to, its rows handed to the body."""
    ref = jax.new_ref(x)
    ref[i % x.shape[0]] = body(ref[i % x.shape[0]], v)[0]
    return [ref[-1], ref[...]]


op("ref", "fi i fi", through_ref, both(first_has_dims, scalars(1)), grad=False, bodies="body",
   given=lambda x, i, v: (without(x, 0), v), keeps=1)
op("jit", "fhibck fhib", lambda x, y, body: jax.jit(lambda x, y: body(x, y))(x, y), bodies="body", adds=3)
op("checkpoint", "fi f", lambda x, y, body: jax.checkpoint(lambda x, y: body(x, y))(x, y), bodies="body", adds=3)
op("captures", "fi f", lambda x, y, body: jax.jit(lambda x: body(x, y))(x), bodies="body", adds=3)
op("cond", "iu fhi fhib", lambda i, x, y, one, other: lax.cond(scalar(i) % 2 == 0, one, other, x, y),
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


op("while", "i fhib fhi fhib", while_, bodies="body", grad=False,
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


op("scan", "fhi fhibck fhi fhib", scan, rank(0, 0, 1, 0),
   lambda pick, *avals: {"reverse": pick((False, True)), "unroll": pick((1, 2))}, bodies="body",
   given=lambda c, d, xs, seen, **params: (c, d, without(xs, 0), seen), keeps=2, adds=1)
op("scan length", "f fi", lambda x, y, body: lax.scan(lambda c, _: (body(*c), c[0]), [x, y], length=2)[0],
   bodies="body", keeps=2)
op("map", "fhi f", lambda xs, y, body: lax.map(lambda x: body(x, y), xs), rank(1, 0),
   bodies="body", given=lambda xs, y: (without(xs, 0), y), adds=2)


def mappable(*avals: Any) -> bool:
    return avals[0].ndim > 0 and avals[0].size > 0


def map_axes(pick: Pick, *avals: Any) -> dict:
    """Axes of one size for the first and perhaps the others."""
    axis = pick(range(avals[0].ndim))
    others = [[None, *(i for i, n in enumerate(a.shape) if n == avals[0].shape[axis])] for a in avals[1:]]
    return {"axes": (axis, *(pick(choices[::-1]) for choices in others)), "out": pick((0, -1))}


def mapped_by(vmap: Callable, x: Any, y: Any, body: Callable, axes: tuple, out: int, name: str) -> Any:
    """`body` mapped by `vmap` over an axis of this name."""
    return vmap(lambda x, y: body(x, y), axes, out, axis_name=name)(x, y)


for name, vmap in {"vmap": minibatch.vmap, "jax.vmap": jax.vmap}.items():
    op(name, "fib fib", functools.partial(mapped_by, vmap), mappable, map_axes, bodies="body", adds=2,
       given=lambda x, y, axes, **params: (without(x, axes[0]), without(y, axes[1])))


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


op("blend", "fh fhiubk", lambda x, y: 0.5 * x + 0.5 * (
    jnp.tanh(y.mean()) if kind(y) in "fh" else small(integer(y))).astype(x.dtype),
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


SCHEDULES = ((), (), ("refill", "partition"), ("compact", "select"))


class Program(NamedTuple):
    """A program of one lane, and how it is mapped: `how` is "called", "jitted" or "traced afresh", `name` the lanes' axis.

    `schedules` are those of loops and branches whose lanes diverge.
    """

    inputs: list[Input]
    body: Body
    out_axes: tuple[int, ...]
    size: int
    how: str = "called"
    name: str | None = None
    schedules: tuple[str, ...] = ()

    def __repr__(self) -> str:
        inputs = "".join(f"\n    Input{tuple(x)}," for x in self.inputs)
        rest = ", ".join(map(repr, self[2:]))
        return f"Program([{inputs}\n], {self.body}, {rest})"

    def fun(self, *args: Any) -> list:
        """The program of one lane."""
        return run(self.body, args)


def draw(x: Input) -> Draw:
    """How one lane's argument is drawn; a key by what it is made of."""
    match x.kind:
        case "k":
            return Draw((*x.shape, 2), np.uint32, 0, 2**32)
        case "i":
            return Draw(x.shape, np.int32, -8, 9)
        case "u":
            return Draw(x.shape, np.uint8, 0, 256)
        case other:
            dtypes = {"f": np.float32, "h": jnp.bfloat16, "w": np.uint32, "b": np.bool_, "c": np.complex64}
            return Draw(x.shape, dtypes[other], -1.5, 1.5)


def lane_aval(x: Input) -> Any:
    """What one lane sees of it."""
    dtype = jax.random.key(0).dtype if x.kind == "k" else draw(x).dtype
    return jax.ShapeDtypeStruct(x.shape, dtype)


def run(body: Body, args: Sequence[Any], jitter: Any = None) -> list:
    """What `body` returns. With `jitter`, every float is off by that much, relatively, as if rounded otherwise."""
    values = list(args)
    for number, step in enumerate(body.steps):
        outs = step_outs(step, [values[i] for i in step.operands], jitter)
        values += [jittered(x, jitter, number) for x in outs] if jitter is not None else outs
    return [values[i] for i in body.outs]


def step_outs(step: Step, operands: Sequence[Any], jitter: Any = None) -> list:
    """What one step returns for its operands."""
    params = {k: functools.partial(call, v, jitter) if isinstance(v, Body) else v for k, v in step.params.items()}
    outs = OPS[step.op].fun(*operands, **params)
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def call(body: Body, jitter: Any, *args: Any) -> list:
    """`body` as the function that operations take."""
    return run(body, args, jitter)


def jittered(x: Any, jitter: Any, number: int) -> Any:
    """x off by `jitter`, each element by another part of it."""
    if kind(x) not in "fhc":
        return x
    wave = np.sin(np.arange(1, x.size + 1) * (1 + number) * 1e3).reshape(x.shape)
    off = 1 + jitter * (2**15 if kind(x) == "h" else 1) * wave.astype(np.float32)  # bfloat16 has 16 bits fewer
    return (x * off).astype(x.dtype)


# --- drawing them -----------------------------------------------------------------------------------------------------
#
# What hypothesis draws is a list of (operation, number). Every such list is a program: what an operation takes and its
# params are read off the number, among what fits; an operation for which nothing fits is left out; one with bodies takes
# its next few neighbours into them. So a shorter list and smaller numbers are a simpler program.

SHAPES = [(), (3,), (2, 3), (3, 3), (2,), (2, 3, 3), (3, 1), (4,), (0,), (2, 0)]
KINDS = "ffffhiiubck"
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
    avals = [*map(lane_aval, found)]
    name = pick((None, None, "lanes")) if size else None
    scope = Scope(grad, {} if name is None else {name: size})
    body, outs = decode_body(iter(raw), pick, avals, scope, limit=len(raw), adds=4)
    out_axes = tuple(pick([*range(a.ndim + 1), *range(-a.ndim - 1, 0)]) for a in outs)
    way = pick(("called", "jitted", "traced afresh"))
    return Program(found, body, out_axes, size, way, name, pick(SCHEDULES))


class Scope(NamedTuple):
    """Where a step stands: what it may be, how deep it is, and the sizes of the named axes around it."""

    grad: bool
    names: dict[str, int]
    depth: int = 0

    def inside(self, chosen: Op, taken: Sequence[Any], params: dict) -> Scope:
        """The scope of a body of such a step."""
        own = {params["name"]: taken[0].shape[params["axes"][0]]} if chosen.name == "vmap" else {}
        return Scope(self.grad or chosen.name in DIFFERENTIATES, {**self.names, **own}, self.depth + 1)

    def avals_of(self, fun: Callable, taken: Sequence[Any]) -> Any:
        """What `fun` returns for such values."""
        return jax.make_jaxpr(fun, axis_env=list(self.names.items()), return_shape=True)(*taken)[1]


def decode_body(
    raw: Iterator[Raw], pick: Pick, given: Sequence[Any], scope: Scope, limit: int, adds: int, keeps: int = 0
) -> tuple[Body, list[Any]]:
    """A body of at most `limit` steps: it returns values like the first `keeps`, and `adds` that nothing else reads."""
    avals, steps, read = list(given), [], set()
    for name, number in raw:
        if name == "nothing" or len(avals) > MOST_VALUES:
            continue
        step, outs = decode_step(OPS[name], Pick(number), raw, avals, scope)
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
    chosen: Op, pick: Pick, raw: Iterator[Raw], avals: Sequence[Any], scope: Scope
) -> tuple[Step | None, list[Any]]:
    """One step and the avals of what it returns; None if nothing fits."""
    if (scope.grad and not chosen.grad) or (chosen.bodies and scope.depth == DEEPEST) or (chosen.meet and not scope.names):
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
    params = chosen.params(pick, *taken, **({"names": list(scope.names)} if chosen.meet else {}))
    if chosen.name == "vmap":
        params["name"] = f"axis {scope.depth}"
    given = list(chosen.given(*taken, **params))
    for name in chosen.bodies:
        inner = scope.inside(chosen, taken, params)
        params[name], _ = decode_body(raw, pick, given, inner, pick((3, 1, 5, 8)), chosen.adds, chosen.keeps)
    step = Step(chosen.name, tuple(operands), params)
    try:
        outs = scope.avals_of(lambda *args: step_outs(step, args), taken)
    except Exception as error:
        if refused(lambda: scope.avals_of(lambda *args: step_outs(by_jax(step), args), taken)):
            return None, []
        error.add_note(f"on {taken}: {step}")
        raise
    return step, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs]


def by_jax(part: Any, own: bool = False) -> Any:
    """The same body or step, with what the table has for JAX: `jax.vmap` where it has `minibatch.vmap` inside.

    `own`: a lane takes a derivative of this by itself, before lanes are mapped.
    """
    match part:
        case Body(given, steps, outs):
            return Body(given, [by_jax(step, own) for step in steps], outs)
        case Step(name, operands, params):
            other = f"jax.{name}" in OPS and (name not in ("cond", "switch") or (meets(part) and not own))
            own = own or name == "grad"
            return Step(f"jax.{name}" if other else name, operands, {k: by_jax(v, own) for k, v in params.items()})
    return part


def meets(part: Any) -> bool:
    """Whether lanes meet in this body or step."""
    match part:
        case Body(_, steps, _):
            return any(map(meets, steps))
        case Step(name, _, params):
            return OPS[name].meet or any(map(meets, params.values()))
    return False


def all_branches(index: Any, x: Any, y: Any, *branches: Callable) -> list:
    """Each run for all lanes, and one chosen: what lanes that meet in a branch do, and send to those that take it.

    `jax.vmap` does the same, but leaves what they send out of the derivative.
    """
    return [lax.select_n(index, *cases) for cases in zip(*(branch(x, y) for branch in branches), strict=True)]


# Drawn by nobody: they stand for those without `jax.` in its own programs.
op("jax.cond", "", lambda i, x, y, one, other: all_branches(scalar(i) % 2 == 0, x, y, other, one))
op("jax.switch", "", lambda i, x, y, one, two, three: all_branches(scalar(i) % 3, x, y, one, two, three))


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
        drawn = np.asarray(draw(x).lanes(rng, max(program.size, 1)))
        made = jax.random.wrap_key_data if x.kind == "k" else lambda x: x
        each.append([made(drawn[i if x.axis is not None else 0]) for i in range(program.size)])
        axis = x.axis is not None and x.axis % (len(x.shape) + 1)
        stacked.append(made(jax.device_put(drawn[0] if x.axis is None else np.moveaxis(drawn[: program.size], 0, axis))))
    return stacked, [list(lane) for lane in zip(*each, strict=True)]


def moved(x: Any, axis: int) -> Any:
    """The lanes of `x`, in front, at `axis`."""
    return np.moveaxis(x, 0, axis)


def plain(x: Any) -> np.ndarray:
    """`x` as numpy has it: keys as what they are made of."""
    return np.asarray(jax.random.key_data(x) if kind(x) == "k" else x)


def rough(program: Program) -> bool:
    """Whether some of it is computed to three digits only."""
    return any(x.kind == "h" for x in program.inputs)


def agree(program: Program, found: Callable[[], Any], wanted: Callable[..., list]) -> None:
    """What is found is what is `wanted`, which is asked for what it would be with a jitter: if it depends on how floats are
    rounded, nothing is asked for.
    """
    try:
        expected = wanted()
    except Exception:
        return  # JAX refuses it
    try:
        outs = jax.tree.leaves(found())
    except jax.errors.JaxRuntimeError as error:
        if "RET_CHECK" in str(error):  # XLA contradicts itself, as its Fourier transforms on CPUs do for some layouts
            return
        raise
    tolerance = 5e-2 if rough(program) else 2e-3
    outs = [plain(x) for x in outs]
    if not close(outs, expected, tolerance) and all(
        close(wanted(np.float32(jitter)), expected, tolerance / 3) for jitter in (1e-6, -1e-6, 3e-6, -3e-6)
    ):
        assert_close(outs, expected, tolerance, "the lanes one by one")


def close(found: list, wanted: list, tolerance: float) -> bool:
    """Whether these agree."""
    try:
        assert_close(found, wanted, tolerance)
    except AssertionError:
        return False
    return True


def by_lanes(program: Program, of: Callable, place: Callable) -> Callable[..., list]:
    """What `of` the program gives for each lane, stacked in front, then placed."""
    _, lanes = arguments(program)
    body = by_jax(program.body)
    once = jax.jit(lambda args, jitter: of(lambda *args: run(body, args, jitter))(*args))

    def wanted(jitter: Any = None) -> list:
        outs = [jax.tree.leaves(once(lane, jitter)) for lane in lanes]
        return [place(np.stack([plain(x) for x in xs]), i, xs[0].ndim + 1) for i, xs in enumerate(zip(*outs, strict=True))]

    return wanted


def by_other_map(program: Program, of: Callable, own: bool = False) -> Callable[..., list]:
    """What `of(jax.vmap, program)` gives. `own`: it takes derivatives inside the map."""
    args, _ = arguments(program)
    body = by_jax(program.body, own)
    once = jax.jit(lambda args, jitter: of(jax.vmap, lambda *args: run(body, args, jitter))(*args))
    return lambda jitter=None: [plain(x) for x in jax.tree.leaves(once(args, jitter))]


def check(program: Program) -> None:
    """The mapped program gives what its lanes give one by one; if there are none, or they meet, what `jax.vmap` gives."""
    args, _ = arguments(program)
    axes, out_axes = tuple(x.axis for x in program.inputs), list(program.out_axes)
    mapped = minibatch.vmap(program.fun, axes, out_axes, program.name, compile=program.how != "traced afresh")
    found = scheduled(program, lambda: (mapped if program.how == "called" else jax.jit(mapped))(*args))
    if program.size and program.name is None:  # an axis counted from the end does not count what a key is made of
        agree(program, found, by_lanes(program, lambda fun: fun, lambda x, i, ndim: moved(x, out_axes[i] % ndim)))
    else:
        agree(program, found, by_other_map(program, lambda vmap, fun: vmap(fun, axes, out_axes, program.name)))


def check_derivatives(program: Program) -> None:
    """The derivative of the mapped program, or the mapped derivative, is that of the lanes, or of `jax.vmap` if they meet."""
    args, _ = arguments(program)
    axes, outs, name = tuple(x.axis for x in program.inputs), list(program.out_axes), program.name
    floats = [i for i, x in enumerate(program.inputs) if x.kind in "fh"]
    slopes = lambda fun: jax.grad(lambda *args: total(fun(*args)), floats)

    def along(fun: Callable) -> Callable:
        def tangents(*args: Any) -> list:
            line = lambda t: [
                y for y in fun(*(x + t.astype(x.dtype) if i in floats else x for i, x in enumerate(args))) if kind(y) == "f"
            ]
            return jax.jvp(line, (jnp.float32(0),), (jnp.float32(1),))[1]

        return tangents

    def of_argument(x: Any, i: int, ndim: int) -> Any:
        axis = axes[floats[i]]
        return x.sum(0) if axis is None else moved(x, axis)

    in_front = lambda x, i, ndim: x
    compiled = jax.jit if program.how != "called" else lambda fun: fun
    of, of_lane, place = {
        "called": (lambda vmap, fun: vmap(slopes(fun), axes, axis_name=name), slopes, in_front),
        "jitted": (lambda vmap, fun: slopes(vmap(fun, axes, outs, name)), slopes, of_argument),
        "traced afresh": (lambda vmap, fun: along(vmap(fun, axes, axis_name=name)), along, in_front),
    }[program.how]
    wanted = by_lanes(program, of_lane, place) if name is None else by_other_map(program, of, program.how == "called")
    agree(program, scheduled(program, lambda: compiled(of(minibatch.vmap, program.fun))(*args)), wanted)


def check_reports(program: Program) -> None:
    """Reports can be made of the program, and find that each equation of it does what it does in its lanes."""
    args, _ = arguments(program)
    axes, name = tuple(x.axis for x in program.inputs), program.name
    assert "lanes" in str(minibatch.explain(program.fun, axes, list(program.out_axes), name)(*args))
    assert "lambda" in minibatch.vmap(program.fun, axes, list(program.out_axes), name).jaxpr(*args, annotate=True)
    assert "lanes" in str(minibatch.find_nonfinite(program.fun, axes, axis_name=name)(*args))
    if program.size:
        with contextlib.suppress(NotImplementedError):  # it makes references, which cannot be checked so
            found = minibatch.check(program.fun, axes, axis_name=name)(*args)
            assert found, str(found)


def scheduled(program: Program, call: Callable[[], Any]) -> Callable[[], Any]:
    """The same call, where the program's schedules are asked for."""

    def found() -> Any:
        with minibatch.divergence(*program.schedules):
            return call()

    return found


# --- making a failing one smaller -------------------------------------------------------------------------------------


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 60) -> Program:
    """A smaller program that still `fails`, found within about so many seconds of computing."""
    end, tried = time.process_time() + seconds, set()
    while True:
        for candidate in simpler(program):
            if time.process_time() > end:
                return program
            if repr(candidate) not in tried and fails(candidate):
                program = candidate
                break
            tried.add(repr(candidate))
        else:
            return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs a little simpler: fewer outputs, later beginnings, values in the place of others."""
    body, given = program.body, [*map(lane_aval, program.inputs)]
    scope = Scope(False, {} if program.name is None else {program.name: program.size})
    if len(body.outs) > 1:
        for out, axis in zip(body.outs, program.out_axes, strict=True):
            yield program._replace(body=body._replace(outs=(out,)), out_axes=(axis,))
    if program.name is not None:
        yield program._replace(name=None)
    values = values_of(body, given, scope)
    counts = [len(avals) for avals in values]
    flat = [*given, *itertools.chain(*values)]
    for first in [len(body.steps) - 1 - n for n in range(len(body.steps))]:
        read = needed(body, counts, first)
        inputs = [program.inputs[i] if i < body.given else Input(kind(flat[i]), flat[i].shape, 0) for i in read]
        if first or len(inputs) < body.given:
            yield program._replace(inputs=inputs, body=taking(body, counts, read, first))
    for variant in variants(body, given, scope):
        yield program._replace(body=variant)


def variants(body: Body, given: Sequence[Any], scope: Scope) -> Iterator[Body]:
    """The same body with a value in the place of a later one, or with such a change in a body inside it."""
    values = values_of(body, given, scope)
    counts, flat = [len(avals) for avals in values], [*given, *itertools.chain(*values)]
    everything = range(body.given)
    first = [next(i for i, x in enumerate(flat) if like(x, y)) for y in flat]
    if body.steps:
        yield taking(body._replace(outs=tuple(first[i] for i in body.outs)), counts, everything, 0)
    for late in [i for i in reversed(range(body.given, len(flat))) if first[i] < i]:
        swap = lambda numbers, late=late: tuple(first[i] if i == late else i for i in numbers)
        steps = [step._replace(operands=swap(step.operands)) for step in body.steps]
        yield taking(body._replace(steps=steps, outs=swap(body.outs)), counts, everything, 0)
    for number, step in enumerate(body.steps):
        chosen, taken = OPS[step.op], [flat[i] for i in step.operands]
        plain_params = {k: v for k, v in step.params.items() if not isinstance(v, Body)}
        for name in chosen.bodies:
            inner = scope.inside(chosen, taken, step.params)
            for variant in variants(step.params[name], chosen.given(*taken, **plain_params), inner):
                changed = step._replace(params={**step.params, name: variant})
                yield body._replace(steps=[*body.steps[:number], changed, *body.steps[number + 1 :]])


def values_of(body: Body, given: Sequence[Any], scope: Scope) -> list[list]:
    """The avals that each step adds."""
    flat, values = list(given), []
    for step in body.steps:
        outs = scope.avals_of(lambda *args, step=step: step_outs(by_jax(step), args), [flat[i] for i in step.operands])
        values.append([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs])
        flat += values[-1]
    return values


def needed(body: Body, counts: Sequence[int], first: int) -> list[int]:
    """The numbers of the values from before step `first` that this step and the later ones need."""
    ends = [body.given, *(body.given + n for n in itertools.accumulate(counts))]
    wanted = set(body.outs)
    for number in range(len(body.steps) - 1, first - 1, -1):
        if wanted & {*range(ends[number], ends[number + 1])}:
            wanted |= {*body.steps[number].operands}
    return sorted(i for i in wanted if i < ends[first])


def taking(body: Body, counts: Sequence[int], given: Sequence[int], first: int) -> Body:
    """The steps from `first` on that anything needs, with the values of the numbers `given` as what is given."""
    ends = [body.given, *(body.given + n for n in itertools.accumulate(counts))]
    wanted, kept = set(body.outs), []
    for number in range(len(body.steps) - 1, first - 1, -1):
        if wanted & {*range(ends[number], ends[number + 1])}:
            wanted |= {*body.steps[number].operands}
            kept.insert(0, number)
    new = {old: i for i, old in enumerate([*given, *(i for number in kept for i in range(ends[number], ends[number + 1]))])}
    renumbered = lambda numbers: tuple(new[i] for i in numbers)
    steps = [body.steps[number]._replace(operands=renumbered(body.steps[number].operands)) for number in kept]
    return Body(len(given), steps, renumbered(body.outs))
