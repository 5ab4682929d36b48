"""The report as a page: one HTML file that needs nothing else, and that says all it has to say without scripts."""

from __future__ import annotations

import html
import importlib.metadata
import linecache
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from minibatch.report import text
from minibatch.report.findings import SEVERITIES
from minibatch.report.lines import LETTERS, LineFacts

TEMPLATE = pathlib.Path(__file__).parent / "template"
AROUND = 8  # lines shown before and after one that made an equation


class SourceLine(NamedTuple):
    """A line as it is shown: highlighted, with what became of it, if anything; a `gap` before it if lines are left out."""

    number: int
    html: Any
    facts: LineFacts | None
    gap: bool

    @property
    def mark(self) -> str:
        """How bad the worst finding on it is."""
        return self.facts.mark.strip() if self.facts else ""


class SourceFile(NamedTuple):
    """A file of the user's."""

    path: str
    name: str
    lines: list[SourceLine]


def render(data: dict[str, Any], lines: list[LineFacts], names: dict[str, str]) -> str:
    """The page of a report's data.

    Raises:
      ImportError: jinja2 or pygments is not installed.
    """
    try:
        import jinja2
        import markupsafe
        import pygments  # noqa: F401 - used below, missed here
    except ImportError as missing:
        raise ImportError(
            f"minibatch.explain: a page needs {missing.name}, which is not installed: pip install 'minibatch[page]'. "
            "print(report) and report.to_dict() need nothing."
        ) from missing
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    trusted = {name: markupsafe.Markup((TEMPLATE / f"page.{ending}").read_text()) for name, ending in
               (("style", "css"), ("script", "js"))}  # fmt: skip
    total = data["cost"]["after"]["work"] or 1.0
    return environment.get_template("page.html").render(
        **trusted,
        data=data,
        call=text.call(data),
        facts=text.sentences(data),
        names=names,
        files=list(_files(lines, names, markupsafe.Markup)),
        equations=list(_flat(data["program"], 0, total, set())),
        letters={letter: LETTERS[letter] for letter in LETTERS if any(at.letter == letter for at in lines)},
        marks=text.MARKS,
        places=text.PLACES,
        severities=SEVERITIES,
        versions={"minibatch": _version(), "jax": jax.__version__},
        share=text.share,
        anchor=lambda file, number: f"line-{re.sub('[^A-Za-z0-9]+', '-', names[file])}-{number}",
        mark_lanes=lambda shape: markupsafe.Markup(re.sub(r"B:\d+", r"<mark>\g<0></mark>", html.escape(shape))),
    )


def _version() -> str:
    try:
        return importlib.metadata.version("minibatch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _flat(scope: list[dict[str, Any]], depth: int, total: float, seen: set[int]) -> Iterator[dict[str, Any]]:
    """The equations in order, each before those inside it. One that is called from several places comes again in each."""
    for equation in scope:
        again = equation["number"] in seen
        seen.add(equation["number"])
        anchor = f"eqn-{equation['number']}" + (f"-again-{len(seen)}-{depth}" if again else "")
        yield {**equation, "depth": depth, "share": equation["after"]["work"] / total, "anchor": anchor}
        for inner in equation["inside"]:
            yield from _flat(inner, depth + 1, total, seen)


def _files(lines: list[LineFacts], names: dict[str, str], trusted: Any) -> Iterator[SourceFile]:
    """The files with lines that made equations, and the lines around those."""
    for path, name in names.items():
        made = {at.line.number: at for at in lines if at.line.file == path}
        source = linecache.getlines(path)
        shown = sorted({n for at in made for n in range(at - AROUND, at + AROUND + 1) if 1 <= n <= len(source)} | {*made})
        coloured = _highlighted("".join(source))
        yield SourceFile(path, name, [
            SourceLine(n, trusted(coloured[n - 1]) if n <= len(coloured) else "", made.get(n), n - 1 not in shown and n > 1)
            for n in shown
        ])  # fmt: skip


def _highlighted(source: str) -> list[str]:
    """The lines of Python `source` as HTML, escaped."""
    import pygments
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return pygments.highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")


def save(page: str, path: str | os.PathLike) -> None:
    """Write the page, and nothing but it.

    Raises:
      OSError: it cannot be written there.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"minibatch.explain: the page cannot be written ({error.strerror}). The report is as it was: "
            "save it to another path, or print it",
            str(path),
        ) from error
