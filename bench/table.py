"""Measurements as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Measured(NamedTuple):
    """Median seconds of one quantity of one workload, for minibatch and the others by name."""

    quantity: str
    workload: str
    medians: dict[str, float]


def cells(measured: Iterable[Measured]) -> Iterator[tuple[str, ...]]:
    """The table's rows, the head first: minibatch's time, and its ratio to each of the others."""
    measured = list(measured)
    others = [name for name in dict.fromkeys(name for one in measured for name in one.medians) if name != "minibatch"]
    yield "", "workload", "minibatch", *(f"/ {name}" for name in others)
    for one in measured:
        ours = one.medians["minibatch"]
        ratios = (f"{ours / one.medians[name]:.3g}" if name in one.medians else "" for name in others)
        yield one.quantity, one.workload, f"{ours * 1e3:.3f} ms", *ratios


def lines(measured: Iterable[Measured]) -> Iterator[str]:
    """The table for a terminal."""
    rows = list(cells(measured))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left, right = list(zip(row, widths, strict=True))[:2], list(zip(row, widths, strict=True))[2:]
        yield "  ".join([*(cell.ljust(width) for cell, width in left), *(cell.rjust(width) for cell, width in right)])


def markdown(measured: Iterable[Measured]) -> Iterator[str]:
    """The table for a page."""
    head, *rows = cells(measured)
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * 2}{' ---: |' * (len(head) - 2)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
