"""The program of one lane, with something noted at every equation while it runs: a state threaded through it all.

The state is a tree of arrays. It goes through loops as one more carry and through branches as one more operand, so that
what is noted in a lane is what happens in that lane, however lanes are scheduled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_leaves

from minibatch import _jax
from minibatch._batched import apart, together
from minibatch._compile import Program
from minibatch._cost import words
from minibatch._interpreter import batch_jaxpr, walk
from minibatch._jax import rebind
from minibatch._trace import Call, Returned, Traced
from minibatch.report.facts import Line

Path = tuple[int, ...]  # the positions of an equation and of those around it, each with the number of the jaxpr inside


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """An equation of the program, by its `path`. `loops`: how many loops it is in. `calls`: whether it is seen through."""

    path: Path
    eqn: Any
    line: Line | None
    loops: int
    calls: bool


class Probe:
    """What to note. Each method takes the state and returns the next; unless told otherwise, the same.

    `steps` are the numbers of the steps of the loops around, outermost first.
    """

    def equation(self, state: Any, place: Place, steps: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        """After an equation that no jaxpr is seen through."""
        return state

    def loop(self, state: Any, place: Place, trips: Any) -> Any:
        """After a loop that took so many steps."""
        return state

    def branch(self, state: Any, place: Place, index: Any) -> Any:
        """Before branch number `index`."""
        return state


CALLS = words("jit closed_call eval_jaxpr remat2 custom_jvp_call custom_vjp_call custom_vmap_call compute_on")
FLOW = words("cond scan while")


def places(jaxpr: Any, path: Path = (), line: Line | None = None, loops: int = 0) -> Iterator[Place]:
    """Every equation that a probe comes to, those inside others after them."""
    for i, eqn in enumerate(_jax.open_jaxpr(jaxpr).eqns):
        found = _jax.user_file_and_line(eqn)
        here = Line(*found) if found else line
        through = eqn.primitive.name in CALLS | FLOW
        yield Place((*path, i), eqn, here, loops, through)
        inner = loops + (eqn.primitive.name in ("scan", "while"))
        for k, each in enumerate(_seen_through(eqn)):
            yield from places(each, (*path, i, k), here, inner)


def _seen_through(eqn: Any) -> list[Any]:
    match eqn.primitive.name:
        case "cond":
            return list(eqn.params["branches"])
        case "scan":
            return [eqn.params["jaxpr"]]
        case "while":
            return [eqn.params["body_jaxpr"]]
        case name if name in CALLS:
            return list(_jax.inner_jaxprs(eqn))[:1]
    return []


class Probed:
    """A call of a mapped function, to be run with probes."""

    def __init__(self, call: Call, traced: Traced) -> None:
        self.call, self.traced = call, traced
        program = Program(call, traced)
        self.jaxpr, self.axis = program.batched.jaxpr, self.call.axis
        self.arrays = [*program.consts, *self.call.arrays()]
        self.bdims = [*[None] * len(program.consts), *self.call.array_axes()]
        self.places = {place.path: place for place in places(self.jaxpr)}
        self.loops = max((place.loops for place in self.places.values()), default=0)

    def returned(self) -> list:
        """The arguments with lanes that the function returns untouched, as [B, *s]."""
        leaves = [out.leaf for out in self.traced.outputs if isinstance(out, Returned)]
        mapped = [i for i in leaves if self.call.axes[i] is not None and not _jax.is_vmappable(self.call.leaves[i])]
        return [self.stacked(self.call.leaves[i], self.call.axes[i]) for i in mapped]

    def stacked(self, x: Any, bdim: int | None) -> Any:
        """`x` as [B, *s]."""
        return jnp.broadcast_to(x, (self.axis.size, *jnp.shape(x))) if bdim is None else jnp.moveaxis(x, bdim, 0)

    def run(self, probe: Probe, start: Any) -> tuple[list, Any]:
        """Run all lanes once: the outputs, and the last state of each lane as [B, *s], from the same `start` in each."""
        leaves, tree = jax.tree.flatten(start)

        def lane(*arrays: Any) -> list:
            outs, state = self._evaluate(probe, self.jaxpr, arrays, start, (), ())
            return [*outs, *tree_leaves(state)]

        with _jax.axis_env(self.axis):
            jaxpr = _jax.trace_jaxpr(lane, [v.aval for v in _jax.open_jaxpr(self.jaxpr).invars])

        def many(arrays: Sequence[Any]) -> list:
            outs = batch_jaxpr(self.axis, jaxpr, together(arrays, self.bdims))
            return [self.stacked(x, bdim) for x, bdim in zip(*apart(outs), strict=True)]

        results = jax.jit(many)(self.arrays)
        count = len(results) - len(leaves)
        return results[:count], tree.unflatten(results[count:])

    def _evaluate(
        self, probe: Probe, jaxpr: Any, args: Sequence[Any], state: Any, path: Path, steps: tuple
    ) -> tuple[list, Any]:
        numbers = itertools.count()

        def apply(eqn: Any, ins: list) -> list:
            nonlocal state
            outs, state = self._equation(probe, self.places[(*path, next(numbers))], ins, state, steps)
            return outs

        return walk(jaxpr, args, apply), state

    def _equation(self, probe: Probe, place: Place, ins: list, state: Any, steps: tuple) -> tuple[list, Any]:
        eqn = place.eqn

        def inside(k: int, jaxpr: Any, args: Sequence[Any], state: Any, steps: tuple) -> tuple[list, Any]:
            return self._evaluate(probe, jaxpr, args, state, (*place.path, k), steps)

        match eqn.primitive.name:
            case "cond":
                return self._cond(probe, place, inside, ins, state, steps)
            case "scan":
                return self._scan(probe, place, inside, ins, state, steps)
            case "while":
                return self._while(probe, place, inside, ins, state, steps)
        if place.calls:
            return inside(0, _seen_through(eqn)[0], ins, state, steps)
        outs = rebind(eqn, *ins)
        return outs, probe.equation(state, place, steps, ins, outs)

    def _cond(self, probe: Probe, place: Place, inside: Callable, ins: list, state: Any, steps: tuple) -> tuple[list, Any]:
        index, *operands = ins
        state = probe.branch(state, place, index)
        branches = [
            lambda state, *operands, k=k, branch=branch: inside(k, branch, operands, state, steps)
            for k, branch in enumerate(_seen_through(place.eqn))
        ]
        return lax.switch(jnp.int32(index), branches, state, *operands)

    def _scan(self, probe: Probe, place: Place, inside: Callable, ins: list, state: Any, steps: tuple) -> tuple[list, Any]:
        params = place.eqn.params
        num_consts, num_carry = _jax.scan_counts(params)
        consts, carry, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]

        def step(carried: tuple, xs: list) -> tuple[tuple, list]:
            carry, state, i = carried
            outs, state = inside(0, params["jaxpr"], [*consts, *carry, *xs], state, (*steps, i))
            return (outs[:num_carry], state, i + 1), outs[num_carry:]

        start = carry, state, jnp.int32(0)
        (carry, state, trips), ys = lax.scan(step, start, xs, length=params["length"], reverse=params["reverse"])
        return [*carry, *ys], probe.loop(state, place, trips)

    def _while(self, probe: Probe, place: Place, inside: Callable, ins: list, state: Any, steps: tuple) -> tuple[list, Any]:
        params = place.eqn.params
        in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
        for_cond, for_body, carry = ins[:in_cond], ins[in_cond : in_cond + in_body], ins[in_cond + in_body :]

        def goes_on(carried: tuple) -> Any:
            return _jax.evaluate(params["cond_jaxpr"], [*for_cond, *carried[0]])[0]

        def step(carried: tuple) -> tuple:
            carry, state, i = carried
            outs, state = inside(0, params["body_jaxpr"], [*for_body, *carry], state, (*steps, i))
            return outs, state, i + 1

        carry, state, trips = lax.while_loop(goes_on, step, (carry, state, jnp.int32(0)))
        return list(carry), probe.loop(state, place, trips)
