"""One benchmark beside others: the sides take turns, and the ratios are printed at the end."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from table import Measured, lines
from workloads import WORKLOADS, Workload

MEASURED = pytest.StashKey[list[Measured]]()


def pytest_configure(config: pytest.Config) -> None:
    """Start with nothing measured."""
    config.stash[MEASURED] = []


@pytest.fixture(params=WORKLOADS, ids=lambda workload: workload.name)
def workload(request: pytest.FixtureRequest) -> Workload:
    """Each workload in turn."""
    return request.param


@pytest.fixture
def beside(benchmark: Any, workload: Workload, request: pytest.FixtureRequest) -> Callable:
    """Measure one callable beside others, by turns, so that the machine's noise meets all of them alike."""

    def measure(quantity: str, sides: dict[str, Callable], budget: float = 2.0) -> None:
        times: dict[str, list[float]] = {name: [] for name in sides}
        order = deque(sides.items())

        def turns() -> None:
            order.rotate()  # nobody is always the one that comes after the slow one
            for name, call in order:
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)

        benchmark.group = quantity
        if benchmark.disabled:
            return benchmark.pedantic(sides["minibatch"], setup=turns)
        once = sum(map(_second_call, sides.values()))
        benchmark.pedantic(sides["minibatch"], setup=turns, rounds=max(3, min(500, int(budget / once))))
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        benchmark.extra_info.update(workload=workload.name, medians=medians)
        request.config.stash[MEASURED].append(Measured(quantity, workload.name, medians))

    return measure


def _second_call(call: Callable) -> float:
    """Call twice: the first may compile, the second says how long it takes."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the ratios."""
    measured = terminalreporter.config.stash[MEASURED]
    if measured:
        terminalreporter.section("minibatch, and its time over theirs (below 1: minibatch takes less)")
        for line in lines(measured):
            terminalreporter.write_line(line)
