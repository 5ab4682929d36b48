"""Cases for rules/control_flow.py."""

import jax
import jax.numpy as jnp
from jax import lax
from oracle import Case, f32, i32


def newton(a, tol):
    """A loop whose lanes stop at different times."""
    return lax.while_loop(
        lambda s: (jnp.abs(s[0] ** 2 - jnp.abs(a)) > jnp.abs(tol) + 0.1) & (s[1] < 20),
        lambda s: (0.5 * (s[0] + jnp.abs(a) / s[0]), s[1] + 1, s[2]),
        (jnp.float32(1.0), 0, a),
    )


def rnn(c, xs, w):
    """A scan with consts, a counter that stays shared, and outputs of both kinds."""

    def step(carry, x):
        n, h = carry
        h = jnp.tanh(h * w + x)
        return (n + 1, h), (h.sum(), n)

    return lax.scan(step, (0, c), xs, reverse=True, unroll=2)


def rotate(x):
    """Carries that start shared and become batched one after the other."""
    return lax.scan(lambda c, _: ((c[1], c[2], c[0] + x), c[0]), (0.0, 0.0, 0.0), None, length=4)


def switch(i, x, w):
    """Three branches, one of which hands an operand through."""
    return lax.switch(i, [lambda x, w: (jnp.sin(x) * w, w), lambda x, w: (x + w.sum(), w), lambda x, w: (w, w)], x, w)


def collatz(n):
    """A loop within a branch within a loop: each ends only for the values that are meant for it."""
    halve = lambda n: lax.while_loop(lambda n: n % 2 == 0, lambda n: n // 2, n)
    step = lambda s: (lax.cond(s[0] % 2 == 0, halve, lambda n: 3 * n + 1, s[0]), s[1] + 1)
    return lax.while_loop(lambda s: s[0] > 1, step, (n, 0))


def nested_loops(n, x):
    """A loop in a loop, both of as many rounds as the lane says."""
    inner = lambda k, x: lax.fori_loop(0, k, lambda i, x: x * 0.9 + i, x)
    return lax.fori_loop(0, n, lambda k, x: inner(k, x) + n, x)


def mapped_by_jax(n, x):
    """A loop that `jax.vmap` mapped already: its predicate is an array."""
    count = lambda n, x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1]
    return jax.vmap(count, (0, None))(n, x)


CASES = [
    Case("cond shared", lambda x, w: lax.cond(w[0] > 0, lambda x: (x * w, w), lambda x: (-x, x), x), (f32(3),) * 2, grad=True),
    Case("cond mapped", lambda p, x: lax.cond(p > 0, jnp.sin, lambda x: 2 * x, x), (f32(), f32(2)), "cond", grad=True),
    Case("cond without operands", lambda p: lax.cond(p > 0, lambda: 1.0, lambda: 2.0), (f32(),), "cond"),
    Case("switch", switch, (i32(low=-1, high=5), f32(3), f32(3)), "cond", grad=True),
    Case("platform", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (f32(2),), "cond", grad=True),
    Case("while", newton, (f32(), f32()), "while"),
    Case("while shared predicate", lambda n, x: lax.fori_loop(0, 3, lambda i, x: x * n + i, x), (f32(), f32(2)), grad=True),
    Case("while mapped by JAX", mapped_by_jax, (i32(3, low=0), f32(2)), "while"),
    Case("while in cond in while", collatz, (i32(low=1, high=30),), "while cond"),
    Case("while in while", nested_loops, (i32(low=0, high=4), f32(2)), "while"),
    Case("scan", rnn, (f32(2), f32(5, 2), f32(2)), "scan", grad=True),
    Case("scan rotating carry", rotate, (f32(),), "scan", grad=True),
    Case("map in batches", lambda x: lax.map(lambda y: y * 2, x, batch_size=2), (f32(5, 2),), "scan"),
    Case("associative scan", lambda x: lax.associative_scan(jnp.maximum, x, axis=1), (f32(2, 5),), grad=True),
    Case(
        "scan of cond",
        lambda i, xs: lax.scan(lambda c, x: (lax.cond(x > c, lambda: x * i, lambda: c + x), c), 0.0, xs),
        (f32(), f32(4)),
        "scan cond",
        grad=True,
    ),
    Case(
        "cond of keys",
        lambda p, k: jax.random.key_data(lax.cond(p > 0, lambda k: jax.random.fold_in(k, 1), lambda k: k, jax.random.key(k))),
        (f32(), i32(low=0)),
    ),
]
