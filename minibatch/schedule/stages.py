"""A loop whose lanes stop at different times, in stages: first all lanes, then those left over, in windows.

Lanes that have not stopped are gathered into an array of fewer rows, the *window*, stepped there, and put back where they
belong. While more are left than the window has rows, one that stops leaves its row to one that waits. When to stop
stepping and move is decided as the program runs: once the rows that stepped for nothing have cost as much as moving does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis
from minibatch._divergence import STAGED
from minibatch._interpreter import remembered
from minibatch.schedule.loop import Loop, count


class Stage(NamedTuple):
    """Step in a window of `width` rows until at most `leaves` lanes are left, and until moving pays.

    `patience`: how many steps for nothing of a row are worth moving one.
    """

    width: int
    leaves: int
    patience: float


class Rows(NamedTuple):
    """The rows of an array of lanes: which are `live` [W], how many those are, and their state."""

    alive: Array
    live: Array
    state: list


def staged(
    axis: Axis, loop: Loop, stages: Sequence[Stage], consts: Sequence[Array], live: Array, state: Sequence[Array]
) -> Sequence[Array]:
    """The state once all lanes have stopped. The first stage has a row for each lane."""
    key = ("staged", loop.key, axis, *stages)
    return remembered(loop.body, key, lambda: _program(axis, loop, stages))(consts, live, list(state))


def _program(axis: Axis, loop: Loop, stages: Sequence[Stage]) -> Any:
    """All stages as one function, whose name says in a program what it is."""

    def while_in_stages(consts: list, live: Array, state: list) -> list:
        rows = _steps(axis, loop, consts, Rows(count(live), live, state), stages[0].leaves, stages[0].patience)
        lane = jnp.arange(axis.size, dtype=np.int32)
        for before, stage in itertools.pairwise(stages):
            queue = _picked(lane, rows, before.leaves)
            lane, rows = _windows(axis, loop, stage, consts, queue, rows.alive, rows.state)
        return rows.state

    while_in_stages.__name__ = STAGED
    return jax.jit(while_in_stages)


def _steps(axis: Axis, loop: Loop, consts: Sequence[Array], rows: Rows, leaves: int | Array, patience: float) -> Rows:
    """Step all rows until at most `leaves` are live, and moving those pays."""

    def go(carry: tuple) -> Array:
        (alive, *_), idle = carry
        return (alive > 0) & ((alive > leaves) | (idle < patience * axis.size))

    def step(carry: tuple) -> tuple:
        (_, live, state), idle = carry
        live, state = loop.step(axis, consts, live, state)
        alive = count(live)
        return Rows(alive, live, state), idle + (axis.size - alive).astype(np.float32)

    return lax.while_loop(go, step, (rows, _like(rows.live, np.float32(0))))[0]


def _windows(
    axis: Axis, loop: Loop, stage: Stage, consts: Sequence[Array], queue: Array, left: Array, state: list
) -> tuple[Array, Rows]:
    """Step the `left` lanes in the queue, in a window, round after round: the lanes in it at the end, and their rows.

    The state is that of all lanes; those in the window are put back after each round.
    """
    nobody, within = axis.size, axis._replace(size=stage.width)

    def go(carry: tuple) -> Array:
        begun, alive, *_ = carry
        return (begun < left) | (alive > stage.leaves)

    def round_(carry: tuple) -> tuple:
        before, alive, lane, live, state = carry
        lane, begun = _filled(lane, live, queue, before, left, nobody)
        mine = [x if d is None else _rows(x, lane) for x, d in zip(consts, loop.bdims, strict=True)]
        rows = Rows(alive + begun - before, lane < nobody, [_rows(x, lane) for x in state])
        leaves = jnp.where(begun < left, stage.width - 1, stage.leaves)
        alive, live, new = _steps(within, loop, mine, rows, leaves, stage.patience)
        return begun, alive, lane, live, [_put(x, lane, y) for x, y in zip(state, new, strict=True)]

    zero, empty = _like(queue, np.int32(0)), _like(queue, np.full(stage.width, nobody, np.int32))
    _, alive, lane, live, state = lax.while_loop(go, round_, (zero, zero, empty, empty < 0, state))
    return lane, Rows(alive, live, state)


def _like(y: Array, x: Any) -> Array:
    """`x`, varying over the same manual mesh axes as `y`."""
    return _jax.vary_like(jnp.asarray(x), y)


def _rows(x: Array, lane: Array) -> Array:
    """[B, *s] -> [W, *s]: the rows of these lanes; that of the last for a number too large."""
    return x.at[lane].get(mode="clip", wrap_negative_indices=False)


def _put(x: Array, lane: Array, rows: Array) -> Array:
    """[B, *s], with these rows in the place of those of these lanes; nothing for a number too large."""
    return x.at[lane].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


# --- who is next ------------------------------------------------------------------------------------------------------
#
# A CPU runs these as loops of scalars, which XLA compiles, and which then run, several times faster than cumulative sums.


def _picked(lane: Array, rows: Rows, most: int) -> Array:
    """[most] of the lanes in the rows that are live, in order; after them anything."""

    def one_by_one(lane: Array, live: Array, alive: Array) -> Array:
        def note(carry: tuple) -> tuple:
            i, found, queue = carry
            return i + 1, found + live[i], _put(queue, found, lane[i])

        zero = _like(live, np.int32(0))
        return lax.while_loop(lambda c: c[1] < alive, note, (zero, zero, _like(live, np.zeros(most, np.int32))))[2]

    def at_once(lane: Array, live: Array, alive: Array) -> Array:
        place = jnp.where(live, jnp.cumsum(live, dtype=np.int32) - 1, most)
        return _put(_like(live, np.zeros(most, np.int32)), place, lane)

    return lax.platform_dependent(lane, rows.live, rows.alive, cpu=one_by_one, default=at_once)


def _filled(lane: Array, live: Array, queue: Array, begun: Array, left: Array, nobody: int) -> tuple[Array, Array]:
    """The lanes in the window, where those that are not live have left their rows to the next in the queue, if any."""

    def one_by_one(lane: Array, live: Array, queue: Array, begun: Array, left: Array) -> tuple:
        def seat(i: Array, found: tuple) -> tuple:
            lane, begun = found
            next_ = jnp.where(begun < left, _rows(queue, begun), nobody)
            return _put(lane, i, jnp.where(live[i], lane[i], next_)), begun + (~live[i] & (begun < left))

        return lax.fori_loop(0, lane.size, seat, (lane, begun))

    def at_once(lane: Array, live: Array, queue: Array, begun: Array, left: Array) -> tuple:
        turn = begun + jnp.cumsum(~live, dtype=np.int32) - 1
        next_ = jnp.where(turn < left, _rows(queue, turn), nobody)
        return jnp.where(live, lane, next_), jnp.minimum(begun + lane.size - count(live), left)

    return lax.platform_dependent(lane, live, queue, begun, left, cpu=one_by_one, default=at_once)
