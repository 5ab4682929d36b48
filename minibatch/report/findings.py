"""What is worth mending: each finding with its line, what happened, how much it costs, and what to do.

Every kind has an id and a section in `docs/findings.md`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from minibatch import _jax
from minibatch._cost import Cost, nbytes
from minibatch.report.analysis import Analysis
from minibatch.report.facts import Equation, Facts, Line, work
from minibatch.report.memory import stored

SEVERITIES = ("low", "medium", "high")


class Kind(NamedTuple):
    """A kind of finding: its title, what to do about it, and the letter that marks its lines."""

    title: str
    fix: str
    letter: str


KINDS = {
    "MB-DV01": Kind(
        "lanes diverge",
        "try another schedule (divergence=\"refill\"), bound the steps, or sort lanes by how long they take",
        "W",
    ),
    "MB-BR01": Kind(
        "both branches run",
        "make the predicate the same for all lanes (in_axes=None), move what is dear out of the branches, or try "
        'divergence="partition"',
        "B",
    ),
    "MB-CP01": Kind(
        "copied to every lane",
        "make it differ by lane from the start, or keep the equation that needs it shared (out_axes=None for an output)",
        "C",
    ),
    "MB-GS01": Kind(
        "became gather/scatter",
        "make the index the same for all lanes (in_axes=None), or slice before mapping",
        "G",
    ),
    "MB-TR01": Kind(
        "transposed",
        "have the lanes where the equation wants them: in front (in_axes=0), second for what a scan runs over (in_axes=1)",
        "T",
    ),
    "MB-LL01": Kind(
        "ran lane by lane",
        "register a rule with minibatch.extend.rule, or use another primitive",
        "L",
    ),
    "MB-EF01": Kind(
        "effect unrolled",
        "give the callback vmap_method='expand_dims' or 'broadcast_all', or move the effect out of the mapped function",
        "E",
    ),
    "MB-RC01": Kind(
        "recompiled",
        "keep shapes, dtypes and shared Python values the same between calls",
        "·",
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to mend.

    `extra` is the work that it adds, in operations with a byte as ten (`facts.work`), `share` that of all the work there
    is. `numbers` are those in `detail`.
    """

    id: str
    severity: str
    line: Line | None
    detail: str
    extra: float
    share: float
    equations: tuple[int, ...]
    numbers: dict[str, float]

    @property
    def title(self) -> str:
        """What happened, in two or three words."""
        return KINDS[self.id].title

    @property
    def fix(self) -> str:
        """What to do."""
        return KINDS[self.id].fix


class Found(NamedTuple):
    """What a detector saw at one equation: the work it adds, the numbers to tell, and those of a run, if there was one."""

    id: str
    extra: float
    numbers: dict[str, float]
    run: dict[str, float] = {}  # noqa: RUF012 - never changed


WORTH_TELLING = {"MB-CP01": 0.005, "MB-GS01": 0.005, "MB-TR01": 0.005}  # the share below which they are noise


class Program(NamedTuple):
    """What detectors look at beside the equation: the batched program, the number of lanes, which variables have a place
    in memory, which hold one constant all over, and what a run showed, if there was one.
    """

    batched: Any
    size: int
    stored: set
    uniform: set
    analysis: Analysis | None


Detector = Callable[[Program, Equation], Iterator[Found]]


def find(facts: Facts, calls: Sequence[str] = (), analysis: Analysis | None = None) -> list[Finding]:
    """The findings, most costly first. `calls`: why the mapped function was compiled each time after the first."""
    jaxprs = [*_jaxprs(facts.batched)]
    uniform = {eqn.outvars[0] for jaxpr in jaxprs for eqn in jaxpr.eqns if _fills(eqn)}
    program = Program(facts.batched, facts.size, set().union(*map(stored, jaxprs)), uniform, analysis)
    together: dict[tuple[str, Line | None], list[tuple[Equation | None, Found]]] = {}
    for equation in facts.lane.all():
        for detector in DETECTORS:
            for found in detector(program, equation):
                together.setdefault((found.id, equation.line), []).append((equation, found))
    owned = {id(b) for equation in facts.lane.all() for b in equation.emitted}
    for found in copied_outputs(program, owned):
        together.setdefault((found.id, None), []).append((None, found))
    total = work(facts.total()) or 1.0
    findings = [_finding(id, line, seen, total, facts.size) for (id, line), seen in together.items()]
    findings = [f for f in findings if f.share >= WORTH_TELLING.get(f.id, 0.0)]
    if calls:
        detail = f"compiled for {len(calls) + 1} different calls; the last because {calls[-1]}"
        findings.append(Finding("MB-RC01", "medium", None, detail, 0.0, 0.0, (), {"times": len(calls) + 1}))
    return sorted(findings, key=lambda f: (-SEVERITIES.index(f.severity), -f.extra, f.line or Line("", 0), f.id))


def _finding(id: str, line: Line | None, seen: list[tuple[Equation | None, Found]], total: float, size: int) -> Finding:
    extra = sum(found.extra for _, found in seen)
    numbers = {key: sum(found.numbers[key] for _, found in seen) for key in seen[0][1].numbers}
    run = max((found for _, found in seen), key=lambda found: found.extra).run
    numbers = {**numbers, **run, "lanes": size, "places": len(seen)}
    share = min(extra / total, 1.0)
    equations = tuple(equation.number for equation, _ in seen if equation)
    return Finding(id, _severity(id, share), line, WORDS[id](numbers), extra, share, equations, numbers)


def _severity(id: str, share: float) -> str:
    """By the share of all the work; what runs in Python or in a loop over lanes costs more than the model knows."""
    if id == "MB-LL01" or share >= 0.2:
        return "high"
    return "medium" if id == "MB-EF01" or share >= 0.02 else "low"


# --- numbers as people read them --------------------------------------------------------------------------------------


def count(number: float, unit: str = "") -> str:
    """`1234567 B` as `1.2 MB`; a number without a unit in full up to five digits."""
    size = abs(number)
    if not unit and size < 100_000:
        return str(int(number))
    step = min(int(math.log10(size) // 3), 5) if size >= 1000 else 0
    scaled = number / 1000**step
    prefix = ("", "k", "M", "G", "T", "P")[step]
    digits = f"{scaled:.0f}" if scaled >= 100 or scaled == int(scaled) else f"{scaled:.2g}"
    return f"{digits} {prefix}{unit}".rstrip()


def _per_place(numbers: dict[str, float], words: str) -> str:
    places = int(numbers["places"])
    return words if places == 1 else f"{words} (in {places} equations)"


def _schedule(n: dict[str, float]) -> str:
    if "staged" in n:
        return "it runs in stages, in which lanes that have stopped leave their place to others"
    return f"all {count(n['lanes'])} step until the last has stopped"


def _steps(n: dict[str, float]) -> str:
    if "mean" not in n:
        return ""
    use = f", so that {100 * n['useful']:.0f} % are of use" if "useful" in n else ""
    return f"; min {n['min']}, mean {n['mean']:.3g}, max {n['max']} steps{use}"


def _taken(n: dict[str, float]) -> str:
    taken = [count(n[key]) for key in n if key.startswith("branch ")]
    return f"; taken by {' and '.join(taken)} lanes" if taken else ""


WORDS: dict[str, Callable[[dict[str, float]], str]] = {
    "MB-DV01": lambda n: _per_place(
        n, f"the lanes of this loop stop at different times: {_schedule(n)}, {count(n['step'], 'FLOP')} a step{_steps(n)}"
    ),
    "MB-BR01": lambda n: _per_place(
        n, f"the lanes choose differently: {count(n['branches'])} branches run for all {count(n['lanes'])} lanes, "
        f"{count(n['after'], 'FLOP')} where the dearest alone is {count(n['before'], 'FLOP')}{_taken(n)}"
    ),
    "MB-CP01": lambda n: _per_place(
        n, f"what all lanes share is repeated for each of the {count(n['lanes'])}: {count(n['bytes'], 'B')}"
    ),
    "MB-GS01": lambda n: _per_place(
        n, f"the index differs by lane, so that a slice became a gather or scatter over {count(n['lanes'])} lanes: "
        f"{count(n['bytes'], 'B')}"
    ),
    "MB-TR01": lambda n: _per_place(n, f"lanes were moved to another dimension: {count(n['bytes'], 'B')} rearranged"),
    "MB-LL01": lambda n: _per_place(n, f"no rule takes all lanes at once: a loop over {count(n['lanes'])} lanes"),
    "MB-EF01": lambda n: _per_place(n, f"the host is called for one lane after another: {count(n['lanes'])} calls"),
}  # fmt: skip


# --- what to look for -------------------------------------------------------------------------------------------------


def diverges(program: Program, e: Equation) -> Iterator[Found]:
    """A while loop whose predicate differs by lane."""
    if e.name == "while" and any(s.outputs == (0,) and _is_predicate(e, s.jaxpr) for s in e.scopes):
        extra = max(work(e.total()) - work(e.total("before")), 0.0)
        trips = program.analysis and program.analysis.loops.get(e.number)
        if e.staged:
            run = {"min": trips.min, "mean": trips.mean, "max": trips.max} if trips else {}
            yield Found("MB-DV01", 0.0, {"staged": 1.0, "step": e.total().flops / max(trips.mean if trips else 1, 1)}, run)
        elif not trips:  # how many lanes wait for how long is not known
            yield Found("MB-DV01", extra + 0.1 * work(e.total()), {"step": e.total().flops})
        elif trips.useful < 1:
            run = {"min": trips.min, "mean": trips.mean, "max": trips.max, "useful": trips.useful}
            yield Found("MB-DV01", extra, {"step": e.total().flops / max(trips.max, 1)}, run)


def _is_predicate(e: Equation, jaxpr: Any) -> bool:
    return jaxpr is _jax.open_jaxpr(e.eqn.params["cond_jaxpr"])


def branches(program: Program, e: Equation) -> Iterator[Found]:
    """A cond whose index differs by lane, and whose lanes are not sorted by it."""
    if e.name == "cond" and e.operands[0] is not None and not e.partitioned and not _turns(program, e):
        before, after = e.total("before"), e.total()
        numbers = {"branches": len(e.eqn.params["branches"]), "before": before.flops, "after": after.flops}
        taken = program.analysis.branches.get(e.number, ()) if program.analysis else ()
        run = {f"branch {k}": float(lanes) for k, lanes in enumerate(taken)}
        yield Found("MB-BR01", max(work(after) - work(before), 0.0), numbers, run)


def copies(program: Program, e: Equation) -> Iterator[Found]:
    """An operand that all lanes share, repeated for each of them where something must find it in memory."""
    copied = sum(nbytes(b.outvars[0]) for b in e.emitted if _repeats(program, b) and b.outvars[0] in program.stored)
    if copied and e.name not in ("broadcast_in_dim", "cond", "while"):
        yield Found("MB-CP01", work(Cost(bytes=copied)), {"bytes": copied})


def copied_outputs(program: Program, owned: set[int]) -> Iterator[Found]:
    """An output that all lanes share, repeated to have lanes: what no equation of the lane's program became."""
    repeats = [b for b in _jax.open_jaxpr(program.batched).eqns if id(b) not in owned and _repeats(program, b)]
    copied = sum(nbytes(b.outvars[0]) for b in repeats)
    if copied:
        yield Found("MB-CP01", work(Cost(bytes=copied)), {"bytes": copied})


def _repeats(program: Program, b: Any) -> bool:
    """Whether `b` repeats an array for every lane; scalars and constants are no matter."""
    if b.primitive.name != "broadcast_in_dim" or program.size < 2 or not getattr(b.invars[0].aval, "shape", ()):
        return False
    return b.invars[0] not in program.uniform and nbytes(b.outvars[0]) == program.size * nbytes(b.invars[0])


def _fills(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], _jax.Literal)


def _jaxprs(jaxpr: Any) -> Iterator[Any]:
    """`jaxpr` and those inside."""
    yield (jaxpr := _jax.open_jaxpr(jaxpr))
    for eqn in jaxpr.eqns:
        for inner in _jax.inner_jaxprs(eqn):
            yield from _jaxprs(inner)


def gathers(program: Program, e: Equation) -> Iterator[Found]:
    """A dynamic slice whose start differs by lane."""
    became = {b.primitive.name for b in e.emitted}
    if e.name in ("dynamic_slice", "dynamic_update_slice") and any(n.startswith(("gather", "scatter")) for n in became):
        yield Found("MB-GS01", work(Cost(bytes=e.after.bytes)), {"bytes": e.after.bytes})


def transposes(program: Program, e: Equation) -> Iterator[Found]:
    """Lanes moved to where a rule wants them."""
    moved = sum(nbytes(b.outvars[0]) for b in e.emitted if b.primitive.name == "transpose")
    if e.name != "transpose" and moved:
        yield Found("MB-TR01", work(Cost(bytes=2 * moved)), {"bytes": moved})


def one_by_one(program: Program, e: Equation) -> Iterator[Found]:
    """A loop over lanes, for want of a rule or for the order of effects."""
    if _turns(program, e):
        yield Found("MB-EF01" if _jax.side_effects(e.eqn) else "MB-LL01", work(e.total()), {})


def _turns(program: Program, e: Equation) -> bool:
    """Whether the lanes of `e` run one after another: in a loop over them, in which `e` is as it was written."""
    loops = [b for b in e.emitted if b.primitive.name == "scan" and b.params["length"] == program.size]
    bodies = (_jax.open_jaxpr(loop.params["jaxpr"]).eqns for loop in loops)
    return e.batched and e.name != "scan" and any(b.primitive is e.eqn.primitive for body in bodies for b in body)


def host_calls(program: Program, e: Equation) -> Iterator[Found]:
    """A callback that is called once for each lane."""
    sequential = e.name == "pure_callback" and e.eqn.params["vmap_method"] in (None, "sequential", "sequential_unrolled")
    if e.batched and (sequential or e.name in ("io_callback", "debug_callback", "debug_print")) and not _turns(program, e):
        yield Found("MB-EF01", work(e.total()), {})


DETECTORS: tuple[Detector, ...] = (diverges, branches, copies, gathers, transposes, one_by_one, host_calls)
