"""What batching did to each equation of a program: observed while it is batched, with what it costs before and after."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from minibatch import _jax, _registry
from minibatch._batched import Axis, apart
from minibatch._compile import Program
from minibatch._cost import Cost, alive, eqn_costs, runs
from minibatch._divergence import STAGED, STEPS
from minibatch._errors import MissingRuleWarning
from minibatch._interpreter import Watch, watched
from minibatch._trace import Call, Computed, Traced, parts, trace

BALANCE = 10  # operations in the time that a byte takes: about that of today's processors, with and without "graphics"


def work(cost: Cost) -> float:
    """One number for a cost: operations, a transcendental function as eight of them, a byte as `BALANCE`."""
    return cost.flops + 8 * cost.transcendentals + BALANCE * cost.bytes


class Line(NamedTuple):
    """A line of the user's source."""

    file: str
    number: int


@dataclasses.dataclass(eq=False)
class Equation:
    """One equation of the lane's program, and what became of it.

    `operands` and `outs` say where each has its lanes (None: shared). `before` is what it costs one lane times the
    number of lanes, `after` what it costs all of them at once, both without what the equations inside cost; `times` is how
    often the lanes come to it, all together, with each `while` loop taking one step.
    """

    number: int
    eqn: Any
    line: Line | None
    rule: _registry.Rule
    operands: tuple[int | None, ...]
    depth: int = 0
    times: float = 0.0
    outs: tuple[int | None, ...] = ()
    scopes: list[Scope] = dataclasses.field(default_factory=list)
    emitted: list[Any] = dataclasses.field(default_factory=list)
    before: Cost = dataclasses.field(default_factory=Cost)
    after: Cost = dataclasses.field(default_factory=Cost)

    @property
    def name(self) -> str:
        """Its primitive's name."""
        return self.eqn.primitive.name

    @property
    def staged(self) -> bool:
        """Whether it is a loop that runs in stages, with ever fewer lanes."""
        return any(map(_in_stages, self.emitted))

    @property
    def partitioned(self) -> bool:
        """Whether it is a branch whose lanes are sorted, so that each runs what it takes: a loop over chunks of them."""
        return self.name == "cond" and any(eqn.primitive.name == "scan" for eqn in self.emitted)

    @property
    def batched(self) -> bool:
        """Whether what it computes differs by lane."""
        return any(d is not None for d in (*self.operands, *self.outs))

    def inside(self) -> Iterator[Equation]:
        """The equation itself and all inside it."""
        yield self
        for scope in self.scopes:
            for equation in scope.equations:
                yield from equation.inside()

    def total(self, which: str = "after") -> Cost:
        """What it costs `before` or `after`, with all inside it."""
        return sum((getattr(equation, which) for equation in dict.fromkeys(self.inside())), Cost())


@dataclasses.dataclass(eq=False)
class Scope:
    """A jaxpr that was batched: the whole program, or one inside an equation."""

    jaxpr: Any
    consts: Sequence[Any]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...] = ()
    equations: list[Equation] = dataclasses.field(default_factory=list)

    def all(self) -> Iterator[Equation]:
        """Its equations and those inside them, in order, each once."""
        return iter(dict.fromkeys(inner for equation in self.equations for inner in equation.inside()))


@dataclasses.dataclass
class Facts:
    """What is known of a mapped call.

    `lane` is the program of one lane, `batched` that of all. `arrays` are the inputs, `names` what the user calls them;
    None for what the function captured; `outputs` those that are computed. `edges` is what placing them on their axes
    costs. `batch` makes the batched program for another number of lanes. `mark` finds in a name stack the marks of the
    equations that something was made for, `marked` has them by those.
    """

    call: Call
    traced: Traced
    axis: Axis
    lane: Scope
    batched: Any
    arrays: list[Any]
    names: list[str | None]
    outputs: list[str]
    edges: Cost
    batch: Callable[[int], Any]
    mark: re.Pattern
    marked: dict[int, Equation]

    @property
    def size(self) -> int:
        """The number of lanes; one where it is not known yet."""
        return self.axis.size if isinstance(self.axis.size, int) else 1

    def owner(self, stack: str, default: Equation | None = None) -> Equation | None:
        """The equation that what has this name stack was made for: the innermost that is marked in it."""
        marks = map(int, self.mark.findall(stack))
        return next((self.marked[number] for number in reversed([*marks]) if number in self.marked), default)

    def total(self, which: str = "after") -> Cost:
        """What the program costs one lane times the number of lanes (`before`), or all at once (`after`)."""
        return sum((getattr(e, which) for e in self.lane.all()), self.edges if which == "after" else Cost())


def observe(call: Call, names: Sequence[str]) -> Facts:
    """Trace the call, batch it, and note what happens. `names`: of each leaf of the arguments."""
    call, traced = trace(call)
    program = Program(call, traced)
    recorder = Recorder(call.axis)
    arrays = [*program.consts, *call.arrays()]
    avals = list(map(_jax.aval_of, arrays))

    def batch(size: int) -> Any:
        """The batched program for another number of lanes, or None where the function works for its own alone."""
        try:
            resized = _resized(call, traced, size)
        except Exception:  # the user's, who scatters a dim over the lanes for instance
            return None
        return _batch(*resized)

    with watched(recorder):
        batched = _trace_batched(program, avals)
    lane = recorder.outermost()
    outputs = [f"output{out.path}" for out in traced.outputs if isinstance(out, Computed) for _ in out.axes]
    named = [*[None] * len(program.consts), *names_of(call, names)]
    facts = Facts(call, traced, call.axis, lane, batched, arrays, named, outputs, Cost(), batch, recorder.mark, {})
    _settle(lane, None, 0)
    _cost_of_lane(lane, float(facts.size), stored=True)
    facts.marked = recorder.marked()
    facts.edges = _cost_of_all(batched, facts.owner)
    for number, equation in enumerate(lane.all(), 1):
        equation.number = number
    return facts


def names_of(call: Call, names: Sequence[str]) -> list[str]:
    """What to call each array that the program takes, `names` being what to call each leaf of the arguments."""
    return [name for name, given, leaf in zip(names, call.traced, call.leaves, strict=True) if given for _ in parts(leaf)]


def _trace_batched(program: Program, avals: Sequence[Any]) -> Any:
    count = len(program.consts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingRuleWarning)  # there is a finding that says so
        return _jax.trace_jaxpr(lambda *xs: program.batched(xs[:count], xs[count:]), avals)


def _resized(call: Call, traced: Any, size: int) -> tuple[Call, Any]:
    """The same call with another number of lanes: what was traced serves unless it could tell how many there are."""

    def sized(x: Any, axis: int | None) -> Any:
        aval = _jax.aval_of(x)
        shape = list(aval.shape)
        if axis is not None:
            shape[axis] = size
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    leaves = [sized(x, d) if t else x for x, d, t in zip(call.leaves, call.axes, call.traced, strict=True)]
    call = call._replace(leaves=leaves, axis=call.axis._replace(size=size))
    return (call, traced) if call.axis.name is None else trace(call)


def _batch(call: Call, traced: Any) -> Any:
    program = Program(call, traced)
    return _trace_batched(program, [_jax.aval_of(x) for x in (*program.consts, *call.arrays())])


# --- looking on -------------------------------------------------------------------------------------------------------

_sessions = itertools.count()


class Recorder(Watch):
    """Notes every equation that is batched. What it becomes carries its number in the name stack."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.prefix = f"explain_{next(_sessions)}_"
        self.mark = re.compile(rf"{self.prefix}(\d+)\b")
        self._numbers = itertools.count()
        self._found: list[list[Scope]] = [[]]  # the scopes met in each equation under way, innermost last
        self._scopes: list[Scope] = []
        self._kept: dict[int, Equation] = {}
        self._memo: dict[Hashable, tuple[Any, list[Scope]]] = {}

    def outermost(self) -> Scope:
        """The whole program."""
        (scope,) = self._found[0]
        return scope

    def jaxpr(self, axis: Axis, jaxpr: Any, args: Sequence[Any]) -> list:
        scope = Scope(_jax.open_jaxpr(jaxpr), _jax.consts_of(jaxpr), tuple(apart(args)[1]))
        self._scopes.append(scope)
        try:
            outs = super().jaxpr(axis, jaxpr, args)
        finally:
            self._scopes.pop()
        scope.outputs = tuple(apart(outs)[1])
        self._found[-1].append(scope)
        return outs

    def eqn(self, axis: Axis, eqn: Any, args: Sequence[Any]) -> list:
        found = _registry.find(eqn.primitive)
        place = _jax.user_file_and_line(eqn)
        equation = Equation(next(self._numbers), eqn, place and Line(*place), found, tuple(apart(args)[1]))
        self._scopes[-1].equations.append(equation)
        self._found.append([])
        try:
            with jax.named_scope(f"{self.prefix}{equation.number}"):
                outs = super().eqn(axis, eqn, args)
        finally:
            scopes = self._found.pop()
        equation.outs = tuple(apart(outs)[1])
        # A loop's body is batched until no more of it gets lanes, and for each stage: the last time stands for all.
        last = {id(scope.jaxpr): scope for scope in scopes}
        for scope in scopes:
            self._stands_for(last[id(scope.jaxpr)], scope)
        equation.scopes = list(last.values())
        return outs

    def _stands_for(self, last: Scope, scope: Scope) -> None:
        """Have the equations of `last` stand for those of `scope`, the same jaxpr batched before."""
        if scope is last:
            return
        for kept, before in zip(last.equations, scope.equations, strict=True):
            self._kept[before.number] = kept
            inner = {id(each.jaxpr): each for each in kept.scopes}
            for each in before.scopes:
                if id(each.jaxpr) in inner:
                    self._stands_for(inner[id(each.jaxpr)], each)

    def marked(self) -> dict[int, Equation]:
        """The equations of the whole program by the numbers that mark what was made for them."""
        found = {equation.number: equation for equation in self.outermost().all()}
        marked = dict(found)
        for number in self._kept:
            at, passed = number, {number}
            while at not in found and at in self._kept and self._kept[at].number not in passed:
                at = self._kept[at].number
                passed.add(at)
            if at in found:
                marked[number] = found[at]
        return marked

    def remembered(self, jaxpr: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        at = jaxpr, key
        if at not in self._memo:
            self._found.append([])
            try:
                made = make()
            finally:
                scopes = self._found.pop()
            self._memo[at] = made, scopes
        return self.recalled(jaxpr, key)

    def recalled(self, jaxpr: Any, key: Hashable) -> Any:
        made, scopes = self._memo.get((jaxpr, key), (None, []))
        self._found[-1] += scopes
        return made


def _settle(scope: Scope, line: Line | None, depth: int) -> None:
    """Say how deep each equation is. One without a line, of JAX's own functions, gets that of the equation it is inside."""
    for equation in scope.equations:
        equation.line, equation.depth = equation.line or line, depth
        for inner in equation.scopes:
            _settle(inner, equation.line, depth + 1)


# --- what it costs ----------------------------------------------------------------------------------------------------


def _cost_of_lane(scope: Scope, times: float, stored: bool) -> None:
    """Add to each equation what it costs one lane, so many `times`."""
    costs = eqn_costs(scope.jaxpr, stored=stored)
    for equation, cost, lives in zip(scope.equations, costs, alive(scope.jaxpr), strict=True):
        equation.times += times
        scopes = {id(inner.jaxpr): inner for inner in equation.scopes}
        for run in runs(equation.eqn) or ():
            inner = scopes.pop(id(_jax.open_jaxpr(run.jaxpr)), None)
            if inner is not None:
                _cost_of_lane(inner, times * run.times * lives, run.stored)
                cost += run.cost(1.0) * -run.times * lives
        equation.before += cost * times


def _in_stages(eqn: Any) -> bool:
    return eqn.params.get("name") == STAGED


def _cost_of_all(batched: Any, owner_of: Callable[[str, Equation | None], Equation | None]) -> Cost:
    """Add to each equation what it became and what that costs; the cost of what belongs to none is returned.

    Of a loop in stages one step of the first counts, as if it was that of all lanes, in lockstep; nothing else does.
    """
    edges = Cost()

    def walk(jaxpr: Any, times: float, owner: Equation | None, stored: bool, stages: list | None = None) -> None:
        """`stages`: the equation that has them, until their first step is found."""
        nonlocal edges
        jaxpr = _jax.open_jaxpr(jaxpr)
        for eqn, cost, lives in zip(jaxpr.eqns, eqn_costs(jaxpr, stored=stored), alive(jaxpr), strict=True):
            here = owner_of(str(eqn.source_info.name_stack), owner)
            within, often = [eqn] if _in_stages(eqn) else stages, times
            if stages and _is_steps(eqn):
                within, often = None, times * _more(stages.pop(), eqn)
            for run in runs(eqn) or ():
                walk(run.jaxpr, often * run.times * lives, here, run.stored, within)
                cost += run.cost(1.0) * -run.times * lives
            cost *= often if within is None else 0.0
            if here is None:
                edges += cost
            else:
                here.after += cost
                here.emitted.append(eqn)

    walk(batched, 1.0, None, True)
    return edges


def _is_steps(eqn: Any) -> bool:
    return eqn.primitive.name == "while" and STEPS in str(eqn.source_info.name_stack)


def _more(staged: Any, steps: Any) -> float:
    """How many times as many lanes as rows that are stepped."""
    rows = next(v.aval.shape[0] for v in steps.outvars if v.aval.dtype == bool and v.aval.shape)  # which are live
    return staged.outvars[0].aval.shape[0] / rows
