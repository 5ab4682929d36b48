"""What an equation costs, estimated: floating-point operations, transcendental functions, bytes to and from memory.

Estimates follow from shapes alone, so that they are there at trace time. They count as XLA's `cost_analysis` counts
before it fuses (one operation for each element, 2·m·n·k for a matrix product), but for bytes, which are those that move
once runs of elementwise equations are fused: an array counts where something else than such an equation reads or makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from minibatch import _jax, _registry


def words(text: str) -> frozenset[str]:
    """The names in `text`."""
    return frozenset(text.split())


class Cost(NamedTuple):
    """Work, in operations of any dtype, calls of transcendental functions, and bytes read and written."""

    flops: float = 0.0
    transcendentals: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Any) -> Cost:
        return Cost(*(x + y for x, y in zip(self, other, strict=True)))

    def __mul__(self, times: Any) -> Cost:
        return Cost(*(x * times for x in self))


TRANSCENDENTAL = words("""
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1
    igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma pow regularized_incomplete_beta rsqrt sin sinh
    sqrt tan tanh zeta
""")
VIEWS = words("""
    bitcast_convert_type broadcast_in_dim copy detach expand_dims iota mesh_cast name optimization_barrier pvary reshape
    sharding_constraint slice squeeze stage stop_gradient tie
""")  # no arithmetic, and nothing to move where a reader can fetch the elements itself


def jaxpr_cost(jaxpr: Any, trips: float = 1.0) -> Cost:
    """The cost of running `jaxpr` once, its inputs read and its outputs written.

    A scan counts all its steps, a `while` loop `trips` of them, a branch of several the dearest.
    """
    return sum(eqn_costs(jaxpr, trips), Cost())


def eqn_costs(jaxpr: Any, trips: float = 1.0, stored: bool = True) -> list[Cost]:
    """The cost of each equation of `jaxpr`. An input that only fused equations read is paid for by the first of them, an
    output by the one that makes it; neither if what goes in and out is not `stored` in memory. What nothing reads is free.
    """
    jaxpr = _jax.open_jaxpr(jaxpr)
    costs = [eqn_cost(eqn, trips) if lives else Cost() for eqn, lives in zip(jaxpr.eqns, alive(jaxpr), strict=True)]
    if not stored:
        return costs
    unread, unwritten = {*jaxpr.invars}, {*_variables(jaxpr.outvars)}
    for i, eqn in enumerate(jaxpr.eqns):
        if not costs[i].bytes:
            touched = ({*_variables(eqn.invars)} & unread) | ({*eqn.outvars} & unwritten)
            costs[i] += Cost(bytes=sum(map(nbytes, touched)))
            unread -= touched
    return costs


def alive(jaxpr: Any) -> list[bool]:
    """Whether each equation of `jaxpr` is of use: XLA drops the others."""
    jaxpr = _jax.open_jaxpr(jaxpr)
    wanted = {*_variables(jaxpr.outvars)}
    lives = []
    for eqn in reversed(jaxpr.eqns):
        lives.append(bool(eqn.effects) or not wanted.isdisjoint(eqn.outvars))
        if lives[-1]:
            wanted.update(_variables(eqn.invars))
    return lives[::-1]


def eqn_cost(eqn: Any, trips: float = 1.0) -> Cost:
    """The cost of one equation; for one with jaxprs inside, that of what they run. `trips`: see `jaxpr_cost`."""
    inside = runs(eqn, trips)
    if inside is not None:
        return sum((run.cost(trips) * run.times for run in inside), Cost())
    name = eqn.primitive.name
    if name in _OWN:
        return Cost(flops=_OWN[name](eqn), bytes=_TOUCHED.get(name, _all_bytes)(eqn))
    if name in VIEWS:
        return Cost()
    elements = float(max((_size(v) for v in eqn.outvars), default=0))
    if name in TRANSCENDENTAL:
        return Cost(transcendentals=elements)
    if _registry.find(eqn.primitive).family == "elementwise":
        return Cost(flops=elements)
    return Cost(flops=elements, bytes=_TOUCHED.get(name, _all_bytes)(eqn))


# --- sizes ------------------------------------------------------------------------------------------------------------


def _variables(atoms: Any) -> Iterator[Any]:
    return (v for v in atoms if not isinstance(v, _jax.Literal))


def _shape(atom: Any) -> tuple:
    return getattr(atom.aval, "shape", ())


def _size(atom: Any) -> float:
    """Elements of `atom`; a symbolic dimension counts as one."""
    return float(math.prod(d for d in _shape(atom) if isinstance(d, int)))


def nbytes(atom: Any) -> float:
    """The bytes that `atom` takes."""
    return _size(atom) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 4)


def _all_bytes(eqn: Any) -> float:
    return sum(map(nbytes, (*eqn.invars, *eqn.outvars)))


# --- equations that run jaxprs ----------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A jaxpr inside an equation: run so many `times`; `stored` if what goes in and out passes through memory."""

    jaxpr: Any
    times: float
    stored: bool

    def cost(self, trips: float) -> Cost:
        """Of running it once."""
        return sum(eqn_costs(self.jaxpr, trips, self.stored), Cost())


def runs(eqn: Any, trips: float = 1.0) -> list[Run] | None:
    """What an equation runs; None if it is one that does the work itself."""
    name = eqn.primitive.name
    if name in _INNER:
        return _INNER[name](eqn, trips)
    inside = [] if name in _OWN else [Run(jaxpr, 1, False) for jaxpr in _jax.inner_jaxprs(eqn)]
    return inside or None


def _scan(eqn: Any, trips: float) -> list[Run]:
    return [Run(eqn.params["jaxpr"], eqn.params["length"], True)]


def _while(eqn: Any, trips: float) -> list[Run]:
    return [Run(eqn.params["cond_jaxpr"], trips, True), Run(eqn.params["body_jaxpr"], trips, True)]


def _cond(eqn: Any, trips: float) -> list[Run]:
    branches = [Run(branch, 0, True) for branch in eqn.params["branches"]]
    dearest = max(range(len(branches)), key=lambda i: sum(branches[i].cost(trips)))
    return [run._replace(times=int(i == dearest)) for i, run in enumerate(branches)]


def _derivable(eqn: Any, trips: float) -> list[Run]:
    """A function with a derivative rule: the function is what runs."""
    return [Run(next(iter(_jax.inner_jaxprs(eqn))), 1, False)]


def _linear_solve(eqn: Any, trips: float) -> list[Run]:
    return [Run(eqn.params["jaxprs"].solve, 1, False)]


_INNER: dict[str, Callable[[Any, float], list[Run]]] = {
    "scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _linear_solve,
    "custom_jvp_call": _derivable, "custom_vjp_call": _derivable, "custom_vmap_call": _derivable,
}  # fmt: skip


# --- equations that do more, or less, than one operation for each element -----------------------------------------------


def _dot_general(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    terms = math.prod(_shape(eqn.invars[0])[d] for d in contracted)
    return _size(eqn.outvars[0]) * (2 * terms if terms > 1 else 1)  # a product alone where nothing is summed


def _conv(eqn: Any) -> float:
    spec = eqn.params["dimension_numbers"].rhs_spec
    kernel = _shape(eqn.invars[1])
    return 2 * _size(eqn.outvars[0]) * math.prod(kernel[d] for d in spec[1:])  # of one output feature


def _of_operand(eqn: Any) -> float:
    return _size(eqn.invars[0])


def _window(eqn: Any) -> float:
    return _size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])


def _sort(eqn: Any) -> float:
    n = _shape(eqn.invars[0])[eqn.params.get("dimension", -1)] if _shape(eqn.invars[0]) else 1
    return sum(map(_size, eqn.invars)) * math.log2(max(n, 2))


def _fft(eqn: Any) -> float:
    return 5 * _size(eqn.outvars[0]) * math.log2(max(math.prod(eqn.params["fft_lengths"]), 2))


def _cubic(factor: float, operand: int = 0) -> Callable[[Any], float]:
    """`factor`·m·n·min(m, n) for matrices [..., m, n] (Golub and Van Loan, Matrix Computations, gives the factors)."""

    def flops(eqn: Any) -> float:
        return factor * _size(eqn.invars[operand]) * min(_shape(eqn.invars[operand])[-2:])

    return flops


def _triangular_solve(eqn: Any) -> float:
    return _size(eqn.invars[1]) * _shape(eqn.invars[0])[-1]


def _banded(eqn: Any) -> float:
    return 8 * _size(eqn.invars[-1])


_REDUCTIONS = "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
_SCANS = "cumlogsumexp cummax cummin cumprod cumsum"
_WINDOWS = "reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add"
_MOVES = "concatenate dynamic_slice dynamic_update_slice gather pad rev split transpose"
_SCATTERS = "scatter scatter-add scatter_add scatter_max scatter_min scatter_mul scatter_sub"

_OWN: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(words(f"{_REDUCTIONS} {_SCANS}"), _of_operand),
    **dict.fromkeys(words(_WINDOWS), _window),
    **dict.fromkeys(words(_MOVES), lambda eqn: 0.0),
    **dict.fromkeys(words(_SCATTERS), lambda eqn: _size(eqn.invars[2])),
    "dot_general": _dot_general, "ragged_dot_general": lambda eqn: 2 * _size(eqn.outvars[0]) * _shape(eqn.invars[0])[-1],
    "conv_general_dilated": _conv, "sort": _sort, "top_k": _sort, "fft": _fft,
    "cholesky": _cubic(1 / 3), "lu": _cubic(2 / 3), "geqrf": _cubic(4 / 3), "qr": _cubic(4 / 3),
    "householder_product": _cubic(4 / 3),
    "eigh": _cubic(9), "eig": _cubic(25), "svd": _cubic(22), "schur": _cubic(25), "hessenberg": _cubic(10 / 3),
    "triangular_solve": _triangular_solve, "tridiagonal_solve": _banded, "tridiagonal": _cubic(4 / 3),
    "threefry2x32": lambda eqn: 100 * sum(map(_size, eqn.outvars)), "random_bits": lambda eqn: 100 * _size(eqn.outvars[0]),
    "rng_bit_generator": lambda eqn: 50 * _size(eqn.outvars[1]),
}  # fmt: skip


def _twice_the_result(eqn: Any) -> float:
    return 2 * sum(map(nbytes, eqn.outvars)) + sum(map(nbytes, eqn.invars[1:]))


def _twice_the_update(eqn: Any) -> float:
    """An operand that nothing else reads is updated in place."""
    return 2 * nbytes(eqn.invars[-1]) + (nbytes(eqn.invars[1]) if len(eqn.invars) == 3 else 0)


_TOUCHED: dict[str, Callable[[Any], float]] = {
    "gather": _twice_the_result, "dynamic_slice": _twice_the_result,
    "dynamic_update_slice": lambda eqn: 2 * nbytes(eqn.invars[1]),
    **dict.fromkeys(words(_SCATTERS), _twice_the_update),
}  # fmt: skip
