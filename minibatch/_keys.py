"""Keys for what a program depends on: avals of what it takes, value or identity of what is part of it."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from minibatch import _jax


class Latest:
    """A cache of about the `capacity` entries used last, safe to use from several threads.

    When it is full the oldest entry goes that was not used since it was last looked at (second chance). What cannot be
    hashed, such as a treedef whose aux data are lists, is not kept.
    """

    def __init__(self, capacity: int) -> None:
        self._kept: dict[Hashable, list] = {}  # key -> [value, used]
        self._capacity = capacity
        self._lock = threading.RLock()  # an object may be freed, and its entry dropped, while another is put

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Any:
        """What was put under `key`, or None."""
        try:
            entry = self._kept.get(key)
        except TypeError:
            return None
        if entry is None:
            return None
        entry[1] = True
        return entry[0]

    def put(self, key: Hashable, value: Any) -> None:
        """Keep `value`."""
        try:
            hash(key)
        except TypeError:
            return
        with self._lock:
            self._kept.pop(key, None)
            while len(self._kept) >= self._capacity:
                oldest = next(iter(self._kept))
                entry = self._kept.pop(oldest, None)
                if entry and entry[1]:
                    self._kept[oldest] = [entry[0], False]
            self._kept[key] = [value, False]

    def drop(self, key: Hashable) -> None:
        """Forget what was put under `key`."""
        with self._lock:
            self._kept.pop(key, None)

    def keys(self) -> list:
        """The keys of all that is kept, the latest put last."""
        return list(self._kept)

    def values(self) -> list:
        """All that is kept."""
        return [value for value, _ in list(self._kept.values())]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()


class Same:
    """Equal to another `Same` of the same living object; holds the object weakly where it can."""

    def __init__(self, x: Any) -> None:
        self._hash = id(x)
        try:
            self._get = weakref.ref(x)
        except TypeError:
            self._get = lambda: x

    def __eq__(self, other: object) -> bool:
        x = self._get()
        return isinstance(other, Same) and x is not None and other._get() is x

    def __hash__(self) -> int:
        return self._hash


def leaf_keys(leaves: Sequence[Any], axes: Sequence[int | None], concrete: bool = False) -> tuple:
    """A key for each leaf of the arguments: its aval if the program takes it, else what it is.

    A program takes the mapped leaves and the shared jax.Arrays; with `concrete` only the mapped ones.
    """
    if not concrete and set(map(type, leaves)) == JUST_ARRAYS:
        return tuple([x.aval for x in leaves])
    return tuple([leaf_key(x, axis, concrete) for x, axis in zip(leaves, axes, strict=True)])


def leaf_key(x: Any, axis: int | None, concrete: bool) -> Hashable:
    """A key for one leaf, mapped on `axis`."""
    if axis is None and not (is_traced(x) and not concrete):
        return static_key(x)
    if isinstance(x, jax.Array):
        return x.aval
    if isinstance(x, np.ndarray):
        return np.ndarray, x.shape, x.dtype
    return _jax.aval_key(x)


def is_traced(x: Any) -> bool:
    """Whether a shared leaf is an argument of the program rather than a part of it. A tracer is a jax.Array."""
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or _jax.is_vmappable(x) or _jax.is_ref(x)


JUST_ARRAYS = {_jax.ArrayImpl}
SMALL = 64  # elements up to which a jax.Array that is part of a program is known by value


def static_key(x: Any, depth: int = 4) -> Hashable:
    """A key that is equal just where `x` may be taken for the same: by value where that can be told, else by identity.

    It holds no object of the user's alive. What an object known by identity holds is `_captured`'s to watch.
    """
    match x:
        case None | bool() | int() | str() | bytes():
            return type(x), x
        case float() | complex():
            return type(x), repr(x)
        case np.ndarray() | np.generic() if x.dtype != object:
            return type(x), np.shape(x), x.dtype.str, hashlib.blake2b(np.ascontiguousarray(x).tobytes()).digest()
        case jax.Array() if not _jax.is_tracer(x) and x.size <= SMALL and jax.numpy.isdtype(x.dtype, "numeric"):
            return type(x), x.aval, np.asarray(x).tobytes()
        case tuple() if depth:
            return type(x), tuple(static_key(y, depth - 1) for y in x)
        case types.MethodType():
            return type(x), static_key(x.__func__), static_key(x.__self__, depth - 1)
    params = getattr(type(x), "__dataclass_params__", None)
    if depth and params is not None and params.frozen and type(x).__hash__ is not None:
        fields = ((field.name, getattr(x, field.name)) for field in dataclasses.fields(x))
        return type(x), tuple((name, static_key(value, depth - 1)) for name, value in fields)
    return type(x), Same(x)
