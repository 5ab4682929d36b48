"""Tracing, compiling, and finding compiled programs again."""

from __future__ import annotations

import dataclasses
import gc
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from minibatch import clear_caches, vmap
from minibatch._compile import Programs, shared
from minibatch._keys import static_key

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def programs(f):
    """The programs of `f`, and those that mapped functions share."""
    kept = [*shared.kept.values(), *f._programs.kept.values()]
    return [found[1] for found in kept if isinstance(found, tuple)]


class Counted:
    """A function that counts how often Python runs it."""

    def __init__(self, fun):
        self.fun, self.calls = fun, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.fun(*args, **kwargs)


def test_one_call_of_the_function_for_each_trace():
    fun = Counted(lambda x, w: x * w)
    f = vmap(fun, (0, None))
    f(X, jnp.ones(4))
    assert fun.calls == 1
    f(X + 1, jnp.zeros(4))
    assert fun.calls == 1, "other values, same program"
    f(X.astype(np.int32), jnp.ones(4))
    f(X[:2], jnp.ones(4))
    f(X, jnp.ones((1, 4)))
    f({"a": X}["a"][None].repeat(3, 0), jnp.ones(4))
    assert fun.calls == 4, "other dtype, shape of a shared argument, rank; not for another number of lanes"
    jax.jit(f)(X, jnp.ones(4))
    jax.make_jaxpr(lambda x: f(x, jnp.ones(4)))(X)
    assert fun.calls == 5, "inside a trace once more, then known there too"


def test_another_number_of_lanes_is_not_traced_again():
    w = jnp.ones(4)
    fun = Counted(lambda x, n: x * w * n)
    f = vmap(fun, (0, None))
    for size in (3, 1, 0, 2):
        np.testing.assert_allclose(f(np.ones((size, 4), np.float32), 2), np.full((size, 4), 2.0))
    assert fun.calls == 1
    w = jnp.zeros(4)
    np.testing.assert_allclose(f(np.ones((5, 4), np.float32), 2), np.zeros((5, 4)))
    assert fun.calls == 2
    g = vmap(lambda x: x / jax.lax.psum(1, "i"), axis_name="i")
    for size in (1, 2):
        np.testing.assert_allclose(g(np.ones((size, 4), np.float32)), np.full((size, 4), 1 / size))
    with pytest.raises(ValueError, match="out_axes"):
        vmap(lambda x: (x, x + 1), out_axes=(None, 0))(X)


def test_uncompiled_traces_at_every_call():
    fun = Counted(lambda x: x * 2)
    f = vmap(fun, compile=False)
    f(X), f(X)
    assert fun.calls == 2


def test_each_static_value_has_its_own_program():
    fun = Counted(lambda x, how: getattr(x, how)())
    f = vmap(fun, (0, None))
    for _ in range(2):
        np.testing.assert_allclose(f(X, "sum"), X.sum(1))
        np.testing.assert_allclose(f(X, "max"), X.max(1))
    assert fun.calls == 2
    g = vmap(lambda x, n: x * n, (0, None))
    for n in (0.0, -0.0, 0, False, 1, 1.0, True):
        found, wanted = g(X, n), jax.vmap(lambda x, n: x * n, (0, None))(X, n)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_a_shared_numpy_array_changed_in_place_is_noticed():
    table = np.ones(4, np.float32)
    f = vmap(lambda x, t: x * t + float(t.sum()), (0, None))
    np.testing.assert_allclose(f(X, table), X + 4)
    table[:] = 2
    np.testing.assert_allclose(f(X, table), X * 2 + 8)


def test_a_shared_object_changed_in_place_is_noticed():
    class Config:
        def __init__(self):
            self.scale, self.inner = 1.0, {"shift": [0.0]}

    config = Config()
    f = vmap(lambda x, c: x * c.scale + c.inner["shift"][0], (0, None))
    np.testing.assert_allclose(f(X, config), X)
    config.scale = 2.0
    np.testing.assert_allclose(f(X, config), X * 2)
    config.inner["shift"][0] = 1.0
    np.testing.assert_allclose(f(X, config), X * 2 + 1)


def test_equal_frozen_dataclasses_share_a_program():
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float

    fun = Counted(lambda x, c: x * c.scale)
    f = vmap(fun, (0, None))
    for scale in (1.0, 1.0, 2.0):
        np.testing.assert_allclose(f(X, Config(scale)), X * scale)
    assert fun.calls == 2


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x: jax.jit(f)(x) + 0), jax.checkpoint])
def test_captured_arrays_are_arguments_of_the_program(inner):
    clear_caches()
    big, other = jnp.ones((1000, 4)), jnp.ones(4)
    f = vmap(lambda x: inner(lambda x: (big @ (x + other)).sum())(x))
    np.testing.assert_allclose(f(X), (X + 1).sum(1) * 1000)
    (program,) = programs(f)
    assert not program.consts
    lowered = program.compiled.lower([], [big, other, jnp.asarray(X)])
    assert len(lowered.as_text()) < 10_000, "no large constant in the program"


# --- values that are needed concretely --------------------------------------------------------------------------------


def test_shared_values_are_concrete_where_the_function_looks():
    fun = Counted(lambda x, gate, table: x + 1 if gate > 2 and float(jnp.sum(table)) > 0 else x)
    f = vmap(fun, (0, None, None))
    np.testing.assert_allclose(f(X, jnp.asarray(3), np.ones(2)), X + 1)
    np.testing.assert_allclose(f(X, jnp.asarray(1), np.ones(2)), X)
    assert fun.calls == 3, "the first time it is found out, then known"
    np.testing.assert_allclose(f(X, jnp.asarray(3), np.ones(2)), X + 1)
    assert fun.calls == 3, "a small array is known by its value"
    for _ in range(2):
        f(X, jnp.full(100, 3).sum(), np.ones(100))
    assert fun.calls == 5


def test_captured_values_are_concrete_where_the_function_looks():
    table = jnp.asarray([2, 0, 1])

    def encode(i):
        width = int(jnp.arange(3).sum())
        return jax.nn.one_hot(i, int(table.max()) + 1).sum() * width

    np.testing.assert_allclose(vmap(encode)(jnp.arange(3)), [3, 3, 3])
    np.testing.assert_allclose(jax.jit(vmap(encode))(jnp.arange(3)), [3, 3, 3])


def test_a_function_made_anew_looks_at_what_it_made_itself():
    for _ in range(3):  # its constant is made while it is traced, so each map keeps a program of its own
        f = vmap(lambda x: x * jnp.full(4, 2.0) if int(jnp.sum(jnp.ones(3))) == 3 else x)
        for _ in range(3):
            np.testing.assert_allclose(f(X), X * 2)


def test_concrete_values_and_lanes_mix():
    def f(x, n):
        total = sum(x * k for k in range(int(n)))
        return total + jnp.cumsum(jnp.arange(4.0))[int(n)]

    np.testing.assert_allclose(vmap(f, (0, None))(X, jnp.asarray(3)), X * 3 + 6)


def test_a_check_raises_only_for_a_lane_that_fails():
    def root(x):
        checkify.check(jnp.all(x >= 0), "negative: {x}", x=x.min())
        return jnp.sqrt(x)

    f = vmap(root)
    np.testing.assert_allclose(f(X), np.sqrt(X), rtol=1e-6)
    with pytest.raises(checkify.JaxRuntimeError, match=r"negative: -1\."):
        f(X - 1)


# --- inside other transformations -------------------------------------------------------------------------------------


def test_inside_jit_grad_and_vmap():
    w = jnp.ones(4)
    f = lambda x, w: jnp.tanh(x) @ w
    mapped = vmap(f, (0, None))
    want = np.tanh(X).sum(1)
    np.testing.assert_allclose(jax.jit(mapped)(X, w), want, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda w: mapped(X, w).sum())(w), np.tanh(X).sum(0), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda w: vmap(lambda x: f(x, w))(X).sum())(w), np.tanh(X).sum(0), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(mapped, (None, 0))(X, jnp.stack([w, w])), [want, want], rtol=1e-5)
    np.testing.assert_allclose(vmap(mapped, (None, 0))(X, jnp.stack([w, w])), [want, want], rtol=1e-5)
    np.testing.assert_allclose(jax.lax.map(lambda x: vmap(jnp.sin)(x), X), np.sin(X), rtol=1e-5)
    outer = jax.jit(lambda s: vmap(lambda x: x * s + jax.grad(lambda t: vmap(lambda u: u * t)(x).sum())(s))(X))(2.0)
    np.testing.assert_allclose(outer, X * 2 + X.sum(1, keepdims=True), rtol=1e-5)


def test_nothing_leaks():
    with jax.checking_leaks():
        np.testing.assert_allclose(vmap(lambda x: jnp.sin(x))(X), np.sin(X), rtol=1e-5)
        np.testing.assert_allclose(jax.jit(vmap(lambda x: jax.jit(jnp.sin)(x)))(X), np.sin(X), rtol=1e-5)


def test_abstract_evaluation():
    shape = jax.eval_shape(vmap(lambda x: x.sum()), jax.ShapeDtypeStruct((7, 3), jnp.bfloat16))
    assert (shape.shape, shape.dtype) == ((7,), jnp.bfloat16)


def test_disable_jit():
    with jax.disable_jit():
        np.testing.assert_allclose(vmap(lambda x: jax.jit(jnp.sin)(x))(X), np.sin(X), rtol=1e-5)


def test_changed_configuration_is_noticed():
    f = vmap(lambda x: x * 1.5)
    assert f(np.ones(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(np.ones(3)).dtype == jnp.float64


# --- the cache --------------------------------------------------------------------------------------------------------


def test_programs_are_bounded_and_the_latest_stay():
    held = types.SimpleNamespace(n=0)  # which only this function sees: nothing that others could share
    f = vmap(lambda x, n: x * abs(n) + held.n, (0, None))
    f._programs = Programs(capacity=4)
    for n in range(10):
        f(X, n)
    assert len(f._programs.kept) == 4
    f.clear_cache()
    assert not len(f._programs.kept)


def test_programs_that_are_shared_are_bounded(monkeypatch):
    monkeypatch.setattr("minibatch._compile.shared", few := Programs(capacity=4))
    for n in range(10):
        vmap(lambda x, n: x * abs(n), (0, None))(X, n)
    assert len(few.kept) == 4


def test_no_argument_is_kept_alive():
    class Config:
        scale = 2.0

    f = vmap(lambda x, c, fn, w: fn(x) * c.scale + w, (0, None, None, None))
    config, fn, w = Config(), lambda x: x + 1, jnp.ones(4)
    x = jnp.asarray(X)
    out = f(x, config, fn, w)
    alive = [weakref.ref(y) for y in (config, fn, w, x)]
    np.testing.assert_allclose(out, (X + 1) * 2 + 1)
    del config, fn, w, x, out
    jax.clear_caches()
    gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 4


def test_a_mapped_function_and_its_captives_can_be_freed():
    def fresh():
        w = jnp.ones(4)
        vmap(lambda x: x * w)(X)
        return weakref.ref(w)

    alive = fresh()
    gc.collect()
    assert alive() is None


@pytest.fixture
def compiled():
    """What XLA compiled since."""
    events = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.clear_event_listeners()


def test_a_fresh_function_is_not_compiled_again(compiled):
    w = jnp.ones(4)

    def fresh(step):
        return vmap(lambda x: jax.nn.relu(x * w) * step)

    for step in range(4):
        np.testing.assert_allclose(fresh(jnp.float32(step))(X), X * step)
        if step == 0:
            compiled.clear()
    assert not compiled


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16])
def test_a_number_that_is_another_every_time_is_not_compiled_again(compiled, dtype):
    x = X.astype(dtype)
    shared = lambda x, n: jax.nn.relu(x * 2) * n + jnp.arange(4) * (n + 1)
    f, theirs = vmap(shared, (0, None)), jax.vmap(shared, (0, None))
    for make in (float, int):
        fresh = lambda n: lambda x: (jnp.tanh(x * 1.0) * n - n, x + n, jnp.where(x > 0, n, x))
        for k in range(5):
            n = make(k + 2)
            wanted = theirs(x, n), jax.vmap(fresh(n))(x)
            before = len(compiled)
            found = f(x, n), vmap(fresh(n))(x)
            assert len(compiled) == before or k < 2
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
                np.testing.assert_allclose(a, b, *((1e-2, 1e-2) if dtype == np.float16 else (1e-6, 5e-6)))


def test_numbers_that_differ_take_turns():
    fun = lambda x, n: x * n + 1.0 / n
    f = vmap(fun, (0, None))
    for n in (1.0, 2.0, 3.0, 1.0, 2.0, 4.0, 1.0):
        for _ in range(3):
            np.testing.assert_allclose(f(X, n), X * n + 1 / n, rtol=1e-6)


def test_an_array_set_anew_is_another_argument():
    w, params, calls = jnp.ones(4), {"b": [jnp.zeros(4)]}, []
    f = vmap(lambda x: (calls.append(1), x * w + params["b"][0])[1])
    for k in range(4):
        w, params = jnp.full(4, k, jnp.float32), {"b": [jnp.full(4, -k, jnp.float32)]}
        for _ in range(3):
            np.testing.assert_allclose(f(X), X * k - k)
    params["b"][0] = jnp.ones(4)
    np.testing.assert_allclose(f(X), X * 3 + 1)
    assert len(calls) == 1
    w = jnp.ones((1, 4))
    np.testing.assert_allclose(f(X)[:, 0], X + 1)
    assert len(calls) == 2, "of another shape"


def test_programs_that_differ_in_an_inner_const_are_told_apart():
    def fresh(k):
        inner = jax.jit(lambda x: x * k)
        return vmap(lambda x: inner(x))

    for k in (1.0, 2.0):
        np.testing.assert_allclose(fresh(jnp.full(4, k))(X), X * k)


def test_threads():
    fun = Counted(lambda x, n: jnp.sin(x) * n)
    f = vmap(fun, (0, None))
    wrong = []

    def work(k):
        for n in range(4):
            if not np.allclose(f(X + k, n), np.sin(X + k) * n, atol=1e-5):
                wrong.append((k, n))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ("a", "a", True),
        (np.float32(1), np.float64(1), False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3)[::-1], False),
        (np.arange(4), np.arange(4).reshape(2, 2), False),
        (len, len, True),
        (jnp.sin, jnp.cos, False),
        (object(), object(), False),
        (X.sum, X.max, False),
    ],
)
def test_static_key(a, b, same):
    assert (static_key(a) == static_key(b)) is same
    if same:
        assert hash(static_key(a)) == hash(static_key(b))
