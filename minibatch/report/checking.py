"""Whether the batched program computes what each lane computes: for people who write rules."""

from __future__ import annotations

import dataclasses
import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from minibatch import _errors, _jax
from minibatch._batched import Axis, Batched, is_batched
from minibatch._interpreter import batch_eqn
from minibatch._jax import rebind
from minibatch._trace import Call
from minibatch.report.facts import Equation, Facts, Line, Scope, observe
from minibatch.report.lines import short_names
from minibatch.report.text import numbers_of, short


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """An equation whose batched value is not that of each lane by itself.

    `lane` is the first that differs, `steps` the steps of the loops around, outermost first. `inputs` are those of that lane,
    `batched` and `alone` what it got in the batched program and by itself: arrays, or the error that was raised.
    """

    equation: int
    primitive: str
    rule: str
    line: Line | None
    steps: tuple[int, ...]
    lane: int
    inputs: tuple[Any, ...]
    batched: Any
    alone: Any


@dataclasses.dataclass(frozen=True)
class Checked:
    """What `check` found: true if all equations agree. `unchecked` are those that have no meaning in a lane by itself."""

    function: str
    checked: int
    unchecked: tuple[int, ...]
    first: Disagreement | None

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        head = f"minibatch.check  {self.function}"
        left = f"; {len(self.unchecked)} could not be checked, as lanes meet in them" if self.unchecked else ""
        d = self.first
        if d is None:
            agree = "1 equation agrees with its" if self.checked == 1 else f"{self.checked} equations agree with their"
            return f"{head}: {agree} lanes{left}\n"
        place = f"{short_names([d.line.file])[d.line.file]}:{d.line.number}" if d.line else "a line that is not known"
        steps = f", in step {' of step '.join(map(str, reversed(d.steps)))} (from 0)" if d.steps else ""
        return "\n".join([
            f"{head}: equation {d.equation}, {d.primitive} (rule in {d.rule}), is the first to disagree",
            f"  at {place}{steps}",
            *[f"      {linecache.getline(line.file, line.number).strip()}" for line in [d.line] if line],
            f"  lane {d.lane}, given {', '.join(map(short, d.inputs))}",
            f"    batched  {_all(d.batched)}",
            f"    alone    {_all(d.alone)}",
        ]) + "\n"  # fmt: skip

    __repr__ = __str__


def _all(values: Any) -> str:
    return repr(values) if isinstance(values, Exception) else ", ".join(map(short, values))


def check(call: Call, names: Sequence[str]) -> Checked:
    """Run each equation batched and lane by lane on the same values, and say which is the first to disagree.

    Raises:
      Problem: there are no lanes.
      NotImplementedError: the program makes references.
    """
    facts = observe(call, names)
    if facts.size == 0:
        raise _errors.no_lanes_to_check()
    for e in facts.lane.all():
        if any(hasattr(v.aval, "inner_aval") for v in e.eqn.outvars):
            raise NotImplementedError(
                f"minibatch.check: equation {e.number}, {e.name}, makes a reference, which lanes by themselves would each "
                "change anew. Programs with references cannot be checked so: compare what vmap returns with what lanes return."
            )
    walk = _Walk(facts)
    operands = [
        jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (facts.size, *jnp.shape(x)))
        for x, d in zip(facts.arrays, facts.lane.inputs, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", _errors.MissingRuleWarning)
        _, first = walk.scope(facts.lane, [[x[i] for i in range(facts.size)] for x in operands], list(range(facts.size)), ())
    return Checked(_errors.name_of(call.fun), len(walk.checked), tuple(sorted(walk.unchecked)), first)


Lanes = list  # of one value, that of each lane


class _Walk:
    """Equation by equation, each on the values that the lanes have by themselves, so that the first error is found alone."""

    def __init__(self, facts: Facts) -> None:
        self.axis = facts.axis
        self.checked: set[int] = set()
        self.unchecked: set[int] = set()

    def scope(self, scope: Scope, args: Sequence[Lanes], lanes: list[int], steps: tuple) -> tuple[list[Lanes], Any]:
        """The outputs of a jaxpr in these `lanes`, and the first disagreement in it or None."""
        jaxpr = scope.jaxpr
        env: dict[Any, Lanes] = dict(zip(jaxpr.invars, args, strict=True))
        consts = getattr(jaxpr, "consts", ()) or scope.consts
        env |= {v: [const] * len(lanes) for v, const in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> Lanes:
            return [atom.val] * len(lanes) if isinstance(atom, _jax.Literal) else env[atom]

        for equation in scope.equations:
            ins = [read(atom) for atom in equation.eqn.invars]
            outs, wrong = self.equation(equation, ins, lanes, steps)
            if wrong is not None:
                return [], wrong
            env.update(zip(equation.eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars], None

    def equation(self, e: Equation, ins: Sequence[Lanes], lanes: list[int], steps: tuple) -> tuple[list[Lanes], Any]:
        """The outputs of an equation in each lane by itself, and the first disagreement in it or None."""
        axis = self.axis._replace(size=len(lanes))
        meets = self.axis.name is not None and _jax.names_axis(e.eqn, self.axis.name)
        batched = _attempt(lambda: self._batched(axis, e, ins, lanes))
        if meets or not lanes:
            self.unchecked |= {e.number} if meets else set()
            return batched if not isinstance(batched, Exception) else _raise(batched), None
        alone = _attempt(lambda: [list(column) for column in zip(*self._alone(e, ins), strict=True)])
        if isinstance(alone, Exception):
            raise alone  # the function itself fails, in a lane by itself
        self.checked.add(e.number)
        lane = _first_to_differ(batched, alone, len(lanes))
        if lane is None:
            return alone, None
        for inner in self._inside(e, ins, lanes, steps):
            if inner is not None:
                return [], inner
        return [], Disagreement(
            e.number, e.name, e.rule.module or e.rule.family, e.line, steps, lanes[lane], tuple(x[lane] for x in ins),
            batched if isinstance(batched, Exception) else tuple(b[lane] for b in batched), tuple(a[lane] for a in alone),
        )  # fmt: skip

    def _alone(self, e: Equation, ins: Sequence[Lanes]) -> Iterator[list]:
        for values in zip(*ins, strict=True) if ins else [()] * self.axis.size:
            yield rebind(e.eqn, *values)

    def _batched(self, axis: Axis, e: Equation, ins: Sequence[Lanes], lanes: list[int]) -> list[Lanes]:
        """What the rule makes of the same values, with lanes where it found them in the program."""
        given = [_stacked(x, d) for x, d in zip(ins, e.operands, strict=True)]
        outs = batch_eqn(axis, e.eqn, given)
        return [_apart(x, len(lanes)) for x in outs]

    def _inside(self, e: Equation, ins: Sequence[Lanes], lanes: list[int], steps: tuple) -> Iterator[Any]:
        """The first disagreements in the jaxprs inside, each on the values that its lanes come to it with."""
        scopes = {id(scope.jaxpr): scope for scope in e.scopes}
        params = e.eqn.params

        def of(jaxpr: Any) -> Scope | None:
            return scopes.get(id(_jax.open_jaxpr(jaxpr)))

        match e.name:
            case "cond":
                for k, branch in enumerate(params["branches"]):
                    here = [i for i, index in enumerate(ins[0]) if int(index) == k]
                    scope = of(branch)
                    if scope is not None and here:
                        taken = [[x[i] for i in here] for x in ins[1:]]
                        yield self.scope(scope, taken, [lanes[i] for i in here], steps)[1]
            case "scan":
                yield from self._steps(of(params["jaxpr"]), e, ins, lanes, steps)
            case "while":
                yield from self._trips(of(params["body_jaxpr"]), e, ins, lanes, steps)
            case _:
                for scope in e.scopes:
                    if len(scope.jaxpr.invars) == len(ins):
                        yield self.scope(scope, ins, lanes, steps)[1]

    def _steps(self, scope: Scope | None, e: Equation, ins: Sequence[Lanes], lanes: list[int], steps: tuple) -> Iterator[Any]:
        params = e.eqn.params
        num_consts, num_carry = _jax.scan_counts(params)
        consts, carry, xs = ins[:num_consts], list(ins[num_consts : num_consts + num_carry]), ins[num_consts + num_carry :]
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            if scope is None:
                return
            outs, wrong = self.scope(scope, [*consts, *carry, *[[x[i] for x in lane] for lane in xs]], lanes, (*steps, i))
            yield wrong
            carry = outs[:num_carry]

    def _trips(self, scope: Scope | None, e: Equation, ins: Sequence[Lanes], lanes: list[int], steps: tuple) -> Iterator[Any]:
        params = e.eqn.params
        in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = ins[in_cond : in_cond + in_body], [list(x) for x in ins[in_cond + in_body :]]
        live, trip = list(range(len(lanes))), 0
        while scope is not None:
            given = {i: [x[i] for x in (*ins[:in_cond], *carry)] for i in live}
            live = [i for i in live if _jax.evaluate(params["cond_jaxpr"], given[i])[0]]
            if not live:
                return
            taken = [[x[i] for i in live] for x in (*consts, *carry)]
            outs, wrong = self.scope(scope, taken, [lanes[i] for i in live], (*steps, trip))
            yield wrong
            for x, new in zip(carry, outs, strict=True):
                for i, value in zip(live, new, strict=True):
                    x[i] = value
            trip += 1


def _attempt(run: Callable[[], Any]) -> Any:
    """What `run` returns, or the exception that it raises."""
    try:
        return run()
    except Exception as error:
        return error


def _raise(error: Exception) -> Any:
    raise error


def _first_to_differ(batched: list[Lanes] | Exception, alone: list[Lanes], size: int) -> int | None:
    """The first lane in which some output is another; the first of all where the batched equation failed."""
    if isinstance(batched, Exception):
        return 0
    pairs = list(zip(batched, alone, strict=True))
    return next((i for i in range(size) if not all(_same(b[i], a[i]) for b, a in pairs)), None)


def _stacked(lanes: Lanes, bdim: int | None) -> Any:
    return lanes[0] if bdim is None else Batched(jnp.moveaxis(jnp.stack(lanes), 0, bdim), bdim)


def _apart(x: Any, size: int) -> Lanes:
    """What each lane has of an operand."""
    if not is_batched(x):
        return [x] * size
    return list(jnp.moveaxis(x.value, x.bdim, 0))


def _same(batched: Any, alone: Any) -> bool:
    """Equal up to the rounding of another order of the same operations."""
    if jnp.shape(batched) != jnp.shape(alone) or jnp.result_type(batched) != jnp.result_type(alone):
        return False
    dtype = jnp.result_type(alone)
    a, b = np.asarray(numbers_of(batched)), np.asarray(numbers_of(alone))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bool((a == b).all())
    tolerance = float(jnp.finfo(dtype).eps) ** 0.5
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return bool(np.allclose(a.astype(complex), b.astype(complex), rtol=tolerance, atol=tolerance * scale, equal_nan=True))
