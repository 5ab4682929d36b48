"""Collectives over the mapped axis, against what each means written out in NumPy, and against jax.vmap where it can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel  # no public name yet

import minibatch
from minibatch import _jax
from minibatch._registry import RULES

GROUPS = [[0, 2], [3, 1]]
ROWS = np.asarray([[0, 2], [3, 1], [0, 2], [3, 1]])  # the group of each lane
PLACE = np.asarray([0, 1, 1, 0])  # its place there
N = 4


def lanes(f: Callable) -> Callable:
    """What every lane gets, from `f(x, lane)` of all the lanes."""
    return lambda x: np.stack([f(x, i) for i in range(N)])


def exchanged(x: np.ndarray, lane: int, members: Any) -> np.ndarray:
    """Piece number (place of `lane`) of each member's first dim, along the last."""
    place = list(members).index(lane)
    return np.concatenate([np.split(x[j], len(members))[place] for j in members], -1)


DYNAMIC = {} if jax.__version_info__ < (0, 11) else {  # before, a source must be an int
    "pbroadcast from where all say": (lambda v: lax.pbroadcast(v, "i", jnp.int32(2)), lanes(lambda x, i: x[2])),
    "pbroadcast from where each says": (
        lambda v: lax.pbroadcast(v, "i", (lax.axis_index("i") + 1) % N),
        lambda x: np.roll(x, -1, 0),
    ),
}  # fmt: skip
ONE_AXIS = {  # name: of one lane [4, 3], of all lanes [4, 4, 3]
    "psum": (lambda v: lax.psum(v, "i"), lanes(lambda x, i: x.sum(0))),
    "psum in groups": (lambda v: lax.psum(v, "i", axis_index_groups=GROUPS), lanes(lambda x, i: x[ROWS[i]].sum(0))),
    "pmean": (lambda v: lax.pmean(v, "i"), lanes(lambda x, i: x.mean(0))),
    "pmean in groups": (lambda v: lax.pmean(v, "i", axis_index_groups=GROUPS), lanes(lambda x, i: x[ROWS[i]].mean(0))),
    "pmax": (lambda v: lax.pmax(v, "i"), lanes(lambda x, i: x.max(0))),
    "pmin in groups": (lambda v: lax.pmin(v, "i", axis_index_groups=GROUPS), lanes(lambda x, i: x[ROWS[i]].min(0))),
    "all_gather": (lambda v: lax.all_gather(v, "i", axis=1), lanes(lambda x, i: x.swapaxes(0, 1))),
    "all_gather tiled": (lambda v: lax.all_gather(v, "i", axis=1, tiled=True), lanes(lambda x, i: np.concatenate(x, 1))),
    "all_gather in groups": (
        lambda v: lax.all_gather(v, "i", axis=1, axis_index_groups=GROUPS),
        lanes(lambda x, i: x[ROWS[i]].swapaxes(0, 1)),
    ),
    "all_gather tiled in groups": (
        lambda v: lax.all_gather(v, "i", tiled=True, axis_index_groups=GROUPS),
        lanes(lambda x, i: np.concatenate(x[ROWS[i]])),
    ),
    "all_to_all": (lambda v: lax.all_to_all(v, "i", 0, 1), lanes(lambda x, i: x[:, i].T)),
    "all_to_all back": (lambda v: lax.all_to_all(v.T, "i", 1, 0), lanes(lambda x, i: x[:, i])),
    "all_to_all tiled": (lambda v: lax.all_to_all(v, "i", 0, 1, tiled=True), lanes(lambda x, i: exchanged(x, i, range(N)))),
    "all_to_all tiled in groups": (
        lambda v: lax.all_to_all(v, "i", 0, 1, tiled=True, axis_index_groups=GROUPS),
        lanes(lambda x, i: exchanged(x, i, ROWS[i])),
    ),
    "ppermute": (lambda v: lax.ppermute(v, "i", [(k, (k + 1) % N) for k in range(N)]), lambda x: np.roll(x, 1, 0)),
    "ppermute of some": (
        lambda v: lax.ppermute(v, "i", [(0, 2), (3, 1)]),
        lambda x: np.stack([0 * x[0], x[3], x[0], 0 * x[0]]),
    ),
    "pshuffle": (lambda v: lax.pshuffle(v, "i", [1, 0, 3, 2]), lambda x: x[[1, 0, 3, 2]]),
    "pbroadcast": (lambda v: lax.pbroadcast(v, "i", 1), lanes(lambda x, i: x[1])),
    "psum_scatter": (lambda v: lax.psum_scatter(v, "i"), lambda x: x.sum(0)),
    "psum_scatter tiled": (
        lambda v: lax.psum_scatter(v, "i", tiled=True, axis_index_groups=GROUPS),
        lanes(lambda x, i: np.split(x[ROWS[i]].sum(0), 2)[PLACE[i]]),
    ),
    "axis_index": (lambda v: v * lax.axis_index("i") + lax.axis_size("i"), lanes(lambda x, i: x[i] * i + N)),
    **DYNAMIC,
    "psum of a constant": (lambda v: v * lax.psum(1, "i"), lambda x: x * N),
}


@pytest.mark.parametrize("name", ONE_AXIS)
@pytest.mark.parametrize("mapped", [True, False])
def test_collective_is_its_definition(name: str, mapped: bool) -> None:
    fun, meaning = ONE_AXIS[name]
    x = np.random.default_rng(0).normal(size=(N, N, 3)).astype("f")
    if not mapped:
        x[:] = x[:1]
    found = minibatch.vmap(fun, 1 if mapped else None, axis_name="i", axis_size=N)(x.swapaxes(0, 1) if mapped else x[0])
    np.testing.assert_allclose(found, meaning(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ONE_AXIS)
def test_collective_inside_a_map_over_another_axis(name: str) -> None:
    fun, meaning = ONE_AXIS[name]
    x = np.random.default_rng(0).normal(size=(2, N, N, 3)).astype("f")
    wanted = np.stack([meaning(row) for row in x])
    inner = minibatch.vmap(fun, axis_name="i")
    np.testing.assert_allclose(minibatch.vmap(inner, axis_name="j")(x), wanted, rtol=1e-5, atol=1e-5)
    outer = minibatch.vmap(minibatch.vmap(fun, axis_name="j"), axis_name="i", out_axes=1)
    np.testing.assert_allclose(outer(x.swapaxes(0, 1)).swapaxes(0, 1).swapaxes(0, 1), wanted, rtol=1e-5, atol=1e-5)


LINEAR = ["psum in groups", "all_gather", "all_to_all tiled in groups", "ppermute of some", "pbroadcast", "psum_scatter tiled"]


@pytest.mark.parametrize("name", LINEAR)
def test_gradient_across_lanes(name: str) -> None:
    fun, _ = ONE_AXIS[name]
    x = np.random.default_rng(0).normal(size=(N, N, 3)).astype("f")

    def loss(mapped: Callable, x: Any) -> Any:
        return (mapped(x) ** 3).sum()

    found = jax.grad(functools.partial(loss, minibatch.vmap(fun, axis_name="i")))(x)
    apply = jax.jit(minibatch.vmap(fun, axis_name="i"))
    for k in [(0, 0, 0), (3, 2, 1), (1, 3, 2)]:
        step = np.zeros_like(x)
        step[k] = 1  # the collectives are linear
        np.testing.assert_allclose(found[k], (3 * apply(x) ** 2 * apply(step)).sum(), rtol=1e-4, atol=1e-4)


TWO_AXES = {  # of one lane [12, 5]
    "psum": lambda v, n: lax.psum(v, n),
    "pmin": lambda v, n: lax.pmin(v, n),
    "axis_index": lambda v, n: v * lax.axis_index(n),
    "all_gather": lambda v, n: lax.all_gather(v, n, axis=1),
    "all_gather tiled": lambda v, n: lax.all_gather(v, n, axis=1, tiled=True),
    "all_to_all": lambda v, n: lax.all_to_all(v[:6], n, 0, 1),
    "all_to_all tiled": lambda v, n: lax.all_to_all(v, n, 0, 1, tiled=True),
    "all_to_all in place": lambda v, n: lax.all_to_all(v, n, 0, 0, tiled=True),
    "all_to_all backwards": lambda v, n: lax.all_to_all(v.T, n, 1, 0, tiled=True),
    "psum_scatter": lambda v, n: lax.psum_scatter(v[:6], n),
    "psum_scatter tiled": lambda v, n: lax.psum_scatter(v, n, tiled=True),
    "pbroadcast": lambda v, n: lax.pbroadcast(v, n, 4),
}


@pytest.mark.parametrize("name", TWO_AXES)
@pytest.mark.parametrize("names", [("i", "j"), ("j", "i")])
def test_collective_over_two_axes_is_over_their_product(name: str, names: tuple) -> None:
    fun = TWO_AXES[name]
    x = np.random.default_rng(0).normal(size=(2, 3, 12, 5)).astype("f")  # lanes j, i
    found = minibatch.vmap(minibatch.vmap(lambda v: fun(v, names), axis_name="i"), axis_name="j")(x)
    flat = minibatch.vmap(lambda v: fun(v, "b"), axis_name="b")
    if names == ("j", "i"):  # the first is the slower
        wanted = flat(x.reshape(6, 12, 5)).reshape(found.shape)
    else:
        wanted = flat(x.swapaxes(0, 1).reshape(6, 12, 5)).reshape(3, 2, *found.shape[2:]).swapaxes(0, 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_collective_over_positions_too() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype("f")
    found = minibatch.vmap(lambda v: lax.psum_p.bind(v, axes=("i", 1), axis_index_groups=None), axis_name="i")(x)
    np.testing.assert_allclose(found, np.broadcast_to(x.sum((0, 2)), (3, 4)), rtol=1e-5)
    found = minibatch.vmap(lambda v: lax.psum_p.bind(v, axes=(1,), axis_index_groups=None), axis_name="i")(x)
    np.testing.assert_allclose(found, x.sum(2), rtol=1e-5)


def test_inner_axis_of_the_same_name_hides_the_outer() -> None:
    x = np.arange(6.0, dtype="f").reshape(2, 3)
    inner = minibatch.vmap(lambda v: lax.psum(v, "i"), axis_name="i")
    both = minibatch.vmap(lambda row: lax.psum(row, "i") + inner(row), axis_name="i")
    np.testing.assert_allclose(both(x), x.sum(0) + x.sum(1)[:, None])


def test_what_all_lanes_share_is_not_repeated() -> None:
    mapped = minibatch.vmap(lambda x, w: (lax.psum(w, "i"), lax.pmax(w, "i"), x), (0, None), (None, None, 0), axis_name="i")
    total, most, _ = mapped(jnp.zeros(3), jnp.arange(2.0))
    np.testing.assert_allclose(total, [0, 3])
    np.testing.assert_allclose(most, [0, 1])


def test_ragged_all_to_all() -> None:
    data = np.asarray([[1, 2, 2, 0], [3, 4, 4, 4], [5, 6, 7, 0]], "f")
    start = np.asarray([[0, 1, 1], [0, 1, 4], [0, 1, 2]])
    size = np.asarray([[1, 0, 2], [1, 3, 0], [1, 1, 1]])
    received = size.T
    place = np.cumsum(size, 0) - size

    def lane(data: Any, start: Any, size: Any, place: Any, received: Any) -> Any:
        return lax.ragged_all_to_all(data, jnp.zeros(6), start, size, place, received, axis_name="i")

    found = minibatch.vmap(lane, axis_name="i")(data, start, size, place, received)
    np.testing.assert_allclose(found, [[1, 3, 5, 0, 0, 0], [4, 4, 4, 6, 0, 0], [2, 2, 7, 0, 0, 0]])


@pytest.mark.parametrize(
    "fun",
    [
        lambda v: lax.ppermute(v, ("i", "j"), [(0, 1)]),
        lambda v: lax.all_gather(v, ("i", "j"), axis_index_groups=[[0, 1], [2, 3]]),
        lambda v: lax.pmax(v, "i", axis_index_groups=[[0], [1, 2]]),
    ],
)
def test_collective_that_cannot_be_taken_apart_says_so(fun: Callable) -> None:
    mapped = minibatch.vmap(minibatch.vmap(fun, axis_name="i"), axis_name="j")
    with pytest.raises(NotImplementedError, match="not over several axes one of which is mapped"):
        mapped(jnp.zeros((2, 3)))


STARTED = sorted(name for name in RULES if str(name).endswith("_start") and hasattr(parallel, f"{name}_p"))


@pytest.mark.parametrize("name", STARTED)
def test_a_collective_that_is_started_is_the_whole_of_it(name: str) -> None:
    jaxpr = jax.make_jaxpr(lambda x: lax.neg(x))(1.0)
    started = jaxpr.eqns[0].replace(primitive=getattr(parallel, f"{name}_p"))
    assert _jax.synchronous(started).primitive.name == name.removesuffix("_start")
    assert name.removesuffix("_start") in RULES


def test_a_collective_started_over_another_axis_stays_under_way() -> None:
    def fun(x: Any) -> Any:
        started = parallel.ppermute_start(x, "j", [(0, 1), (1, 0)])
        return lax.psum(started.done(), "i")

    mapped = minibatch.vmap(fun, in_axes=1, axis_name="i")
    jaxpr = jax.make_jaxpr(mapped, axis_env=[("j", 2)])(jnp.ones((2, 3)))
    assert [eqn.primitive.name for eqn in jaxpr.eqns if "ppermute" in eqn.primitive.name] == ["ppermute_start", "ppermute_done"]
    assert [x.shape for x in jaxpr.out_avals] == [(3, 2)]


def test_what_is_sent_to_nobody_has_no_gradient() -> None:
    sent = lambda v: lax.ppermute(v**2, "i", [(0, 1), (1, 2)]).sum()
    x = jnp.arange(6.0).reshape(3, 2)
    found = minibatch.vmap(jax.grad(sent), axis_name="i")(x)  # jax.vmap refuses a permutation of some lanes
    np.testing.assert_allclose(found, [[0, 2], [4, 6], [0, 0]])


def test_inner_axis_of_the_same_name_is_the_one_meant() -> None:
    x = jnp.arange(6.0).reshape(3, 2)
    inner = minibatch.vmap(lambda v: lax.psum(v, "i"), axis_name="i")
    np.testing.assert_allclose(minibatch.vmap(inner, axis_name="i")(x), np.broadcast_to(x.sum(1, keepdims=True), (3, 2)))
