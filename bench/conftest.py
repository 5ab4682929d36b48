"""One benchmark beside others: the sides take turns, and the ratios are printed at the end."""

from __future__ import annotations

import itertools
import statistics
import time
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
def beside(benchmark: Any, request: pytest.FixtureRequest) -> Callable:
    """Measure one callable beside others, by turns, so that the machine's noise meets all of them alike."""

    def measure(
        quantity: str,
        name: str,
        sides: dict[str, Callable],
        budget: float = 2.0,
        repeat: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`repeat`: how often each is called in a turn; what is reported is one call, by this `clock`."""
        times: dict[str, list[float]] = {name: [] for name in sides}
        orders = itertools.cycle(itertools.permutations(sides.items()))  # nobody always comes after the slow one

        def turns() -> None:
            for side, call in next(orders):
                start = clock()
                for _ in range(repeat):
                    call()
                times[side].append((clock() - start) / repeat)

        benchmark.group = quantity
        if benchmark.disabled:
            return benchmark.pedantic(sides["minibatch"], setup=turns)
        once = sum(map(_warm_call, sides.values()))
        benchmark.pedantic(sides["minibatch"], setup=turns, rounds=max(3, min(500, int(budget / once / repeat))))
        medians = {side: statistics.median(taken) for side, taken in times.items()}
        benchmark.extra_info.update(workload=name, medians=medians)
        request.config.stash[MEASURED].append(Measured(quantity, name, medians))

    return measure


@pytest.fixture
def recorded(benchmark: Any, request: pytest.FixtureRequest) -> Callable:
    """Take down what was measured elsewhere, in seconds."""

    def record(quantity: str, name: str, medians: dict[str, float]) -> None:
        benchmark.group = quantity
        benchmark.pedantic(lambda: None)
        benchmark.extra_info.update(workload=name, medians=medians)
        request.config.stash[MEASURED].append(Measured(quantity, name, medians))

    return record


def _warm_call(call: Callable) -> float:
    """Call a few times, of which the first may trace, compile, and see that it comes again; the last says how long it takes."""
    for _ in range(4):
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
