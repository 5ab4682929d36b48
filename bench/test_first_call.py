"""What the first call costs: tracing, and tracing with compiling."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from workloads import TRACED, WORKLOADS, Workload

import minibatch


@pytest.mark.parametrize("workload", [*WORKLOADS, *TRACED], ids=lambda workload: workload.name)
def test_tracing(beside: Callable, workload: Workload) -> None:
    """From a function never seen to the batched program as a jaxpr."""
    args = workload.args(workload.lanes)

    def ours() -> Any:
        return minibatch.vmap(fresh(workload, minibatch.vmap), workload.in_axes).jaxpr(*args)

    def theirs() -> Any:
        return jax.make_jaxpr(jax.vmap(fresh(workload, jax.vmap), workload.in_axes))(*args)

    beside("tracing", workload.name, {"minibatch": ours, "jit(jax.vmap)": theirs})


def test_compile(beside: Callable, workload: Workload) -> None:
    """From a function never seen to compiled code."""
    args = workload.args(workload.lanes)

    def ours() -> Any:
        return minibatch.vmap(fresh(workload, minibatch.vmap), workload.in_axes).lower(*args).compile()

    def theirs() -> Any:
        return jax.jit(jax.vmap(fresh(workload, jax.vmap), workload.in_axes)).lower(*args).compile()

    beside("compile", workload.name, {"minibatch": ours, "jit(jax.vmap)": theirs})


def fresh(workload: Workload, vmap: Callable) -> Callable:
    """The workload's function as one that no cache knows."""
    fun = workload.fun(vmap)
    return lambda *args: fun(*args)
