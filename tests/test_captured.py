"""State that a mapped function sees besides its arguments, set anew between two calls."""

from __future__ import annotations

import functools
import types
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minibatch import vmap

X = np.arange(3, dtype=np.float32)
FACTOR = 1.0
settings = types.SimpleNamespace(shift=0.0)


def scale(x):
    return x * FACTOR


def through_another(x):
    return scale(x) + 1


# https://github.com/jax-ml/jax/issues/5206
def test_globals_also_of_functions_called(monkeypatch):
    f, g = vmap(scale), vmap(through_another)
    np.testing.assert_allclose([f(X), g(X)], [X, X + 1])
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    np.testing.assert_allclose([f(X), g(X)], [3 * X, 3 * X + 1])


def test_globals_that_hold_functions_of_a_library(monkeypatch):
    for module in (jnp, np):
        for name in ("sin", "exp2"):
            monkeypatch.setitem(globals(), "LIBRARY", module)
            monkeypatch.setitem(globals(), "FUNCTION", getattr(jnp, name))
            for f in (in_use, vmap(lambda x: FUNCTION(x) + len(LIBRARY.__name__))):
                np.testing.assert_allclose(f(X), getattr(np, name)(X) + len(module.__name__), rtol=1e-6)


LIBRARY, FUNCTION = np, jnp.cos


@vmap
def in_use(x):
    return FUNCTION(x) + len(LIBRARY.__name__)


def test_closure_variables():
    w = jnp.ones(())
    f = vmap(lambda x: x * w)
    np.testing.assert_allclose(f(X), X)
    w = jnp.full((), 2.0)
    np.testing.assert_allclose(f(X), 2 * X)
    w = 3.0
    np.testing.assert_allclose(f(X), 3 * X)


def test_entries_of_dicts_and_lists():
    state, steps = {"scale": 1.0, "inner": {"shift": 0.0}}, [1.0]
    f = vmap(lambda x: x * state["scale"] * sum(steps) + state["inner"]["shift"] + len(state))
    np.testing.assert_allclose(f(X), X + 2)
    state["scale"] = 2.0
    np.testing.assert_allclose(f(X), 2 * X + 2)
    state["inner"]["shift"] = 5.0
    np.testing.assert_allclose(f(X), 2 * X + 7)
    steps.append(2.0)
    np.testing.assert_allclose(f(X), 6 * X + 7)
    steps[0] = 0.0
    np.testing.assert_allclose(f(X), 4 * X + 7)
    state["more"] = None
    np.testing.assert_allclose(f(X), 4 * X + 8)


def test_attributes_of_self_and_of_captured_objects():
    class Model:
        def __init__(self):
            self.n, self.options = 1.0, types.SimpleNamespace(shift=0.0)

        def __call__(self, x):
            return x * self.n + self.options.shift

        def method(self, x):
            return self(x)

    model = Model()
    for f in (vmap(model), vmap(model.method), vmap(lambda x: model(x)), vmap(functools.partial(model.method))):
        model.n, model.options.shift = 1.0, 0.0
        np.testing.assert_allclose(f(X), X)
        model.n = 2.0
        np.testing.assert_allclose(f(X), 2 * X)
        model.options.shift = 3.0
        np.testing.assert_allclose(f(X), 2 * X + 3)


def test_state_that_the_function_sets_itself():
    class Counter:
        n = 0

        def bump(self, x):
            self.n += 1
            return x + self.n

    f = vmap(Counter().bump)
    for k in range(1, 4):
        np.testing.assert_allclose(f(X), X + k)


def test_defaults_and_attributes_of_functions_passed_in():
    k = 1.0
    f = vmap(lambda fn, x: fn(x), (None, 0))
    fn = lambda x: x * k
    np.testing.assert_allclose(f(fn, X), X)
    k = 2.0
    np.testing.assert_allclose(f(fn, X), 2 * X)


def test_defaults_set_anew():
    def scaled(x, by=1.0, *, plus=0.0):
        return x * by + plus

    f = vmap(scaled)
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], X)
    scaled.__defaults__ = (2.0,)
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], 2 * X)
    scaled.__kwdefaults__["plus"] = 1.0
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], 2 * X + 1)
    scaled.__kwdefaults__ = {"plus": 5.0}
    np.testing.assert_allclose(f(X), 2 * X + 5)


made_by_hand = types.ModuleType("made_by_hand")


def test_slots_sets_and_modules_made_by_hand():
    class Slotted:
        __slots__ = ("n",)

    slotted, numbers = Slotted(), {1.0}
    slotted.n, made_by_hand.n = 1.0, 1.0
    f = vmap(lambda x: x * slotted.n * sum(numbers) * made_by_hand.n)
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], X)
    slotted.n = 2.0
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], 2 * X)
    numbers.add(2.0)
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], 6 * X)
    made_by_hand.n = 5.0
    np.testing.assert_allclose(f(X), 30 * X)


def test_contents_of_sets_and_deques():
    numbers, queue = {1.0}, deque([1.0])
    f = vmap(lambda x: x * sum(numbers) * queue[0])
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], X)
    numbers.remove(1.0)
    numbers.add(2.0)
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], 2 * X)
    queue[0] = 3.0
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], 6 * X)


def test_attributes_of_functions():
    def scaled(x):
        return x * scaled.by

    scaled.by = 1.0
    f = vmap(lambda x: scaled(x) + scaled.by)
    np.testing.assert_allclose([f(X) for _ in range(3)][-1], X + 1)
    scaled.by = 2.0
    np.testing.assert_allclose(f(X), 2 * X + 2)


class Log:
    n = 0


def test_counts_kept_on_the_side_do_not_trace_again():
    n, calls, entries, log = 0, [], {"n": 0}, Log()
    log.n = 0

    def fun(x):
        nonlocal n
        n += 1
        calls.append(x.shape)
        entries["n"] += 1
        log.n += 1
        return x * 2

    f = vmap(fun)
    for _ in range(3):
        f(X)
    assert (n, len(calls), entries["n"], log.n) == (1, 1, 1, 1)
    entries["other"] = 1
    f(X)


def test_counts_that_are_read_trace_again():
    n, entries = 0, {"n": 0}

    def fun(x):
        nonlocal n
        n += 1
        entries["n"] += 1
        return x * n + entries["n"]

    f = vmap(fun)
    for k in range(1, 4):
        np.testing.assert_allclose(f(X), X * k + k)


def test_what_an_imported_library_sets_is_not_watched():
    f = vmap(lambda x: jax.nn.relu(x) * settings.shift)
    f(X), f(X)
    assert len(f._captured._slots) < 6


def test_state_of_a_mapped_function_inside():
    k = 1.0
    inner = vmap(lambda x: x * k)
    f = vmap(lambda x: inner(x).sum())
    rows = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(f(rows), [3, 3])
    k = 2.0
    np.testing.assert_allclose(f(rows), [6, 6])


def test_an_object_that_resists_being_looked_at():
    class Proxy:
        @property
        def __dict__(self):
            raise RuntimeError("not now")

        scale = 2.0

    proxy = Proxy()
    np.testing.assert_allclose(vmap(lambda x: x * proxy.scale)(X), 2 * X)


def test_the_kind_of_random_keys(monkeypatch):
    new = vmap(lambda seed: jax.random.key_data(jax.random.key(seed)))
    split = vmap(lambda key: jax.random.split(key), None, axis_size=3)
    for kind in ("rbg", "unsafe_rbg", "threefry2x32", "rbg"):
        with jax.default_prng_impl(kind):
            key = jnp.arange(jax.random.PRNGKey(0).size, dtype=jnp.uint32)
            for _ in range(3):
                np.testing.assert_array_equal(new(jnp.arange(2))[1], jax.random.key_data(jax.random.key(1)))
                np.testing.assert_array_equal(split(key)[2], jax.random.split(key))


class Settings:
    scale = 1.0

    def scaled(self, x):
        return x * self.scale * FACTOR

    @property
    def doubled(self):
        return 2 * FACTOR

    @staticmethod
    def plain(x):
        return x * FACTOR

    @classmethod
    def of_class(cls, x):
        return x * cls.scale * FACTOR

    def __call__(self, x):
        return self.scaled(x)


SETTINGS = Settings()
USES = {
    "method": lambda x: Settings().scaled(x),
    "captured": lambda x: SETTINGS(x),
    "bound": Settings().scaled,
    "object": Settings(),
    "static": lambda x: Settings.plain(x) * Settings.scale,
    "class": lambda x: Settings.of_class(x),
    "property": lambda x: x * Settings().doubled * Settings.scale / 2,
}


@pytest.mark.parametrize("use", USES)
def test_classes_and_what_their_methods_see(monkeypatch, use):
    f = vmap(USES[use])
    for _ in range(3):
        np.testing.assert_allclose(f(X), X)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    for _ in range(3):
        np.testing.assert_allclose(f(X), 3 * X)
    monkeypatch.setattr(Settings, "scale", 2.0)
    np.testing.assert_allclose(f(X), 6 * X)


def test_methods_set_anew(monkeypatch):
    f = vmap(lambda x: Settings().scaled(x))
    f(X), f(X)
    monkeypatch.setattr(Settings, "scaled", lambda self, x: x + 1)
    np.testing.assert_allclose(f(X), X + 1)


def test_a_class_of_a_module_is_seen_by_functions_made_anew():
    calls = []

    def made():
        def fun(x):
            calls.append(x)
            return Settings().scaled(x)

        return vmap(fun)

    for _ in range(3):
        np.testing.assert_allclose(made()(X), X)
    assert len(calls) == 1
