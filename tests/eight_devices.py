"""Maps over arrays that lie over a mesh of eight devices. Run by test_sharding.py, which simulates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close

import minibatch

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
X = np.random.default_rng(0).normal(size=(8, 4, 6)).astype("f")
W = np.random.default_rng(1).normal(size=(8, 6)).astype("f")


def agree(fun: Callable, in_axes: tuple, *args: Any, **options: Any) -> Any:
    """The map of `fun`, which gives what the stack of lanes gives."""
    moved = [x if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(args, in_axes, strict=True)]
    found = jax.jit(minibatch.vmap(fun, in_axes, **options))(*moved)
    once = jax.jit(fun)
    rows = [once(*(x if d is None else x[i] for x, d in zip(args, in_axes, strict=True))) for i in range(8)]
    assert_close(jax.tree.map(np.asarray, found), jax.tree.map(lambda *xs: np.stack(xs), *rows), 1e-4)
    return found


def lies_as(x: Any, *spec: Any) -> bool:
    return x.sharding.is_equivalent_to(NamedSharding(MESH, P(*spec)), x.ndim)


# --- shard_map --------------------------------------------------------------------------------------------------------


def parts(x: Any, w: Any) -> Any:
    def each(x: Any, w: Any) -> Any:
        return lax.psum(jnp.sin(x) * w + 2, "a"), x * 3, w + 1

    return jax.shard_map(each, mesh=MESH, in_specs=(P("a"), P()), out_specs=(P(), P("a"), P()))(x, w)


def much(x: Any, w: Any) -> Any:
    """A bit of everything: what is shared has to vary over as many mesh axes as what is mapped."""

    def each(x: Any, w: Any) -> Any:
        w = lax.pcast(w, "a", to="varying")
        i = jnp.argmax(x) % 3
        y = jnp.concatenate([jnp.where(x > 0, x @ jnp.diag(w), 0.0), x], 1)
        z, _ = lax.scan(lambda c, row: (c + row, None), w, x)
        q = lax.cond(x[0, 0] > 0, lambda: z, lambda: w)
        _, n = lax.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 1, c[1] * w), (i - i, z))
        return lax.psum((y, z + q, n + x[0 * i], x.at[0, i].add(1.0)), "a")

    return jax.shard_map(each, mesh=MESH, in_specs=(P("a"), P()), out_specs=P())(x, w)


@pytest.mark.parametrize("spmd_axis_name", [None, "b"])
@pytest.mark.parametrize("fun", [parts, much])
@pytest.mark.parametrize("in_axes", [(0, None), (1, 0), (None, 1)])
def test_shard_map(fun: Callable, in_axes: tuple, spmd_axis_name: Any) -> None:
    agree(fun, in_axes, X[0] if in_axes[0] is None else X, W[0] if in_axes[1] is None else W, spmd_axis_name=spmd_axis_name)


@pytest.mark.parametrize("spmd_axis_name", [None, "b"])
def test_gradient_through_shard_map(spmd_axis_name: Any) -> None:
    def loss(mapped: Callable) -> Callable:
        return lambda x, w: sum((y**2).sum() for y in mapped(x, w))

    mapped = minibatch.vmap(parts, (0, None), spmd_axis_name=spmd_axis_name)
    lanes = jax.jit(jax.grad(loss(parts), (0, 1)))
    of_x, of_w = zip(*[lanes(x, W[0]) for x in X], strict=True)
    found = jax.grad(loss(mapped), (0, 1))(X, W[0])
    assert_close(jax.tree.map(np.asarray, found), (np.stack(of_x), np.sum(of_w, 0)), 1e-4)


def test_lanes_lie_over_the_spmd_axis() -> None:
    total, kept, shared = jax.jit(minibatch.vmap(parts, (0, None), spmd_axis_name="b"))(X, W[0])
    assert lies_as(total, "b") and lies_as(kept, "b", "a")
    assert shared.shape == (8, 6)


def test_shared_output_of_shard_map_stays_shared() -> None:
    shared = minibatch.vmap(parts, (0, None), (0, 0, None))(X, W[0])[2]
    np.testing.assert_allclose(shared, W[0] + 1)


def test_shard_map_in_two_maps() -> None:
    found = jax.jit(minibatch.vmap(minibatch.vmap(parts, (0, None)), (0, None), spmd_axis_name="b"))(np.stack([X, X + 1]), W[0])
    np.testing.assert_allclose(found[1], 3 * np.stack([X, X + 1]), rtol=1e-5)
    assert lies_as(found[1], "b", None, "a")


def test_shard_map_over_some_axes_leaves_the_lanes_to_the_others() -> None:
    def fun(x: Any) -> Any:
        return jax.shard_map(lambda x: lax.psum(x, "a"), mesh=MESH, in_specs=P("a"), out_specs=P(), axis_names={"a"})(x)

    agree(fun, (0,), X)
    agree(fun, (0,), X, spmd_axis_name="b")


def test_collectives_over_the_mesh_and_the_lanes() -> None:
    def across(f: Callable) -> Any:
        def whole(x: Any) -> Any:
            return jax.shard_map(f, mesh=MESH, in_specs=P("a"), out_specs=P("a"), check_vma=False)(x)

        return np.asarray(jax.jit(minibatch.vmap(whole, axis_name="i"))(X))

    np.testing.assert_allclose(across(lambda x: lax.psum(x, ("a", "i")) + 0 * x)[:, 0], [X.sum((0, 1))] * 8, rtol=1e-4)
    gathered = across(lambda x: lax.all_gather(x, ("i", "a")))  # [lane, over a: i a, 1 row, 6]
    np.testing.assert_allclose(gathered.reshape(8, 4, 8, 4, 6), np.broadcast_to(X, (8, 4, 8, 4, 6)), rtol=1e-5)
    index = across(lambda x: 0 * x + lax.axis_index("i") * 10 + lax.axis_index("a"))
    np.testing.assert_allclose(index[:, :, 0], np.arange(8)[:, None] * 10 + np.arange(4))


OVER_THE_MESH = {  # of a shard [1, 8], over four
    "invariant": (lambda x: lax.all_gather(x, "a", to="invarying", axis=1), P()),
    "invariant tiled": (lambda x: lax.all_gather(x, "a", to="invarying", axis=1, tiled=True), P()),
    "mean": (lambda x: lax.pmean(x, "a"), P()),
    "reduced": (lambda x: lax.pcast(lax.all_gather(x, "a", to="reduced", axis=1), "a", to="varying").sum(1), P("a")),
    "reduced sum": (lambda x: lax.pcast(lax.pcast(lax.psum(x, "a"), "a", to="reduced"), "a", to="varying") * x, P("a")),
    "unreduced": (lambda x: lax.psum(lax.pcast(x * 2, "a", to="unreduced"), "a"), P()),
    "unreduced pieces": (
        lambda x: lax.psum_scatter(lax.pcast(x * 2, "a", to="unreduced"), "a", scatter_dimension=1, tiled=True),
        P("a"),
    ),
    "swap": (lambda x: lax.all_to_all(x, "a", 1, 0, tiled=True), P("a")),
    "permutation": (lambda x: lax.ppermute(x, "a", [(0, 1), (3, 2)]), P("a")),
    "extrema": (lambda x: lax.pmax(x, "a") - lax.pmin(x, "a"), P()),
}


@pytest.mark.parametrize("name", OVER_THE_MESH)
def test_collective_over_the_mesh_alone(name: str) -> None:
    fun, out_specs = OVER_THE_MESH[name]
    agree(jax.shard_map(fun, mesh=MESH, in_specs=P("a"), out_specs=out_specs), (1,), np.tile(X, (1, 1, 4)))


def test_map_inside_a_shard() -> None:
    def shard(x: Any, w: Any) -> Any:
        return minibatch.vmap(lambda x, w: (lax.psum(jnp.where(x > 0, x, w), "a") @ w, jnp.cumsum(x, 1)), (0, None))(x, w)

    found = jax.shard_map(shard, mesh=MESH, in_specs=(P(None, "a"), P()), out_specs=(P(), P(None, "a")))(X, W[0])
    np.testing.assert_allclose(found[0][:, 0], np.where(X > 0, X, W[0]).sum(1) @ W[0], rtol=1e-4)
    np.testing.assert_allclose(found[1], X.cumsum(2), rtol=1e-4)


def test_lanes_lie_over_several_spmd_axes() -> None:
    constrained = lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P()))
    sharded = lambda x: jax.shard_map(lambda x: x * 3, mesh=MESH, in_specs=P(), out_specs=P())(x)
    for fun in (constrained, sharded):
        assert lies_as(agree(fun, (0,), X, spmd_axis_name=("a", "b")), ("a", "b"))


@pytest.mark.parametrize("spmd_axis_name", [None, "b"])
def test_shard_map_may_close_over_a_lane(spmd_axis_name: Any) -> None:
    def fun(x: Any, w: Any) -> Any:
        return jax.shard_map(lambda x: x * w.sum() + lax.psum(x, "a"), mesh=MESH, in_specs=P("a"), out_specs=P("a"))(x)

    agree(fun, (0, 0), X, W, spmd_axis_name=spmd_axis_name)


@pytest.mark.parametrize("across", [lambda x: x - lax.pmean(x, "i"), lambda x: lax.psum(x, ("a", "i"))])
def test_collective_over_the_lanes_inside_a_checked_shard_says_what_to_do(across: Callable) -> None:
    def mapped(check_vma: bool) -> Any:
        inside = minibatch.vmap(across, axis_name="i")
        return jax.shard_map(inside, mesh=MESH, in_specs=P(None, "a"), out_specs=P(None, "a"), check_vma=check_vma)(X)

    mapped(check_vma=False)
    with pytest.raises(NotImplementedError, match=r"know mesh axes alone, not the mapped axis 'i'\. Pass check_vma=False"):
        mapped(check_vma=True)


def test_lanes_that_cannot_lie_over_mesh_axes() -> None:
    with pytest.raises(ValueError, match="vmap spmd_axis_name cannot appear in P"):
        minibatch.vmap(parts, (0, None), spmd_axis_name="a")(X, W[0])
    with pytest.raises(ValueError, match="vmap spmd_axis_name cannot appear in P"):
        minibatch.vmap(parts, (None, 0), spmd_axis_name="a")(X[0], W)
    with pytest.raises(ValueError, match=r"3 lanes cannot lie over mesh axes \('b',\) in 2 shards"):
        minibatch.vmap(parts, (0, None), spmd_axis_name="b")(X[:3], W[0])


@pytest.mark.parametrize("name", ["i", "b"])
def test_shards_of_some_lanes_cannot_act_across_them(name: str) -> None:
    def across(x: Any) -> Any:
        return jax.shard_map(lambda x: lax.psum(x, name), mesh=MESH, in_specs=P("a"), out_specs=P("a"), check_vma=False)(x)

    with pytest.raises(NotImplementedError, match=f"over which the lanes lie, may not act across axis '{name}'"):
        minibatch.vmap(across, axis_name="i", spmd_axis_name="b")(X)


def test_lanes_give_way_to_a_shard_map_over_their_mesh_axis_if_jax_is_told_not_to_mind() -> None:
    gather = lambda x: lax.all_gather(x, "a", tiled=True)
    fun = lambda x, w: jax.shard_map(gather, mesh=MESH, in_specs=P("a"), out_specs=P(), check_vma=False)(x) * w
    with pytest.raises(ValueError, match="vmap spmd_axis_name cannot appear in"):
        agree(fun, (0, None), X, W[0], spmd_axis_name="a")
    with jax._src.config.disable_vmap_shmap_error(True):
        agree(fun, (0, None), X, W[0], spmd_axis_name="a")


@pytest.mark.parametrize("check_vma", [True, False])
def test_map_of_a_gradient_through_shard_map(check_vma: bool) -> None:
    def loss(x: Any) -> Any:
        each = lambda x: lax.psum(jnp.sin(x).sum(), "a")
        return jax.shard_map(each, mesh=MESH, in_specs=P("a"), out_specs=P(), check_vma=check_vma)(x)

    agree(jax.grad(loss), (0,), X, spmd_axis_name="b")


# --- constraints and placement ----------------------------------------------------------------------------------------


def test_sharding_constraint() -> None:
    fun = lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("a")))
    assert lies_as(agree(fun, (0,), X, spmd_axis_name="b"), "b", "a")
    assert lies_as(agree(fun, (1,), X, spmd_axis_name="b"), "b", "a")
    there = jax.device_put(X, NamedSharding(MESH, P("b")))
    assert lies_as(jax.jit(minibatch.vmap(fun))(there), "b", "a")  # nothing said of the lanes: they stay as they lay
    both = jax.jit(minibatch.vmap(minibatch.vmap(fun, spmd_axis_name="b")))(np.stack([X, X]))
    assert lies_as(both, None, "b", "a")


def test_device_put() -> None:
    fun = lambda x, w: jax.device_put((x * 2, w), NamedSharding(MESH, P("a")))
    agree(fun, (0, None), X, np.ones((4, 6), "f"))
    mapped = minibatch.vmap(fun, (0, None), (0, None), spmd_axis_name="b", compile=False)(X, np.ones((4, 6), "f"))
    assert lies_as(mapped[0], "b", "a") and lies_as(mapped[1], "a")
    agree(lambda x: jax.device_put(x * 2), (1,), X)


def test_layout_constraint() -> None:
    fun = minibatch.vmap(lambda x: with_layout_constraint(x, Layout((1, 0))), 1, 1)
    eqn = next(e for e in fun.jaxpr(jnp.zeros((4, 8, 6))).eqns if e.primitive.name == "layout_constraint")
    assert eqn.params["layout"].major_to_minor == (1, 2, 0)
    agree(lambda x: with_layout_constraint(x, Layout((1, 0))), (1,), X)


# --- explicit meshes --------------------------------------------------------------------------------------------------

OVER_EXPLICIT = {
    "elementwise": lambda x, w: jnp.sin(x) * w + 1,
    "reductions": lambda x, w: (x.sum(1), x @ w, x.max()),
    "select": lambda x, w: jnp.where(x > 1, x, w),
    "concatenate": lambda x, w: jnp.concatenate([x.sum(0), w]),
    "repeated": lambda x, w: (x.sum(), w),
    "constraint": lambda x, w: lax.with_sharding_constraint(x, P("a")),
    "reshard": lambda x, w: jax.reshard(x * w, P()),
    "shard_map": lambda x, w: jax.shard_map(lambda x: lax.psum(x * 2, "a"), in_specs=P("a"), out_specs=P())(x),
    "shard_map over a": lambda x, w: jax.shard_map(
        lambda x: lax.psum(x * 2, "a"), in_specs=P("a"), out_specs=P(), axis_names={"a"}
    )(x),
    "scan": lambda x, w: lax.scan(lambda c, _: (c * w, c.sum()), x, None, length=2),
    "branch": lambda x, w: lax.cond(x.sum() > 0, lambda: (x * w, w), lambda: (-x, w * 2)),
    "loop": lambda x, w: lax.while_loop(lambda c: jnp.abs(c[0]).sum() > 3, lambda c: (c[0] / 2, c[1] + w), (x, w)),
    "place of its own": lambda x, w: (lax.dynamic_slice(w, (jnp.int32(x.max()),), (2,)), w[jnp.argmax(x[:, 0])]),
}


@pytest.mark.parametrize("name", OVER_EXPLICIT)
def test_lanes_over_an_explicit_mesh_axis(name: str) -> None:
    fun = OVER_EXPLICIT[name]
    with jax.set_mesh(EXPLICIT):
        x, w = jax.device_put(X, NamedSharding(EXPLICIT, P("b", "a"))), jax.device_put(W[0], NamedSharding(EXPLICIT, P()))
        found = jax.jit(minibatch.vmap(fun, (0, None)))(x, w)
        assert all(jax.typeof(leaf).sharding.spec[0] == "b" for leaf in jax.tree.leaves(found))
        lane = jax.jit(fun)
        rows = [lane(jax.reshard(X[i], P("a")), w) for i in range(8)]
        wanted = jax.tree.map(lambda *rows: np.stack(rows), *rows)
        assert_close(jax.tree.map(np.asarray, found), wanted, 1e-4)


NAMED = {
    "psum": (lambda x: x / lax.psum(x, "i"), lambda x: x / x.sum(0)),
    "groups": (
        lambda x: lax.psum(x, "i", axis_index_groups=[[0, 2, 4, 6], [1, 3, 5, 7]]),
        lambda x: np.tile(x.reshape(4, 2, 4, 6).sum(0), (4, 1, 1)),
    ),
    "all_gather": (lambda x: lax.all_gather(x, "i"), lambda x: np.stack([x] * 8)),
    "ppermute": (lambda x: lax.ppermute(x, "i", [(i, (i + 1) % 8) for i in range(8)]), lambda x: np.roll(x, 1, 0)),
    "axis_index": (lambda x: x * lax.axis_index("i"), lambda x: x * np.arange(8)[:, None, None]),
    "callback": (
        lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"),
        lambda x: x,
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_collective_over_lanes_on_an_explicit_mesh_axis(name: str) -> None:
    fun, meaning = NAMED[name]
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, NamedSharding(EXPLICIT, P("b", "a")))
        np.testing.assert_allclose(jax.jit(minibatch.vmap(fun, axis_name="i"))(x), meaning(X), rtol=1e-4, atol=1e-5)


def test_parameters_reduced_over_a_mesh_axis() -> None:
    def loss(w: Any, x: Any) -> Any:
        y, _ = lax.scan(lambda c, w: (jnp.dot(c, w, out_sharding=P("b")), None), x, w)
        return (y**2).sum()

    w = np.random.default_rng(2).normal(size=(2, 6, 6)).astype("f")
    gradients = minibatch.vmap(jax.grad(loss), (None, 0))
    with jax.set_mesh(EXPLICIT):
        found = jax.jit(gradients)(jax.device_put(w, P(reduced={"b"})), jax.device_put(X, P(None, "b")))
        found = jax.reshard(found, P())
    wanted = [jax.grad(lambda w, x: (((x @ w[0]) @ w[1]) ** 2).sum())(w, x) for x in X]
    np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-3, atol=1e-3)


def test_spmd_axis_name_may_name_mesh_axes_of_size_one() -> None:
    mesh = jax.make_mesh((8, 1), ("a", "one"), axis_types=(AxisType.Explicit,) * 2)
    fun = jax.jit(minibatch.vmap(lambda x: x * 2, spmd_axis_name=("a", "one")))
    with jax.set_mesh(mesh), jax._src.config.remove_size_one_mesh_axis_from_type(True):
        found = fun(jax.device_put(X, NamedSharding(mesh, P(("a", "one")))))
    assert found.sharding.spec[0] == "a"
    np.testing.assert_allclose(found, X * 2)


def test_a_lane_on_one_device_cannot_lie_over_mesh_axes() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    fun = minibatch.vmap(lambda x: lax.with_sharding_constraint(x, device), spmd_axis_name="a")
    with pytest.raises(ValueError, match=r"make sure to run your jitted function inside the mesh context manager"):
        jax.jit(fun)(X)


# --- lanes that diverge -----------------------------------------------------------------------------------------------


def rounds(n: Any, x: Any, w: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ W[:6]) * w), (0, x))


@pytest.mark.parametrize("schedule", ["lockstep", "refill"])
@pytest.mark.parametrize("where", ["spmd_axis_name", "explicit", "shard_map"])
def test_each_device_steps_its_own_lanes(where: str, schedule: str) -> None:
    n, x = np.random.default_rng(0).geometric(0.2, 32).astype(np.int32), np.tile(X[0], (8, 1))
    mesh, name = (EXPLICIT, None) if where == "explicit" else (MESH, "a" if where == "spmd_axis_name" else None)
    mapped = minibatch.vmap(rounds, (0, 0, None), spmd_axis_name=name, divergence=schedule)
    if where == "shard_map":
        mapped = jax.shard_map(mapped, mesh=mesh, in_specs=(P("a"), P("a"), P()), out_specs=P("a"))
    with jax.set_mesh(mesh):
        lie = NamedSharding(mesh, P("a"))
        args = jax.device_put(n, lie), jax.device_put(x, lie), jnp.float32(0.9)
        program = jax.jit(mapped).lower(*args).compile()
        steps, found = program(*args)
    assert not [word for word in ("all-reduce", "all-gather", "all-to-all", "collective") if word in program.as_text()]
    np.testing.assert_array_equal(steps, n)
    lane = jax.jit(rounds)
    assert_close(np.asarray(found), np.stack([lane(*each, 0.9)[1] for each in zip(n, x, strict=True)]), 1e-4)
    assert lies_as(found, "a") or where == "explicit"


# --- branches that only some devices take -----------------------------------------------------------------------------


def dear(p: Any, x: Any, w: Any) -> Any:
    """A branch worth taking apart, with an operand that the lanes share; and what no branch changes."""
    taken = lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ W[:6]) * w, None), x, None, length=150)[0]
    return lax.cond(p, lambda x, w: (taken(x, w), w), lambda x, w: (x, w), x, w)


@pytest.mark.parametrize("divergence", ["auto", "partition"])
@pytest.mark.parametrize("where", ["spmd_axis_name", "explicit"])
def test_each_device_partitions_its_own_lanes(where: str, divergence: str) -> None:
    rng = np.random.default_rng(0)
    p, x = rng.random(4096) < np.where(np.arange(4096) < 2400, 0.2, 0), rng.normal(size=(4096, 6)).astype("f")
    w = np.float32(0.9)
    mesh, name = (EXPLICIT, None) if where == "explicit" else (MESH, "a")
    mapped = minibatch.vmap(dear, (0, 0, None), spmd_axis_name=name, divergence=divergence, out_axes=(0, None))
    gradient = jax.grad(lambda p, x, w: (mapped(p, x, w)[0] ** 2).sum(), (1, 2))
    with jax.set_mesh(mesh):
        lie = NamedSharding(mesh, P("a"))
        args = jax.device_put(p, lie), jax.device_put(x, lie), jnp.asarray(w)
        program = jax.jit(mapped).lower(*args).compile()
        found, shared = program(*args)
        of_x, of_w = jax.jit(gradient)(*args)
    assert not [word for word in ("all-reduce", "all-gather", "all-to-all", "collective") if word in program.as_text()]
    assert "conditional" in program.as_text() and shared == w
    lane = lambda p, x, w: (dear(p, x, w)[0] ** 2).sum()
    assert_close(np.asarray(found), np.asarray(jax.jit(jax.vmap(dear, (0, 0, None)))(p, x, w)[0]), 1e-4)
    wanted = jax.jit(jax.vmap(jax.grad(lane, (1, 2)), (0, 0, None)))(p, x, w)
    assert_close(np.asarray(of_x), np.asarray(wanted[0]), 1e-4)
    assert_close(np.asarray(of_w), np.asarray(wanted[1].sum(0)), 1e-3)


@pytest.mark.parametrize("divergence", ["auto", "partition"])
def test_devices_meet_in_a_branch_that_some_of_them_take(divergence: Any) -> None:
    """All run it, as they do in `jax.vmap`: whoever skips it would be waited for."""

    def each(p: Any, x: Any) -> Any:
        dear = lambda x: lax.fori_loop(0, 600, lambda _, x: jnp.sin(x @ x) + 0.1 * x, x)
        return lax.cond(p > 0, lambda x: lax.psum(dear(x), "d"), lambda x: 2 * x, x)

    def sharded(map: Callable) -> Callable:
        mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
        return jax.jit(jax.shard_map(map(each), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))

    p, x = np.arange(512) < 70, np.random.default_rng(0).normal(size=(512, 8, 8)).astype("f")
    found = sharded(lambda f: minibatch.vmap(f, divergence=divergence))
    assert " cond[" not in str(jax.make_jaxpr(found)(p, x))
    assert_close(found(p, x), sharded(jax.vmap)(p, x), 1e-4)


@pytest.mark.parametrize("divergence", ["auto", "partition"])
def test_gradient_of_a_branch_that_one_device_takes(divergence: Any) -> None:
    """The operand that lies alike on all devices has its cotangent summed outside of the branch: nobody waits in it."""

    def each(w: Any, x: Any) -> Any:
        def dear() -> Any:
            return lax.scan(lambda c, _: (jnp.tanh(w @ c), None), x, None, length=60)[0]

        return lax.cond(x[0] > 0, dear, lambda: jnp.sqrt(x**2 + 1.0) + w[0]).sum()

    def gradient(w: Any, x: Any) -> Any:
        mapped = minibatch.vmap(each, in_axes=(None, 0), divergence=divergence)
        return jax.grad(lambda *args: mapped(*args).sum(), (0, 1))(w, x)

    x = np.abs(np.random.default_rng(0).normal(size=(64, 16))) * np.where(np.arange(64) < 8, 1, -1)[:, None]
    x, w = x.astype("f"), np.eye(16, dtype="f") / 2
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = P(), P("d")
    of_w, of_x = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs))(w, x)
    lanes_of_w, lanes_of_x = jax.jit(lambda w, x: lax.map(lambda row: jax.grad(each, (0, 1))(w, row), x))(w, x)
    assert_close(of_w, lanes_of_w.sum(0), 1e-4)
    assert_close(of_x, lanes_of_x, 1e-4)
