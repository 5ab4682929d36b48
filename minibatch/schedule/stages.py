"""A loop whose lanes stop at different times, in stages: first all lanes, then those left over, in windows.

Lanes that have not stopped are gathered into an array of fewer rows, the *window*, stepped there, and put back where they
belong. While more are left than the window has rows, one that stops leaves its row to one that waits. When to stop
stepping and move is decided as the program runs: once the rows that stepped for nothing have cost as much as moving does.

Each stage is one more copy of the body to compile. If there is but one, a window, all lanes wait for it from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis
from minibatch._divergence import STAGED, STEPS
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


class Waiting(NamedTuple):
    """Who is to have a row: which of [Q] are to have one, none of them if `left` is 0, and what lane each is, or its number."""

    waits: Array
    left: Array | int
    lane: Array | None


def staged(
    axis: Axis, loop: Loop, stages: Sequence[Stage], consts: Sequence[Array], live: Array, state: Sequence[Array]
) -> Sequence[Array]:
    """The state once all lanes have stopped."""
    key = ("staged", loop.key, axis, *stages)
    return remembered(loop.body, key, lambda: _program(axis, loop, stages))(consts, live, list(state))


def _program(axis: Axis, loop: Loop, stages: Sequence[Stage]) -> Any:
    """All stages as one function, whose name says in a program what it is."""

    def while_in_stages(consts: list, live: Array, state: list) -> list:
        left, windows = Waiting(live, live.size, None), list(stages)
        if windows[0].width == axis.size:
            first = windows.pop(0)
            rows = Rows(count(live) if loop.careful else _like(live, np.float32(axis.size)), live, state)
            rows = _steps(axis, loop, consts, rows, lambda: first.leaves, first.patience)
            state, left = rows.state, Waiting(rows.live, rows.alive, None)
        for stage in windows:
            left, state = _windows(axis, loop, stage, consts, left, state)
        return state

    while_in_stages.__name__ = STAGED
    return jax.jit(while_in_stages)


def _steps(
    axis: Axis, loop: Loop, consts: Sequence[Array], rows: Rows, leaves: Callable[[], Any], patience: float
) -> Rows:
    """Step all rows until at most as many are live as `leaves` says, and moving those pays."""

    def go(carry: tuple) -> Array:
        (alive, *_), idle = carry
        return (alive > 0) & ((alive > leaves()) | (idle < patience * axis.size))

    def step(carry: tuple) -> tuple:
        (_, live, state), idle = carry
        live, state = loop.step(axis, consts, live, state)
        alive = count(live)
        return Rows(alive, live, state), idle + (axis.size - alive)

    with jax.named_scope(STEPS):
        return lax.while_loop(go, step, (rows, _like(rows.live, np.float32(0))))[0]


def _windows(
    axis: Axis, loop: Loop, stage: Stage, consts: Sequence[Array], queue: Waiting, state: list
) -> tuple[Waiting, list]:
    """Step those in the queue, in a window, round after round: who is left in it, and the state.

    The state is that of all lanes; those in the window are put back after each round.
    """
    many, within = queue.waits.size, axis._replace(size=stage.width)

    def lanes(place: Array) -> Array:
        """[W] of places in the queue -> whose they are; one too many if nobody's."""
        return place if queue.lane is None else jnp.where(place < many, _rows(queue.lane, place), axis.size)

    def go(carry: tuple) -> Array:
        asked, alive, *_ = carry
        return ((asked < many) | (alive > stage.leaves)) & (queue.left > 0)

    def round_(carry: tuple) -> tuple:
        asked, alive, place, live, state = carry
        asked, alive, place = _seated(queue.waits, asked, alive, place, live)
        live, lane = place < many, lanes(place)
        mine = [x if d is None else _rows(x, lane) for x, d in zip(consts, loop.bdims, strict=True)]
        rows = Rows(alive, live, [_rows(x, lane) for x in state])

        def leaves() -> Array:
            return jnp.where(asked < many, np.float32(stage.width - 1), np.float32(stage.leaves))

        alive, live, new = _steps(within, loop, mine, rows, leaves, stage.patience)
        return asked, alive, place, live, [_put(x, lane, y) for x, y in zip(state, new, strict=True)]

    empty = _like(queue.waits, np.full(stage.width, many, np.int32))
    start = _like(queue.waits, np.int32(0)), _like(queue.waits, np.float32(0)), empty, empty < 0, state
    _, alive, place, live, state = lax.while_loop(go, round_, start)
    return Waiting(live, alive, lanes(place)), state


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
# A CPU asks one after the other, in a loop of scalars: XLA compiles it, and it then runs, several times faster than
# cumulative sums.


def _seated(waits: Array, asked: Array, alive: Array, place: Array, live: Array) -> tuple[Array, Array, Array]:
    """How many have been asked, how many rows are taken, and the place in the queue of whoever has each row [W].

    Rows that are not `live`, as all but `alive` are, go to the next who waits, in order; that of nobody is one too many.
    """
    nobody = waits.size

    def one_by_one(waits: Array, asked: Array, alive: Array, place: Array, live: Array) -> tuple:
        def ask(carry: tuple) -> tuple:
            row, asked, alive, place = carry
            asks = ~live[row] & (asked < nobody)
            comes = asks & _rows(waits, asked)
            place = _put(place, row, jnp.where(live[row], place[row], jnp.where(comes, asked, nobody)))
            return row + jnp.where(asks & ~comes, 0, 1), asked + asks, alive + comes, place

        start = _like(live, np.int32(0)), asked, alive, place
        return lax.while_loop(lambda carry: carry[0] < live.size, ask, start)[1:]

    return lax.platform_dependent(waits, asked, alive, place, live, cpu=one_by_one, default=at_once)


def at_once(waits: Array, asked: Array, alive: Array, place: Array, live: Array) -> tuple[Array, Array, Array]:
    """`_seated`, by cumulative sums."""
    nobody, free = waits.size, ~live
    numbers = _like(waits, np.arange(nobody, dtype=np.int32))
    ahead = waits & (numbers >= asked)
    turn, rows = jnp.cumsum(ahead, dtype=np.int32) - 1, jnp.cumsum(free, dtype=np.int32)
    next_ = _put(_like(waits, np.full(live.size, nobody, np.int32)), jnp.where(ahead, turn, live.size), numbers)
    last = jnp.where(rows[-1] > 0, jnp.minimum(_rows(next_, rows[-1] - 1) + 1, nobody), asked)
    place = jnp.where(live, place, _rows(next_, rows - 1))
    return last, count(place < nobody), place
