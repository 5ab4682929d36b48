"""References as arguments of a mapped function, captured by it, and made in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minibatch


def count(ref: Any, x: Any) -> Any:
    ref[0] += x
    return ref[...].sum()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_mapped_reference_is_each_lanes_own(axis: int, compile: bool) -> None:
    ref = jax.new_ref(jnp.zeros((3, 3)))
    mapped = minibatch.vmap(count, (axis, 0), compile=compile)
    for times in (1, 2):
        np.testing.assert_allclose(mapped(ref, jnp.arange(3.0)), times * np.arange(3))
        np.testing.assert_allclose(jnp.moveaxis(ref[...], axis, 0), [[times * i, 0, 0] for i in range(3)])


def test_mapped_reference_in_two_maps() -> None:
    ref = jax.new_ref(jnp.zeros((2, 4, 3)))
    minibatch.vmap(minibatch.vmap(count, (1, 0)), (0, None))(ref, jnp.arange(3.0))
    np.testing.assert_allclose(ref[...], np.tile(np.eye(4)[:, :1] * np.arange(3), (2, 1, 1)))


def add(ref: Any, x: Any) -> None:
    ref[0] += x


STORING = {  # name: program of a lane's reference to [2], and of its value
    "branch": lambda ref, x: lax.cond(x > 0.5, lambda: ref.__setitem__(0, x), lambda: ref.__setitem__(1, -x)),
    "what a branch reads": lambda ref, x: lax.cond(ref[0] > 0, lambda: (ref.__setitem__(0, x), ref[1])[1], lambda: ref[0]),
    "loop": lambda ref, x: lax.while_loop(lambda c: c < x, lambda c: (add(ref, c + 1), c + 1)[1], 0.0),
    "loop in branch": lambda ref, x: lax.cond(
        x > 1, lambda: lax.fori_loop(0, jnp.int32(x), lambda i, c: (add(ref, c), c + i)[1], 0.5), lambda: 0.5
    ),
    "branch in loop": lambda ref, x: lax.while_loop(
        lambda c: c < x, lambda c: (lax.cond(c > 0, lambda: add(ref, c), lambda: None), c + 1)[1], 0.0
    ),
    "scan": lambda ref, x: lax.scan(lambda c, i: (ref.__setitem__(i, c + ref[i]), (c * 2, ref[0]))[1], x, jnp.arange(2)),
    "inner map": lambda ref, x: minibatch.vmap(lambda e, y: e.__setitem__(..., y * x))(ref, jnp.arange(2.0)),
    "callback beside": lambda ref, x: lax.cond(
        x > 0.5, lambda: (jax.debug.callback(lambda _: None, x), add(ref, x))[1], lambda: None
    ),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", STORING)
def test_reference_in_branches_and_loops_that_lanes_take_apart(name: str, axis: int) -> None:
    start, x = jnp.asarray([[-1.0, 2.0], [3.0, -4.0], [5.0, 0.5]]), jnp.arange(3.0)
    refs = [jax.new_ref(row) for row in start]
    lanes = [STORING[name](ref, v) for ref, v in zip(refs, x, strict=True)]
    ref = jax.new_ref(jnp.moveaxis(start, 0, axis))
    found = minibatch.vmap(STORING[name], (axis, 0))(ref, x)
    jax.tree.map(lambda y, *ys: np.testing.assert_allclose(y, jnp.stack(ys)), found, *lanes)
    np.testing.assert_allclose(jnp.moveaxis(ref[...], axis, 0), jnp.stack([ref[...] for ref in refs]))


def test_shared_reference_can_be_read() -> None:
    table = jax.new_ref(jnp.arange(4.0) * 2)
    mapped = minibatch.vmap(lambda ref, i: ref[i], (None, 0))
    np.testing.assert_allclose(mapped(table, jnp.asarray([3, 1])), [6, 2])
    table[3] = 9.0
    np.testing.assert_allclose(mapped(table, jnp.asarray([3, 1])), [9, 2])
    np.testing.assert_allclose(minibatch.vmap(lambda i: table[i])(jnp.asarray([3, 1])), [9, 2])


@pytest.mark.parametrize(
    "store",
    [
        lambda ref, x: ref.__setitem__(0, x),
        lambda ref, x: ref.__setitem__(0, 1.0),
        lambda ref, x: ref.__setitem__(x.astype(int), 1.0),
        lambda ref, x: jax.ref.addupdate(ref, 0, x),
    ],
)
def test_shared_reference_cannot_be_stored_into(store: Callable) -> None:
    ref = jax.new_ref(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"vmapped value on an unbatched array reference of type Ref\{float32") as caught:
        minibatch.vmap(lambda x: store(ref, x))(jnp.arange(3.0))
    assert "test_state.py" in caught.value.__notes__[0]


def test_part_of_a_reference_is_no_argument() -> None:
    def call() -> Any:
        return minibatch.vmap(lambda ref: ref[...])(jax.new_ref(jnp.zeros(3)).at[1:])

    with pytest.raises(TypeError, match="TransformedRefs are not allowed as arguments, but argument ref is one"):
        jax.jit(call)()


@pytest.mark.parametrize("options", [{}, {"compile": False}, {"in_axes": (0, {"same": None})}])
def test_one_reference_is_no_two_arguments(options: dict) -> None:
    ref = jax.new_ref(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"only one reference to a mutable .* argument ref and argument other.* the same"):
        minibatch.vmap(lambda ref, other: None, **options)(ref, {"same": ref})


def test_reference_made_in_a_lane_may_get_what_differs_by_lane_later() -> None:
    def fun(x: Any) -> Any:
        ref = jax.new_ref(0.0)

        @jax.jit
        def store(ref: Any, x: Any) -> Any:
            ref[...] += x

        store(ref, x)
        lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., ref[...] * 2), None)
        lax.cond(x > 1, lambda: ref.__setitem__(..., -ref[...]), lambda: None)
        return ref[...]

    np.testing.assert_allclose(minibatch.vmap(fun)(jnp.arange(3.0)), [0, 8, -16])


def test_gradient_through_a_reference() -> None:
    def cube(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] *= x
        return ref[...] * x

    x = jnp.arange(3.0)
    np.testing.assert_allclose(minibatch.vmap(jax.grad(cube))(x), 3 * x**2)
    np.testing.assert_allclose(jax.grad(lambda x: minibatch.vmap(cube)(x).sum())(x), 3 * x**2)


def test_indices_that_differ_among_slices_and_integers() -> None:
    x = np.arange(2 * 3 * 4 * 5.0, dtype="f").reshape(2, 3, 4, 5)

    def fun(x: Any, i: Any) -> Any:
        ref = jax.new_ref(x)
        return ref[i], ref[:, i], ref[jnp.asarray([0, 2]), :, jnp.asarray([1, 0])], ref[i, :, jax.ds(i, 2)]

    found = minibatch.vmap(fun, (3, 0))(np.moveaxis(x, 0, 3), jnp.arange(2))
    wanted = [(row[i], row[:, i], row[[0, 2], :, [1, 0]], row[i, :, i : i + 2]) for i, row in enumerate(x)]
    for found_part, wanted_part in zip(found, zip(*wanted, strict=True), strict=True):
        np.testing.assert_allclose(found_part, np.stack(wanted_part))


def test_reference_seen_through_more_than_an_index_says_so() -> None:
    with pytest.raises(NotImplementedError, match="get of a reference seen through"):
        minibatch.vmap(lambda x: jax.new_ref(x).at[1:].at[0][...])(jnp.ones((2, 3)))


def test_lanes_meet_in_a_loop_with_a_reference_of_its_own() -> None:
    def fun(x: Any, n: Any) -> Any:
        def step(state: Any) -> Any:
            k, y = state
            ref = jax.new_ref(y)
            ref[0] += lax.psum(y[1], "lanes")
            return k + 1, ref[...]

        return lax.while_loop(lambda state: state[0] < n, step, (0, x))[1]

    x, n = jnp.arange(6.0).reshape(3, 2), jnp.asarray([1, 3, 0])
    found = minibatch.vmap(fun, axis_name="lanes")(x, n)
    np.testing.assert_allclose(found, [[0 + 9, 1], [2 + 3 * 9, 3], [4, 5]])


def test_reference_made_in_a_loop_beside_branches_that_are_partitioned() -> None:
    """What JAX makes of such a loop takes no constants in it, and to lay out lanes takes some."""

    def f(n: Any, x: Any) -> Any:
        def step(carry: Any) -> Any:
            ref = jax.new_ref(carry[1])
            ref[0] = ref[0] + 1.0
            return carry[0] + 1, lax.switch(carry[0] % 3, [jnp.sin, jnp.cumsum, lambda x: x * ref[0]], ref[...])

        return lax.while_loop(lambda carry: carry[0] < n, step, (0, x))

    args = jnp.array([1, 5, 0, 2]), jnp.arange(8.0).reshape(4, 2)
    found = jax.jit(minibatch.vmap(f, divergence=("refill", "partition")))(*args)
    one = jax.jit(f)
    lanes = jax.tree.map(lambda *xs: jnp.stack(xs), *[one(*each) for each in zip(*args, strict=True)])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, lanes)
