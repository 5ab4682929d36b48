"""The rules: importing this package enters them all in the table."""

from minibatch.rules import (
    callbacks,
    calls,
    collectives,
    contractions,
    control_flow,
    elementwise,
    fallback,
    indexing,
    linalg,
    random,
    reductions,
    shape,
    sharding,
    sorting,
    sparse,
    state,
    windows,
)

__all__ = [
    "callbacks", "calls", "collectives", "contractions", "control_flow", "elementwise", "fallback", "indexing", "linalg",
    "random", "reductions", "shape", "sharding", "sorting", "sparse", "state", "windows",
]  # fmt: skip
