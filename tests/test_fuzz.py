"""Programs at random: a few, always the same, and with `--fuzz=20000` as many as one has time for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fuzz
import jax
import pytest
from hypothesis import HealthCheck, given, seed, settings

EACH = 25  # programs in a test, after which what was compiled is forgotten


def check_programs(check: Callable, numbers: range, steps: int, grad: bool) -> None:
    """Check the programs of these numbers.

    Each is drawn by itself (the first of two examples is the empty program): in one long run hypothesis would try many
    variations of a few.
    """
    for number in numbers:

        @seed(number)
        @settings(max_examples=2, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(fuzz.programs(steps, grad))
        def checked(program: fuzz.Program) -> None:
            if program.body.steps:
                check(program)

        checked()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    soak = metafunc.config.getoption("--fuzz", default=0)
    starts = range(0, soak or EACH, EACH)
    metafunc.parametrize("numbers", [range(i, i + EACH) for i in starts], ids=[f"{i}-{i + EACH - 1}" for i in starts])


@pytest.fixture(autouse=True)
def forgets_what_it_compiled() -> Iterator[None]:
    yield
    jax.clear_caches()


def test_programs_agree(numbers: range) -> None:
    check_programs(fuzz.check, numbers, 40, grad=False)


def test_derivatives_of_programs_agree(numbers: range) -> None:
    check_programs(fuzz.check_derivatives, numbers[: EACH // 2], 25, grad=True)
