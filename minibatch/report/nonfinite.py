"""Which lanes turned NaN or infinite, where first, and on what."""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from minibatch import _errors, _jax
from minibatch._trace import Call, trace
from minibatch.report.facts import Line, names_of
from minibatch.report.lines import short_names
from minibatch.report.probe import Place, Probe, Probed
from minibatch.report.text import short

NEVER = -1


@dataclasses.dataclass(frozen=True)
class Event:
    """The first time that values turned `kind` ("NaN" or "infinite") in some lanes, at one equation.

    `steps` and the values are those of the first of `lanes`: in which step of each loop around it was, outermost first, what
    the equation was given and what it made of it. In an argument (`primitive` is its name) it was there from the start.
    `backward`: the equation is one of the derivative of its line.
    """

    kind: str
    primitive: str
    line: Line | None
    backward: bool
    lanes: tuple[int, ...]
    steps: tuple[int, ...]
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """What `find_nonfinite` found: true if there is any. `lanes` are those that turned NaN or infinite."""

    function: str
    size: int
    lanes: tuple[int, ...]
    events: tuple[Event, ...]

    def __bool__(self) -> bool:
        return bool(self.events)

    def __str__(self) -> str:
        head = f"minibatch.find_nonfinite  {self.function}"
        if not self:
            return f"{head}: all {self.size} lanes are finite\n"
        names = short_names(event.line.file for event in self.events if event.line)
        lines = [f"{head}: {len(self.lanes)} of {self.size} lanes are NaN or infinite"]
        for number, event in enumerate(self.events, 1):
            lines += _told(number, event, names)
        return "\n".join(lines) + "\n"

    __repr__ = __str__


def _told(number: int, event: Event, names: dict[str, str]) -> list[str]:
    first = event.lanes[0]
    lanes = ", ".join(map(str, event.lanes[:8])) + (f" and {len(event.lanes) - 8} more" if len(event.lanes) > 8 else "")
    which = f"lane{'s' if len(event.lanes) > 1 else ''} {lanes}"
    if event.primitive.startswith("argument "):
        return [f" {number} {event.kind} in {event.primitive}, from the start: {which}"]
    place = f"{names[event.line.file]}:{event.line.number}" if event.line else "a line that is not known"
    steps = f", in step {' of step '.join(map(str, reversed(event.steps)))} (from 0)" if event.steps else ""
    backward = ", backward pass" if event.backward else ""
    source = linecache.getline(event.line.file, event.line.number).strip() if event.line else ""
    given = ", ".join(map(short, event.inputs))
    made = ", ".join(map(short, event.outputs))
    lines = [f" {number} {event.kind} first in {event.primitive} at {place}{backward}{steps}: {which}"]
    return [*lines, *[f"      {source}"] * bool(source), f"      lane {first}: {event.primitive}({given}) -> {made}"]


class First(Probe):
    """Notes the first equation that makes a NaN, or an infinity, of what had none: its number, and the steps of the loops."""

    def __init__(self, numbers: dict[Any, int], loops: int) -> None:
        self.numbers = numbers
        self.loops = loops

    def start(self) -> dict[str, Any]:
        """The state of a lane that nothing happened in."""
        nothing = jnp.full(1 + self.loops, NEVER, "int32")
        return {"NaN": nothing, "infinite": nothing}

    def equation(self, state: Any, place: Place, steps: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        found, given = list(filter(_is_float, outs)), list(filter(_is_float, ins))
        if not found:
            return state
        entry = [self.numbers[place.path], *steps, *[NEVER] * (self.loops - len(steps))]
        here = jnp.stack([jnp.asarray(x, "int32") for x in entry])
        new = {kind: _any(test, found) & ~_any(test, given) for kind, test in TESTS.items()}
        new["infinite"] &= ~_any(jnp.isnan, given)
        return {kind: jnp.where((state[kind][0] == NEVER) & new[kind], here, state[kind]) for kind in state}


class Caught(Probe):
    """Keeps what the equation at `path` is given and makes in one step of the loops around it."""

    def __init__(self, place: Place, steps: Sequence[int]) -> None:
        self.place, self.steps = place, steps

    def start(self) -> list:
        """Zeros of the right shapes."""
        atoms = (*self.place.eqn.invars, *self.place.eqn.outvars)
        return [_blank(atom.aval) for atom in atoms]

    def equation(self, state: Any, place: Place, steps: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        if place.path != self.place.path:
            return state
        now = jnp.all(jnp.asarray([a == b for a, b in zip(steps, self.steps, strict=True)] or [True]))
        values = zip((*ins, *outs), state, strict=True)
        return [old if _jax.dtype_of(x) is None else jnp.where(now, x, old) for x, old in values]


TESTS = {"NaN": jnp.isnan, "infinite": jnp.isinf}


def _is_float(x: Any) -> bool:
    dtype = _jax.dtype_of(x)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _any(test: Any, arrays: Sequence[Any]) -> Any:
    return sum((jnp.any(test(x)) for x in arrays), jnp.bool_(False))


def _blank(aval: Any) -> Any:
    dtype = getattr(aval, "dtype", None)
    plain = dtype is not None and hasattr(aval, "shape") and jnp.issubdtype(dtype, jnp.generic)
    return jnp.zeros(aval.shape, dtype) if plain else jnp.zeros((), "int32")


def find(call: Call, names: Sequence[str], everywhere: bool) -> Nonfinite:
    """Run the call and say which lanes turned NaN or infinite. `names`: of each leaf of the arguments."""
    probed = Probed(*trace(call))
    paths = list(probed.places)
    first = First({path: i for i, path in enumerate(paths)}, probed.loops)
    outs, state = probed.run(first, first.start())
    outs += [x for x in probed.returned() if _is_float(x)]
    reached = {kind: _lanes_with(test, outs, probed.axis.size) for kind, test in TESTS.items()}
    noted = {kind: np.asarray(entries) for kind, entries in state.items()}
    events: list[Event] = []
    for kind in TESTS:
        wanted = np.ones(probed.axis.size, bool) if everywhere else reached["NaN"] | reached["infinite"]
        events += _in_arguments(probed, names, kind, wanted)
        entries = noted[kind]
        for number in sorted({int(n) for n in entries[wanted, 0]} - {NEVER}):
            lanes = [int(i) for i in np.flatnonzero(wanted & (entries[:, 0] == number))]
            events.append(_event(probed, kind, probed.places[paths[number]], lanes, entries[lanes[0], 1:]))
    lanes = sorted({lane for event in events for lane in event.lanes})
    return Nonfinite(_errors.name_of(call.fun), probed.axis.size, tuple(lanes), tuple(events))


def _lanes_with(test: Any, arrays: Sequence[Any], size: int) -> np.ndarray:
    """[B]: in which lanes some of the arrays [B, *s] have a value of that kind."""
    found = np.zeros(size, bool)
    for x in filter(_is_float, arrays):
        found |= np.asarray(jnp.any(test(x), axis=tuple(range(1, x.ndim))))
    return found


def _in_arguments(probed: Probed, names: Sequence[str], kind: str, wanted: np.ndarray) -> list[Event]:
    events = []
    taken = names_of(probed.call, names)
    captured = ["that the function captured"] * (len(probed.arrays) - len(taken))
    for name, x, bdim in zip([*captured, *taken], probed.arrays, probed.bdims, strict=True):
        if not _is_float(x):
            continue
        found = wanted & _lanes_with(TESTS[kind], [probed.stacked(x, bdim)], probed.axis.size)
        if found.any():
            lanes = tuple(int(i) for i in np.flatnonzero(found))
            events.append(Event(kind, f"argument {name}", None, False, lanes, (), (), ()))
    return events


def _event(probed: Probed, kind: str, place: Place, lanes: list[int], steps: np.ndarray) -> Event:
    at = tuple(int(step) for step in steps if step != NEVER)
    caught = Caught(place, at)
    _, values = probed.run(caught, caught.start())
    values = [np.asarray(x[lanes[0]]) for x in values]
    count = len(place.eqn.invars)
    backward = "transpose(" in str(place.eqn.source_info.name_stack)
    name = place.eqn.primitive.name
    return Event(kind, name, place.line, backward, tuple(lanes), at, tuple(values[:count]), tuple(values[count:]))
