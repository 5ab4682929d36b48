"""What a call costs once compiled, on many lanes and on few."""

from collections.abc import Callable

import jax
import pytest
from workloads import EMITTED, WORKLOADS, Workload

import minibatch


@pytest.mark.parametrize("workload", [*WORKLOADS, *EMITTED], ids=lambda workload: workload.name)
def test_run(beside: Callable, workload: Workload) -> None:
    """Many lanes."""
    called(beside, "run", workload, workload.lanes)


def test_dispatch(beside: Callable, workload: Workload) -> None:
    """One lane: mostly what a call costs by itself."""
    called(beside, "dispatch", workload, 1)


def called(beside: Callable, quantity: str, workload: Workload, lanes: int) -> None:
    """Measure a call of the mapped function: compiled, and as the user writes it."""
    args = workload.args(lanes)
    sides = {
        "minibatch": minibatch.vmap(workload.fun(minibatch.vmap), workload.in_axes),
        "jit(jax.vmap)": jax.jit(jax.vmap(workload.fun(jax.vmap), workload.in_axes)),
        "jax.vmap": jax.vmap(workload.fun(jax.vmap), workload.in_axes),
    }
    calls = {name: lambda mapped=mapped: jax.block_until_ready(mapped(*args)) for name, mapped in sides.items()}
    beside(quantity, workload.name, calls)
