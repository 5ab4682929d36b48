"""Which carries of a loop differ by lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def fixpoint(step: Callable[[tuple], tuple[Any, Sequence[int | None]]], start: Sequence[bool]) -> tuple[Any, tuple]:
    """A carry is batched if its start is, or if one step can make it so.

    `step` lifts the body of a loop for carries of which those flagged are batched, and says where the lanes are in what
    they become. Returns the lifted body for which nothing more becomes batched, and the flags.
    """
    batched = tuple(start)
    while True:
        body, bdims = step(batched)
        found = tuple(before or bdim is not None for before, bdim in zip(batched, bdims, strict=True))
        if found == batched:
            return body, batched
        batched = found
