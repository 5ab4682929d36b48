"""Primitives that act on each element by itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from minibatch._batched import Axis, Batched, apart, is_batched, lanes, lifted, together
from minibatch._jax import is_ref, is_tracer, rebind
from minibatch._registry import elementwise, leading, rule

elementwise("""
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj convert_element_type copy cos cosh
    digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p log2 logistic name neg not
    one_minus_square population_count real reduce_precision round rsqrt sign sin sinh sqrt square stage stop_gradient tan
    tanh with_memory_space_constraint xla_metadata_value
""")
elementwise("""
    add and atan2 complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min mul mulhi ne nextafter
    or polygamma pow rem shift_left shift_right_arithmetic shift_right_logical sub xor zeta
""")
elementwise("polynomial regularized_incomplete_beta")
leading("bitcast_convert_type")  # its last dim may come or go with the width of the type


@rule("select_n", anywhere=True)
def select_n(axis: Axis, eqn: Any, which: Any, *cases: Any) -> list:
    """[*s] or [], [*s]… -> [*s]   lifts to   [B, *s] or [], [B, *s]… -> [B, *s]."""
    bdim = next((x.bdim for x in (*cases, which) if is_batched(x)), 0)
    values = [lanes(axis, x, bdim) for x in cases]
    return lifted(axis, eqn, bdim, spread(axis, which, values[0], bdim), *values)


@rule("clamp", anywhere=True)
def clamp(axis: Axis, eqn: Any, low: Any, x: Any, high: Any) -> list:
    """[] or [*s], [*s], [] or [*s] -> [*s]   lifts to   [] or [B, *s], [B, *s], [] or [B, *s] -> [B, *s]."""
    bdim = next((y.bdim for y in (x, low, high) if is_batched(y)), 0)
    x = lanes(axis, x, bdim)

    def limit(y: Any) -> Any:  # JAX has no derivative by a scalar limit of an array
        alike = np.ndim(x) == 1 and is_tracer(y)
        return lanes(axis, y, bdim) if alike else spread(axis, y, x, bdim)

    return lifted(axis, eqn, bdim, limit(low), x, limit(high))


def spread(axis: Axis, x: Any, like: Any, bdim: int) -> Any:
    """`x` with the shape of `like`, whose lanes are at `bdim`. A scalar that all lanes share stays."""
    if not is_batched(x) and np.ndim(x) == 0:
        return x
    if is_batched(x) and np.ndim(x.value) < np.ndim(like):
        return lax.broadcast_in_dim(x.value, np.shape(like), [bdim], out_sharding=jax.typeof(like).sharding)
    return lanes(axis, x, bdim)


@rule("add_any", anywhere=True)
def add_any(axis: Axis, eqn: Any, x: Any, y: Any) -> list:
    """[*s], [*s] -> [*s]   lifts to   [B, *s], [B, *s] -> [B, *s]: unlike add, it takes equal shapes only."""
    bdim = x.bdim if is_batched(x) else y.bdim
    return lifted(axis, eqn, bdim, lanes(axis, x, bdim), lanes(axis, y, bdim))


@rule("tie", anywhere=True)
def tie(axis: Axis, eqn: Any, x: Any, y: Any) -> list:
    """[*s], [*t] -> [*t]   lifts to   the same: the result is the second operand, batched if that is."""
    return passed_on(eqn, [x, y], [y])


@rule("optimization_barrier", anywhere=True)
def optimization_barrier(axis: Axis, eqn: Any, *operands: Any) -> list:
    """[*s]… -> [*s]…   lifts to   the same: each result is its operand (a reference has none), batched if that is."""
    return passed_on(eqn, operands, [x for x in operands if not is_ref(x.value if is_batched(x) else x)])


@rule("dce_sink", anywhere=True)
def dce_sink(axis: Axis, eqn: Any, x: Batched) -> list:
    """[*s] ->   lifts to   [B, *s] ->."""
    return rebind(eqn, x.value)


def passed_on(eqn: Any, operands: Any, results: Any) -> list:
    """`eqn` on operands as they are, where each result is the operand that `results` says."""
    return together(rebind(eqn, *apart(operands)[0]), apart(results)[1])
