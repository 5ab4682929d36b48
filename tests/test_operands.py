"""Numbers that are operands only: the function is not called for each, and no other number is taken for one."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minibatch import clear_caches, vmap
from minibatch._operands import operands

X = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
NUMBERS = [0.5, 0.25, 3.0, 7.5, -2.0, 3.0, 3.0, 3.0]


@pytest.fixture(autouse=True)
def _nothing_known():
    clear_caches()


def agree(found, wanted):
    """Same dtypes, same values."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)
        rtol = 2e-6 if x.dtype.itemsize >= 4 else 1e-2
        x, y = (np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64) for x in (x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


calls = 0


def sin(x):
    """The sine, counted."""
    global calls
    calls += 1
    return jnp.sin(x)


def calls_in(make, numbers, x=X):
    """How often the function that `make` makes of a number is called, mapped for each number and compared."""
    global calls
    calls = 0
    for number in numbers:
        fun = make(number)
        with np.errstate(all="ignore"):
            found, count = vmap(fun)(x), calls
            agree(found, jax.vmap(fun)(x))
        calls = count
    return calls


# --- not called for each ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda n: lambda x: sin(x) * n,
        lambda n: lambda x: n - sin(x),
        lambda n: lambda x: (sin(x) / n, n + x * n),
        lambda n: lambda x: [y := sin(x), y := y * n, y - n][1:],
        lambda n: lambda x: jax.nn.relu(x @ jnp.ones((4, 2)) * n) + len([sin(x)]),
    ],
)
def test_a_new_number_in_a_new_function_calls_it_no_more(make):
    assert calls_in(make, NUMBERS) == 3
    clear_caches()
    assert calls_in(make, [1, 2, 3, 5, -8]) == 3


def scaled(x, n):
    """Two operations by a number."""
    return sin(x) * n + n


def layered(x, n):
    """Hands its number on."""
    return scaled(x, n) - n


def test_a_number_that_is_handed_on_calls_nobody_more():
    w = jnp.ones(4)

    def inside(n, x):
        return sin(x * w) * n

    assert calls_in(lambda n: lambda x: scaled(x, n), NUMBERS) == 3
    assert calls_in(lambda n: lambda x: layered(x, n) * n + inside(n, x), NUMBERS) == 6
    global calls
    calls = 0
    f = vmap(lambda x, n, m: layered(x, n) + inside(m, x), (0, None, None))
    for n in NUMBERS:
        np.testing.assert_allclose(f(X, n, 2 * n), jnp.sin(X) * n + jnp.sin(X) * 2 * n, rtol=1e-5, atol=1e-6)
    assert calls == 6


def test_arrays_and_other_functions_beside_the_number():
    def make(n):
        w, other = jnp.full(4, n), {"shift": jnp.ones(4)}
        return lambda x: sin(x) * w * n + other["shift"]

    assert calls_in(make, NUMBERS) == 3


step = 0.0


def test_a_global_number():
    global step, calls
    calls = 0

    def turn():
        return vmap(lambda x: sin(x) * step)(X)

    for step in NUMBERS:
        np.testing.assert_allclose(turn(), np.sin(X) * step, rtol=1e-5)
    assert calls == 3


def test_another_shared_number():
    global calls
    calls = 0
    f = vmap(lambda x, n, m: sin(x) * n - m, in_axes=(0, None, None))
    for n in NUMBERS:
        np.testing.assert_allclose(f(X, n, 2), np.sin(X) * n - 2, rtol=1e-5)
    assert calls == 3
    for n in NUMBERS:
        np.testing.assert_allclose(f(X, 1, n), np.sin(X) - n, rtol=1e-5)
    for n in (1, 2, 1.0, 2.0, True, np.float32(2), jnp.asarray(2.0), np.ones(4)):
        agree(f(X, n, 2), jax.vmap(lambda x, n: jnp.sin(x) * n - 2, (0, None))(X, n))


def test_a_number_that_comes_again_is_dispatched_as_ever():
    f = vmap(lambda x, n: x * n, in_axes=(0, None))
    for n in range(8):
        f(X, n)
    before = f._programs.find
    f(X, 6), f(X, 6)
    f._programs.find = None  # type: ignore[assignment]
    np.testing.assert_allclose(f(X, 6), X * 6)
    f._programs.find = before


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8", "int8", "uint32", "bool", "complex64"])
@pytest.mark.parametrize("numbers", [[0.1, 0.3, 1 / 3, -0.0, 1e-40, np.inf, 1e30, 0.1 + 1e-9], [1, 2, 3, 100, 0, 5]])
def test_every_dtype(dtype, numbers):
    x = (np.arange(6) % 2).reshape(3, 2).astype(jnp.dtype(dtype))
    calls_in(lambda n: lambda x: (x * n, n + x, x / n), [n for n in numbers if n or n in (1, 2)], x)
    calls_in(lambda n: lambda x: (x * n, n + x), numbers, x)


def test_in_double_precision():
    with jax.enable_x64(True):
        calls_in(lambda n: lambda x: x * n, [1 / 3, 1 / 7, 1 / 9, 1 / 11])
        found = vmap(lambda x, n: x * n, (0, None))
        for n in (1 / 3, 1 / 7, 1 / 9, 1 / 11):
            np.testing.assert_array_equal(found(X.astype(np.float64), n), X.astype(np.float64) * n)


def test_an_int_that_jax_refuses_is_refused():
    f = vmap(lambda x, n: x * n, (0, None))
    for n in (1, 2, 3):
        f(X, n)
    with pytest.raises(OverflowError):
        f(X, 2**40)
    g = vmap(lambda x, n: x + n, (0, None))
    small = np.zeros((3, 2), np.uint8)
    for n in (1, 2, 3):
        agree(g(small, n), small + np.uint8(n))
    for n in (300, -1):
        outcomes = []
        for f in (g, jax.vmap(lambda x, n: x + n, (0, None))):
            try:
                outcomes.append(np.asarray(f(small, n)).tolist())
            except OverflowError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1]


# --- what is more than an operand -------------------------------------------------------------------------------------


class Scaled:
    """A user's own value, which looks at what it is multiplied with."""

    def __init__(self, x):
        self.x = x

    def __mul__(self, other):
        return self.x * (3 if type(other) is float and other > 1 else 2)


def swallowed(n):
    def fun(x):
        try:
            return 2 * n * x
        except TypeError:
            return x

    return fun


def in_a_loop(n):
    def fun(x):
        z = x
        for y in (Scaled(x), x):
            z = z + y * n
        return z

    return fun


def looks(x, n):
    """Looks at its number."""
    return x * n if n > 1 else -x


def times(x, n):
    """Does not."""
    return x * n


def by_a_local_name(n):
    def fun(x):
        times = lambda x, n: globals()["times"](x, n) * (2 if type(n) is float and float.__gt__(n, 1.0) else 1)
        return times(x, n)

    return fun


def names_from_outside(times, n):
    return lambda x: times(x, n)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: lambda x: looks(x, n),
        lambda n: lambda x: times(x, n) + looks(x, n),
        lambda n: lambda x: times(Scaled(x), n) + times(x, n),
        lambda n: lambda x: times(x, n) + times(x, n=n),
        lambda n: lambda x: times(*(x, n)),
        lambda n: lambda x: times(times(x, n), n),
        lambda n: names_from_outside(times if n > 1 else looks, n),
        by_a_local_name,
        lambda n: lambda x: x * n if n > 1 else x,
        lambda n: lambda x: x**n,
        lambda n: lambda x: x * (n * 0.1),
        lambda n: lambda x: x * n * (1 if isinstance(n, float) else 2),
        lambda n: lambda x: x * float(n),
        lambda n: lambda x: jax.lax.scan(lambda c, y: (c * n, y + n), 1.0, x)[1] * n,
        lambda n: lambda x: (lambda y: y * (n if n > 1 else 3))(x) * n,
        lambda n: lambda x: Scaled(x) * n + x * n,
        lambda n: lambda x: x * n + (np.float32(2) * n > 4),
        lambda n: lambda x: x * eval("n", {"n": n}) * n,
        lambda n: lambda x: x * (np.ones(4) * n) + np.ones(4) * n,
        swallowed,
        in_a_loop,
    ],
)
def test_python_may_do_anything_with_a_number(make):
    calls_in(make, [0.5, 0.25, 3.0, 7.5, 0.75])


def test_a_number_that_another_function_sees_too():
    n = 0.5
    holder = types.SimpleNamespace(f=lambda x: x if n > 1 else -x)
    mapped = vmap(lambda x: holder.f(x) * n)
    for n in (0.5, 0.25, 3.0, 0.75):
        np.testing.assert_allclose(mapped(X), X * n if n > 1 else -X * n)


def test_a_function_that_reaches_itself():
    n, holder = 0.5, types.SimpleNamespace()

    def fun(x, again=True):
        return (holder.fun(x, False) if again else x) * n

    holder.fun, mapped = fun, vmap(fun)
    for n in (0.5, 0.25, 3.0, 0.75):
        np.testing.assert_allclose(mapped(X), X * n * n)


def test_a_global_number_that_an_inner_function_sees_too():
    global step
    mapped = vmap(lambda x: (lambda y: y if step > 1 else -y)(x) * step)
    for step in (0.5, 0.25, 3.0, 0.75):
        np.testing.assert_allclose(mapped(X), X * step if step > 1 else -X * step)


def test_other_state_is_noticed_beside_a_number():
    scale = types.SimpleNamespace(by=2.0)
    mapped = vmap(lambda x, n: x * scale.by * n, (0, None))
    for n in (1.0, 2.0, 3.0, 4.0):
        np.testing.assert_allclose(mapped(X, n), X * 2 * n, rtol=1e-6)
    scale.by = 5.0
    for n in (1.0, 2.0, 3.0, 4.0):
        np.testing.assert_allclose(mapped(X, n), X * 5 * n, rtol=1e-6)


def test_what_the_code_says():
    other = 1.0
    found = operands(lambda x, n, m: x * n + m / other - len(str(m)))
    assert found.keys() == {"x", "n", "other"} - {"x"} or found.keys() == {"x", "n", "other"}
    assert operands(lambda x, n: locals() and x * n) == {}
    assert "n" not in operands(lambda x, n: [x * n for _ in range(2)])
    assert operands(jnp.sin) == {}
