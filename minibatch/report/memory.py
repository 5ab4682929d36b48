"""How much memory a batched program takes at once, and how many lanes fit.

An estimate from shapes and the order of the equations: an array takes memory from the equation that makes it to the last
that reads it, but none where only elementwise equations make and read it, which XLA fuses. What such an equation makes
takes the place of what it reads last. A loop changes its carries in place.
"""

from __future__ import annotations

from typing import Any

from minibatch import _jax
from minibatch._cost import alive, eqn_cost, nbytes, runs
from minibatch.report.facts import Facts

MANY = 64  # times as many lanes as there are
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def in_bytes(memory: int | str) -> int:
    """`"8GB"`, `"512 MiB"` or a number of bytes, in bytes.

    Raises:
      ValueError: it is none of these.
    """
    if isinstance(memory, int):
        return memory
    text = memory.strip().upper()
    number = text.rstrip("BKMGTI ")
    unit = text[len(number) :].strip() or "B"
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError):
        raise ValueError(f"memory={memory!r} is not a number of bytes, nor one with a unit such as '8GB' or '512MiB'") from None


def stored(jaxpr: Any) -> set:
    """The variables of `jaxpr` that have a place in memory."""
    jaxpr = _jax.open_jaxpr(jaxpr)
    kept = {*jaxpr.invars, *(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))}
    for eqn in jaxpr.eqns:
        if not fused(eqn):
            kept |= {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, _jax.Literal)}
    return kept


def fused(eqn: Any) -> bool:
    """Whether XLA makes one loop of `eqn` and its neighbours."""
    return runs(eqn) is None and not eqn_cost(eqn).bytes


def peak(jaxpr: Any) -> float:
    """The most bytes that a run of `jaxpr` takes at once, its inputs and outputs included."""
    jaxpr = _jax.open_jaxpr(jaxpr)
    kept = stored(jaxpr)
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, _jax.Literal)}
    stays = {*jaxpr.invars, *(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))}
    now = most = sum(map(nbytes, jaxpr.invars))
    lives = alive(jaxpr)
    for i, eqn in enumerate(jaxpr.eqns):
        if not lives[i]:
            continue
        dead = {v for v in eqn.invars if not isinstance(v, _jax.Literal) and last[v] == i} & kept - stays
        freed = sum(map(nbytes, dead))
        made = sum(nbytes(v) for v in eqn.outvars if v in kept)
        most = max(most, now + max(made - freed if fused(eqn) else made, 0) + max(map(_inside, runs(eqn) or ()), default=0))
        now += made - freed
    return most


def _inside(run: Any) -> float:
    """What a run of an inner jaxpr takes beside its inputs and outputs, which are those of the equation."""
    jaxpr = _jax.open_jaxpr(run.jaxpr)
    return max(peak(jaxpr) - sum(map(nbytes, (*jaxpr.invars, *jaxpr.outvars))), 0)


def largest_batch(facts: Facts, memory: int) -> int | None:
    """How many lanes fit in so many bytes; None where memory does not grow with the lanes.

    What shared values take stays, what lanes take grows with them: two sizes tell the one from the other. Both are of many
    lanes, as a schedule may be another for few. Where the function works for its own number of lanes alone, they fit or none.
    """
    many = MANY * max(facts.size, 1)
    one, two = facts.batch(many), facts.batch(2 * many)
    if one is None or two is None:
        return facts.size if peak(facts.batched) <= memory else 0
    less = peak(one)
    each = (peak(two) - less) / many
    if each <= 0:
        return None
    return max(int((memory - less) / each) + many, 0)
