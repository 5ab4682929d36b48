"""One query attends to memory: the program that docs/explain.md looks at."""

import jax
import jax.numpy as jnp
from jax import lax


def attend(query, keys, values, i):
    """The values, weighted by how well their keys fit; and one of them once more."""
    weights = jax.nn.softmax(keys @ query)
    return weights @ values + values[i]


def attend_to_some(query, keys, values, mask):
    """The values of those that the mask lets through."""
    fit = jnp.where(mask, keys @ query, -jnp.inf)
    weights = jnp.exp(fit - fit.max())
    return weights / weights.sum() @ values


def halvings(x):
    """How often x must be halved to be below one."""
    return lax.while_loop(lambda s: s[0] >= 1, lambda s: (s[0] / 2, s[1] + 1), (x, 0))[1]


def settle(query, keys, values):
    """Attend again and again until nothing changes."""

    def moving(state):
        query, before = state
        return jnp.abs(query - before).max() > 1e-4

    def step(state):
        query, _ = state
        return jax.nn.softmax(keys @ query / query.size) @ values, query

    return lax.while_loop(moving, step, (query, query + 1))[0]
