"""Callbacks, references, random numbers and the like, nested at random: what happens is what happens in each lane by itself.

`--fuzz=1000` for so many programs.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import minibatch

pytestmark = pytest.mark.usefixtures("compiles_quickly")

FEW = 12  # programs
TABLE = jnp.arange(9.0).reshape(3, 3)
SCHEDULES = [(), ("refill", "partition"), ("compact", "select"), ("lockstep", "select")]
Fun = Callable[[Any, Any], Any]  # from an integer and a float of one lane to a float
Heard = collections.Counter  # how often each callback was called, and with what


# --- what happens -----------------------------------------------------------------------------------------------------


def told(heard: Heard, number: int) -> Callable[..., np.float32]:
    """The callback of this number, which tells what it is called with."""

    def hear(i: Any, x: Any) -> np.float32:
        heard[number, int(i), round(float(x), 3)] += 1
        return np.float32(x / 8)

    return hear


def debugged(heard: Heard, number: int) -> Fun:
    def f(i: Any, x: Any) -> Any:
        jax.debug.callback(told(heard, number), i, x)
        return x * 1.1

    return f


def exchanged(ordered: bool) -> Callable[[Heard, int], Fun]:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda heard, number: lambda i, x: x + io_callback(told(heard, number), shape, i, x, ordered=ordered)


def on_the_host(method: str) -> Callable[[Heard, int], Fun]:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    sine = lambda x: np.sin(x, dtype=np.float32)
    return lambda heard, number: lambda i, x: x + jax.pure_callback(sine, shape, x, vmap_method=method)


def by_reference(heard: Heard, number: int) -> Fun:
    def f(i: Any, x: Any) -> Any:
        ref = jax.new_ref(jnp.full(4, x))
        ref[i % 4] += x * 2
        ref[0] = ref[1] / 2 + ref[i % 4]
        return ref[...].mean()

    return f


@jax.custom_batching.custom_vmap
def own_sine(x: Any) -> Any:
    return jnp.sin(x)


@own_sine.def_vmap
def own_sine_of_lanes(size: int, batched: list[bool], x: Any) -> tuple[Any, bool]:
    return jnp.sin(x), batched[0]


def mapped_inside(vmap: Callable) -> Callable[[Heard, int], Fun]:
    row = lambda a, x: lax.cond(a > x, lambda: jnp.sin(a * x), lambda: a)
    return lambda heard, number: lambda i, x: vmap(lambda a: row(a, x))(jnp.arange(3.0)).sum()


LEAVES: list[Callable[[Heard, int], Fun]] = [
    debugged,
    exchanged(ordered=False),
    exchanged(ordered=True),
    on_the_host("sequential"),
    on_the_host("expand_dims"),
    by_reference,
    mapped_inside(jax.vmap),
    mapped_inside(minibatch.vmap),
    lambda heard, number: lambda i, x: own_sine(x) * 1.2,
    lambda heard, number: lambda i, x: x + jax.random.normal(jax.random.fold_in(jax.random.key(3), i)),
    lambda heard, number: lambda i, x: x + TABLE[i % 3].sum() / 8,
    lambda heard, number: lambda i, x: jnp.cos(x) * 1.5,
]

# --- and where --------------------------------------------------------------------------------------------------------


def with_a_rule(f: Fun) -> Fun:
    """`f` with a derivative of its own."""
    g = jax.custom_vjp(lambda i, x: f(i, x))
    g.defvjp(lambda i, x: (f(i, x), None), lambda _, t: (None, t))
    return g


def stepped(f: Fun) -> Fun:
    """`f`, as often as the integer says."""
    step = lambda s: (s[0] + 1, f(s[0], s[1]))
    return lambda i, x: lax.while_loop(lambda s: s[0] < i % 4, step, (0, x))[1]


NESTS: list[Callable[[Fun, Fun], Fun]] = [
    lambda f, g: lambda i, x: lax.cond(i % 2 == 0, f, g, i, x),
    lambda f, g: lambda i, x: lax.switch(i % 3, [f, g, lambda i, x: x], i, x),
    lambda f, g: stepped(f),
    lambda f, g: lambda i, x: lax.fori_loop(0, i % 3, lambda k, x: f(k + i, x), x),
    lambda f, g: lambda i, x: lax.fori_loop(0, 2, lambda k, x: g(k, f(i, x)), x),
    lambda f, g: lambda i, x: lax.scan(lambda x, k: (f(i + k, x), None), x, jnp.arange(2))[0],
    lambda f, g: lambda i, x: lax.map(lambda t: f(i + 1, t + x), jnp.arange(2.0)).sum(),
    lambda f, g: lambda i, x: g(i + 1, f(i, x)),
    lambda f, g: jax.jit(f),
    lambda f, g: jax.checkpoint(f),
    lambda f, g: with_a_rule(f),
]


def program(draw: random.Random, depth: int, heard: Heard, numbers: Iterator[int]) -> Fun:
    """Something that happens, nested so deep."""
    if not depth:
        return draw.choice(LEAVES)(heard, next(numbers))
    f = program(draw, depth - 1, heard, numbers)
    return draw.choice(NESTS)(f, program(draw, draw.choice([0, depth - 1]), heard, numbers))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("number", range(metafunc.config.getoption("--fuzz", default=0) or FEW))


def test_what_happens_is_what_happens_in_each_lane(number: int) -> None:
    draw, heard = random.Random(number), Heard()
    f = program(draw, draw.choice([2, 3, 3, 4]), heard, itertools.count())
    size = draw.choice([1, 3, 5, 6])
    i = jnp.asarray([draw.randrange(7) for _ in range(size)])
    x = jnp.asarray([round(draw.uniform(-1, 1), 2) for _ in range(size)], jnp.float32)
    wanted = [jax.jit(f)(*lane) for lane in zip(i, x, strict=True)]
    jax.effects_barrier()
    by_lanes = heard.copy()
    heard.clear()
    mapped = minibatch.vmap(f, compile=draw.random() < 0.7, divergence=draw.choice(SCHEDULES) or None)
    found = (jax.jit(mapped) if draw.random() < 0.5 else mapped)(i, x)
    jax.effects_barrier()
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
    assert heard == by_lanes
