"""Settings that every test shares."""

import pathlib
import sys
from collections.abc import Iterator

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of what is random or long is run; `--write-golden` takes the reports as they are now for good."""
    parser.addoption("--fuzz", type=int, default=0, help="check so many programs at random (tests/test_fuzz.py)")
    parser.addoption("--harnesses", choices=["some", "all"], default="some", help="how many (tests/test_harnesses.py)")
    parser.addoption("--write-golden", action="store_true", help="write the golden reports anew (tests/test_report.py)")
    parser.addoption("--whole", action="store_true", help="all cases (tests/test_modes.py, tests/test_orders.py)")


@pytest.fixture(scope="module")
def compiles_quickly() -> Iterator[None]:
    """Without XLA's costly passes, which are not what is tested; what was compiled so is forgotten."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
