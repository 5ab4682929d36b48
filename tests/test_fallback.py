"""Primitives that nobody here wrote a rule for: a third party's rule, JAX's own delegations, and the loop over lanes."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.hijax import MappingSpec
from jax.experimental import hijax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from oracle import assert_close

import minibatch

NUMBER = itertools.count()


def made(fun: Callable, abstract: Callable = lambda x, *_: x, multiple_results: bool = False) -> Primitive:
    """A primitive of a third party that does what `fun` does."""
    primitive = Primitive(f"theirs_{next(NUMBER)}")
    primitive.multiple_results = multiple_results
    primitive.def_impl(fun)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=multiple_results))
    return primitive


X = np.arange(6.0, dtype="f").reshape(3, 2)


# --- the loop over lanes ----------------------------------------------------------------------------------------------


def test_loop_warns_at_the_line_of_the_user() -> None:
    double = made(lambda x: x * 2)
    fun = lambda x: double.bind(x)
    with pytest.warns(minibatch.MissingRuleWarning) as caught:
        np.testing.assert_allclose(minibatch.vmap(fun)(X), X * 2)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, fun.__code__.co_firstlineno)
    line = f"{__file__}:{fun.__code__.co_firstlineno}"
    text = str(warning.message)
    why = f"{double} has no batching rule and runs lane by lane, in a loop over 3 lanes"
    assert text.startswith(f"minibatch: {why}, for {line}")
    assert text.endswith("<lambda>). Register a rule for it with minibatch.extend.rule.")


def test_loop_can_be_an_error() -> None:
    double = made(lambda x: x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", minibatch.MissingRuleWarning)
        with pytest.raises(minibatch.MissingRuleWarning, match="has no batching rule"):
            minibatch.vmap(double.bind)(X)


@pytest.mark.filterwarnings("ignore::minibatch.MissingRuleWarning")
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("in_axes", [(0, None), (None, -1), (1, 0)])
def test_loop_gives_what_the_lanes_give(in_axes: tuple, size: int) -> None:
    both = made(lambda x, y: [x @ y, y], lambda x, y: [y, y], multiple_results=True)
    args = [np.ones((2, 2), "f"), np.arange(2.0, dtype="f")]
    stacked = [np.stack([x + i for i in range(3)])[:size] for x in args]
    args = [x if d is None else np.moveaxis(xs, 0, d) for x, xs, d in zip(args, stacked, in_axes, strict=True)]
    found = minibatch.vmap(lambda x, y: both.bind(x, y), in_axes)(*args)
    assert_close(found, jax.vmap(lambda x, y: [x @ y, y], in_axes)(*args), 1e-6)


@pytest.mark.filterwarnings("ignore::minibatch.MissingRuleWarning")
def test_loop_over_typed_keys_and_in_two_maps() -> None:
    normal = made(lambda key: jax.random.normal(key, (2,)), lambda key: jax.core.ShapedArray((2,), np.float32))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    found = minibatch.vmap(minibatch.vmap(normal.bind))(keys)
    np.testing.assert_allclose(found, jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (2,))))(keys))


@pytest.mark.filterwarnings("ignore::minibatch.MissingRuleWarning")
def test_loop_has_the_derivative_that_the_primitive_has() -> None:
    cube = made(lambda x: x**3)
    ad.defjvp(cube, lambda t, x: 3 * x**2 * t)
    np.testing.assert_allclose(jax.grad(lambda x: minibatch.vmap(cube.bind)(x).sum())(X), 3 * X**2)
    np.testing.assert_allclose(minibatch.vmap(jax.grad(lambda x: cube.bind(x).sum()))(X), 3 * X**2)


def test_what_all_lanes_share_is_not_looped_over() -> None:
    double = made(lambda x: x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = minibatch.vmap(lambda x, w: x + double.bind(w), (0, None))(X, X[0])
    np.testing.assert_allclose(found, X + 2 * X[0])


def test_what_acts_across_the_lanes_is_not_looped_over() -> None:
    effects = jax.make_jaxpr(lambda: lax.axis_index("i"), axis_env=[("i", 3)])().effects
    across = Primitive("across")
    across.def_effectful_abstract_eval(lambda x: (x, effects))
    with pytest.raises(NotImplementedError, match="acts across the lanes of axis 'i', so they cannot run one by one"):
        minibatch.vmap(across.bind, axis_name="i")(X)


# --- rules of third parties -------------------------------------------------------------------------------------------


def test_rule_registered_here_comes_before_one_registered_with_jax() -> None:
    double = made(lambda x: x * 2)
    batching.primitive_batchers[double] = lambda args, dims: pytest.fail("not this one")

    @minibatch.extend.rule(double)
    def rule(axis: Any, eqn: Any, x: Any) -> list:
        return [minibatch.extend.Batched(out, 0) for out in minibatch.extend.rebind(eqn, x.value)]

    np.testing.assert_allclose(minibatch.vmap(double.bind, 1, 1)(X), X * 2)


def test_rule_registered_with_jax() -> None:
    seen = []
    scaled = made(lambda x, *, k: x * k, lambda x, k: x)
    fun = lambda x: scaled.bind(x, k=3)

    def simple(args: Any, dims: Any, *, k: int) -> Any:
        seen.append(dims)
        return scaled.bind(*args, k=k), dims[0]

    def named(size: int, name: Any, _: Any, args: Any, dims: Any, *, k: int) -> Any:
        seen.append((size, name))
        return simple(args, dims, k=k)

    batching.primitive_batchers[scaled] = simple
    np.testing.assert_allclose(minibatch.vmap(fun, 1)(X), 3 * X.T)
    batching.axis_primitive_batchers[scaled] = named
    np.testing.assert_allclose(minibatch.vmap(fun, 1, axis_name="i")(X), 3 * X.T)
    assert seen == [(1,), (2, "i"), (1,)]


@pytest.mark.filterwarnings("ignore::minibatch.MissingRuleWarning")
def test_rule_registered_with_jax_is_asked_of_what_lanes_share_if_the_axis_has_a_name() -> None:
    total = made(lambda x: x)

    def rule(axis: Any, values: Any, dims: Any) -> tuple:
        (x,), (d,) = values, dims
        return (x * axis.size if d is None else x.sum(d)), None

    batching.fancy_primitive_batchers[total] = rule
    fun = lambda x, y: (total.bind(x), total.bind(y))
    x, y = minibatch.vmap(fun, (0, None), None, axis_name="i")(jnp.arange(3.0), 2.0)
    assert (x, y) == (3.0, 6.0)
    assert minibatch.vmap(fun, (0, None), None)(jnp.arange(3.0), 2.0) == (3.0, 2.0)


def test_rule_that_declines_leaves_it_to_the_loop() -> None:
    double = made(lambda x: x * 2)

    def declining(args: Any, dims: Any) -> Any:
        raise NotImplementedError("not today")

    batching.primitive_batchers[double] = declining
    with pytest.warns(minibatch.MissingRuleWarning, match=r"declines \(not today\) and runs lane by lane"):
        np.testing.assert_allclose(minibatch.vmap(double.bind)(X), X * 2)


def test_reduction_over_lanes_by_equinox_keeps_its_branch() -> None:
    def fun(x: Any) -> Any:
        return lax.cond(eqxi.unvmap_any(x > 4), lambda x: x * 10, lambda x: x, x)

    mapped = minibatch.vmap(fun)
    np.testing.assert_allclose(mapped(X[:, 0]), X[:, 0])
    np.testing.assert_allclose(mapped(X[:, 1]), X[:, 1] * 10)
    assert any(eqn.primitive.name == "cond" and eqn.invars[0].aval.shape == () for eqn in mapped.jaxpr(X[:, 0]).eqns)
    np.testing.assert_allclose(minibatch.vmap(lambda x: eqxi.unvmap_max(x), out_axes=None)(np.arange(3)), 2)


# --- delegated to JAX -------------------------------------------------------------------------------------------------


def add_scaled(x: Any, y: Any, out: Any) -> None:
    out[...] = x[...] + y[...] * pl.program_id(0)


def add(x: Any, y: Any) -> Any:
    block = pl.BlockSpec((2,), lambda i: (i,))
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return pl.pallas_call(add_scaled, out_shape=shape, grid=(2,), in_specs=[block] * 2, out_specs=block, interpret=True)(x, y)


@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 0)])
def test_pallas_kernel(in_axes: tuple) -> None:
    x, y = np.arange(12.0, dtype="f").reshape(3, 4), np.ones((3, 4), "f") * 2
    args = [v[0] if d is None else np.moveaxis(v, 0, d) for v, d in zip((x, y), in_axes, strict=True)]
    wanted = np.stack([add(x[0 if in_axes[0] is None else i], y[0 if in_axes[1] is None else i]) for i in range(3)])
    np.testing.assert_allclose(minibatch.vmap(add, in_axes)(*args), wanted)
    twice = minibatch.vmap(minibatch.vmap(add, in_axes), (0, None))
    np.testing.assert_allclose(twice(np.stack([args[0]] * 2), args[1]), [wanted] * 2)


HiPrimitive = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


class Square(HiPrimitive):
    """x ** 2 as a hijax primitive with a `batch` of its own."""

    def __init__(self, aval: Any) -> None:
        self.in_avals = (aval,)
        self.out_aval = aval
        self.params = {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return x**2

    def batch(self, axis_data: Any, args: tuple, dims: tuple) -> Any:
        (x,), (d,) = args, dims
        return Square(jax.typeof(x))(x), d


def test_hijax_primitive() -> None:
    fun = lambda x: Square(jax.typeof(x))(x) + 1
    np.testing.assert_allclose(minibatch.vmap(fun)(X), X**2 + 1)
    np.testing.assert_allclose(minibatch.vmap(fun, 1, compile=False)(X), (X**2 + 1).T)
    np.testing.assert_allclose(minibatch.vmap(minibatch.vmap(fun))(X), X**2 + 1)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value of two arrays that is no pytree: a type of its own."""

    first: Any
    second: Any


class Dims(MappingSpec):
    """Where each part of a pair has its lanes."""

    def __init__(self, *dims: int | None) -> None:
        self.dims = dims

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dims) and self.dims == other.dims

    def __hash__(self) -> int:
        return hash(self.dims)


@dataclasses.dataclass(frozen=True)
class PairOf(hijax.HiType):
    """The type of pairs."""

    parts: tuple

    def lo_ty(self) -> list:
        return list(self.parts)

    def lower_val(self, hi_val: Pair) -> list:
        return [hi_val.first, hi_val.second]

    def raise_val(self, *lo_vals: Any) -> Pair:
        return Pair(*lo_vals)

    def dec_rank(self, size: int, spec: Any) -> PairOf:
        pairs = zip(self.parts, spec.dims, strict=True)
        return PairOf(tuple(part if d is None else part.dec_rank(size, d) for part, d in pairs))

    def inc_rank(self, size: int, spec: Any) -> PairOf:
        pairs = zip(self.parts, spec.dims, strict=True)
        return PairOf(tuple(part if d is None else part.inc_rank(size, d) for part, d in pairs))


hijax.register_hitype(Pair, lambda pair: PairOf((jax.typeof(pair.first), jax.typeof(pair.second))))


class Swap(HiPrimitive):
    """The pair (b, a) of the pair (a, b)."""

    def __init__(self, aval: Any) -> None:
        self.in_avals = (aval,)
        self.out_aval = PairOf(aval.parts[::-1])
        self.params = {}
        super().__init__()

    def expand(self, pair: Any) -> Any:
        return Pair(pair.second, pair.first)

    def batch(self, axis_data: Any, args: tuple, dims: tuple) -> Any:
        return Swap(jax.typeof(args[0]))(args[0]), Dims(*dims[0].dims[::-1])


@pytest.mark.parametrize("compile", [True, False])
def test_value_of_a_hijax_type(compile: bool) -> None:
    pair = Pair(jnp.asarray(X), jnp.float32(5))
    swap = lambda pair: Swap(jax.typeof(pair))(pair)
    found = minibatch.vmap(swap, Dims(0, None), Dims(None, 0), axis_size=3, compile=compile)(pair)
    assert found.first == 5
    np.testing.assert_allclose(found.second, X)
    same = minibatch.vmap(lambda pair, x: (pair, x), (Dims(1, None), 0), (Dims(1, None), 0), compile=compile)(pair, X.T)
    np.testing.assert_allclose(same[0].first, X)
    with pytest.raises(ValueError, match=r"at vmap out_axes, got axis spec .*Dims.* but output was batched on axis .*Dims"):
        minibatch.vmap(swap, Dims(0, None), Dims(0, None), axis_size=3, compile=compile)(pair)


def test_root() -> None:
    def root(a: Any) -> Any:
        solve = lambda f, x: lax.fori_loop(0, 30, lambda _, x: x - f(x) / (2 * x), x)
        return lax.custom_root(lambda x: x * x - a, 1.0 + 0 * a, solve, lambda g, y: y / g(1.0))

    a = np.asarray([2.0, 3.0, 9.0], "f")
    np.testing.assert_allclose(minibatch.vmap(root)(a), np.sqrt(a), rtol=1e-5)
    np.testing.assert_allclose(minibatch.vmap(jax.grad(root))(a), 0.5 / np.sqrt(a), rtol=1e-4)
    np.testing.assert_allclose(jax.grad(lambda a: minibatch.vmap(root)(a).sum())(a), 0.5 / np.sqrt(a), rtol=1e-4)


def test_marks_for_checks_of_key_reuse() -> None:
    from jax.experimental.key_reuse import _core as marks

    keys = jax.random.split(jax.random.key(0), 3)
    fun = lambda k: marks.assert_consumed_value_p.bind(marks.consume_p.bind(k), value=True)
    assert (jax.random.key_data(minibatch.vmap(fun)(keys)) == jax.random.key_data(keys)).all()


def test_a_rule_registered_later_is_used() -> None:
    late = made(lambda x: x * 2)
    fun = minibatch.vmap(lambda x: jax.jit(late.bind)(x))
    with pytest.warns(minibatch.MissingRuleWarning):
        np.testing.assert_allclose(fun(X), X * 2)

    @minibatch.extend.rule(late)
    def rule(axis: Any, eqn: Any, x: Any) -> list:
        return [minibatch.extend.Batched(x.value * 2, 0)]

    assert "while" not in str(fun.jaxpr(X)) and "scan" not in str(fun.jaxpr(X))
    np.testing.assert_allclose(fun(X), X * 2)
