"""Cases for rules/state.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
from oracle import Case, f32, i32


def through(act: Callable) -> Callable:
    """`act` on a reference that starts as the first argument; its result, and what the reference holds in the end."""

    def fun(x: Any, *args: Any) -> Any:
        ref = jax.new_ref(x)
        return act(ref, *args), jax.ref.freeze(ref)

    return fun


def whole(ref: Any, y: Any) -> Any:
    before = jax.ref.swap(ref, ..., y)
    jax.ref.addupdate(ref, ..., before * y)
    return before, ref[...]


def fixed(ref: Any, y: Any) -> Any:
    ref[0, :, 1] = y
    jax.ref.addupdate(ref, (slice(None), slice(0, 2), jnp.asarray([1, 3, 0])), y[:, None] * jnp.ones((2, 2, 3)))
    return ref[1], ref[:, 1], ref[jnp.asarray([[1], [0]]), :, jnp.asarray([[2, 0, 3]])], ref[1:, jnp.asarray([0, 1, 1]), 2:]


def picked(ref: Any, i: Any, j: Any, y: Any) -> Any:
    before = jax.ref.swap(ref, (i, slice(None), j), y)
    jax.ref.addupdate(ref, (jnp.asarray([1, 0]), 0, j), y * 2)
    return before, ref[i], ref[:, i, jnp.stack([j, i])], ref[jnp.stack([i, j]), :, jnp.asarray([0, 2])], ref[i, j, i]


def sliced(ref: Any, i: Any, y: Any) -> Any:
    ref[:, jax.ds(i, 2), 1] = y[:, None] * jnp.ones((2, 2))
    return ref[jnp.asarray([1, 0, 0]), jax.ds(i, 2), 2], ref[:, :, jax.ds(i, 3)]


def made(x: Any) -> Any:
    ref = jax.ref.empty_ref(jax.typeof(x))
    ref[...] = x
    counter = jax.new_ref(0)
    counter[...] += 1
    out = ref[...] + counter[...]
    jax.ref.free_ref(ref)
    return out


def seen(x: Any, i: Any) -> Any:
    """A reference that all lanes share, only read."""
    table = jax.new_ref(jnp.arange(12.0).reshape(3, 4))
    return table[i] + x, table[i, i], table[...] * x


def run(x: Any, y: Any) -> Any:
    """A function of references on values: one stored into, one only read."""

    def act(refs: Any) -> None:
        ref, seen = refs
        ref[1] = ref[0] + seen[0]

        def step(i: Any, total: Any) -> Any:
            ref[i] += seen[0] * i
            return total + ref[i]

        ref[1] += lax.fori_loop(0, 2, step, 0.0)

    return pallas.run_state(act)((x, y))


INDEX = i32(low=0, high=2)
CASES = [
    Case("whole", through(whole), (f32(2, 3), f32(2, 3)), "new_ref get swap addupdate freeze", grad=True),
    Case("fixed", through(fixed), (f32(2, 2, 4), f32(2)), "get swap addupdate", jax=False),
    Case("picked", through(picked), (f32(2, 2, 4), INDEX, INDEX, f32(2)), "get swap addupdate broadcast_to", jax=False),
    Case("sliced", through(sliced), (f32(2, 3, 4), INDEX, f32(2)), "get swap", jax=False),
    Case("made", made, (f32(2),), "empty_ref free_ref new_ref", jax=False),
    Case("seen", seen, (f32(4), INDEX), "get"),
    Case("run", run, (f32(2), f32(1)), "run_state", jax=False),
]
