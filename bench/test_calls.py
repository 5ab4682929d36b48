"""What a call costs by itself, and what loops cost that map a new function at every turn."""

from collections.abc import Callable

import jax
import pytest
from calls import Call, calls, jitted, loops

import minibatch


@pytest.mark.parametrize("call", list(calls()), ids=lambda call: call.name)
def test_call(beside: Callable, call: Call) -> None:
    """The same call again and again, in a tight loop."""
    mapped = minibatch.vmap(call.fun, call.in_axes)
    beside("call", call.name, {"minibatch": lambda: mapped(*call.args), "jit(jax.vmap)": jitted(call)}, repeat=100)


@pytest.mark.parametrize(("name", "turn"), list(loops()), ids=lambda x: x if isinstance(x, str) else "")
def test_loop(beside: Callable, name: str, turn: Callable) -> None:
    """A turn of a loop once warm."""
    sides = {"minibatch": turn(minibatch.vmap), "jax.vmap": turn(jax.vmap)}
    for call in sides.values():
        for _ in range(3):
            jax.block_until_ready(call())
    beside("loop", name, {side: lambda call=call: jax.block_until_ready(call()) for side, call in sides.items()})
