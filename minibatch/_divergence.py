"""What the caller says of loops and branches whose lanes diverge: the words for schedules, for one call or for a region."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from minibatch import _errors

LOOPS = ("lockstep", "compact", "refill")
BRANCHES = ("select", "partition")
STAGED = "while_in_stages"  # what a loop in stages is called in a program
STEPS = "steps"  # and in it the loops that take the steps


class Divergence(NamedTuple):
    """The schedule of loops and that of branches; "auto": whichever should take least time."""

    loops: str = "auto"
    branches: str = "auto"


mapping = jax.make_user_context(False)  # whether a function is being traced that will itself be mapped
_region = jax.make_user_context(Divergence())  # jax.jit traces anew where it changes


def chosen(words: Any) -> Divergence:
    """The schedules that the region under way, and then `words`, ask for: None, one word, or several.

    Raises:
      TypeError: something in `words` is no string.
      ValueError: it is none of the words.
    """
    found: Divergence = _region.value
    for word in () if words is None else (words,) if isinstance(words, str) else words:
        if word == "auto":
            found = Divergence()
        elif word in LOOPS:
            found = found._replace(loops=word)
        elif word in BRANCHES:
            found = found._replace(branches=word)
        else:
            raise _errors.no_schedule(word, LOOPS, BRANCHES)
    if mapping.value and found.loops == "auto":  # the map around schedules for its lanes; over both would gain little
        found = found._replace(loops="lockstep")
    return found


@contextlib.contextmanager
def divergence(*schedules: str) -> Iterator[None]:
    """Choose how loops and branches run whose lanes diverge, in every `vmap` called inside a `with` block.

    What `vmap(..., divergence=...)` says for itself goes before. Works as a decorator too. Results do not depend on it
    (but for rounding), time does: see [Lanes that diverge](divergence.md).

    Args:
      *schedules: at most one for loops, "lockstep", "compact" or "refill", and one for branches, "select" or "partition".
        What is left out stays as it is outside; "auto" lets the library choose both again.

    Raises:
      ValueError: a word is none of these.

    Examples:
      >>> import jax, jax.numpy as jnp, minibatch
      >>> @minibatch.vmap
      ... def halvings(x):
      ...     return jax.lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))[1]
      >>> with minibatch.divergence("compact"):
      ...     halvings(jnp.array([1.0, 8.0, 1024.0]))
      Array([ 0,  3, 10], dtype=int32, weak_type=True)
    """
    with _region(chosen(schedules)):
        yield
