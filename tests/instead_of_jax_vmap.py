"""A pytest plugin: `minibatch.vmap` in the place of `jax.vmap`, to run what others wrote for theirs.

    PYTHONPATH=.:tests python -m pytest -p instead_of_jax_vmap …/jax/tests/batching_test.py

JAX's own calls, from inside `jax.jacfwd`, `jax.numpy.vectorize` and the like, are left alone unless DEEP=1 is set. The
number of calls that were replaced is reported at the end: a suite that has none says nothing.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import jax

import minibatch

theirs = jax.vmap
replaced = 0


@functools.wraps(theirs)
def vmap(*args: Any, **kwargs: Any) -> Any:
    """Ours for whoever writes `jax.vmap`; theirs for our own package and, unless DEEP, for JAX's."""
    global replaced
    caller = sys._getframe(1).f_globals.get("__name__", "")
    inside = caller.partition(".")[0] == "jax" and "test_util" not in caller and os.environ.get("DEEP") != "1"
    if inside or caller.partition(".")[0] == "minibatch":
        return theirs(*args, **kwargs)
    replaced += 1
    return minibatch.vmap(*args, **kwargs)


for module in list(sys.modules.values()):
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if value is theirs and module.__name__ != __name__:
            setattr(module, name, vmap)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how often."""
    terminalreporter.write_line(f"{replaced} calls of jax.vmap were calls of minibatch.vmap")
