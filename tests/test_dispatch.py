"""What a repeated call is found by: hits that run no Python of ours, and everything that must not be taken for a hit."""

from __future__ import annotations

import dataclasses
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import minibatch
from minibatch import if_array, vmap
from minibatch._api import Vmapped
from minibatch._compile import shared

X = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)


@pytest.fixture
def asked(monkeypatch):
    """The calls that came as far as Python."""
    calls = []
    answer = Vmapped.answer
    monkeypatch.setattr(Vmapped, "answer", lambda self, *args: calls.append(args) or answer(self, *args))
    return calls


class Pair(NamedTuple):
    left: object
    right: object


TREE = {"b": [X, (X, None)], "a": Pair(X, {"c": X})}
TOTAL = jnp.sum(X, 1)


@pytest.mark.parametrize(
    ("f", "in_axes", "args", "kwargs"),
    [
        (lambda x: x.sum(), 0, (X,), {}),
        (lambda x: x.sum(), 0, (np.asarray(X),), {}),
        (lambda t: jax.tree.map(jnp.sum, t), 0, (TREE,), {}),
        (lambda x, n: x.sum() * n, (0, None), (X, 2), {}),
        (lambda x, n: x.sum() * n, (0, None), (X, -0.0), {}),
        (lambda x, n: x.sum() * n, (0, None), (X, float("nan")), {}),
        (lambda x, how, **rest: getattr(x, how)(**rest), (0, None), (X, "sum"), {"axis": 0}),
        (lambda x, fn, dtype: fn(x).astype(dtype), (0, None, None), (X, jnp.tanh, jnp.float16), {}),
        (lambda m: m["act"](m["w"]) * m["scale"], if_array(0), ({"w": X, "act": jnp.tanh, "scale": 2.0},), {}),
        (lambda x, w: x * w.sum(), (0, None), (X, X), {}),
        (lambda key: jax.random.normal(key), 0, (jax.random.split(jax.random.key(0), 3),), {}),
        (lambda key: jax.random.split(key), 0, (jax.random.split(jax.random.key(0), 3),), {}),
        (lambda a, x: a @ x, (None, 0), (sparse.BCOO.fromdense(X), X), {}),
    ],
)
def test_a_call_repeated_runs_no_python_of_ours(asked, f, in_axes, args, kwargs):
    mapped = vmap(f, in_axes)
    wanted = mapped(*args, **kwargs)
    for _ in range(2):  # first it is traced, then it is seen to come again, then classes may be met for the first time
        mapped(*args, **kwargs)
    asked.clear()
    for _ in range(3):
        found = mapped(*args, **kwargs)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(bits, found), jax.tree.map(bits, wanted))
    assert len(asked) == 0


def bits(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def repeated(f, *args, **kwargs):
    """What `f` gives when it knows the call."""
    for _ in range(3):
        out = f(*args, **kwargs)
    return out


def test_static_values_are_told_by_type_and_bits():
    fun = lambda x, n: x * n
    f, theirs = vmap(fun, (0, None)), jax.vmap(fun, (0, None))
    values = (0.0, -0.0, 0, False, 1, 1.0, True, np.float32(1), np.float64(1), np.ones(()), jnp.ones(()), float("inf"))
    for _ in range(2):
        for n in values:
            found, wanted = repeated(f, X + 1, n), theirs(X + 1, n)
            assert (found.dtype, found.weak_type) == (wanted.dtype, wanted.weak_type)
            np.testing.assert_array_equal(np.asarray(found).view(np.int32), np.asarray(wanted).view(np.int32))


def test_an_argument_of_another_kind_at_the_same_place():
    f = vmap(lambda x, w: x * (2 if isinstance(w, str) else w), (0, None))
    for w, factor in (("double", 2), (jnp.ones(4), 1), (3, 3), ("double", 2), (np.full(4, 5), 5), (jnp.full(4, 7), 7)):
        np.testing.assert_allclose(repeated(f, X, w), X * factor)


def test_avals_are_told_apart():
    f = vmap(lambda x, w: (x + w).sum(), (0, None))
    one = jnp.ones(4)
    for x, w in ((X, one), (X.astype(int), one), (X[:2], one), (X, one[:1]), (X, jnp.asarray(1.0)), (X, one.astype(bool))):
        found, wanted = repeated(f, x, w), jax.vmap(lambda x, w: (x + w).sum(), (0, None))(x, w)
        assert (found.shape, found.dtype, found.weak_type) == (wanted.shape, wanted.dtype, wanted.weak_type)
        np.testing.assert_allclose(found, wanted)


def test_the_state_of_a_static_function_is_noticed():
    k = 1.0
    fn = lambda x: x * k
    f = vmap(lambda fn, x: fn(x), (None, 0))
    np.testing.assert_allclose(repeated(f, fn, X), X)
    k = 2.0
    np.testing.assert_allclose(repeated(f, fn, X), X * 2)


ADDED = 1.0


def added(x):
    return jnp.tanh(x) + ADDED


def test_what_static_functions_see_of_their_module_is_watched(asked, monkeypatch):
    f = vmap(lambda fn, x: fn(x), (None, 0))
    for k in (1.0, 2.0):
        monkeypatch.setitem(globals(), "ADDED", k)
        for fn, wanted in ((added, jnp.tanh(X) + k), (jnp.tanh, jnp.tanh(X))):
            np.testing.assert_allclose(repeated(f, fn, X), wanted, rtol=1e-6)
    asked.clear()
    f(added, X), f(jnp.tanh, X)
    assert not asked


def test_configuration_is_part_of_what_a_call_is_found_by():
    f = vmap(lambda x: x * 1.5)
    x = np.ones(3)
    for _ in range(2):
        assert repeated(f, x).dtype == jnp.float32
        with jax.enable_x64(True):
            assert repeated(f, x).dtype == jnp.float64
    g = vmap(lambda x: jax.lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))[1])
    minibatch.clear_caches()
    repeated(g, x)
    with minibatch.divergence("lockstep"):
        repeated(g, x)
    assert len(shared.kept) == 2
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        repeated(vmap(jnp.log), X - 5)
    with jax.disable_jit():
        np.testing.assert_allclose(repeated(f, X), X * 1.5)


def test_inside_another_trace_the_equations_are_its_own():
    f = vmap(lambda x: jnp.sin(x))
    repeated(f, X)
    assert "sin" in str(jax.make_jaxpr(lambda y: f(X) * y)(1.0))
    np.testing.assert_allclose(jax.jit(lambda y: f(X) * y)(2.0), np.sin(X) * 2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), np.cos(X), rtol=1e-5)
    np.testing.assert_allclose(jax.lax.map(f, X[None]), np.sin(X)[None], rtol=1e-6)
    np.testing.assert_allclose(repeated(f, X), np.sin(X), rtol=1e-6)


def test_captured_values_reach_a_known_call():
    w, key = jnp.ones(4), jax.random.key(0)
    f = vmap(lambda x: (x * w, jax.random.normal(key)))
    for scale in (1.0, 2.0):
        w = jnp.full(4, scale)
        np.testing.assert_allclose(repeated(f, X)[0], X * scale)
    key = jax.random.key(1)
    np.testing.assert_allclose(repeated(f, X)[1], jax.random.normal(key))


def test_a_failed_call_is_not_remembered():
    limit = 4

    def fun(x):
        assert limit == 4 or len(x) != 4, "too long"
        return x * limit

    f = vmap(fun)
    repeated(f, X)
    limit = 5
    for _ in range(3):
        with pytest.raises(AssertionError, match="too long"):
            f(X)
    limit = 4
    np.testing.assert_allclose(repeated(f, X), X * 4)


def test_classes_registered_later():
    f = vmap(lambda t: jax.tree.map(lambda x: x * 2, t))
    repeated(f, X)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Point:
        x: object
        name: str = dataclasses.field(metadata={"static": True})

    for name in "ab":
        found = repeated(f, Point(X, name))
        assert found.name == name
        np.testing.assert_allclose(found.x, X * 2)


def test_caches_clear(asked):
    f = vmap(lambda x: x * 2)
    for clear in (jax.clear_caches, minibatch.clear_caches, f.clear_cache):
        repeated(f, X)
        asked.clear()
        f(X)
        assert not asked
        clear()
        np.testing.assert_allclose(f(X), X * 2)
        assert asked


def test_a_rule_declared_anew_is_used(monkeypatch):
    from jax.extend.core import Primitive

    from minibatch import extend
    from minibatch._registry import RULES

    twice_p = Primitive("twice")
    twice_p.def_abstract_eval(lambda x: x)
    monkeypatch.setattr("minibatch._registry.RULES", dict(RULES))
    for factor in (2, 3):
        extend.rule(twice_p, replace=True)(lambda axis, eqn, x, factor=factor: [extend.Batched(x.value * factor, x.bdim)])
        if factor == 2:
            f = vmap(lambda x: twice_p.bind(x))
        np.testing.assert_allclose(repeated(f, X), X * factor)


def test_threads_on_one_function_and_on_many():
    shared = vmap(lambda x, n: jnp.sin(x) * n, (0, None))
    wrong = []

    def work(k):
        w = jnp.full(4, float(k))
        own = vmap(lambda x: x * w)
        for n in range(12):
            good = np.allclose(shared(X + k, n % 3), np.sin(X + k) * (n % 3), atol=1e-5)
            good &= np.allclose(own(X), X * k) and np.allclose(vmap(lambda x: x + w)(X), X + k)
            if not good:
                wrong.append((k, n))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong
