"""Loops that update a buffer for some lanes at a time, by length: `python bench/buffers.py` prints the table in the docs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from workloads import normal, stack

import minibatch

LANES, LENGTHS, ROUNDS = 16, (256, 1024, 4096), 5


def table(buffer: Any, x: Any) -> Any:
    """A buffer filled until what is written grows too large, which lanes come to at different times."""

    def step(carry: tuple) -> tuple:
        i, buffer, y = carry
        return i + 1, lax.dynamic_update_index_in_dim(buffer, y, i, 0), y * 1.1 + x[i]

    return lax.while_loop(lambda carry: (carry[0] < len(x)) & (carry[2] < 1e30), step, (0, buffer, x[0]))


def seconds(calls: list[Callable]) -> list[float]:
    """The least that each takes, taking turns."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    """Print the table."""
    print(f"JAX {jax.__version__}, {jax.default_backend()}, {LANES} lanes: ms, jit(jax.vmap(f)) and minibatch.\n")
    print(f"| program | {' | '.join(map(str, LENGTHS))} |\n| --- |{' ---: |' * len(LENGTHS)}")
    for name, fun in {"a push in a branch": stack, "a table filled until a lane stops": table}.items():
        row = []
        for length in LENGTHS:
            args = jnp.zeros((LANES, length)), normal(0, LANES, length)
            compiled = [jax.jit(vmap(fun)).lower(*args).compile() for vmap in (jax.vmap, minibatch.vmap)]
            theirs, ours = seconds([lambda f=f, args=args: f(*args) for f in compiled])
            row.append(f"{theirs * 1e3:.2f}, {ours * 1e3:.2f}")
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
