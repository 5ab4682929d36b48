"""The program run and looked at: how many steps each lane takes, which branches, how long each line takes.

Steps and branches are counted in the lanes themselves (`probe`); times come from JAX's profiler, whose events are joined
with equations by the marks in their name stacks.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minibatch import _jax
from minibatch.report.facts import Equation, Facts
from minibatch.report.probe import Place, Probe, Probed

BINS = 10


@dataclasses.dataclass(frozen=True)
class Trips:
    """How many steps each lane took in a loop, all its runs together. `useful`: the share of steps that a lane was in."""

    min: int
    mean: float
    max: int
    useful: float
    histogram: tuple[int, ...]
    edges: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What a run showed, by the number of the equation.

    `loops`: the steps of each `while` loop; `branches`: how many lanes took each branch of a `cond` at least once; `seconds`:
    how long what an equation became ran, without what is inside; None where the profiler told nothing.
    """

    loops: dict[int, Trips]
    branches: dict[int, tuple[int, ...]]
    seconds: dict[int, float] | None


def analyze(facts: Facts) -> Analysis:
    """Run the program once to count, and once to take times."""
    probed = Probed(facts.call, facts.traced)
    counts = Counts(probed.places.values())
    _, state = probed.run(counts, counts.start())
    numbers = {id(e.eqn): e.number for e in facts.lane.all()}
    loops, branches = {}, {}
    for place, counted in _by_equation(counts.loops, state["trips"]):
        if id(place.eqn) in numbers:
            loops[numbers[id(place.eqn)]] = _trips(counted)
    for place, counted in _by_equation(counts.branches, state["taken"]):
        if id(place.eqn) in numbers:
            branches[numbers[id(place.eqn)]] = tuple(int(n) for n in (counted > 0).sum(0))
    return Analysis(loops, branches, _seconds(facts))


def _by_equation(places: list[Place], counted: list[Any]) -> list[tuple[Place, np.ndarray]]:
    """The counts of each equation, from all places that it is called at."""
    found: dict[int, tuple[Place, np.ndarray]] = {}
    for place, counts in zip(places, map(np.asarray, counted), strict=True):
        before = found.get(id(place.eqn), (place, np.zeros_like(counts)))
        found[id(place.eqn)] = before[0], before[1] + counts
    return list(found.values())


def _trips(counts: np.ndarray) -> Trips:
    """[B] -> what there is to tell of it."""
    if not counts.size:
        return Trips(0, 0.0, 0, 1.0, (), ())
    histogram, edges = np.histogram(counts, bins=BINS)
    most = int(counts.max())
    useful = float(counts.mean() / most) if most else 1.0
    return Trips(int(counts.min()), float(counts.mean()), most, useful, tuple(map(int, histogram)), tuple(map(float, edges)))


class Counts(Probe):
    """Counts the steps of every `while` loop and how often each branch of every `cond` is taken."""

    def __init__(self, places: Any) -> None:
        places = list(places)
        self.loops = [place for place in places if place.eqn.primitive.name == "while"]
        self.branches = [place for place in places if place.eqn.primitive.name == "cond"]

    def start(self) -> dict[str, list]:
        """Nothing counted yet."""
        counts = [jnp.zeros(len(place.eqn.params["branches"]), "int32") for place in self.branches]
        return {"trips": [jnp.int32(0) for _ in self.loops], "taken": counts}

    def loop(self, state: Any, place: Place, trips: Any) -> Any:
        return {**state, "trips": [x + trips if at is place else x for x, at in zip(state["trips"], self.loops, strict=True)]}

    def branch(self, state: Any, place: Place, index: Any) -> Any:
        def counted(x: Any) -> Any:
            return x + (jnp.arange(len(x)) == jnp.int32(index))

        taken = zip(state["taken"], self.branches, strict=True)
        return {**state, "taken": [counted(x) if at is place else x for x, at in taken]}


# --- times ------------------------------------------------------------------------------------------------------------

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\(.*op_name="([^"]*)"')
FUSED = re.compile(r"calls=%?([\w.\-]+)")
CONTAINERS = frozenset({"while", "conditional", "call"})  # their time is that of what is inside


def _seconds(facts: Facts) -> dict[int, float] | None:
    """How long what each equation became ran, by the profiler; None if it tells nothing."""
    compiled = jax.jit(lambda *arrays: _jax.evaluate(facts.batched, arrays)).lower(*facts.arrays).compile()
    shares = _shares(facts, compiled.as_text() or "")
    taken: dict[int, float] = {}
    for name, seconds in _events(compiled, facts.arrays):
        for number, share in shares.get(name, {}).items():
            taken[number] = taken.get(number, 0.0) + seconds * share
    return taken or None


def _shares(facts: Facts, program: str) -> dict[str, dict[int, float]]:
    """For each instruction of a compiled program the equations that it runs, with their shares of it by estimate.

    The time of a fusion is not told apart by the profiler: it is that of all equations in it.
    """
    inside: dict[str, dict[int, Equation]] = {}  # by computation
    instructions: dict[str, tuple[str | None, Equation | None]] = {}
    computation = ""
    for line in program.splitlines():
        header, found = COMPUTATION.match(line), INSTRUCTION.match(line)
        if header:
            computation = header[1]
        elif found and found[2] not in CONTAINERS:
            fused, equation = FUSED.search(line), facts.owner(found[3])
            instructions[found[1]] = fused and fused[1], equation
            if equation is not None:
                inside.setdefault(computation, {})[equation.number] = equation

    def shares(fused: str | None, root: Equation | None) -> dict[int, float]:
        members = list(inside.get(fused or "", {}).values()) or ([root] if root else [])
        work = np.array([e.after.flops + e.after.transcendentals for e in members]) / [max(e.times, 1) for e in members]
        work = work if work.sum() else np.ones(len(members))
        return dict(zip([e.number for e in members], work / work.sum(), strict=True))

    return {name: shares(*what) for name, what in instructions.items()}


def _events(compiled: Any, arrays: list) -> list[tuple[str, float]]:
    """One run of a compiled program: its instructions as the profiler saw them, with how many seconds each took."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(*arrays))
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a class of JAX's has no module
            data = jax.profiler.ProfileData.from_file(str(files[0]))
            events = [event for plane in data.planes for line in plane.lines for event in line.events]
            return [(dict(e.stats)["hlo_op"], e.duration_ns * 1e-9) for e in events if "hlo_op" in dict(e.stats)]


def count_steps(facts: Facts, analysis: Analysis) -> None:
    """Count what is inside `while` loops as often as it ran: for lanes by themselves their own steps, for all together those
    of the lane that takes longest, unless the loop runs in stages. What is called at several places counts as where it runs
    most.
    """
    most: dict[int, tuple[float, float]] = {}

    def walk(equations: Any, alone: float, together: float) -> None:
        for e in equations:
            trips = analysis.loops.get(e.number)
            runs = max(e.times / max(facts.size, 1), 1.0)
            factors = alone, together
            if trips:
                factors = trips.mean / runs, (trips.mean if e.staged else trips.max) / runs
            most[e.number] = max(factors, most.get(e.number, factors))
            for scope in e.scopes:
                walk(scope.equations, *factors)

    walk(facts.lane.equations, 1.0, 1.0)
    for e in facts.lane.all():
        e.before, e.after = e.before * most[e.number][0], e.after * most[e.number][1]
