"""Inside another transformation: what a function does to one lane is remembered, and nothing that it could see is stale."""

from __future__ import annotations

import collections
import contextvars
import gc
import itertools
import random
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minibatch import _lanes, clear_caches, vmap

X = np.arange(12, dtype=np.float32).reshape(3, 4)


class Counted:
    """A function that counts how often Python runs it."""

    def __init__(self, fun):
        self.fun, self.calls = fun, 0

    def __call__(self, *args):
        self.calls += 1
        return self.fun(*args)


def traced(fun, *args, in_axes=0, out_axes=0, **options):
    """`fun` mapped inside another trace, compared with `jax.vmap`."""
    bare = fun.fun if isinstance(fun, Counted) else fun
    found = jax.jit(lambda *args: vmap(fun, in_axes, out_axes, **options)(*args))(*args)
    wanted = jax.vmap(bare, in_axes, out_axes, **options)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)
    return found


def layer(x, w):
    """One lane."""
    return jax.nn.relu(jnp.tanh(x @ w) * 2), jax.lax.scan(lambda c, x: (c + x, c * w.sum()), 0.0, x * 1.0)[1]


# --- it is not called again -------------------------------------------------------------------------------------------


def test_another_number_of_lanes_or_another_axis_does_not_call_the_function():
    fun = Counted(layer)
    w = jnp.ones((4, 2))
    for size in (3, 1, 2):
        traced(fun, np.ones((size, 4), np.float32), w, in_axes=(0, None))
    traced(fun, X.T, w, in_axes=(1, None))
    traced(fun, X, jnp.ones((4, 3, 2)), in_axes=(0, 1))
    assert fun.calls == 1
    traced(fun, X, w, in_axes=(0, None), out_axes=(1, 0))
    traced(fun, X.astype(np.int32), w, in_axes=(0, None))
    assert fun.calls == 3, "other out_axes, another type"


@pytest.mark.parametrize(
    "outer",
    [
        jax.jit,
        lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
        lambda f: lambda x: jax.make_jaxpr(f)(x) and jax.jit(f)(x),
        lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, 2)[1],
        lambda f: jax.checkpoint(lambda x: f(x) * 2),
    ],
)
def test_inside_every_transformation(outer):
    fun = Counted(lambda x, w: jnp.sin(x) @ w)
    x, w = jnp.asarray(X)[None], jnp.ones(4)
    for size in (3, 2, 3):
        found = outer(lambda x: vmap(vmap(fun, (0, None)), (0, None))(x, w))(x[:, :size])
        wanted = outer(lambda x: jax.vmap(jax.vmap(fun.fun, (0, None)), (0, None))(x, w))(x[:, :size])
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert fun.calls == 1


def test_a_method_and_what_other_transformations_return():
    class Model:
        def __init__(self):
            self.w, self.calls = jnp.ones(4), 0

        def predict(self, x):
            self.calls += 1
            return x @ self.w

    model = Model()
    slope = jax.grad(model.predict)
    for size in (3, 2):
        traced(model.predict, X[:size])
        traced(slope, X[:size])
    assert model.calls == 2 + 4, "once each here, and each time by jax.vmap"


def test_values_of_the_trace_around_are_handed_over():
    calls = []

    def train(f, x, w, v):
        def fun(x):
            calls.append(x)
            return jnp.tanh(x @ w["w"]) * v + w["b"]

        return f(fun)(x) + f(fun, 0)(x * 2), f(fun, 1)(x.T)

    def both(x, *weights):
        found = jax.jit(lambda *args: train(vmap, *args))(x, *weights)
        count = len(calls)
        wanted = jax.jit(lambda *args: train(jax.vmap, *args))(x, *weights)
        jax.tree.map(np.testing.assert_allclose, found, wanted)
        return count

    w = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    assert both(X, w, 3.0) == 1
    calls.clear()
    assert both(X[:2], w, 4.0) == 1, "a function of its own"


def test_functions_that_are_made_anew_each_time_are_remembered_when_they_come_again():
    calls = []

    def made():
        def fun(x):
            calls.append(x)
            return x * 2

        return fun

    def counted(fun):
        calls.clear()
        for size in (3, 2, 1):
            np.testing.assert_array_equal(jax.jit(lambda x: vmap(fun)(x))(X[:size]), X[:size] * 2)
        return len(calls)

    for fun in (made(), made(), made()):
        jax.make_jaxpr(vmap(fun))(X)
    assert counted(made()) == 2, "so far none of these was called twice"
    assert counted(made()) == 1


# --- what it sees is not stale ----------------------------------------------------------------------------------------

SCALE = 1.0
TABLE = np.ones(4, np.float32)


def scaled(x):
    """Uses globals."""
    return x * SCALE + TABLE


def test_a_global_set_anew_and_an_array_changed_in_place_are_noticed(monkeypatch):
    traced(scaled, X)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    traced(scaled, X)
    TABLE[0] = 5
    traced(scaled, X)
    TABLE[0] = 1
    traced(scaled, X)


def test_what_is_captured_is_noticed():
    number, table, config, model = 1.0, np.ones(4, np.float32), {"shift": [0.0]}, types.SimpleNamespace(w=jnp.ones(4))
    weight = jnp.ones(4)

    def fun(x):
        return x * number + table * config["shift"][0] + model.w + weight

    def change():
        nonlocal number, weight
        yield
        number = 2.0
        yield
        table[1] = 3
        yield
        config["shift"][0] = 1.0
        yield
        model.w = jnp.zeros(4)
        yield
        weight = weight + 1
        yield
        fun.__defaults__ = (None,)

    for _ in change():
        traced(fun, X)


def test_a_captured_value_that_python_looks_at():
    def fun(x):
        return x * 2 if bool(flag) else x  # the value of a gradient's tracer can be looked at

    def loss(value):
        nonlocal flag
        flag = value
        return vmap(fun)(jnp.asarray(X)).sum() * value

    flag = None
    for value in (1.0, 0.0, 1.0):
        assert jax.grad(loss)(value) == X.sum() * (2 if value else 1)


def test_which_captured_values_are_the_same_counts():
    def fun(x):
        return x + a if a is b else x * b

    def both(f, x, y):
        nonlocal a, b
        a, b = x, x
        first = f(fun)(X)
        a, b = x, y
        return first, f(fun)(X)

    a = b = None
    found, wanted = (jax.jit(lambda x, y, f=f: both(f, x, y))(2.0, 3.0) for f in (vmap, jax.vmap))
    jax.tree.map(np.testing.assert_allclose, found, wanted)


def test_state_that_cannot_be_seen_calls_the_function_again():
    state = contextvars.ContextVar("state")
    fun = Counted(lambda x: x * state.get())

    def step(f, w, x):
        state.set(w)
        return f(fun)(x)

    for w in (2.0, 3.0):
        np.testing.assert_allclose(jax.jit(lambda w: step(vmap, w, X))(w), X * w)
        np.testing.assert_allclose(jax.jit(lambda x, w=w: step(vmap, jnp.full(4, w), x))(X), X * w)
    assert fun.calls == 4


@pytest.mark.parametrize("number", [itertools.count(2), random.Random(0), np.random.default_rng(0), collections.deque([2, 3])])
def test_what_gives_something_else_at_each_look_calls_the_function_again(number):
    def fun(x):
        return x * take(number)

    take = {itertools.count: next, collections.deque: lambda x: x.pop()}.get(type(number), lambda x: x.random())
    factors = [jax.make_jaxpr(vmap(fun))(X).eqns[-1].invars[1].val for _ in range(2)]
    assert factors[0] != factors[1]


def test_an_argument_handed_out_where_it_is():
    fun = Counted(lambda x, y: (x, y * 2))
    for in_axes in ((0, 0), (1, 0), (0, 1), (0, None), (1, 0)):
        x, y = X[:, :3], X[:3, 0] if in_axes[1] is None else X[:, :3]
        traced(fun, x, y, in_axes=in_axes)
    assert fun.calls == 2, "as it came, and then moved"


def test_names_of_axes_and_sizes_that_can_be_seen():
    def mean(x):
        return jax.lax.pmean(x, "i")

    for size in (3, 2):
        traced(mean, X[:size], axis_name="i")
    fun = Counted(lambda x: x / jax.lax.psum(1, "outer"))
    for size in (3, 2):
        found = jax.vmap(lambda x: vmap(fun)(x), axis_name="outer")(X[:size])
        np.testing.assert_allclose(found, X[:size] / size, rtol=1e-6)
    assert fun.calls == 2


def test_the_configuration_counts():
    fun = Counted(lambda x: x * jnp.arange(4).astype(float))
    assert traced(fun, X).dtype == np.float32
    with jax.enable_x64(True):
        assert traced(fun, X).dtype == np.float64
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="promotion"):
        jax.make_jaxpr(vmap(lambda x: fun(x) + np.ones(4, np.int32)))(X)
    assert traced(fun, X).dtype == np.float32
    assert fun.calls == 3


def test_sizes_of_an_export():
    fun = Counted(lambda x: jnp.sin(x).sum())
    for _ in range(2):
        shape = jax.export.symbolic_shape("b, n")
        exported = jax.export.export(jax.jit(vmap(fun)))(jax.ShapeDtypeStruct(shape, np.float32))
        np.testing.assert_allclose(exported.call(X), np.sin(X).sum(1), rtol=1e-5)
    assert fun.calls == 2


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_derivative_rule_that_sees_a_value_around(kind):
    def double(w):
        f = (jax.custom_jvp if kind == "jvp" else jax.custom_vjp)(lambda x: x * 2)
        if kind == "jvp":
            f.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * w))
        else:
            f.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * w,))
        return f

    def slopes(f, fun, x):
        mapped = lambda x: f(fun)(x).sum()
        return jax.grad(mapped)(x), jax.grad(mapped)(x[:2])

    def step(f, w, x):
        g = double(w)
        return slopes(f, lambda x: g(x).sum() + 0 * w, x), slopes(f, lambda x: g(x).sum(), x), slopes(f, g, x)

    for w in (3.0, 5.0):
        with jax.checking_leaks():
            found, wanted = (jax.jit(lambda w, x, f=f: step(f, w, x))(w, X) for f in (vmap, jax.vmap))
        jax.tree.map(np.testing.assert_allclose, found, wanted)


def test_uncompiled_calls_the_function_each_time():
    fun = Counted(lambda x: x * 2)
    for _ in range(2):
        jax.make_jaxpr(vmap(fun, compile=False))(X)
    assert fun.calls == 2


def test_what_raised_is_not_remembered():
    ready = []

    def fun(x):
        if not ready:
            raise ValueError("not ready")
        return x * 2

    with pytest.raises(ValueError, match="not ready"):
        jax.make_jaxpr(vmap(fun))(X)
    ready.append(True)
    traced(fun, X)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_nothing_is_kept_of_what_is_gone():
    def step(w, x):
        inner = lambda x: x @ w
        inners.append(weakref.ref(inner))
        return vmap(inner)(x) + vmap(inner)(x[:1])

    def outside():
        big = jnp.ones((4, 7))
        fun = lambda x: (x @ big).sum()
        inners.extend([weakref.ref(fun), weakref.ref(big)])
        traced(fun, X)

    gc.collect()
    inners, before = [], len(_lanes._kept)
    with jax.checking_leaks():
        jax.jit(step)(jnp.ones((4, 2)), X)
    outside()
    jax.clear_caches()
    gc.collect()
    assert [r() for r in inners] == [None, None, None]
    assert len(_lanes._kept) == before


def test_a_function_that_sees_itself_is_not_kept_alive():
    def make():
        def fun(x, depth=2):
            return x if depth == 0 else fun(jnp.sin(x), depth - 1)

        traced(fun, X)
        return weakref.ref(fun)

    made = make()
    jax.clear_caches()
    gc.collect()
    assert made() is None


def test_forgotten_when_asked_to():
    fun = Counted(lambda x: x * 2)
    jax.make_jaxpr(vmap(fun))(X)
    clear_caches()
    jax.make_jaxpr(vmap(fun))(X)
    assert fun.calls == 2


def test_many_threads_trace_one_function():
    scale = 1.0
    failures = []

    def fun(x, w):
        return jnp.tanh(x @ w) * scale

    def work(seed):
        try:
            for i in range(8):
                size = 1 + (seed + i) % 3
                w = jnp.full((4, 2 + seed % 2), float(seed))
                found = jax.jit(lambda x, w: vmap(fun, (0, None))(x, w))(X[:size], w)
                np.testing.assert_allclose(found, np.tanh(X[:size] @ np.asarray(w)), rtol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures
