"""The call: signatures, specs, names, decorators, methods, what comes back."""

from __future__ import annotations

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters.batching import infer, sum_axis

import minibatch
from minibatch import if_array, if_batched, vmap

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def score(image, weights, bias, temperature=1.0):
    """How good an image is."""
    return (image @ weights + bias) / temperature


class Model:
    def __init__(self, scale):
        self.scale = scale

    @vmap(in_axes=(None, 0))
    def mapped(self, x):
        return x * self.scale

    def plain(self, x):
        return x * self.scale


# --- the object -------------------------------------------------------------------------------------------------------


def test_name_documentation_and_signature_survive():
    mapped = vmap(score)
    assert (mapped.__name__, mapped.__doc__, mapped.__wrapped__) == ("score", score.__doc__, score)
    assert mapped.__module__ == score.__module__


@pytest.mark.parametrize("axes", [{}, {"in_axes": (0, None)}])
def test_decorator(axes):
    @vmap(**axes)
    def f(x, y=1.0):
        return x + y

    np.testing.assert_allclose(f(X[:, 0], 1.0) if axes else f(X[:, 0]), X[:, 0] + 1)


def test_method_of_a_class():
    np.testing.assert_allclose(Model(2.0).mapped(X), X * 2)
    np.testing.assert_allclose(Model(3.0).mapped(X), X * 3)
    np.testing.assert_allclose(vmap(Model(4.0).plain)(X), X * 4)


def test_pickles_if_the_function_does():
    mapped = pickle.loads(pickle.dumps(vmap(score, (0, None, None), axis_name="i")))
    np.testing.assert_allclose(mapped(X, X.T, 1.0), X @ X.T + 1)


def test_partial_and_callable_objects():
    class Scale:
        def __call__(self, x):
            return x * 2

    np.testing.assert_allclose(vmap(Scale())(X), X * 2)
    np.testing.assert_allclose(vmap(functools.partial(jnp.add, 1.0))(X), X + 1)
    np.testing.assert_allclose(vmap(jnp.sin)(X), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(vmap(jax.jit(jnp.sin))(X), np.sin(X), rtol=1e-6)


def test_positional_order_is_that_of_jax_vmap():
    f = lambda x, y: (x + y, jax.lax.axis_index("i"))
    for module in (minibatch, jax):
        a, b = module.vmap(f, (0, None), (1, 0), "i", 3, None)(X, X[0])
        np.testing.assert_allclose(a, (X + X[0]).T)
        np.testing.assert_allclose(b, range(3))


def test_jaxpr_trace_and_lower():
    f = vmap(score, in_axes=(0, None, None))
    assert "dot_general" in str(f.jaxpr(X, X.T, 1.0))
    assert [a.shape for a in f.jaxpr(jax.ShapeDtypeStruct((7, 4), jnp.float32), X.T, 1.0).out_avals] == [(7, 3)]
    compiled = f.lower(X, X.T, jnp.float32(1)).compile()
    np.testing.assert_allclose(compiled(X, X.T, jnp.float32(1)), X @ X.T + 1)
    assert f.trace(X, X.T, jnp.float32(1)).out_info.shape == (3, 3)
    g = vmap(lambda how, x: x.sum() if how == "sum" else x.max(), in_axes=(None, 0))
    np.testing.assert_allclose(g.lower("max", X).compile()(X), X.max(1))


# --- in_axes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_an_int_maps_that_axis(axis):
    np.testing.assert_allclose(vmap(jnp.sum, axis)(X), np.moveaxis(X, axis, 0).sum(1))


def test_lists_stand_for_tuples():
    np.testing.assert_allclose(vmap(lambda a, b: a[0] + a[1] * b, [[0, None], None])((X, 1.0), 2.0), X + 2)
    np.testing.assert_allclose(vmap(lambda a: a[0] + a[1], ((0, None),))([X, 1.0]), X + 1)


def test_none_and_ints_stand_for_subtrees():
    tree = {"a": (X, [X.T, X.T]), "b": {"c": 5.0, "d": [1.0]}}
    f = vmap(lambda t: t["a"][0].sum() + t["a"][1][0].sum() * t["b"]["c"], in_axes=({"a": (0, 1), "b": None},))
    np.testing.assert_allclose(f(tree), X.sum(1) * 6)


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(X, X.T, X[:, 0], 2.0),
        lambda f: f(X, X.T, X[:, 0], temperature=2.0),
        lambda f: f(X, X.T, temperature=2.0, bias=X[:, 0]),
        lambda f: f(X, bias=X[:, 0], weights=X.T, temperature=2.0),
        lambda f: f(temperature=2.0, bias=X[:, 0], weights=X.T, image=X),
    ],
)
@pytest.mark.parametrize("in_axes", [(0, None, 0, None), {"image": 0, "weights": None, "bias": 0, "temperature": None}])
def test_arguments_by_name(call, in_axes):
    np.testing.assert_allclose(call(vmap(score, in_axes)), (X @ X.T + X[:, :1]) / 2)


def test_axes_follow_names_after_partial():
    f = vmap(functools.partial(score, bias=1.0), in_axes=(0, None))
    np.testing.assert_allclose(f(X, X.T), X @ X.T + 1)
    g = vmap(functools.partial(score, X[0]), in_axes={"weights": 2, "bias": None})
    np.testing.assert_allclose(g(np.stack([X.T, X.T], 2), bias=0.0), np.stack([X[0] @ X.T] * 2))


def test_a_parameter_left_at_its_default_needs_no_axis():
    np.testing.assert_allclose(vmap(score, (0, None, None, None))(X, X.T, 1.0), X @ X.T + 1)
    np.testing.assert_allclose(vmap(score, (0, None, None))(X, X.T, 1.0, temperature=np.full(3, 2.0)), (X @ X.T + 1) / 2)


def test_keyword_arguments_are_mapped_on_axis_0_unless_they_have_none():
    f = lambda x, **options: x * options["scale"] + options["shift"]["by"]
    got = vmap(f)(X, scale=np.arange(3.0, dtype=np.float32), shift={"by": 1.0, "how": "up"})
    np.testing.assert_allclose(got, X * np.arange(3)[:, None] + 1)


def test_star_arguments():
    f = lambda *xs, **named: sum(xs) + sum(named.values())
    np.testing.assert_allclose(vmap(f, (0, None, 1))(X, 1.0, X.T, extra=X), 3 * X + 1)
    np.testing.assert_allclose(vmap(f, {"xs": 0, "extra": None})(X, X, extra=1.0), 2 * X + 1)
    np.testing.assert_allclose(vmap(f)(X, X), 2 * X)


def test_a_callable_is_asked_for_each_leaf():
    tree = {"w": X, "b": 1.0, "act": jnp.tanh}
    f = lambda t: t["act"](t["w"] + t["b"])
    np.testing.assert_allclose(vmap(f, if_array(0))(tree), np.tanh(X + 1), rtol=1e-6)
    np.testing.assert_allclose(vmap(f, (if_array(1),), 1)(tree), np.tanh(X + 1), rtol=1e-6)
    by_rank = lambda leaf: 0 if np.ndim(leaf) == 2 else None
    np.testing.assert_allclose(vmap(lambda a, b: a + b, by_rank)(X, X[0]), X + X[0])


# --- out_axes ---------------------------------------------------------------------------------------------------------


def test_out_axes_place_the_lanes():
    out = vmap(lambda x: {"p": x, "q": (x.sum(), 7.0)}, out_axes={"p": -1, "q": (0, None)})(X)
    np.testing.assert_allclose(out["p"], X.T)
    np.testing.assert_allclose(out["q"][0], X.sum(1))
    assert out["q"][1] == 7.0 and type(out["q"][1]) is float


def test_if_batched_leaves_a_shared_output_alone():
    a, b, c = vmap(lambda x, w: (x + w, w * 2, w), (0, None), if_batched(-1))(X, X[0])
    np.testing.assert_allclose(a, (X + X[0]).T)
    np.testing.assert_allclose(b, X[0] * 2)
    assert c is not None and c.shape == (4,)


@pytest.mark.parametrize("compile", [True, False])
def test_sum_match_sums_what_differs_by_lane(compile):
    x = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    fun = lambda x, w: {"kept": x * w, "summed": x + 1, "shared": w, "counted": x.sum() > 2}
    axes = {"kept": 0, "summed": None, "shared": None, "counted": None}
    found = vmap(fun, (0, None), axes, sum_match=True, compile=compile)(x, jnp.float32(2))
    wanted = jax.vmap(fun, (0, None), axes, sum_match=True)(x, jnp.float32(2))
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, wanted)
    jax.tree.map(np.testing.assert_allclose, found, wanted)


@pytest.mark.parametrize("compile", [True, False])
def test_out_axes_that_jax_has_for_itself(compile):
    x = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    fun = lambda x, w: (x, x * w, w, x.sum(), 3.0)
    out_axes = (infer, 0, infer, sum_axis, infer)
    found, axes = vmap(fun, (1, None), out_axes, compile=compile)(x, 2.0)
    wanted, wanted_axes = jax.vmap(fun, (1, None), out_axes)(x, 2.0)
    assert axes == wanted_axes == (1, 0, None, sum_axis, None)
    jax.tree.map(np.testing.assert_allclose, found, wanted)


def test_a_callable_out_axis_is_asked_for_each_output():
    out = vmap(lambda x: (x, x.sum()), out_axes=lambda leaf: 1 if leaf.ndim else 0)(X)
    assert [y.shape for y in out] == [(4, 3), (3,)]


# --- what goes in and comes back unchanged ----------------------------------------------------------------------------


def test_shared_leaves_reach_the_function_unchanged():
    class Config:
        depth = 2

    def f(x, times, fn, table, config, name, nothing):
        assert type(times) is int and callable(fn) and type(table) is np.ndarray and name == "n" and nothing is None
        for _ in range(times * config.depth):
            x = fn(x)
        return x + float(table.sum())

    got = vmap(f, (0, *[None] * 6))(X, 2, lambda v: v * 2, np.ones(5), Config(), "n", None)
    np.testing.assert_allclose(got, X * 16 + 5)


def test_untouched_values_keep_their_type():
    a, b, c = vmap(lambda x, y, z: (x, y, z), (0, None, None), (0, None, None))(X, 8.0, X)
    assert a is X and b == 8.0 and type(b) is float and c is X
    assert isinstance(vmap(lambda x: x)(jnp.asarray(X)), jax.Array)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_sizes(size):
    x = np.ones((size, 2), np.float32)
    np.testing.assert_allclose(vmap(lambda a: (a * 2).sum())(x), np.full(size, 4.0))
    assert vmap(lambda: jnp.ones(2), axis_size=size)().shape == (size, 2)


def test_axis_size_without_mapped_arguments():
    np.testing.assert_allclose(vmap(lambda x: x + 1, None, axis_size=3)(1.0), [2, 2, 2])
    assert vmap(lambda x: x + 1, None, None, axis_size=3)(jnp.float32(1.0)) == 2


@pytest.mark.parametrize("tree", [(), {}, [None], {"a": [], "b": ((), None)}])
def test_empty_trees(tree):
    assert vmap(lambda t: (t, None))(tree) == (tree, None)


def test_typed_keys_map():
    keys = jax.random.split(jax.random.key(0), 3)
    want = np.stack([jax.random.normal(k, (2,)) for k in keys])
    np.testing.assert_allclose(vmap(lambda k: jax.random.normal(k, (2,)))(keys), want, rtol=1e-6)


def test_strings_go_through_untouched():
    words = jax.device_put(np.array(["one", "two"], dtype=np.dtypes.StringDType()), jax.devices("cpu")[0])
    assert vmap(lambda word: word)(words) is words


def test_weak_types_are_those_of_one_lane():
    weak = jax.lax.broadcast(1.5, (3,))
    for f in (lambda x: x * 2, lambda x: 3.0, lambda x: jnp.float32(2) * x, lambda x: jnp.where(x > 0, 1.0, x)):
        for x in (weak, jnp.ones(3), jnp.ones(3, jnp.bfloat16)):
            found, wanted = vmap(f)(x), jax.vmap(f)(x)
            assert (found.dtype, found.weak_type) == (wanted.dtype, wanted.weak_type)


def test_argument_dtypes_are_those_of_one_lane():
    assert vmap(lambda x: x + 1)(np.arange(3)).dtype == jnp.arange(3).dtype
    assert vmap(lambda x: x * 1)(np.arange(3.0)).dtype == jnp.arange(3.0).dtype


def test_attributes_of_the_function_survive():
    class Layer:
        def __init__(self):
            self.index, self._options, self.__name__ = 3, "own", 7

        def __call__(self, x):
            return x + self.index

    mapped = vmap(Layer())
    assert mapped.index == 3
    np.testing.assert_allclose(mapped(X), X + 3)
