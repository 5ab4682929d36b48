"""Branches whose number differs by lane: the same answers by each schedule, alone and under derivatives, loops and maps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import assert_close
from test_control_flow import primitives, shapes

from minibatch import if_batched, vmap
from minibatch._batched import Axis
from minibatch._divergence import Divergence
from minibatch.schedule import choose
from minibatch.schedule.partition import _chunks, at_once, one_by_one


def slow(x: Any, w: Any) -> Any:
    """A branch worth taking apart."""
    return lax.fori_loop(0, 40, lambda i, x: jnp.sin(x * w) + 0.1 * x, x)


def rarely(p: Any, x: Any, w: Any) -> Any:
    """A branch that costs, and one that hands through."""
    return lax.cond(p > 0, slow, lambda x, w: x, x, w)


def singular(p: Any, x: Any, w: Any) -> Any:
    """Branches singular where they are not taken, in their own operand and in one that the lanes share."""
    return lax.cond(p > 0, lambda x, w: jnp.sqrt(p * w) * jnp.abs(x).sum(), lambda x, w: x.sum() * w, x, w)


def four(p: Any, x: Any, w: Any) -> Any:
    """Outputs that some branches make and others hand through, constants, integers, and one that nobody changes."""
    branches = [
        lambda x, w, n: (slow(x, w), x, n + 1, w),
        lambda x, w, n: (x * w, x, n, w),
        lambda x, w, n: (x, jnp.cos(x), n * 2, w),
        lambda x, w, n: (jnp.ones_like(x), x + w, 7, w),
    ]
    y, z, n, w = lax.switch(p, branches, x, w, lax.convert_element_type(p, jnp.int32))
    return y * z, n, w


def looped(p: Any, x: Any, w: Any) -> Any:
    """A loop that ends only for the lanes whose branch it is."""
    countdown = lambda p: lax.while_loop(lambda s: s[0] != 0, lambda s: (s[0] - 2, s[1] + 1), (p, 0))[1]
    return lax.cond(p % 2 == 0, lambda: countdown(jnp.abs(p)) * 1.0 + x * w, lambda: x)


def inside_loops(p: Any, x: Any, w: Any) -> Any:
    """A branch in the body of a scan, and one in that of a loop whose lanes stop at different times."""
    x, _ = lax.scan(lambda x, k: (rarely(p + k, x, w), None), x, jnp.arange(-1, 2))
    step = lambda s: (s[0] + 1, rarely(s[0] - 1, s[1], w))
    return lax.while_loop(lambda s: s[0] < p, step, (0, x))[1]


def scanned(p: Any, x: Any, w: Any) -> Any:
    """A branch in a scan, with a carry and rows."""
    return lax.scan(lambda x, k: (rarely(p + k, x, w), x), x, jnp.arange(-1, 2))


def rematerialized(p: Any, x: Any, w: Any) -> Any:
    """A branch that a reverse pass computes again."""
    return jax.checkpoint(rarely)(p, x, w)


def nested(p: Any, x: Any, w: Any) -> Any:
    """A branch for each element."""
    return vmap(rarely, (None, 0, None))(p, x, w) + vmap(rarely, (0, None, 0))(p + jnp.arange(-1, 2), x, w * x).sum(0)


PROGRAMS = {f.__name__: f for f in (rarely, singular, four, looped, inside_loops, scanned, rematerialized, nested)}
DIFFERENTIABLE = ("singular", "four", "scanned", "rematerialized", "nested")


def arguments(size: int) -> tuple:
    """Branch numbers [size], values [size, 3], and one number for all lanes."""
    rng = np.random.default_rng(size)
    p, x = rng.integers(-1, 4, size), rng.normal(size=(size, 3))
    return jnp.asarray(p, jnp.int32), jnp.asarray(x, jnp.float32), jnp.float32(1.5)


def loss(mapped: Callable, p: Any) -> Callable:
    """What the lanes' outputs add up to, as a function of x and w."""

    def total(x: Any, w: Any) -> Any:
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(mapped(p, x, w)) if jnp.issubdtype(y.dtype, jnp.inexact))

    return total


# --- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_schedules_agree_with_the_lanes(name: str) -> None:
    fun, args = PROGRAMS[name], arguments(7)
    once = jax.jit(fun)
    wanted = jax.tree.map(lambda *ys: jnp.stack(ys), *[once(p, x, args[2]) for p, x in zip(*args[:2], strict=True)])
    for schedule in ("select", "partition"):
        assert_close(vmap(fun, (0, 0, None), divergence=schedule)(*args), wanted, 1e-5, schedule)


@pytest.mark.parametrize("size", [0, 1, 100])
def test_any_number_of_lanes(size: int) -> None:
    args = arguments(size)
    found = vmap(four, (0, 0, None), divergence="partition")(*args)
    assert_close(found, jax.vmap(four, (0, 0, None))(*args), 1e-6)


@pytest.mark.parametrize("taken", [-1, 1])
def test_all_lanes_alike(taken: int) -> None:
    p, x, w = arguments(50)
    for fun in (rarely, four):
        found = vmap(fun, (0, 0, None), divergence="partition")(jnp.full_like(p, taken), x, w)
        assert_close(found, jax.vmap(fun, (0, 0, None))(jnp.full_like(p, taken), x, w), 1e-6)


@pytest.mark.parametrize("in_axes", [(0, 1, None), (0, None, 0)])
def test_lanes_anywhere(in_axes: tuple) -> None:
    p, x, w = arguments(9)
    x = {0: x, 1: x.T, None: x[0]}[in_axes[1]]
    w = w if in_axes[2] is None else w + jnp.arange(9)
    assert_close(vmap(four, in_axes, divergence="partition")(p, x, w), jax.vmap(four, in_axes)(p, x, w), 1e-6)


def test_keys_and_integers_go_through_exactly() -> None:
    def f(p: Any, key: Any, n: Any) -> Any:
        key, n = lax.cond(p > 0, lambda k, n: (jax.random.split(k)[0], n // 3), lambda k, n: (k, n), key, n)
        return jax.random.key_data(key), n

    p = arguments(30)[0]
    args = p, jax.random.split(jax.random.key(0), 30), jnp.arange(30)
    found = vmap(f, divergence="partition")(*args)
    jax.tree.map(np.testing.assert_array_equal, found, jax.vmap(f)(*args))


def test_values_are_moved_only_to_branches_they_are_meant_for() -> None:
    p, x, w = jnp.asarray([1, 0, 1, 0, 0]), jnp.asarray([4.0, -1.0, 9.0, 0.0, -2.0]), 2.0
    f = vmap(lambda p, x: lax.cond(p > 0, lambda x: jnp.sqrt(x) / x, lambda x: x * w, x), divergence="partition")
    with jax.debug_nans(True):
        np.testing.assert_allclose(f(p, x), [0.5, -2, 1 / 3, 0, -4], rtol=1e-6)


def test_lanes_that_meet_in_a_branch_are_not_parted() -> None:
    p, x, _ = arguments(6)
    f = lambda p, x: lax.cond(p > 0, lambda x: lax.psum(slow(x, 1.5), "i"), lambda x: slow(x, 0.5), x)
    found = vmap(f, axis_name="i", divergence="partition")(p, x)
    np.testing.assert_allclose(found, jax.vmap(f, axis_name="i")(p, x), rtol=1e-5)


@pytest.mark.parametrize("through", [lambda f: f, jax.jit, lambda f: lambda x: lax.map(f, x[None])[0]])
def test_lanes_keep_their_numbers(through: Callable) -> None:
    """Where they are laid out by branch, those are not the numbers of the rows."""
    p, x, _ = arguments(7)
    numbered = through(lambda x: jnp.sin(x + lax.axis_index("lanes")))
    f = lambda p, x: lax.cond(p > 0, numbered, lambda x: x * 2, x)
    found = vmap(f, axis_name="lanes", divergence="partition")(p, x)
    np.testing.assert_allclose(found, jax.vmap(f, axis_name="lanes")(p, x), rtol=1e-5)


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_of_a_partition(name: str) -> None:
    p, x, w = arguments(7)
    fun = PROGRAMS[name]
    found = jax.jit(jax.grad(loss(vmap(fun, (0, 0, None), divergence="partition"), p), (0, 1)))(x, w)
    each = jax.jit(jax.grad(lambda p, x, w: loss(fun, p)(x, w), (1, 2)))
    lanes = [each(*lane, w) for lane in zip(p, x, strict=True)]
    assert_close(found, (jnp.stack([g for g, _ in lanes]), sum(g for _, g in lanes)), 1e-4)


@pytest.mark.parametrize("name", ["four", "scanned"])
def test_map_of_a_gradient(name: str) -> None:
    p, x, w = arguments(7)
    gradient = jax.grad(lambda p, x, w: loss(PROGRAMS[name], p)(x, w), (1, 2))
    found = vmap(gradient, (0, 0, None), divergence="partition")(p, x, w)
    assert_close(found, jax.jit(jax.vmap(gradient, (0, 0, None)))(p, x, w), 1e-4)


@pytest.mark.parametrize("recompute", [True, False])
def test_second_derivatives(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "kept", lambda branch: 1e9 if recompute else 0.0)
    p, x, w = arguments(5)
    fun = lambda p, x, w: lax.cond(p > 0, lambda x, w: jnp.sin(x * w * 1.1) * x, lambda x, w: x * w, x, w)
    hessian = lambda map: jax.jit(jax.hessian(loss(map(fun, (0, 0, None)), p), (0, 1)))(x, w)
    found = hessian(lambda *args: vmap(*args, divergence="partition"))
    assert_close(found, hessian(jax.vmap), 1e-4)


@pytest.mark.parametrize("name", ["four", "inside_loops"])
def test_forward_derivatives(name: str) -> None:
    p, x, w = arguments(6)
    along = lambda map: jax.jit(lambda x: jax.jvp(loss(map(PROGRAMS[name], (0, 0, None)), p), (x, w), (jnp.cos(x), 1.0)))(x)
    assert_close(along(lambda *args: vmap(*args, divergence="partition")), along(jax.vmap), 1e-4)


def test_copies_of_a_lane_send_nothing_back() -> None:
    p = jnp.asarray([1, 1, 1, 0, 0])  # chunks of three: two lanes of the other branch, and a copy of one
    root = lambda p, x: lax.cond(p > 0, lambda x: 2 * x, lambda x: jnp.sqrt(x), x)
    found = jax.grad(lambda x: vmap(root, divergence="partition")(p, x).sum())(jnp.asarray([1.0, 1.0, 1.0, 4.0, 0.0]))
    np.testing.assert_allclose(found, [2, 2, 2, 0.25, np.inf])


LINEAR = {  # in x [3], all but `updated` in w [] too
    "plain": lambda p, x, w: lax.cond(p > 0, lambda: jnp.cos(1.5) * x + w, lambda: x),
    "costly": lambda p, x, w: lax.cond(
        p > 0, lambda: lax.fori_loop(0, 40, lambda i, x: 0.9 * x + jnp.roll(x, 1), x) * 0.1 + w, lambda: x
    ),
    "updated": lambda p, x, w: lax.cond(
        p > 0, lambda: jnp.zeros(64).at[p].set(x[0]).at[p + 1].add(x[1]) * 3, lambda: jnp.zeros(64)
    ),
}


@pytest.mark.parametrize("schedule", ["select", "partition"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_branches_are_transposed(name: str, schedule: str) -> None:
    """Which `jax.vmap` cannot do: it keeps derivatives out of branches by what has no transpose."""
    p, x, w = arguments(6)
    fun = lambda x, w: vmap(LINEAR[name], (0, 0, None), divergence=schedule)(p, x, w)
    stacked = lambda x, w: jnp.stack([LINEAR[name](p, x, w) for p, x in zip(p, x, strict=True)])
    out = jnp.cos(jnp.arange(stacked(x, w).size, dtype=x.dtype)).reshape(stacked(x, w).shape)
    transposed = lambda fun: jax.jit(jax.linear_transpose(fun, x, w))(out)
    assert_close(transposed(fun), transposed(stacked), 1e-5)


@pytest.mark.parametrize("schedule", ["select", "partition"])
def test_tangents_meet_branches_in_a_rule_of_ones_own(schedule: str) -> None:
    """Mapped before it is transposed: the tangents go through the copies that other lanes compute with."""
    p, x, w = arguments(6)
    fun = jax.custom_jvp(lambda p, x, w: rarely(p, x, w).sum())
    fun.defjvp(lambda primals, tangents: jax.jvp(lambda x, w: rarely(primals[0], x, w).sum(), primals[1:], tangents[1:]))
    mapped = lambda x, w: vmap(fun, (0, 0, None), divergence=schedule)(p, x, w).sum()
    stacked = lambda x, w: sum(rarely(p, x, w).sum() for p, x in zip(p, x, strict=True))
    assert_close(jax.jit(jax.grad(mapped, (0, 1)))(x, w), jax.jit(jax.grad(stacked, (0, 1)))(x, w), 1e-4)


# --- in other maps, and compiled or not -------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [vmap, jax.vmap])
def test_partition_is_mapped_again(outer: Callable) -> None:
    rng = np.random.default_rng(0)
    p, x = jnp.asarray(rng.integers(-1, 4, (3, 8))), jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)
    f = lambda p, x: rarely(p, x, 1.5)
    found = jax.jit(outer(vmap(f, divergence="partition")))(p, x)
    np.testing.assert_allclose(found, jax.vmap(jax.vmap(f))(p, x), rtol=1e-5)
    g = lambda p, x: vmap(f, divergence="partition")(p, x).sum()
    np.testing.assert_allclose(jax.jit(outer(jax.grad(g, 1)))(p, x), jax.vmap(jax.vmap(jax.grad(f, 1)))(p, x), rtol=1e-4)


def test_partition_runs_equation_by_equation_and_compiles_once() -> None:
    p, x, w = arguments(40)
    f = vmap(rarely, (0, 0, None), divergence="partition", compile=False)
    first = f(p, x, w)
    with jax.log_compiles(False):
        np.testing.assert_array_equal(first, f(p, x, w))
    np.testing.assert_allclose(first, jax.vmap(rarely, (0, 0, None))(p, x, w), rtol=1e-5)


# --- what it emits ----------------------------------------------------------------------------------------------------


def test_each_branch_runs_for_a_chunk_of_lanes_on_shared_operands() -> None:
    p, x, w = jnp.arange(256) % 3, jnp.ones((256, 5)), jnp.ones((5, 5))
    f = vmap(lambda p, x, w: lax.cond(p > 0, lambda x, w: w @ jnp.sin(w @ x), lambda x, w: x, x, w), (0, 0, None))
    jaxpr = jax.make_jaxpr(lambda *args: vmap(f.__wrapped__, (0, 0, None), divergence="partition")(*args))(p, x, w)
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    (branch,) = [eqn for eqn in loop.params["jaxpr"].eqns if eqn.primitive.name == "cond"]
    assert [v.aval.shape for v in branch.invars[1:]] == [(32, 5), (5, 5)]
    assert not any(shape[1:] == (5, 5) for shape in shapes(jaxpr))


def test_output_that_no_branch_makes_differ_stays_shared_in_a_partition() -> None:
    out = vmap(four, (0, 0, None), if_batched(0), divergence="partition")(*arguments(9))
    assert [y.shape for y in out] == [(9, 3), (9,), ()]


def test_lanes_fill_chunks_of_one_branch_each() -> None:
    turn = jnp.asarray([1, 0, 2, 1, 1, 0, 2, 1, 1])  # two branches; lanes 2 and 6 take none
    turns, lane, home = (np.asarray(x) for x in _chunks(turn, 2, 2))
    chunks = zip(turns.tolist(), lane.reshape(5, 2).tolist(), home.reshape(5, 2).tolist(), strict=True)
    assert sorted(chunks) == [
        (0, [1, 5], [1, 5]), (1, [0, 3], [0, 3]), (1, [4, 7], [4, 7]), (1, [8, 8], [8, -1]), (2, [0, 0], [-1, -1]),
    ]  # fmt: skip


@pytest.mark.parametrize("way", [one_by_one, at_once])
@pytest.mark.parametrize(("size", "branches", "width"), [(50, 3, 8), (50, 1, 7), (9, 2, 1), (1, 1, 1), (40, 6, 32)])
def test_lanes_sit_down_in_order(way: Callable, size: int, branches: int, width: int) -> None:
    """One by one, as on a CPU, and at once, as elsewhere."""
    for seed in range(4):
        turn = np.random.default_rng(seed).integers(0, branches + (seed % 2), size).astype(np.int32)
        count = (size + branches * (width - 1)) // width
        found = jax.jit(partial(way, branches, width, count))(turn)
        chunks = [chunk[chunk >= 0].tolist() for chunk in np.asarray(found).reshape(count, width)]
        for k in range(branches):
            own = [chunk for chunk in chunks if chunk and turn[chunk[0]] == k]
            assert [lane for chunk in own for lane in chunk] == np.flatnonzero(turn == k).tolist()
            assert all(len(chunk) == width for chunk in own[:-1])


# --- the choice -------------------------------------------------------------------------------------------------------


def plan_for(size: Any, fun: Callable, *avals: Any, divergence: str = "auto", batched: tuple | None = None) -> Any:
    """What is chosen for a branch that does nothing, and `fun`."""
    branches = [jax.make_jaxpr(f)(*avals) for f in (lambda x, *_: x, fun)]
    axis = Axis(size, divergence=Divergence(branches=divergence))
    return choose.plan(axis, branches, jnp.zeros(axis.size, int), batched or [True] * len(avals))


def test_what_costs_little_is_not_partitioned() -> None:
    x = jnp.ones(())
    assert plan_for(4096, lambda x: 2 * x + 1, x) is None
    assert plan_for(4096, lambda x: jnp.exp(x) * x, x) is None
    assert plan_for(4096, lambda x: slow(x, 1.0), x) is None


def test_what_costs_much_is_partitioned_where_there_are_lanes_enough() -> None:
    x = jnp.ones(8)
    heavy = lambda x: lax.fori_loop(0, 200, lambda i, x: jnp.sin(x) * 1.01, x)
    assert plan_for(8192, heavy, x).numbers == (1,)
    assert plan_for(8192, heavy, x).width <= 2048
    assert plan_for(16, heavy, x) is None
    assert plan_for(8192, heavy, x, divergence="select") is None
    assert plan_for(16, lambda x: x + 1, x, divergence="partition").numbers == (1,)


def test_what_lanes_share_is_not_computed_in_each_chunk() -> None:
    x, w = jnp.ones(()), jnp.ones((256, 256))
    once = lambda x, w: (w @ w).sum() * x
    assert plan_for(4096, once, x, w, batched=(True, False)) is None
    assert plan_for(4096, once, x, w, batched=(True, True)).numbers == (1,)
    both = lambda x, w: once(lax.fori_loop(0, 2000, lambda i, x: jnp.sin(x) * 1.01, x), w[:32, :32])
    assert plan_for(1 << 16, both, x, w, batched=(True, False)).numbers == (1,)


def test_reverse_pass_keeps_what_costs_much_to_compute_again() -> None:
    x = jnp.ones(64)
    sums = lambda x: lax.fori_loop(0, 2000, lambda i, x: x * 0.9 + 0.1, x)
    recompute = lambda fun: plan_for(8192, fun, x, divergence="partition").recompute
    assert recompute(sums) == (True,)
    assert recompute(jnp.sort) == (False,)


def test_elementwise_branch_is_not_guarded() -> None:
    x, p = jnp.ones((4096, 16)), jnp.zeros(4096)
    f = lambda p, x: lax.cond(p > 0, lambda x: jnp.exp(-x * x) * jnp.sin(x), lambda x: x, x)
    assert primitives(vmap(f).jaxpr(p, x))["cond"] == 0


def test_branch_that_hands_out_much_is_not_guarded() -> None:
    """What a reverse pass needs of it takes as long to put into memory as to compute."""
    x, p = jnp.ones((1 << 16, 4)), jnp.zeros(1 << 16)
    f = lambda p, x: lax.cond(p > 0, lambda x: jnp.exp(-x * x) * jnp.sin(x), lambda x: x, x).sum()
    assert primitives(vmap(jax.grad(f, 1)).jaxpr(p, x))["cond"] == 0
    heavy = lambda p, x: lax.cond(p > 0, lambda x: lax.fori_loop(0, 50, lambda _, y: jnp.sin(y @ y), x), lambda x: x, x)
    assert primitives(vmap(heavy, divergence="select").jaxpr(p, jnp.ones((1 << 16, 4, 4))))["cond"] == 1
