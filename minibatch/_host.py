"""What the host is called with: functions of all lanes, made of one that knows a single lane."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from minibatch._jax import is_key, rebind

# Each is equal to another just where its parts are, so that a program compiled with one serves for the other.


@dataclasses.dataclass(frozen=True)
class EachLane:
    """A host function of all lanes: `callback` for one lane after another, results stacked.

    Arguments that are `mapped` come as [B, *s], the others as every lane sees them.
    """

    callback: Any
    mapped: tuple[bool, ...]
    avals: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Sequence[Any]:
        columns = [np.asarray(x) if mapped and not is_key(x) else x for x, mapped in zip(args, self.mapped, strict=True)]
        count = next(len(x) for x, mapped in zip(columns, self.mapped, strict=True) if mapped)
        rows = [self.callback(*self.lane(columns, i)) for i in range(count)]
        return [np.stack(column) for column in zip(*rows, strict=True)] if rows else [empty(aval) for aval in self.avals]

    def lane(self, columns: Sequence[Any], i: int) -> list:
        """The arguments of lane `i`, as arrays of the kind that JAX itself hands to a callback."""
        return [jax.device_put(x[i]) if mapped else x for x, mapped in zip(columns, self.mapped, strict=True)]


def empty(aval: Any) -> np.ndarray:
    """No lane of `aval`."""
    return np.zeros((0, *aval.shape), aval.dtype)


@dataclasses.dataclass(frozen=True)
class IfLive:
    """A host function that is told first whether to run at all; where not, its results are zeros of `avals`."""

    callback: Any
    avals: tuple[Any, ...] = ()

    def __call__(self, live: Any, *args: Any) -> Sequence[Any]:
        return self.callback(*args) if live else [np.zeros(aval.shape, aval.dtype) for aval in self.avals]


@dataclasses.dataclass(frozen=True)
class Again:
    """A host function that does on the host what `eqn` does."""

    eqn: Any

    def __call__(self, *args: Any) -> list:
        return rebind(self.eqn, *args)
