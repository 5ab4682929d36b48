"""The report as text: a verdict, the findings, the user's lines; the full list of equations; a program with its lanes."""

from __future__ import annotations

import collections
import os
import shutil
import string
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from minibatch import _jax
from minibatch.report.findings import Finding, count
from minibatch.report.lines import LETTERS, MISJUDGED, LineFacts
from minibatch.report.provenance import Step

MARKS = {"high": "!", "medium": "~", "low": "-"}
COLOURS = {"high": "31", "medium": "33", "low": "36", "dim": "2", "bold": "1"}


PLACES = collections.defaultdict(lambda: "no line known", {"MB-CP01": "the outputs", "MB-RC01": "the calls"})
"""What to name where a finding has no line."""


class Style(NamedTuple):
    """How wide the text is, and whether it has colours."""

    width: int
    colour: bool

    def paint(self, text: str, name: str) -> str:
        """`text` in a colour of `COLOURS`."""
        return f"\033[{COLOURS[name]}m{text}\033[0m" if self.colour else text


def style(width: int | None = None, colour: bool | None = None) -> Style:
    """As asked for, else as wide as the terminal, and without colours: with them only on request, and never with NO_COLOR."""
    width = width or min(max(shutil.get_terminal_size((100, 24)).columns, 60), 140)
    return Style(width, bool(colour) and not os.environ.get("NO_COLOR"))


def share(x: float) -> str:
    """A part of the whole: `12 %`."""
    percent = 100 * x
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def count_seconds(x: float) -> str:
    """A time: `1.2 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if x >= scale:
            return f"{x / scale:.3g} {unit}"
    return f"{x * 1e6:.3g} us"


def shape(aval: Any, bdim: int | None, size: Any) -> str:
    """One lane's `aval` with its lanes at `bdim`: `f32[B:128,3]`."""
    short = aval.str_short(short_dtypes=True)
    if bdim is None or not hasattr(aval, "shape") or "[" not in short:
        return short
    dims = [str(d) for d in aval.shape]
    dims.insert(bdim, f"B:{size}")
    return f"{short.partition('[')[0]}[{','.join(dims)}]"


def numbers_of(x: Any) -> Any:
    """The array `x`, or if it is one of keys, the numbers that they are made of."""
    return jax.random.key_data(x) if _jax.is_key(x) else x


def short(x: Any) -> str:
    """An array's values, in a few letters; of keys, the numbers that they are made of."""
    if not hasattr(x, "dtype"):
        return str(x)
    x = numbers_of(x)
    return " ".join(np.array2string(np.asarray(x), precision=4, threshold=8, edgeitems=3, separator=",").split())


# --- the page that is printed -----------------------------------------------------------------------------------------


def verdict(data: dict[str, Any], to: Style) -> Iterator[str]:
    """The first lines, of a report's data."""
    yield from textwrap.wrap(f"minibatch.explain  {call(data)}", to.width, subsequent_indent="    ")
    for sentence in sentences(data):
        yield from textwrap.wrap(sentence, to.width, initial_indent="  ", subsequent_indent="    ")


def sentences(data: dict[str, Any]) -> list[str]:
    """How many equations got lanes, what that costs, how much memory it takes."""
    before, after = data["cost"]["before"], data["cost"]["after"]
    memory, loops = data["memory"], data["loops"]
    fits = memory["largest_batch"]
    said = [
        f"{count(data['lanes'])} lanes · {data['equations']['batched']} equations batched, "
        f"{data['equations']['shared']} shared by all lanes",
        f"{count(after['flops'], 'FLOP')} and {count(after['bytes'], 'B')} moved, where one lane times "
        f"{count(data['lanes'])} is {count(before['flops'], 'FLOP')} and {count(before['bytes'], 'B')}",
        f"memory about {count(memory['peak'], 'B')} at its peak; "
        f"{'any number of lanes fits' if fits is None else f'about {count(fits)} lanes fit'} in {count(memory['given'], 'B')}",
    ]
    run = data["analysis"]
    if run:
        took = "the profiler told no times" if run["seconds"] is None else f"{count_seconds(run['seconds'])} measured"
        said.append(f"run once: {took}" + ("; loops counted by the steps that they took" if loops else ""))
    elif loops:
        which = "the while loop" if loops == 1 else f"each of {loops} while loops"
        said.append(f"{which} counted as one step, as how many there are is not known")
    return said


def call(data: dict[str, Any], most: int = 4) -> str:
    """The call: the function's name, and the types of its arguments, if they are not too many."""
    told = [f"{each['name']}: {each['type']}" for each in data["arguments"]]
    more = [f"and {len(told) - most} more arrays"] if len(told) > most + 1 else []
    return f"{data['function']}({', '.join([*told[:most], *more] if more else told)})"


def finding(number: int, found: Finding, to: Style, names: dict[str, str]) -> Iterator[str]:
    """One finding: what, where and how dear; then in words what happened and what to do."""
    where = f"{names[found.line.file]}:{found.line.number}" if found.line else PLACES[found.id]
    head = f" {number:2} {MARKS[found.severity]} {found.title.upper()}  {where}"
    tail = f"{share(found.share)}  {found.id}" if found.share else found.id
    yield to.paint(head.ljust(max(to.width - len(tail) - 1, len(head) + 1)) + tail, found.severity)
    for words in (found.detail, f"do: {found.fix}"):
        yield from textwrap.wrap(words, to.width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def findings(found: Sequence[Finding], to: Style, names: dict[str, str]) -> list[str]:
    """The findings, or one line that says that there are none."""
    if not found:
        return ["  nothing to fix"]
    head = "findings, most costly first"
    return [f"  {head}", *(line for i, each in enumerate(found, 1) for line in finding(i, each, to, names))]


def source(lines: Iterable[LineFacts], to: Style, names: dict[str, str]) -> Iterator[str]:
    """The user's lines with their share of the cost and the letter for what they became."""
    used = set()
    file = None
    timed = False
    for line in lines:
        if line.line.file != file:
            file = line.line.file
            yield f"  {names[file]}"
        used.add(line.letter)
        measured = "" if line.measured is None else f"{share(line.measured):>7}{'!' if line.misjudged else ' '}| "
        head = f" {line.line.number:5} |{line.letter}{line.mark}|{share(line.share):>7} | {measured}"
        tail = f"   {line.change}"
        room = to.width - len(head) - len(tail)
        if room < 24:
            yield f"{head}{line.text}"[: to.width].rstrip()
        else:
            yield head + line.text[:room].ljust(room) + to.paint(tail, "dim")
        timed = timed or line.measured is not None
    if timed:
        yield f"  first the share of the work as estimated, then that of the time; ! they are {MISJUDGED} times apart"
    if used:
        legend = ", ".join(f"{letter} {LETTERS[letter]}" for letter in LETTERS if letter in used)
        yield from textwrap.wrap(legend, to.width, initial_indent="  ", subsequent_indent="  ")


def way(steps: Sequence[Step], names: dict[str, str]) -> str:
    """A chain of provenance, one step on a line."""
    lines = []
    for i, step in enumerate(steps):
        lead = "  <- " if i else ""
        if step.equation is None:
            axis = "" if step.bdim is None else f", lanes on axis {step.bdim}"
            lines.append(f"{lead}argument {step.name}{axis}")
        else:
            at = step.equation.line
            place = f"  {names[at.file]}:{at.number}" if at else ""
            lines.append(f"{lead}{step.name}  (equation {step.equation.number}){place}")
    return "\n".join(lines)


# --- programs, equation by equation -----------------------------------------------------------------------------------


class Letters:
    """A name for each variable: a, b, …, z, aa, ab, …; or the one it was given."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}
        self._used: set[str] = set()
        self._count = 0

    def give(self, var: Any, wanted: str) -> None:
        """Call `var` as near to `wanted` as a name can be."""
        name = "".join(c if c.isalnum() else "_" for c in wanted).strip("_")
        while "__" in name:
            name = name.replace("__", "_")
        if name and name not in self._used:
            self._used.add(name)
            self._known[var] = name

    def __call__(self, atom: Any) -> str:
        if isinstance(atom, _jax.Literal):
            return str(np.asarray(atom.val)) if np.ndim(atom.val) == 0 else str(atom.val)
        if isinstance(atom, _jax.DropVar):
            return "_"
        while atom not in self._known:
            name = _letters(self._count)
            self._count += 1
            if name not in self._used:
                self._used.add(name)
                self._known[atom] = name
        return self._known[atom]


def _letters(n: int) -> str:
    name = ""
    while n >= 0:
        name = string.ascii_lowercase[n % 26] + name
        n = n // 26 - 1
    return name


def listing(facts: Any, to: Style, names: dict[str, str]) -> Iterator[str]:
    """Every equation, one lane's shapes beside those of all lanes, indented through what is inside; rule and line."""
    letters = named(facts)
    rows = [*_rows(facts, letters, names)]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    spare = to.width - sum(widths) - 2 * len(widths)
    widths[1] = max(24, widths[1] + min(spare, 0))
    for row in rows:
        cells = [cell if len(cell) <= width else cell[: width - 1] + "…" for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def named(facts: Any) -> Letters:
    """Names for the variables of the lane's program: its inputs by the names of the arguments."""
    letters = Letters()
    for var, name in zip(facts.lane.jaxpr.invars, facts.names, strict=True):
        letters.give(var, name or "captured")
    return letters


def _rows(facts: Any, letters: Letters, names: dict[str, str]) -> Iterator[tuple[str, ...]]:
    yield "", "equation", "one lane", f"all {facts.size} lanes", "rule", "line"

    def walk(scope: Any, depth: int) -> Iterator[tuple[str, ...]]:
        for e in scope.equations:
            outs = e.eqn.outvars
            text = f"{' '.join(map(letters, outs))} = {e.name} {' '.join(map(letters, e.eqn.invars))}"
            yield (
                str(e.number),
                "  " * depth + text.strip(),
                " ".join(shape(v.aval, None, facts.size) for v in outs),
                " ".join(shape(v.aval, d, facts.size) for v, d in zip(outs, e.outs, strict=True)) if e.batched else "shared",
                e.rule.family if e.batched else "as written",
                f"{names[e.line.file]}:{e.line.number}" if e.line else "",
            )
            for inner in e.scopes:
                yield from walk(inner, depth + 1)

    yield from walk(facts.lane, 0)


# --- a batched program with its lane axes -------------------------------------------------------------------------------


def annotated(program: Any, other: Any, size: int, inputs: Sequence[str | None]) -> str:
    """The batched `program`, each variable with its lane axis marked.

    `other` is the same program for another number of lanes: the dimensions in which the two differ are those that hold
    lanes. Where the two are not built alike, or there is no other, nothing is marked.
    """
    letters = Letters()
    for var, name in zip(_jax.open_jaxpr(program).invars, inputs, strict=True):
        letters.give(var, name or "captured")
    return "\n".join(_program(program, other, size, letters, "")) + "\n"


def _program(program: Any, other: Any, size: int, letters: Letters, indent: str) -> Iterator[str]:
    jaxpr = _jax.open_jaxpr(program)
    twin = _jax.open_jaxpr(other) if other is not None else None
    alike = twin is not None and [e.primitive for e in twin.eqns] == [e.primitive for e in jaxpr.eqns]

    def typed(variables: Sequence[Any], twins: Sequence[Any] | None) -> str:
        pairs = zip(variables, twins or variables, strict=True)
        return " ".join(f"{letters(v)}:{_marked(v.aval, w.aval, size)}" for v, w in pairs)

    consts = typed(jaxpr.constvars, None)
    yield f"{indent}{{ lambda {consts}; {typed(jaxpr.invars, twin.invars if alike and twin else None)}. let"
    for i, eqn in enumerate(jaxpr.eqns):
        same = twin.eqns[i] if alike and twin else None
        outs = typed(eqn.outvars, same.outvars if same else None)
        inside = list(_jax.inner_jaxprs(eqn))
        others = list(_jax.inner_jaxprs(same)) if same else [None] * len(inside)
        head = f"{indent}    {outs} = " if outs else f"{indent}    "
        yield f"{head}{eqn.primitive.name}{_params(eqn)} {' '.join(map(letters, eqn.invars))}".rstrip()
        for inner, twin_inner in zip(inside, others, strict=True):
            yield from _program(inner, twin_inner, size, letters, indent + "      ")
    outs = ", ".join(map(letters, jaxpr.outvars))
    yield f"{indent}  in ({outs}{',' if len(jaxpr.outvars) == 1 else ''}) }}"


def _marked(aval: Any, other: Any, size: int) -> str:
    """The type `aval` with a mark at the dimensions that differ in `other`: `f32[B:128,3]`, or `B*4:512` if flattened."""
    short = aval.str_short(short_dtypes=True)
    if "[" not in short or getattr(aval, "shape", ()) == getattr(other, "shape", ()):
        return short
    dims = [str(d) if d == e else _lanes_of(d, size) for d, e in zip(aval.shape, other.shape, strict=True)]
    return f"{short.partition('[')[0]}[{','.join(dims)}]"


def _lanes_of(dim: int, size: int) -> str:
    times, rest = divmod(dim, size) if size else (1, 0)
    return f"B:{dim}" if times == 1 or rest else f"B*{times}:{dim}"


UNSAID = ("shardings", "layouts", "donated_invars", "nconsts", "num_consts", "num_carry", "sharding")


def _params(eqn: Any) -> str:
    """What is short to say of an equation's params."""
    said = {name: _said(value) for name, value in eqn.params.items() if not name.endswith(UNSAID)}
    return f"[{' '.join(f'{name}={text}' for name, text in said.items() if text)}]" if any(said.values()) else ""


def _said(value: Any) -> str:
    """A param in a few letters; nothing where it is the default of most, or needs more."""
    empty = value is False or (isinstance(value, (str, tuple)) and not value)
    if empty or not isinstance(value, (int, float, str, tuple, np.dtype)):
        return ""
    text = str(value).replace(" ", "")
    return text if len(text) <= 48 and "<" not in text and "let" not in text else ""
