"""Branches whose number differs by lane: lanes of the same branch come together, and each branch runs for its own.

The lanes are laid out in chunks of `width`, each of one branch; a loop over the chunks runs for each its branch, a real one.
How many chunks there are is known beforehand, so that the loop is differentiated in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minibatch import _jax
from minibatch._batched import Array, Axis, Batched, apart, front, is_batched, lanes, together
from minibatch._interpreter import batch_jaxpr, remembered
from minibatch._jax import rebind
from minibatch.schedule.borrow import choose, hands_through, reads
from minibatch.schedule.choose import Plan


def partition(
    axis: Axis, eqn: Any, plan: Plan, index: Array, operands: Sequence[Any], others: dict[int, Array | None]
) -> dict[int, Array]:
    """[B] of branch numbers, and operands -> those outputs [B, *s] of which `others` has what lanes outside the plan get.

    It has None if no lane is outside.
    """
    branches = [eqn.params["branches"][number] for number in plan.numbers]
    wanted = tuple(others)
    read = tuple(any(each) for each in zip(*(_needed(branch, wanted) for branch in branches), strict=True))
    arrays, bdims = apart(Batched(front(x), 0) if is_batched(x) else x for x, r in zip(operands, read, strict=True) if r)
    given = [x for x in others.values() if x is not None]
    turn = _turns(plan, len(eqn.params["branches"]), index)

    def many(turn: Array, arrays: Sequence[Array], given: Sequence[Array]) -> list:
        avals = [jax.typeof(x) for x in arrays]
        avals = [a if d is None else a.update(shape=(plan.width, *a.shape[1:])) for a, d in zip(avals, bdims, strict=True)]
        lifted = [
            _branch(axis._replace(size=plan.width), branch, avals, bdims, read, wanted, recompute)
            for branch, recompute in zip(branches, plan.recompute, strict=True)
        ]
        return _in_chunks(eqn, plan.width, lifted, turn, arrays, [d is not None for d in bdims], given)

    def flat(turn: Array, *rest: Array) -> list:
        return many(turn, rest[: len(arrays)], rest[len(arrays) :])

    key = ("partition", axis, *branches[1:], plan, tuple(bdims), wanted, bool(given))
    run = remembered(branches[0], key, lambda: _jax.trace_jaxpr(flat, [jax.typeof(x) for x in (turn, *arrays, *given)]))
    return dict(zip(wanted, _jax.evaluate(run, [turn, *arrays, *given]), strict=True))


def _needed(branch: Any, wanted: Sequence[int]) -> list[bool]:
    """Whether each input of `branch` is read, or handed through into an output that is `wanted`."""
    handed = {origin for j, origin in enumerate(hands_through(branch)) if j in wanted}
    return [read or i in handed for i, read in enumerate(reads(branch))]


def _turns(plan: Plan, count: int, index: Array) -> Array:
    """[B]: which branch of the plan each lane takes, counted in the plan; one more than those there are for the rest."""
    turns = {number: turn for turn, number in enumerate(plan.numbers)}
    return look_up([turns.get(number, len(turns)) for number in range(count)], index)


def look_up(table: Sequence[int], index: Array) -> Array:
    """[B] of numbers -> what the table says of each."""
    index = lax.convert_element_type(index, np.int32)
    away = [(k, entry - k) for k, entry in enumerate(table) if entry != k]
    if len(away) > FEW:
        return rows(jnp.asarray(table, np.int32), index)
    return index + sum(jnp.where(index == k, np.int32(d), 0) for k, d in away) if away else index


FEW = 8


def rows(x: Array, numbers: Array) -> Array:
    """[B, *s], [N] -> [N, *s]: the rows of `x` with these numbers, all of which there are."""
    shape = np.shape(x)[1:]
    dims = lax.GatherDimensionNumbers(tuple(range(1, 1 + len(shape))), (0,), (0,))
    return lax.gather(x, lax.expand_dims(numbers, [1]), dims, (1, *shape), mode="promise_in_bounds")


class Chunks(NamedTuple):
    """Where lanes go: N chunks of C places each.

    `turn` [N] is the branch of each chunk (one too many where it has none), `lane` [N·C] who is in each place, and `home`
    [N·C] the same of those there for themselves: other places hold the first lane of the chunk, again, and are nobody's, -1.
    """

    turn: Array
    lane: Array
    home: Array


def _chunks(turn: Array, branches: int, width: int) -> Chunks:
    """[B] of branch numbers, one more than there are for lanes that take none -> the chunks."""
    (size,) = np.shape(turn)
    count = (size + branches * (width - 1)) // width  # as many as there are if each branch leaves its last chunk open
    home = _seated(branches, width, count, turn)
    seats = lax.reshape(home, [count, width])
    first = jnp.maximum(seats[:, :1], 0)
    turns = jnp.where(seats[:, 0] >= 0, rows(turn, first[:, 0]), branches)
    return Chunks(turns, lax.reshape(jnp.where(seats >= 0, seats, first), [count * width]), home)


def _seated(branches: int, width: int, count: int, turn: Array) -> Array:
    """[B] of branch numbers -> the lane in each place of `count` chunks, or -1.

    Lanes of a branch are in order, chunk by chunk.
    """
    ways = [partial(way, branches, width, count) for way in (one_by_one, at_once)]
    return lax.platform_dependent(turn, cpu=ways[0], default=ways[1])


def one_by_one(branches: int, width: int, count: int, turn: Array) -> Array:
    """`_seated`, as a CPU does it: a lane whose branch has no place left opens the next chunk."""
    opened, nowhere = branches + 1, count * width
    book = np.zeros(branches + 2, np.int32)  # the next place of each branch, of those that take none, and the next chunk
    book[branches] = nowhere

    def sit_down(lane: Array, carry: tuple) -> tuple:
        book, seats = carry
        number = lax.dynamic_slice(turn, [lane], [1])
        place = rows(book, number)
        opens = (number < branches) & (lax.rem(place, np.int32(width)) == 0)
        place = jnp.where(opens, book[opened] * width, place)
        book = put(book, number, jnp.where(number < branches, place + 1, nowhere))
        return book.at[opened].add(opens[0]), put(seats, place, lane[None])

    return lax.fori_loop(0, np.shape(turn)[0], sit_down, (_jax.vary_like(book, turn), _nobody(turn, nowhere)))[1]


def at_once(branches: int, width: int, count: int, turn: Array) -> Array:
    """`_seated`, by a sort."""
    (size,) = np.shape(turn)
    hot = lax.convert_element_type(turn == np.arange(branches, dtype=np.int32)[:, None], np.int32)
    lanes = lax.dot(hot, np.ones(size, np.int32))
    places = width * lax.div(lanes + (width - 1), np.int32(width))
    before = np.tri(branches + 1, branches, -1, dtype=bool)  # what branches come before each, and before none
    first, begins = (jnp.sum(jnp.where(before, each, 0), 1, dtype=np.int32) for each in (places, lanes))
    numbers = _jax.vary_like(lax.iota(np.int32, size), turn)
    by_branch = lax.sort(turn * size + numbers)
    branch, lane = lax.div(by_branch, np.int32(size)), lax.rem(by_branch, np.int32(size))
    place = jnp.where(branch < branches, rows(first - begins, branch) + numbers, count * width)
    return put(_nobody(turn, count * width), place, lane)


def _nobody(turn: Array, count: int) -> Array:
    return _jax.vary_like(np.full(count, -1, np.int32), turn)


def _in_chunks(
    eqn: Any, width: int, branches: Sequence[Any], turn: Array, arrays: Sequence[Array], batched: Sequence[bool],
    others: Sequence[Array],
) -> list:  # fmt: skip
    """The outputs of `branches`, each lifted to `width` lanes, put into `others` [B, *s] for lanes whose `turn` [B] it is."""
    size, chunks = np.shape(turn)[0], _chunks(turn, len(branches), width)

    def moved(x: Array) -> Array:
        there = rows(x, chunks.lane)
        if jnp.issubdtype(there.dtype, jnp.inexact):
            there = choose(chunks.home >= 0, _jax.detach(there), there)  # no derivative flows back to a lane by its copies
        return lax.reshape(there, [len(chunks.turn), width, *np.shape(x)[1:]])

    skip = _jax.trace_jaxpr(lambda *_: list(map(_jax.zeros, branches[0].out_avals)), branches[0].in_avals)

    def chunk(_: None, xs: tuple) -> tuple:
        turn, own = xs[0], iter(xs[1])
        given = [next(own) if b else x for x, b in zip(arrays, batched, strict=True)]
        return None, rebind(eqn, turn, *given, branches=(*branches, skip))

    _, outs = lax.scan(chunk, None, (chunks.turn, [moved(x) for x, b in zip(arrays, batched, strict=True) if b]))
    zeros = (_jax.zeros(aval.update(shape=(size, *aval.shape[1:]))) for aval in branches[0].out_avals)
    return [put(x, chunks.home, out) for x, out in zip(others or zeros, outs, strict=True)]


def put(x: Array, numbers: Array, new: Array) -> Array:
    """[B, *s], [N], [N, *s] -> [B, *s]: `x`, the rows with these numbers anew; one that is there at most once, others not."""
    shape = np.shape(x)[1:]
    dims = lax.ScatterDimensionNumbers(tuple(range(1, 2 + len(shape))), (), (0,))
    new = lax.reshape(new, [np.shape(numbers)[0], 1, *shape])
    return lax.scatter(x, lax.expand_dims(numbers, [1]), new, dims, unique_indices=True, mode="drop")


def _branch(
    axis: Axis, branch: Any, avals: Sequence[Any], bdims: Sequence[int | None], read: Sequence[bool], wanted: Sequence[int],
    recompute: bool,
) -> Any:  # fmt: skip
    """A branch on the lanes of one chunk: what is `read` in, of these `avals`, what is `wanted` out as [C, *s]."""

    def many(*arrays: Any) -> list:
        given = iter(together(arrays, bdims))
        outs = batch_jaxpr(axis, branch, [next(given) if r else None for r in read])
        return [lanes(axis, outs[j]) for j in wanted]

    return _jax.trace_jaxpr(jax.checkpoint(many, prevent_cse=False) if recompute else many, avals)
