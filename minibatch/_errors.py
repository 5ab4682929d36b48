"""The exceptions and warnings, and the functions that word them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from minibatch import _jax


class MissingRuleWarning(UserWarning):
    """A primitive has no batching rule: it runs lane by lane, in a loop.

    Turn it into an error with `warnings.simplefilter("error", minibatch.MissingRuleWarning)`, or register a rule with
    `minibatch.extend.rule`.
    """


@contextlib.contextmanager
def noting(eqn: Any) -> Iterator[None]:
    """Add to an error raised by a rule which primitive it was and the user's line that used it."""
    try:
        yield
    except Exception as error:
        line = _jax.user_line(eqn)
        if line and not any(note.startswith("while batching") for note in getattr(error, "__notes__", ())):
            error.add_note(f"while batching {eqn.primitive.name} from {line}")
        raise


def name_of(fun: Any) -> str:
    """What to call `fun`."""
    return getattr(fun, "__name__", None) or type(fun).__name__
