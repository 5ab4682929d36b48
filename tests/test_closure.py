"""Functions made anew: traced once where they are the same, and never taken for the same where they are not."""

# ruff: noqa: B023 - functions over what a loop sets anew are what is tested

from __future__ import annotations

import functools
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minibatch import vmap
from minibatch._compile import Programs

X = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
TABLE = jnp.ones(4)


@pytest.fixture
def traced():
    """A list to append to whenever a function is traced."""
    return []


def mlp(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"]) + layer["b"]
    return x


def params(k):
    return [{"w": jnp.full((4, 4), k / 4), "b": jnp.full(4, k)} for _ in range(2)]


def test_a_fresh_closure_is_traced_once(traced):
    for k in range(4):
        weights, scale = params(float(k)), {"by": 2.0}
        f = lambda x: (traced.append(1), mlp(weights, x) * scale["by"])[1]
        for _ in range(3):
            np.testing.assert_allclose(vmap(f)(X), jax.vmap(f)(X), rtol=1e-6)
    assert len(traced) - 12 == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda k, log: functools.partial(lambda w, x: (log(), x * w)[1], k),
        lambda k, log: lambda x, w=k: (log(), x * w)[1],
        lambda k, log: lambda x, *, w=k: (log(), x * w)[1],
        lambda k, log: jax.grad(lambda x: (log(), (x * k).sum())[1]),
        lambda k, log: jax.tree_util.Partial(lambda w, x: (log(), x * w)[1], k),
        lambda k, log: (lambda inner: lambda x: inner(x) + inner(-x))(lambda x: (log(), x * k)[1]),
    ],
    ids=["partial", "default", "keyword-default", "grad", "pytree", "nested"],
)
def test_what_closes_over_an_array(traced, make):
    log = functools.partial(traced.append, 1)
    for k in range(3):
        w = jnp.full(4, float(k))
        np.testing.assert_allclose(vmap(make(w, log))(X), jax.vmap(make(w, lambda: None))(X))
    assert len(traced) in (1, 2), "once for each call of the function in one trace"


@pytest.mark.parametrize("values", [(1, 2), (1, True), (0.0, -0.0), ("sum", "max"), (jnp.tanh, jnp.sin), (None, 1)])
def test_what_is_no_array_makes_another_program(values):
    for value in values * 2:
        times = lambda x, y: x if y is None else x * y
        f = lambda x: getattr(x, value)() if isinstance(value, str) else value(x) if callable(value) else times(x, value)
        found, wanted = vmap(f)(X), jax.vmap(f)(X)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_other_code_makes_another_program():
    w = jnp.ones(4)
    for f in (lambda x: x * w, lambda x: x + w, lambda x: x * w * 1, lambda x: x * w * 1.5, lambda x: x * w * True):
        np.testing.assert_allclose(vmap(f)(X), jax.vmap(f)(X))


@pytest.mark.parametrize(
    "look", [float, lambda w: w.item(), lambda w: np.asarray(w).sum(), lambda w: len(w.devices()) * float(w)]
)
def test_an_array_that_is_needed_as_it_is(look):
    for k in (1.0, 2.0, 1.0):
        w = jnp.float32(k)
        f = lambda x: x * w if look(w) > 1 else x - w
        np.testing.assert_allclose(vmap(f)(X), jax.vmap(f)(X))


def test_containers_of_arrays_that_functions_change():
    kept, log = {"w": jnp.ones(()), "n": 0}, [jnp.zeros(())]

    def fun(x):
        kept["n"] = kept["n"] + 1
        log.append(kept["n"])
        return x * kept["w"] + kept["n"] + log[0]

    for k in range(1, 3):
        np.testing.assert_allclose(vmap(fun)(X), X + k)
        assert kept["n"] == k and log[1:] == list(range(1, k + 1))


def test_functions_that_are_met_twice():
    def make(k):
        w = jnp.full(4, k)
        inner = lambda x: x * w
        outer = lambda x: inner(x) + w
        return inner, outer

    inner, outer = make(2.0)
    for first, second in ((inner, outer), (outer, inner), (outer, outer), (inner, inner)):
        for _ in range(2):
            found = vmap(lambda x: outer(x) - 3 * first(x) + 5 * second(x))(X)
            np.testing.assert_allclose(found, outer(X) - 3 * first(X) + 5 * second(X))


def test_what_resists_being_taken_apart():
    loop = [jnp.ones(4)]
    loop.append(loop)
    np.testing.assert_allclose(vmap(lambda x: x * loop[0])(X), X)


class Bag:
    """Has methods of the names that lists and sets have."""

    def __init__(self, k):
        self.k = k

    def add(self, x):
        return x + self.k

    append = add


def test_what_only_looks_like_a_tally():
    for k in (1.0, 2.0):
        bag = Bag(k)
        for _ in range(3):
            np.testing.assert_allclose(vmap(lambda x: bag.add(x))(X), X + k)
            np.testing.assert_allclose(vmap(lambda x: bag.append(x))(X), X + k)
        mapped = vmap(lambda x: bag.add(x))
        for bag.k in (k, k + 3):
            for _ in range(3):
                np.testing.assert_allclose(mapped(X), X + bag.k)


def test_functions_that_call_themselves():
    for k in (1.0, 2.0):
        w = jnp.full(4, k)

        def power(x, n):
            return w if n == 0 else power(x, n - 1) * x

        np.testing.assert_allclose(vmap(lambda x: power(x, 3))(X), X**3 * k)


def test_an_array_that_is_reached_in_two_ways():
    for k in (1.0, 2.0):
        w = jnp.full(4, k)
        model = types.SimpleNamespace(w=w)
        jitted = jax.jit(lambda x: x * w)
        for _ in range(2):
            np.testing.assert_allclose(vmap(lambda x: x * w + model.w + jitted(x))(X), 2 * X * k + k)
        model.w = w + 1
        np.testing.assert_allclose(vmap(lambda x: x * w + model.w + jitted(x))(X), 2 * X * k + k + 1)


def test_globals_set_anew(monkeypatch, traced):
    def use(x):
        return x * TABLE

    for k in (1.0, 2.0, 2.0):
        monkeypatch.setitem(globals(), "TABLE", jnp.full(4, k))
        np.testing.assert_allclose(vmap(lambda x: (traced.append(1), x * TABLE)[1])(X), X * k)
        np.testing.assert_allclose(vmap(lambda x: use(x))(X), X * k)
    assert len(traced) == 1


def test_another_function_of_the_same_name_in_a_global(monkeypatch):
    for factor in (1, 2):
        monkeypatch.setitem(globals(), "mlp", lambda params, x, factor=factor: x * factor)
        np.testing.assert_allclose(vmap(lambda x: mlp(None, x))(X), X * factor)


def fresh_closure(k):
    w, b = jnp.full(4, float(k)), [jnp.ones(4)]
    return vmap(lambda x: x * w + b[0])(X)


def fresh_object(k):
    model = types.SimpleNamespace(w=jnp.full(4, float(k)))
    return vmap(lambda x: x * model.w)(X)


def fresh_and_called_again(k):
    w = jnp.full(4, float(k))
    mapped = vmap(lambda x: x * w)
    return mapped(X), mapped(X), mapped(X)


def fresh_number(k):
    return vmap(lambda x: x * k)(X)


@pytest.mark.parametrize("turn", [fresh_closure, fresh_object, fresh_and_called_again, fresh_number])
def test_fresh_functions_leave_nothing_behind(turn, monkeypatch):
    monkeypatch.setattr("minibatch._compile.shared", Programs(capacity=8))
    for k in range(40):  # until the caches are full
        turn(k)
    gc.collect()
    arrays, objects = len(jax.live_arrays()), len(gc.get_objects())
    for k in range(40, 240):
        turn(k)
    gc.collect()
    assert len(jax.live_arrays()) <= arrays
    assert len(gc.get_objects()) < objects + 200, "not one object for each"


def test_ten_thousand_closures():
    fresh_closure(0)
    gc.collect()
    arrays, objects = len(jax.live_arrays()), len(gc.get_objects())
    w = np.ones(4, np.float32)
    for _ in range(10_000):
        fresh = jax.device_put(w)
        vmap(lambda x, fresh=fresh: x * fresh)(X)
    del fresh
    assert len(jax.live_arrays()) <= arrays, "without the garbage collector, too"
    gc.collect()
    assert len(gc.get_objects()) < objects + 200
