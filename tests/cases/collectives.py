"""Cases for rules/collectives.py: each maps four lanes under a name, inside the mapped function."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.lax import parallel  # no public name yet
from oracle import Case, f32

import minibatch

GROUPS = [[0, 2], [3, 1]]


def named(fun: Callable, in_axes: Any = 0) -> Callable:
    """`fun` on four lanes named `i`."""
    return minibatch.vmap(fun, in_axes=in_axes, axis_name="i", axis_size=4)


def reductions(v: Any, w: Any) -> Any:
    return lax.psum(v, "i"), lax.pmax(v, "i", axis_index_groups=GROUPS), lax.pmin(v, "i"), lax.psum(w, "i")


def moves(v: Any, w: Any) -> Any:
    swapped = lax.all_to_all(v, "i", 0, 1)
    return lax.all_gather(v, "i", axis=1), swapped, lax.psum_scatter(v, "i"), lax.all_gather(w, "i", axis_index_groups=GROUPS)


def permutations(v: Any, w: Any) -> Any:
    there = lax.ppermute(v, "i", [(0, 1), (3, 2)])
    return there, lax.pbroadcast(v, "i", 2), lax.pbroadcast(w, "i", 1), v * lax.axis_index("i")


def waited_for(v: Any, w: Any) -> Any:
    """Collectives that are started, then waited for."""
    started = [
        parallel.psum_start(v, "i"),
        parallel.all_gather_start(w, "i"),
        parallel.psum_scatter_start(v, "i", tiled=True),
        parallel.all_to_all_start(v, "i", 0, 0, tiled=True),
        parallel.ppermute_start(v, "i", [(0, 1), (3, 2)]),
    ]
    return [x.done() if hasattr(x, "done") else x for x in started]  # not every JAX starts each of them


def ragged(v: Any, w: Any) -> Any:
    ones = jnp.ones(4, int)
    return lax.ragged_all_to_all(v, v, jnp.arange(4), ones, jnp.full(4, lax.axis_index("i")), ones, axis_name="i")


CASES = [
    Case("reductions", named(reductions, (0, None)), (f32(4, 4, 2), f32(4)), "psum pmax pmin"),
    Case("sums", named(lambda v, w: lax.psum(v, "i") * lax.pmean(w, "i"), (0, None)), (f32(4, 2), f32(2)), "psum", grad=True),
    Case("moves", named(moves, (1, None)), (f32(4, 4, 2), f32(3)), "all_gather all_to_all reduce_scatter", grad=True),
    Case("permutations", named(permutations, (0, None)), (f32(4, 3), f32(3)), "ppermute pbroadcast axis_index"),
    Case(
        "waited_for",
        named(waited_for, (0, None)),
        (f32(4, 4), f32(3)),
        """all_gather_done all_gather_start all_to_all_done all_to_all_start ppermute_done ppermute_start psum_done psum_start
        reduce_scatter_done reduce_scatter_start""",
        jax=False,
    ),
    Case("ragged", named(ragged, (0, None)), (f32(4, 4), f32(3)), "ragged_all_to_all"),
]
