"""A `vmap` for JAX: an interpreter with its own batching rules, compiled."""

import os as _os

from minibatch import _jax, extend
from minibatch._api import Vmapped, check, explain, find_nonfinite, vmap
from minibatch._axes import if_array, if_batched
from minibatch._compile import clear_caches
from minibatch._divergence import divergence
from minibatch._errors import MissingRuleWarning

__all__ = [
    "MissingRuleWarning", "Vmapped", "check", "clear_caches", "divergence", "explain", "extend", "find_nonfinite", "if_array",
    "if_batched", "vmap",
]  # fmt: skip

_jax.hide(_os.path.dirname(__file__) + _os.sep)
