"""For test suites: that a function maps well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minibatch._api import Vmapped, explain
from minibatch.report.findings import KINDS, SEVERITIES

__all__ = ["assert_batches"]


def assert_batches(
    fun: Callable, *args: Any, in_axes: Any = 0, forbid: Sequence[str] = tuple(KINDS), severity: str = "medium", **options: Any
) -> None:
    """Assert that batching `fun` for these arguments leaves nothing to mend.

    The function is traced, not run.

    Args:
      fun: the function of one lane, or what `vmap` made of it.
      *args: its arguments with their lanes; an array may be a `jax.ShapeDtypeStruct`.
      in_axes: as for `vmap`; ignored where `fun` is mapped already.
      forbid: ids or titles of findings (`"MB-LL01"` or `"ran lane by lane"`): all of them if not given.
      severity: "low", "medium" or "high": findings less severe are let pass.
      **options: as for `explain`.

    Raises:
      AssertionError: there is a finding; the report is the message.
      ValueError: `forbid` or `severity` names something that does not exist.

    Examples:
      >>> import jax.numpy as jnp
      >>> from minibatch.testing import assert_batches
      >>> assert_batches(lambda x: jnp.tanh(x).sum(), jnp.ones((8, 3)))
    """
    by_title = {kind.title: id for id, kind in KINDS.items()}
    forbidden = {by_title.get(each, each) for each in forbid}
    unknown = forbidden - {*KINDS}
    if unknown:
        raise ValueError(f"forbid={sorted(unknown)} names no finding; there are {', '.join(KINDS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity={severity!r} is none of {', '.join(SEVERITIES)}")
    report = fun.explain(*args) if isinstance(fun, Vmapped) else explain(fun, in_axes, **options)(*args)
    least = SEVERITIES.index(severity)
    found = [f for f in report.findings if f.id in forbidden and SEVERITIES.index(f.severity) >= least]
    if found:
        raise AssertionError(f"{', '.join(f'{f.id} ({f.title})' for f in found)}\n\n{report}")
