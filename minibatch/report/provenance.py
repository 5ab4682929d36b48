"""Why a value has lanes: the shortest way from it back to the argument that made it so."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from minibatch import _jax
from minibatch.report.facts import Equation, Facts, Scope

Place = tuple[Scope, Any]  # a variable, in the jaxpr it belongs to


@dataclasses.dataclass(frozen=True)
class Step:
    """A value on the way: what `equation` made, or (None) the input named `name`; it has its lanes at `bdim`."""

    equation: Equation | None
    name: str
    bdim: int | None


class Provenance:
    """Of every value that has lanes, the values that it has them from."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._makers: dict[Place, Equation] = {}
        self._made: dict[Equation, list[Place]] = collections.defaultdict(list)
        self._causes: dict[Place, list[Place]] = collections.defaultdict(list)
        self._bdims: dict[Place, int | None] = {}
        self._roots: dict[Place, str] = {}
        lane = facts.lane
        for var, name, bdim in zip(lane.jaxpr.invars, facts.names, lane.inputs, strict=True):
            if bdim is not None:
                self._roots[lane, var] = name or "what the function captured"
        self._seen: set[int] = set()
        self._enter(lane)

    def output(self, index: int) -> list[Step]:
        """The way from output number `index` of the program."""
        return self._way((self._facts.lane, self._facts.lane.jaxpr.outvars[index]))

    def equation(self, equation: Equation) -> list[Step]:
        """The way from what `equation` makes. Empty: every lane has the same."""
        return min(filter(None, map(self._way, self._made[equation])), key=len, default=[])

    def _way(self, place: Place | None) -> list[Step]:
        steps: list[Step] = []
        if place is None or self._bdims.get(place) is None:
            return steps
        while place is not None:
            if place in self._roots:
                steps.append(Step(None, self._roots[place], self._bdims[place]))
            elif place in self._makers:
                steps.append(Step(self._makers[place], self._makers[place].name, self._bdims[place]))
            place = self._next.get(place)
        return steps

    @functools.cached_property
    def _next(self) -> dict[Place, Place]:
        """From each value with lanes the next on a shortest way: breadth first, from all ends at once."""
        effects: dict[Place, list[Place]] = collections.defaultdict(list)
        ends = []
        for place in [place for place, bdim in self._bdims.items() if bdim is not None]:
            causes = [cause for cause in self._causes[place] if not self._shared(cause)]
            for cause in causes:
                effects[cause].append(place)
            if place in self._roots or not causes:
                ends.append(place)
        following: dict[Place, Place] = {}
        seen = {*ends}
        queue = collections.deque(ends)
        while queue:
            cause = queue.popleft()
            for place in effects[cause]:
                if place not in seen:
                    seen.add(place)
                    following[place] = cause
                    queue.append(place)
        return following

    # --- the graph ---

    def _enter(self, scope: Scope) -> None:
        if id(scope) in self._seen:
            return
        self._seen.add(id(scope))
        for var, bdim in zip(scope.jaxpr.invars, scope.inputs, strict=True):
            self._bdims[scope, var] = bdim
        for equation in scope.equations:
            made = [(scope, var) for var in equation.eqn.outvars]
            self._made[equation] += made
            for k, place in enumerate(made):
                self._makers[place] = equation
                self._bdims[place] = equation.outs[k]
            through = equation.name != "while" and equation.name != "cond" and bool(equation.scopes)
            given = [(scope, v) for v in equation.eqn.invars if not isinstance(v, _jax.Literal)]
            for inner in equation.scopes:
                self._enter(inner)
                for place, out in zip(made, inner.jaxpr.outvars, strict=False):
                    if equation.name != "while" or inner is not _condition(equation):
                        self._because(place, (inner, out))
                for taken, outer in _bound(scope, equation, inner):
                    self._because(taken, outer)
                    if equation.name == "while" and self._shared(outer):  # a lane that stops keeps its own
                        for cause in _deciders(equation, given):
                            self._because(taken, cause)
            for place in made if not through else ():
                for cause in _deciders(equation, given):
                    self._because(place, cause)
            if through and not any(d is not None for inner in equation.scopes for d in inner.outputs):
                for place in made:
                    for cause in given:
                        self._because(place, cause)

    def _shared(self, place: Place) -> bool:
        return isinstance(place[1], _jax.Literal) or self._bdims.get(place) is None

    def _because(self, place: Place, cause: Place) -> None:
        if not isinstance(cause[1], _jax.Literal):
            self._causes[place].append(cause)


def _condition(equation: Equation) -> Scope | None:
    """The scope of a loop's predicate."""
    wanted = _jax.open_jaxpr(equation.eqn.params["cond_jaxpr"])
    return next((scope for scope in equation.scopes if scope.jaxpr is wanted), None)


def _deciders(equation: Equation, given: list[Place]) -> list[Place]:
    """What decides that the results have lanes, where the way does not lead through the jaxprs inside."""
    if equation.name == "cond":
        return given[:1] if equation.operands[0] is not None else []
    if equation.name == "while":
        scope = _condition(equation)
        return [(scope, scope.jaxpr.outvars[0])] if scope is not None and scope.outputs[0] is not None else []
    return given


def _bound(outer: Scope, equation: Equation, inner: Scope) -> Iterator[tuple[Place, Place]]:
    """Each input of a jaxpr inside `equation`, with what it comes from: an operand, or a carry of the step before."""
    operands = [(outer, v) for v in equation.eqn.invars]
    consts = carried = 0
    match equation.name:
        case "cond":
            operands = operands[1:]
        case "scan":
            consts, carried = _jax.scan_counts(equation.eqn.params)
        case "while":
            in_cond, in_body = (equation.eqn.params[f"{part}_nconsts"] for part in ("cond", "body"))
            consts, carried = in_body, len(operands) - in_cond - in_body
            if inner is _condition(equation):
                own = [*operands[:in_cond], *operands[in_cond + in_body :]]
                body = next((s for s in equation.scopes if s is not inner), None)
                yield from zip([(inner, v) for v in inner.jaxpr.invars], own, strict=True)
                if body is not None:
                    taken = inner.jaxpr.invars[in_cond:]
                    yield from (((inner, v), (body, out)) for v, out in zip(taken, body.jaxpr.outvars, strict=True))
                return
            operands = operands[in_cond:]
    taken = [(inner, v) for v in inner.jaxpr.invars]
    if len(taken) == len(operands):
        yield from zip(taken, operands, strict=True)
    else:  # how the two correspond is the primitive's own affair: any operand may be where the lanes are from
        yield from itertools.product(taken, operands)
    if carried:
        steps = zip(taken[consts : consts + carried], inner.jaxpr.outvars, strict=False)
        yield from ((place, (inner, out)) for place, out in steps)
