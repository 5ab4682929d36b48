"""Containers of every kind, as arguments, results and specs: nothing but real values goes through their code."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import distrax
import equinox as eqx
import flax.struct
import inox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.interpreters.batching import register_vmappable

from minibatch import if_array, vmap

X = np.arange(12, dtype=np.float32).reshape(3, 4)


# https://github.com/jax-ml/jax/issues/16170
@jax.tree_util.register_pytree_node_class
class Particle:
    """Decides while flattening: a velocity that is an array is a child, anything else is static."""

    def __init__(self, velocity):
        self.velocity = velocity

    def tree_flatten(self):
        dynamic = isinstance(self.velocity, (jax.Array, np.ndarray))
        return ((self.velocity,), (True, None)) if dynamic else ((None,), (False, self.velocity))

    @classmethod
    def tree_unflatten(cls, aux, children):
        dynamic, static = aux
        return cls(children[0] if dynamic else static)


# https://github.com/jax-ml/jax/issues/12319
@jax.tree_util.register_pytree_node_class
class Segment:
    """Validates and converts its ends whenever it is made."""

    made: list = []  # noqa: RUF012 - shared on purpose

    def __init__(self, ends):
        self.ends = jnp.asarray(ends, jnp.float32)
        Segment.made.append(isinstance(ends, (jax.Array, np.ndarray)))
        assert self.ends.shape[-1] == 2, "a segment has two ends"

    def tree_flatten(self):
        return (self.ends,), "static"

    @classmethod
    def tree_unflatten(cls, aux, children):
        assert aux == "static"
        return cls(*children)


# https://github.com/jax-ml/jax/issues/26053
@dataclasses.dataclass
class Hidden:
    """Hides its fields in an inner dict when flattened."""

    slope: object
    shift: object


jax.tree_util.register_pytree_node(
    Hidden,
    lambda h: jax.tree.flatten({"slope": h.slope, "shift": h.shift}),
    lambda treedef, leaves: Hidden(**jax.tree.unflatten(treedef, leaves)),
)


@flax.struct.dataclass
class Gear:
    teeth: object
    label: object = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class Motor:
    power: object
    gear: Gear
    serial: object = flax.struct.field(pytree_node=False, default=None)


class Pair(NamedTuple):
    left: object
    right: object


def test_structure_that_depends_on_leaves():
    calls = []

    def make(x):
        calls.append(1)
        return Particle(x * 2), Particle(None), Particle("still")

    moving, none, still = vmap(make)(X)
    assert calls == [1]
    np.testing.assert_allclose(moving.velocity, X * 2)
    assert none.velocity is None and still.velocity == "still"
    np.testing.assert_allclose(vmap(lambda p: p.velocity + 1)(moving), X * 2 + 1)
    np.testing.assert_allclose(vmap(lambda p: p.velocity.sum(), (Particle(0),))(moving), (X * 2).sum(1))
    np.testing.assert_allclose(vmap(lambda p: p.velocity.sum(), (Particle(1),))(moving), (X * 2).sum(0))
    axes = jax.tree.map(lambda _: 0, moving)
    np.testing.assert_allclose(vmap(lambda p: p.velocity.sum(), (axes,))(moving), (X * 2).sum(1))


def test_constructor_that_validates_and_converts():
    ends = Segment(np.ones((5, 2)))
    Segment.made.clear()
    for out_axes in (0, (0, 0)):
        segment, length = vmap(lambda s: (Segment(s.ends * 3), s.ends.sum()), (0,), out_axes)(ends)
        assert segment.ends.shape == (5, 2) and length.shape == (5,)
    assert all(Segment.made), "made of something that is no array"


def test_static_fields_of_a_spec_need_not_agree():
    motor = Motor(jnp.arange(3.0), Gear(jnp.arange(3.0) * 10, label="spur"), serial=7)
    out = vmap(lambda m: m, (Motor(0, Gear(0, label=None), serial=99),), Motor(0, Gear(0)))(motor)
    assert out.serial == 7 and out.gear.label == "spur"
    total = vmap(lambda m: m.power + m.gear.teeth.sum(), (Motor(0, None),))(motor)
    np.testing.assert_allclose(total, [30, 31, 32])


def test_spec_object_that_holds_none():
    found = vmap(lambda q: q.slope + q.shift, (Hidden(slope=0, shift=None),))(Hidden(X[:, 0], 10.0))
    np.testing.assert_allclose(found, X[:, 0] + 10)
    with pytest.raises(ValueError, match="in_axes"):
        vmap(lambda q: q.slope, (Hidden(slope={"a": 0}, shift=None),))(Hidden(X, 10.0))


@jax.tree_util.register_pytree_node_class
class Named:
    """Has aux data that cannot be hashed."""

    def __init__(self, names, data):
        self.names, self.data = names, data

    def tree_flatten(self):
        return (self.data,), self.names

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(names, *children)


def test_aux_data_that_cannot_be_hashed():
    f = vmap(lambda x: Named([*x.names, "doubled"], x.data * 2))
    for _ in range(2):
        found = f(Named(["a"], X))
        assert found.names == ["a", "doubled"]
        np.testing.assert_allclose(found.data, X * 2)


def test_named_tuples():
    out = vmap(lambda p: Pair(p.right, p.left * 2), (Pair(0, None),), Pair(None, 0))(Pair(X, 3.0))
    assert isinstance(out, Pair) and out.left == 3.0
    np.testing.assert_allclose(out.right, X * 2)


def test_equinox_modules():
    make = lambda key: eqx.nn.MLP(4, 2, 8, 1, key=key)
    keys = jax.random.split(jax.random.key(0), 3)
    models = eqx.filter_vmap(make)(keys)
    one = [jax.tree.map(lambda leaf, i=i: leaf[i] if eqx.is_array(leaf) else leaf, models) for i in range(3)]
    found = vmap(lambda m, x: m(x), in_axes=(if_array(0), 0))(models, X)
    np.testing.assert_allclose(found, np.stack([m(x) for m, x in zip(one, X, strict=True)]), rtol=1e-5)
    found = vmap(lambda m, x: m(x), in_axes=(if_array(0), None))(models, X[0])
    np.testing.assert_allclose(found, np.stack([m(X[0]) for m in one]), rtol=1e-5)
    arrays, static = eqx.partition(models, eqx.is_array)
    doubled = vmap(lambda a: jax.tree.map(lambda w: w * 2, a))(arrays)
    assert isinstance(eqx.combine(doubled, static), eqx.nn.MLP)


def test_inox_modules():
    class Scale(inox.nn.Module):
        def __init__(self, factor):
            self.factor = factor
            self.kind = "linear"

        def __call__(self, x):
            return x * self.factor

    found = vmap(lambda m, x: m(x), if_array(0))(Scale(jnp.arange(3.0)), X)
    np.testing.assert_allclose(found, X * np.arange(3)[:, None])
    module = vmap(lambda s: Scale(s * 2), out_axes=if_array(0))(jnp.arange(3.0))
    np.testing.assert_allclose(module.factor, [0, 2, 4])
    assert module.kind == "linear"


def test_distrax_distributions():
    normals = vmap(lambda mean: distrax.Normal(mean, 1.0))(X[:, 0])
    assert isinstance(normals, distrax.Normal)
    found = vmap(lambda d, x: d.log_prob(x))(normals, X[:, 1])
    np.testing.assert_allclose(found, distrax.Normal(X[:, 0], 1.0).log_prob(X[:, 1]), rtol=1e-5)


class Labelled:
    """An array whose dims have names: one lane of it has one name less."""

    def __init__(self, names, data):
        assert len(names) == data.ndim
        self.names, self.data = tuple(names), data


@dataclasses.dataclass(frozen=True)
class Over:
    """Along the dim of this name, which is, or becomes, this dim."""

    name: str
    dim: int


def to_lane(lane, _, x, spec):
    assert x.names[spec.dim] == spec.name
    return Labelled([n for n in x.names if n != spec.name], lane(x.data, spec.dim))


def from_lane(many, size, x, spec):
    return Labelled([*x.names[: spec.dim], spec.name, *x.names[spec.dim :]], many(size, x.data, spec.dim))


jax.tree_util.register_pytree_node(Labelled, lambda x: ([x.data], x.names), lambda names, xs: Labelled(names, xs[0]))
register_vmappable(Labelled, Over, int, to_lane, from_lane, None)


@pytest.mark.parametrize("compile", [True, False])
def test_container_that_is_mapped_as_its_own_specs_say(compile):
    def fun(x, w):
        assert x.names == ("j",) and x.data.shape == (4,)
        return Labelled(x.names, x.data * w), x.data.sum()

    mapped = vmap(fun, (Over("i", 0), 0), (Over("i", 1), 0), axis_size=3, compile=compile)
    for call in (mapped, jax.jit(mapped)):
        scaled, total = call(Labelled(["i", "j"], X), X[:, 0])
        assert scaled.names == ("j", "i")
        np.testing.assert_allclose(scaled.data, (X * X[:, :1]).T, rtol=1e-6)
        np.testing.assert_allclose(total, X.sum(1), rtol=1e-6)
    nested = vmap(vmap(lambda x: x.data + 1, Over("j", 0), axis_size=4), Over("i", 0), axis_size=3, compile=compile)
    np.testing.assert_allclose(nested(Labelled(["i", "j"], X)), X + 1)


def test_sparse_matrices_are_mapped_as_a_whole():
    dense = X.reshape(3, 2, 2) * (np.arange(4).reshape(2, 2) > 0)
    batch = sparse.BCOO.fromdense(jnp.asarray(dense), n_batch=1)
    v = np.ones((3, 2), np.float32)
    np.testing.assert_allclose(vmap(lambda a, b: a @ b)(batch, v), dense.sum(2), rtol=1e-6)
    doubled = vmap(lambda a: a * 2)(batch)
    assert isinstance(doubled, sparse.BCOO) and doubled.shape == (3, 2, 2)
    np.testing.assert_allclose(doubled.todense(), dense * 2)
    made = vmap(lambda d: sparse.BCOO.fromdense(d, nse=4))(dense)
    np.testing.assert_allclose(made.todense(), dense)
    one = sparse.BCOO.fromdense(jnp.asarray(dense[0]))
    np.testing.assert_allclose(vmap(lambda a, b: a @ b, (None, 0))(one, v), v @ dense[0].T)
    under_jit = jax.jit(vmap(lambda a, b: a @ b))(batch, v)
    np.testing.assert_allclose(under_jit, dense.sum(2), rtol=1e-6)
