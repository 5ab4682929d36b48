"""Lanes against time, by schedule: `python bench/divergence_pictures.py` draws docs/images/divergence-*.svg.

The trips of each lane are those that the program makes; the schedules' rules (`minibatch/schedule/stages.py`) are replayed
on them. Each row of an array that is stepped is a line: dark where its lane is live, pale where the row is stepped for nothing.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from divergence import collatz

import minibatch
from minibatch.schedule.stages import Stage

IMAGES = pathlib.Path(__file__).parent.parent / "docs" / "images"


class Line(NamedTuple):
    """A row stepped from `start` to `end`, for a lane that is live until `stop`."""

    row: int
    start: int
    stop: int
    end: int


def replay(trips: np.ndarray, stages: Sequence[Stage]) -> Iterator[Line]:
    """The lines of a program whose lanes make these trips, in stages."""
    left, clock, waiting = trips.copy(), 0, list(range(len(trips)))
    rows: list[int] = []
    for stage in stages:
        waiting = [lane for lane in (*rows, *waiting) if left[lane] > 0]
        rows = []
        while waiting or sum(left[rows] > 0) > stage.leaves:
            rows = [lane for lane in rows if left[lane] > 0]
            rows += waiting[: stage.width - len(rows)]
            waiting = [lane for lane in waiting if lane not in rows]
            most = stage.width - 1 if waiting else stage.leaves
            steps = steps_until(left[rows], stage, most)
            yield from (Line(i, clock, clock + min(steps, left[lane]), clock + steps) for i, lane in enumerate(rows))
            clock += steps
            left[rows] = np.maximum(left[rows] - steps, 0)


def steps_until(left: np.ndarray, stage: Stage, most: int) -> int:
    """How many steps are taken until at most so many rows are live, and moving them pays."""
    steps = idle = 0
    while (left > steps).any() and (sum(left > steps) > most or idle < stage.patience * stage.width):
        steps += 1
        idle += stage.width - sum(left > steps)
    return steps


HIGH, WIDE, LEFT = 0.75, 900, 110


def panel(name: str, lines: list[Line], top: float, scale: float) -> tuple[str, float]:
    """One schedule's picture as SVG, and how high it is."""
    rows = 1 + max(line.row for line in lines)
    work = sum(line.end - line.start for line in lines)
    useful = sum(line.stop - line.start for line in lines)

    def path(spans: Iterator[tuple[int, int, int]], color: str) -> str:
        each = (f"M{LEFT + a * scale:.1f} {top + HIGH * (row + 0.5):.2f}h{(b - a) * scale:.1f}" for row, a, b in spans if b > a)
        return f'<path d="{"".join(each)}" stroke="{color}" stroke-width="{HIGH + 0.05}"/>'

    live = path(((line.row, line.start, line.stop) for line in lines), "#2b6cb0")
    idle = path(((line.row, line.stop, line.end) for line in lines), "#d5dde8")
    text = (
        f'<text x="0" y="{top + 12}" font-weight="bold">{name}</text>'
        f'<text x="0" y="{top + 28}">{100 * useful / work:.0f} % live</text>'
        f'<text x="0" y="{top + 44}">{work} row-steps</text>'
    )
    return text + idle + live, max(rows * HIGH, 50)


def picture(trips: np.ndarray, schedules: dict[str, Sequence[Stage]]) -> str:
    """All schedules below each other, on one scale: the area is the work."""
    drawn = {name: list(replay(trips, stages)) for name, stages in schedules.items()}
    longest = max(line.end for lines in drawn.values() for line in lines)
    scale, top, parts = (WIDE - LEFT - 5) / longest, 10.0, []
    for name, lines in drawn.items():
        part, height = panel(name, lines, top, scale)
        parts.append(part)
        top += height + 24
    parts.append(f'<text x="{LEFT}" y="{top}">steps: {longest} from left to right; one line is one row of the array</text>')
    size = f'viewBox="0 0 {WIDE} {top + 10:.0f}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def main() -> None:
    """Draw."""
    lanes = 256
    trips = np.asarray(minibatch.vmap(collatz)(jnp.arange(1, lanes + 1)))
    IMAGES.mkdir(exist_ok=True)
    schedules = {
        "lockstep": [Stage(lanes, 0, 0)],
        "compact": [Stage(lanes, 128, 0.5), Stage(128, 64, 0.5), Stage(64, 32, 0.5), Stage(32, 0, 0.5)],
        "refill": [Stage(lanes, 128, 0.5), Stage(32, 0, 0.5)],
    }
    (IMAGES / "divergence-lanes.svg").write_text(picture(trips, schedules))


if __name__ == "__main__":
    main()
