"""Cases for rules/random.py."""

import jax
import jax.numpy as jnp
from jax import lax
from jax import random as r
from jax._src import dtypes
from jax._src.core import ShapedArray
from jax._src.random.philox2x32 import philox2x32_p
from jax._src.random.philox4x32 import philox4x32_p
from jax._src.random.threefry4x32 import threefry4x32_p
from jax.extend.random import threefry2x32_p
from oracle import Case, f32, i32, keys, u32


class PairRules:
    """What JAX asks of a type whose elements are pairs of integers."""

    allow_conversion = True

    @staticmethod
    def physical_element_aval(dtype):
        """How one element is stored."""
        return ShapedArray((2,), jnp.dtype("uint32"))


class Pair(dtypes.ExtendedDType):
    """A type whose elements are pairs of integers."""

    type = dtypes.extended
    name = "pair"
    _rules = PairRules

    def __hash__(self):
        return hash(type(self))

    def __eq__(self, other):
        return type(other) is type(self)


def drawn(key):
    """Bits, uniform and normal numbers, a permutation, further keys."""
    a, b = r.split(key)
    return r.bits(a, (3,), "uint8"), r.uniform(b), r.normal(r.fold_in(key, 3), (2,)), r.permutation(a, 4), r.split(b, (2, 2))


def hashed(impl):
    """Numbers drawn with keys of `impl` made from a number."""
    return lambda seed: r.uniform(r.split(r.key(seed, impl=impl), 2)[1], (2,))


CASES = [
    Case("draws", drawn, (keys(),), "random_bits random_split random_fold_in"),
    Case("draws-rbg", drawn, (keys(impl="rbg"),), "random_bits random_split random_fold_in", jax=False),
    Case("draws-unsafe-rbg", drawn, (keys(impl="unsafe_rbg"),), "random_bits random_split random_fold_in", jax=False),
    Case("seed", hashed("threefry2x32"), (i32(low=0, high=99),), "random_seed"),
    Case("seed-rbg", hashed("rbg"), (i32(low=0, high=99),), "random_seed", jax=False),
    Case("fold_in", r.fold_in, (keys(), i32(low=0, high=99)), "random_fold_in"),
    Case(
        "fold_in-unsafe-rbg",
        r.fold_in,
        (keys(impl="unsafe_rbg"), i32(low=0, high=99)),
        "random_fold_in",
        jax=False,
    ),
    Case(
        "raw-keys",
        lambda data: r.key_data(r.clone(r.wrap_key_data(data, impl="threefry2x32"))),
        (u32(3, 2),),
        "random_wrap random_unwrap random_clone",
    ),
    Case("several-keys", jax.vmap(lambda key: r.bits(key, (2,))), (keys(2),), "random_bits"),
    Case("gamma", r.gamma, (keys(), f32(2, low=0.5)), "random_gamma"),
    Case("loggamma", lambda key, a: r.loggamma(key, a, (2,)), (keys(), f32(low=0.5)), "random_gamma"),
    Case("gamma-unsafe-rbg", r.gamma, (keys(impl="unsafe_rbg"), f32(2, low=0.5)), "random_gamma", jax=False),
    Case("threefry2x32", lambda key, n: threefry2x32_p.bind(key[0], key[1], n, n), (u32(2), u32(3)), "threefry2x32"),
    Case(
        "hashes",
        lambda key, n: [
            *philox2x32_p.bind(key[0], n, n),
            *philox4x32_p.bind(key[0], key[1], n, n, n, n),
            *threefry4x32_p.bind(*key, n, n, n, n),
        ],
        (u32(4), u32(3)),
        "philox2x32 philox4x32 threefry4x32",
    ),
    Case(
        "extended-types",
        lambda x: lax.convert_element_type(lax.convert_element_type(x, Pair()).T, jnp.uint32),
        (u32(3, 4, 2),),
        "to_edtype from_edtype",
        jax=False,
    ),
    Case(
        "rng_bit_generator",
        lambda key: lax.rng_bit_generator(key, (2, 3), jnp.uint16),
        (u32(4),),
        "rng_bit_generator",
        jax=False,
    ),
    Case("rng_uniform", lambda n: lax.rng_uniform(n, n + 1, (2,)), (i32(),), "rng_uniform", jax=False),
]
