"""Programs at random: a few, always the same, and with `--fuzz=20000` as many as one has time for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fuzz
import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

pytestmark = pytest.mark.usefixtures("compiles_quickly")
EACH = 25  # programs in a test, after which what was compiled is forgotten


def drawn(number: int, steps: int, grad: bool) -> fuzz.Program:
    """The program of this number, drawn by itself: in one long run hypothesis would try many variations of a few."""
    found = []

    @seed(number)
    @settings(max_examples=2, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(fuzz.programs(steps, grad))
    def record(program: fuzz.Program) -> None:
        found.append(program)

    record()
    return found[-1]  # the first example is the empty program


def check_programs(check: Callable, numbers: range, steps: int, grad: bool) -> None:
    """Check the programs of these numbers. One that fails is made smaller and printed as a program to run."""
    failures = []
    for number in numbers:
        program = drawn(number, steps, grad)
        try:
            check(program)
        except Exception as error:
            small = fuzz.shrunk(program, lambda candidate, error=error: failing(check, candidate, type(error)))
            error.add_note(f"program {number}:\n\nfrom fuzz import *\n\n{check.__name__}({small})")
            failures.append(error)
    if failures:
        raise failures[0] if len(failures) == 1 else ExceptionGroup(f"{len(failures)} programs", failures)


def failing(check: Callable, program: fuzz.Program, kind: type) -> bool:
    """Whether it fails in this way."""
    try:
        check(program)
    except Exception as error:
        return type(error) is kind
    return False


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


def test_reports_of_programs(numbers: range) -> None:
    check_programs(fuzz.check_reports, numbers[:1], 25, grad=False)


def test_derivatives_of_programs_agree(numbers: range) -> None:
    check_programs(fuzz.check_derivatives, numbers[: EACH // 2], 25, grad=True)
