"""Random bits and keys."""

from __future__ import annotations

from typing import Any

import jax

from minibatch._batched import Axis, is_batched
from minibatch._registry import elementwise, leading, lift_elementwise, lift_leading, rule
from minibatch.rules.fallback import one_by_one

elementwise("philox2x32 philox4x32 threefry2x32 threefry4x32")
elementwise("assert_consumed_value consume from_edtype random_clone random_unwrap")
leading("random_wrap to_edtype")  # the last dims of an array become part of its type

EVERY = {"random_bits", "random_fold_in", "random_gamma", "random_seed", "random_split"}
AT_ONCE = {
    **dict.fromkeys(["philox2x32", "philox4x32", "threefry2x32", "threefry4x32"], EVERY),
    "rbg": EVERY - {"random_bits"},
    "unsafe_rbg": {"random_seed"},
}
"""For each implementation of keys the primitives that, given many keys at once, do for each what they do for it alone.

Those that hash a key and a position do. `rng_bit_generator` draws one stream for all the keys that it is given, and so
does what is built on it: these run lane by lane, as do implementations that are not known here.
"""


@rule("random_bits random_fold_in random_seed random_split", anywhere=True)
def draw(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*k] -> [*k, *s]   lifts to   [B, *k] -> [B, *k, *s]."""
    lift = lift_elementwise if at_once(eqn, operands[0]) else one_by_one
    return lift(axis, eqn, *operands)


@rule("random_gamma")
def random_gamma(axis: Axis, eqn: Any, key: Any, a: Any) -> list:
    """[*k], [*k, *s] -> [*k, *s]   lifts to   [B, *k], [B, *k, *s] -> [B, *k, *s]."""
    lift = lift_leading if at_once(eqn, key) else one_by_one
    return lift(axis, eqn, key, a)


def at_once(eqn: Any, key: Any) -> bool:
    """Whether the primitive of `eqn` takes many keys at once, rather than one after another."""
    key = key.value if is_batched(key) else key
    implementation = eqn.params["impl"].name if "impl" in eqn.params else str(jax.random.key_impl(key))
    return eqn.primitive.name in AT_ONCE.get(implementation, ())


@rule("rng_bit_generator rng_uniform")
def generate(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[k] -> [*s]   lifts to   a loop: each lane draws from a stream of its own."""
    return one_by_one(axis, eqn, *operands)
