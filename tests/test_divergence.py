"""Schedules: the same answers by each, for the lanes alone, and the words that choose one."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import minibatch
from minibatch import vmap
from minibatch._divergence import Divergence, chosen

# --- the words --------------------------------------------------------------------------------------------------------


def test_words_of_a_call_go_before_those_of_the_region() -> None:
    assert chosen(None) == Divergence("auto", "auto")
    assert chosen(("compact", "select")) == Divergence("compact", "select")
    with minibatch.divergence("refill", "partition"):
        assert chosen(None) == Divergence("refill", "partition")
        assert chosen("lockstep") == Divergence("lockstep", "partition")
        assert chosen("auto") == Divergence()
        with minibatch.divergence("select"):
            assert chosen(None) == Divergence("refill", "select")
    assert chosen(None) == Divergence()


def test_region_is_that_of_its_thread() -> None:
    seen = []
    with minibatch.divergence("refill"):
        thread = threading.Thread(target=lambda: seen.append(chosen(None)))
        thread.start()
        thread.join()
    assert seen == [Divergence()]


@pytest.mark.parametrize("compile", [True, False])
def test_program_is_traced_anew_where_the_region_differs(compile: bool) -> None:
    calls = []

    @jax.jit
    def mapped(x: Any) -> Any:
        calls.append(chosen(None).loops)
        return vmap(lambda x: lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x), compile=compile)(x)

    x = jnp.arange(1, 4)
    for words in ((), ("refill",), (), ("refill",)):
        with minibatch.divergence(*words):
            assert mapped(x).tolist() == [16, 16, 12]
    assert calls == ["auto", "refill"]
