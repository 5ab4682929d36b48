"""A `vmap` for JAX: an interpreter with its own batching rules, compiled."""

import os as _os

from minibatch import _jax, extend
from minibatch._api import Vmapped, explain, vmap
from minibatch._axes import if_array, if_batched
from minibatch._compile import clear_caches
from minibatch._divergence import divergence
from minibatch._errors import MissingRuleWarning

__all__ = ["MissingRuleWarning", "Vmapped", "clear_caches", "divergence", "explain", "extend", "if_array", "if_batched", "vmap"]

_jax.hide(_os.path.dirname(__file__) + _os.sep)
