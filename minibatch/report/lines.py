"""The user's source lines: what share of the cost each has, and what it became."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from minibatch.report.facts import Equation, Facts, Line, work
from minibatch.report.findings import KINDS, SEVERITIES, Finding

LETTERS = {
    "L": "lane by lane",
    "W": "loop whose lanes diverge",
    "B": "branches that all run",
    "E": "effect, lane by lane",
    "G": "gather or scatter",
    "C": "copied to every lane",
    "T": "transposed",
    "R": "lanes meet",
    "V": "all lanes at once",
    "·": "shared",
}
MISJUDGED = 10
MARKS = {"high": "!", "medium": "~", "low": " "}


class LineFacts(NamedTuple):
    """A line of the user's: its text, its share of all the work, the letter for what became of it, and how a shape changed.

    After a run: how long it took, its share of all that was measured, and whether estimate and time are `MISJUDGED` apart.
    """

    line: Line
    text: str
    letter: str
    mark: str
    share: float
    change: str
    equations: tuple[int, ...]
    seconds: float | None
    measured: float | None
    misjudged: bool


def lines_of(
    facts: Facts, findings: Sequence[Finding], describe: Callable[[Equation], str], times: Mapping[int, float] | None
) -> list[LineFacts]:
    """The lines that made equations, by file and number. `describe` words how a shape changed."""
    by_line: dict[Line, list[Equation]] = {}
    for equation in facts.lane.all():
        if equation.line is not None:
            by_line.setdefault(equation.line, []).append(equation)
    total = work(facts.total()) or 1.0
    found: dict[Line, list[Finding]] = {}
    for finding in findings:
        if finding.line is not None:
            found.setdefault(finding.line, []).append(finding)
    all_seconds = sum(times.values()) if times else 0.0

    def line_facts(line: Line, made: list[Equation]) -> LineFacts:
        share = sum(work(e.after) for e in made) / total
        seconds = sum(times.get(e.number, 0.0) for e in made) if times else None
        measured = seconds / all_seconds if seconds is not None else None
        return LineFacts(
            line,
            linecache.getline(line.file, line.number).strip(),
            _letter(made, found.get(line, [])),
            MARKS[max((f.severity for f in found.get(line, [])), key=SEVERITIES.index, default="low")],
            share,
            describe(min(reversed(made), key=lambda e: e.depth)),
            tuple(e.number for e in made),
            seconds,
            measured,
            measured is not None and _far_apart(share, measured),
        )

    return [line_facts(line, made) for line, made in sorted(by_line.items())]


def _far_apart(share: float, measured: float) -> bool:
    """Whether the larger is worth a word, and the other less than a tenth of it."""
    more, less = max(share, measured), min(share, measured)
    return more >= 0.01 and more >= MISJUDGED * less


def _letter(made: Iterable[Equation], found: Iterable[Finding]) -> str:
    letters = {KINDS[f.id].letter for f in found}
    for equation in made:
        if equation.batched:
            letters.add("R" if equation.rule.family == "collectives" else "V")
    return next((letter for letter in LETTERS if letter in letters), "·")


def short_names(files: Iterable[str]) -> dict[str, str]:
    """The files by their last name; those that share it by as much of the path as tells them apart."""
    files = sorted({*files})
    names = {}
    for file in files:
        parts = file.split(os.sep)
        for k in range(1, len(parts) + 1):
            tail = os.sep.join(parts[-k:])
            if sum(other == tail or other.endswith(os.sep + tail) for other in files) == 1:
                names[file] = tail
                break
        else:
            names[file] = file
    return names
