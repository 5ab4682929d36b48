"""What lanes that diverge cost, by the default; all by schedule are in divergence.py and divergence_branches.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from divergence import LOOPS
from divergence_branches import WORKLOADS, total
from workloads import Workload

import minibatch

OF_LOOPS = {"geometric trips, 8x8 products", "uniform trips, 8x8 products", "Newton from far", "sphere tracing"}
OF_BRANCHES = {"1% take a loop", "100% take a loop", "six branches", "cheap branches"}
PROGRAMS = [each for each in LOOPS if each.name in OF_LOOPS], [each for each in WORKLOADS if each.name in OF_BRANCHES]


def each(workloads: list[Workload]) -> Any:
    """A test of every workload."""
    return pytest.mark.parametrize("workload", workloads, ids=lambda workload: workload.name)


@each(PROGRAMS[0] + PROGRAMS[1])
def test_run(beside: Callable, workload: Workload) -> None:
    """The program, compiled."""
    measured(beside, "diverging", workload, lambda fun, vmap: vmap(fun, workload.in_axes))


@each(PROGRAMS[1])
def test_gradient_of_all(beside: Callable, workload: Workload) -> None:
    """grad(vmap(f)): what all lanes make together, differentiated."""
    measured(beside, "grad(vmap)", workload, lambda fun, vmap: total(vmap(fun, workload.in_axes), workload))


@each(PROGRAMS[1])
def test_gradient_of_each(beside: Callable, workload: Workload) -> None:
    """vmap(grad(f)): each lane's own."""
    measured(beside, "vmap(grad)", workload, lambda fun, vmap: vmap(total(fun, workload), workload.in_axes))


def measured(beside: Callable, quantity: str, workload: Workload, mapped: Callable) -> None:
    """Measure a program that `mapped` makes of a function and a `vmap`."""
    args = workload.args(workload.lanes)
    sides = {"minibatch": minibatch.vmap, "jit(jax.vmap)": jax.vmap}
    programs = {name: jax.jit(mapped(workload.fun(vmap), vmap)).lower(*args).compile() for name, vmap in sides.items()}
    calls = {name: lambda program=program: jax.block_until_ready(program(*args)) for name, program in programs.items()}
    beside(quantity, workload.name, calls)
