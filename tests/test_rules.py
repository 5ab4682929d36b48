"""Every rule against both oracles: all bdims, sizes 0, 1 and 3, nested, and under derivatives."""

from __future__ import annotations

import importlib
import pkgutil

import cases
import pytest
from oracle import (
    Case,
    assert_derivatives_agree,
    assert_lanes_agree,
    assert_nested_agrees,
    bdims_of,
)

FAMILIES = {m.name: importlib.import_module(f"cases.{m.name}") for m in pkgutil.iter_modules(cases.__path__)}
CASES = [pytest.param(case, id=f"{name}:{case.name}") for name, family in FAMILIES.items() for case in family.CASES]
MAPPED = [
    pytest.param(case, bdims, id=f"{name}:{case.name} bdims={','.join(map(str, bdims))}".replace(" bdims", "-bdims"))
    for name, family in FAMILIES.items()
    for case in family.CASES
    for bdims in bdims_of(case)
]


@pytest.mark.parametrize(("case", "bdims"), MAPPED)
def test_lanes_agree(case: Case, bdims: tuple) -> None:
    assert_lanes_agree(case, bdims, 3)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_lanes_agree_when_there_are_few(case: Case, size: int) -> None:
    assert_lanes_agree(case, [0] * len(case.args), size, out_axes=-1 if size else 0)


@pytest.mark.parametrize("case", CASES)
def test_lanes_agree_when_nested(case: Case) -> None:
    assert_nested_agrees(case)


@pytest.mark.parametrize("case", [param for param in CASES if param.values[0].grad])
def test_derivatives_agree(case: Case) -> None:
    assert_derivatives_agree(case, [0] * len(case.args))
    if len(case.args) > 1:
        assert_derivatives_agree(case, [0] + [None] * (len(case.args) - 1))
