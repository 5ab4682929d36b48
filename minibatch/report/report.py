"""The report itself: what is known of a mapped call, as text and as data."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import html
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from minibatch import _errors
from minibatch._trace import Call
from minibatch.report import text
from minibatch.report.analysis import Analysis, count_steps
from minibatch.report.analysis import analyze as run_and_look
from minibatch.report.facts import Cost, Equation, Facts, Line, Scope, observe, work
from minibatch.report.findings import Finding, find
from minibatch.report.lines import LineFacts, lines_of, short_names
from minibatch.report.memory import in_bytes, largest_batch, peak
from minibatch.report.provenance import Provenance, Step


class Report:
    """What batching did to a program: print it, ask it `why`, or take it as data.

    `findings` are what is worth mending, most costly first; `lines` are the user's own lines, with what each became;
    `analysis` is what a run showed, None where there was none.
    """

    def __init__(self, facts: Facts, memory: int, calls: Sequence[str] = (), analysis: Analysis | None = None) -> None:
        self._facts = facts
        self._memory = memory
        self.analysis = analysis
        self.findings: list[Finding] = find(facts, calls, analysis)
        times = analysis.seconds if analysis else None
        self.lines: list[LineFacts] = lines_of(facts, self.findings, self._change, times)
        self._names = short_names(e.line.file for e in facts.lane.all() if e.line)

    # --- as text ---

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None, colour: bool | None = None) -> str:
        """The report in a screenful.

        Args:
          width: of a line; that of the terminal if None.
          colour: True for colours, unless NO_COLOR is set in the environment.
        """
        to = text.style(width, colour)
        head = text.verdict(self.to_dict(), to)
        found = text.findings(self.findings, to, self._names)
        return "\n".join([*head, *found, *text.source(self.lines, to, self._names)]) + "\n"

    def full(self, width: int | None = None) -> str:
        """Every equation: one lane's shapes beside those of all lanes, with rule and line."""
        return "\n".join(text.listing(self._facts, text.style(width), self._names)) + "\n"

    def why(self, x: Any) -> str:
        """The way from a value back to the argument that made it differ by lane.

        Args:
          x: the number of an equation, as `full` gives it; a finding; a line, as `"model.py:12"` or `"line 12"`; or an
            output, as `"output"`, `"output[0]"`, `"output['loss']"`.

        Raises:
          ValueError: there is none such; the message names the nearest.
        """
        ways = [steps for steps in self._ways(x) if steps]
        if not ways:
            return f"{x}: all lanes share it\n"
        return text.way(min(ways, key=len), self._names) + "\n"

    def _ways(self, x: Any) -> list[list[Step]]:
        if isinstance(x, Finding):
            return [self._provenance.equation(self._equations[n]) for n in x.equations]
        if isinstance(x, int) and x in self._equations:
            return [self._provenance.equation(self._equations[x])]
        if isinstance(x, str):
            outputs = [i for i, name in enumerate(self._facts.outputs) if name == x]
            if outputs:
                return [self._provenance.output(i) for i in outputs]
            line = re.fullmatch(r"(?:line\s+|(.+):)(\d+)", x.strip())
            if line:
                on_line = [e for e in self._equations.values() if e.line and self._is_line(e.line, line[1], int(line[2]))]
                if on_line:
                    return [self._provenance.equation(e) for e in on_line]
        raise ValueError(f"why({x!r}): this report has no such equation, line or output. Nearest: {self._nearest(x)}.")

    def _is_line(self, line: Line, file: str | None, number: int) -> bool:
        return line.number == number and (file is None or line.file == file or line.file.endswith("/" + file))

    def _nearest(self, x: Any) -> str:
        if isinstance(x, int):
            near = sorted(sorted(self._equations, key=lambda n: abs(n - x))[:3])
            return ", ".join(f"equation {n} ({self._equations[n].name})" for n in near) or "none"
        words = [*self._facts.outputs, *(f"{self._names[at.line.file]}:{at.line.number}" for at in self.lines)]
        number = re.search(r"(\d+)$", str(x))
        if number and not str(x).startswith("output"):
            places = sorted((abs(at.line.number - int(number[1])), at.line) for at in self.lines)
            return ", ".join(f"{self._names[line.file]}:{line.number}" for _, line in places[:3]) or "none"
        return ", ".join(difflib.get_close_matches(str(x), words, 3, 0.0)) or "none"

    # --- as a page ---

    def html(self) -> str:
        """The report as a page: one HTML file that needs no network, no server and, to be read, no scripts.

        Raises:
          ImportError: jinja2 or pygments is not installed (`pip install 'minibatch[page]'`).
        """
        from minibatch.report import page

        return page.render(self._data, self.lines, self._names)

    def save(self, path: str | os.PathLike) -> None:
        """Write the report as a page to the file `path`. It holds the lines of source that it speaks of.

        Raises:
          ImportError: jinja2 or pygments is not installed (`pip install 'minibatch[page]'`).
          OSError: it cannot be written there.
        """
        from minibatch.report import page

        page.save(self.html(), path)

    def _repr_html_(self) -> str | None:
        """For notebooks: the page in a frame of its own; None, that is the text, where it cannot be made."""
        try:
            page = self.html()
        except ImportError:
            return None
        return f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:42em;border:1px solid #8884"></iframe>'

    def __repr__(self) -> str:
        return self.text()

    # --- as data ---

    def to_dict(self) -> dict[str, Any]:
        """All of the report, as dicts, lists, numbers and strings."""
        return self._data

    def to_json(self) -> str:
        """All of the report, as JSON."""
        return json.dumps(self._data, indent=1)

    @functools.cached_property
    def _data(self) -> dict[str, Any]:
        facts = self._facts
        equations = list(self._equations.values())
        size = facts.size
        return {
            "function": _errors.name_of(facts.call.fun),
            "lanes": size,
            "axis_name": None if facts.axis.name is None else str(facts.axis.name),
            "arguments": [
                {"name": name or "captured", "axis": bdim, "type": text.shape(var.aval, bdim, size)}
                for name, bdim, var in zip(facts.names, facts.lane.inputs, facts.lane.jaxpr.invars, strict=True)
            ],
            "outputs": [
                {"name": name, "axis": bdim, "type": text.shape(var.aval, bdim, size)}
                for name, bdim, var in zip(facts.outputs, facts.lane.outputs, facts.lane.jaxpr.outvars, strict=True)
            ],
            "cost": {"before": _cost(facts.total("before")), "after": _cost(facts.total())},
            "memory": {
                "given": self._memory,
                "peak": peak(facts.batched),
                "largest_batch": largest_batch(facts, self._memory),
            },
            "equations": {"batched": sum(e.batched for e in equations), "shared": sum(not e.batched for e in equations)},
            "loops": sum(e.name == "while" for e in equations),
            "findings": [self._finding(i, each) for i, each in enumerate(self.findings, 1)],
            "lines": [
                {
                    "file": at.line.file, "line": at.line.number, "text": at.text, "letter": at.letter, "share": at.share,
                    "change": at.change, "equations": list(at.equations), "seconds": at.seconds, "measured": at.measured,
                    "misjudged": at.misjudged,
                }
                for at in self.lines
            ],
            "analysis": self.analysis and _run(self.analysis),
            "program": self._scope(facts.lane),
        }  # fmt: skip

    def _finding(self, number: int, each: Finding) -> dict[str, Any]:
        return {
            "number": number, "id": each.id, "severity": each.severity, "title": each.title, "detail": each.detail,
            "fix": each.fix, "extra": each.extra, "share": each.share, "equations": list(each.equations),
            "numbers": each.numbers, "file": each.line and each.line.file, "line": each.line and each.line.number,
        }  # fmt: skip

    def _scope(self, scope: Scope) -> list[dict[str, Any]]:
        return [self._equation(e) for e in scope.equations]

    def _equation(self, e: Equation) -> dict[str, Any]:
        letters = self._letters
        outs = e.eqn.outvars
        return {
            "number": e.number,
            "primitive": e.name,
            "batched": e.batched,
            "rule": e.rule.family if e.batched else None,
            "module": e.rule.module if e.batched else None,
            "file": e.line and e.line.file,
            "line": e.line and e.line.number,
            "inputs": [letters(v) for v in e.eqn.invars],
            "outputs": [letters(v) for v in outs],
            "lane": [text.shape(v.aval, None, 0) for v in outs],
            "lanes": [text.shape(v.aval, d, self._facts.size) for v, d in zip(outs, e.outs, strict=True)],
            "bdims": [*e.outs],
            "because": self._because(e),
            "became": [b.primitive.name for b in e.emitted],
            "before": _cost(e.before),
            "after": _cost(e.after),
            "inside": [self._scope(inner) for inner in e.scopes],
        }

    def _because(self, e: Equation) -> int | str | None:
        """What has the lanes that `e` got: the number of the next equation on the way to an argument, or its name."""
        steps = self._provenance.equation(e)[1:2]
        return None if not steps else steps[0].equation.number if steps[0].equation else steps[0].name

    @functools.cached_property
    def _letters(self) -> text.Letters:
        return text.named(self._facts)

    @functools.cached_property
    def _equations(self) -> dict[int, Equation]:
        return {e.number: e for e in self._facts.lane.all()}

    @functools.cached_property
    def _provenance(self) -> Provenance:
        return Provenance(self._facts)

    def _change(self, e: Equation) -> str:
        """How the first result of an equation changed."""
        if not e.eqn.outvars:
            return ""
        aval = e.eqn.outvars[0].aval
        before, after = text.shape(aval, None, 0), text.shape(aval, e.outs[0], self._facts.size)
        return before if before == after else f"{before} -> {after}"


def _run(analysis: Analysis) -> dict[str, Any]:
    seconds = analysis.seconds
    return {
        "loops": [{"equation": n, **dataclasses.asdict(trips)} for n, trips in analysis.loops.items()],
        "branches": [{"equation": n, "lanes": list(lanes)} for n, lanes in analysis.branches.items()],
        "seconds": None if seconds is None else sum(seconds.values()),
    }


def _cost(cost: Cost) -> dict[str, float]:
    return {**cost._asdict(), "work": work(cost)}


def explain(
    call: Call, names: Sequence[str], memory: int | str = "16GB", analyze: bool = False, calls: Sequence[str] = ()
) -> Report:
    """The report on a call. `names`: of each leaf of its arguments; `calls`: why the function was compiled again."""
    given = in_bytes(memory)
    facts = observe(call, names)
    if not analyze:
        return Report(facts, given, calls)
    run = run_and_look(facts)
    count_steps(facts, run)
    return Report(facts, given, calls, run)


def annotated(call: Call, names: Sequence[str]) -> str:
    """The batched program of a call as text, each variable with its lane axis marked."""
    facts = observe(call, names)
    return text.annotated(facts.batched, facts.batch(facts.size + 1), facts.size, facts.names)
