"""A loop whose lanes stop at different times, as every schedule takes it: what a step does to lanes of which some are live."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, lanes, together
from minibatch._interpreter import batch_jaxpr
from minibatch.schedule.borrow import borrow, choose, may_not_end, reads
from minibatch.schedule.live import NOTHING, Telling, taking_part
from minibatch.schedule.updates import looked_up, updated


class Loop(NamedTuple):
    """while pred(c): c = f(c).

    `changes` says of each carry whether a step changes it. Those that it does, the *state*, have their lanes in front; those
    that it hands through are consts like the others, in this order: those of the predicate, those of f, those carries. `bdims`
    says where each const has its lanes. A predicate [*p] is that of lanes mapped before, by JAX: each of its elements stops by
    itself, and p begins the shape of every carry.
    """

    cond: Any
    body: Any
    counts: tuple[int, int]
    changes: tuple[bool, ...]
    bdims: tuple[int | None, ...]

    @property
    def key(self) -> Hashable:
        """What tells this loop from others of the same body."""
        return self._replace(body=None)

    @property
    def careful(self) -> bool:
        """Whether a step must only see values that were meant for it, so that some lane must be live."""
        return may_not_end(self.body) or _jax.watches_nans()

    def step(self, axis: Axis, consts: Sequence[Any], live: Array, state: Sequence[Any]) -> tuple[Array, list]:
        """c = where(live, f(c), c); live &= pred(c). A lane that has stopped is never changed."""
        _, of_body, carry = self._given(consts, state)
        given, telling = [*of_body, *carry], NOTHING
        if not _jax.lanes_meet(self.body):
            if live.ndim == 1:
                telling = Telling(self._kept(), looked_up(self.body, given) if self.careful else (), self.careful)
            if self.careful:
                spared = {*telling.read, *(self.counts[1] + i for i in telling.kept)}
                used = [use and i not in spared for i, use in enumerate(reads(self.body))]
                given = borrow(axis, jnp.any(live, axis=range(1, live.ndim)), given, used)
        aval = _jax.open_jaxpr(self.cond).outvars[0].aval
        outs = batch_jaxpr(axis, *taking_part(axis, self.body, live, aval, given, telling))
        changed = [i for i, change in enumerate(self.changes) if change]
        new = [lanes(axis, outs[i]) for i in changed]
        state = [y if i in telling.kept else choose(live, x, y) for i, x, y in zip(changed, state, new, strict=True)]
        of_cond, _, carry = self._given(consts, state)
        goes_on = batch_jaxpr(axis, *taking_part(axis, self.cond, live, aval, [*of_cond, *carry]))
        return lax.bitwise_and(live, lanes(axis, *goes_on)), state

    def _kept(self) -> tuple[int, ...]:
        """The carries that are buffers, of which a step changes but a few elements."""
        origins = enumerate(updated(self.body))
        return tuple(i for i, origin in origins if self.changes[i] and origin == self.counts[1] + i)

    def carry(self, kept: Sequence[Any], state: Sequence[Any]) -> list:
        """All carries, of those handed through and the state."""
        rest, changed = iter(kept), iter(state)
        return [Batched(next(changed), 0) if change else next(rest) for change in self.changes]

    def _given(self, consts: Sequence[Any], state: Sequence[Any]) -> tuple[list, list, list]:
        own, both = self.counts[0], sum(self.counts)
        operands = together(consts, self.bdims)
        return operands[:own], operands[own:both], self.carry(operands[both:], state)


def count(live: Array) -> Array:
    """How many are. Added up as bytes, down columns, then as floats: few kernels to compile, and quick ones.

    Few columns are of two dimensions: a sum over more than 32 XLA would break up into several kernels.
    """
    few = live.size < 1 << 13
    columns = few or live.size >= 1 << 16  # between, XLA would start threads to add up bytes
    rows = min(16, max(1, -(-live.size // 32))) if columns else 1
    shape = (rows, -1, 32)[: 2 + few]
    live = live.reshape(-1)
    live = jnp.pad(live, (0, -live.size % (shape[0] * 32))).reshape(shape)
    return jnp.sum(jnp.sum(live, 0, dtype=np.uint8), dtype=np.float32)
