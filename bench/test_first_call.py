"""What the first call costs: tracing, in CPU time, and tracing with compiling."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest
from workloads import TRACED, WORKLOADS, Workload

import minibatch


@pytest.mark.parametrize("workload", [*WORKLOADS, *TRACED], ids=lambda workload: workload.name)
def test_tracing(beside: Callable, workload: Workload) -> None:
    """From a function never seen to the batched program as a jaxpr, by JAX's own outermost trace."""
    args = workload.args(workload.lanes)

    def traced(vmap: Callable) -> Any:
        return jax.make_jaxpr(vmap(fresh(workload, vmap), workload.in_axes))(*args)

    vmaps = {"minibatch": minibatch.vmap, "jit(jax.vmap)": jax.vmap}
    sides = {side: lambda vmap=vmap: traced(vmap) for side, vmap in vmaps.items()}
    beside("tracing", workload.name, sides, clock=time.process_time)


@pytest.mark.parametrize("workload", [*WORKLOADS, *TRACED], ids=lambda workload: workload.name)
def test_retracing(beside: Callable, workload: Workload) -> None:
    """The same function again and again, on another number of lanes each time."""

    def traced(vmap: Callable) -> Callable:
        fun, sizes = fresh(workload, vmap), itertools.cycle([workload.args(workload.lanes + i) for i in (0, 1)])
        return lambda: jax.make_jaxpr(vmap(fun, workload.in_axes))(*next(sizes))

    sides = {"minibatch": traced(minibatch.vmap), "jit(jax.vmap)": traced(jax.vmap)}
    beside("retracing", workload.name, sides, clock=time.process_time)


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
