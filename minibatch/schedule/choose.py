"""Which schedule should take least time: a model of the machine, in a few constants, and what follows from it.

The constants are what `python bench/divergence.py --calibrate` measures. They need not be exact: schedules differ by
factors, and each is entered such that a wrong guess costs little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from minibatch import _jax
from minibatch._batched import Array, Axis
from minibatch._cost import Cost, eqn_cost, jaxpr_cost
from minibatch.schedule.live import acts
from minibatch.schedule.loop import Loop
from minibatch.schedule.stages import Stage


class Machine(NamedTuple):
    """What a device does in a second, in cache; and in seconds what a step of a loop costs it beside the work.

    `step` is that of any step, `equation` that of each equation in it that is not fused with others. `row` is what it costs,
    beside the bytes, to take a row from one array and put it into another.
    """

    flops: float
    transcendentals: float
    bytes: float
    step: float
    equation: float
    row: float


MACHINES = {
    "cpu": Machine(flops=3e10, transcendentals=1e9, bytes=3e10, step=3e-7, equation=2.5e-7, row=1e-9),
    "gpu": Machine(flops=1e13, transcendentals=1e12, bytes=1e12, step=2e-5, equation=1e-6, row=1e-11),
    "tpu": Machine(flops=1e13, transcendentals=1e12, bytes=1e12, step=5e-6, equation=1e-6, row=1e-9),
}


def machine() -> Machine:
    """The machine that programs are made for just now."""
    return MACHINES.get(jax.default_backend(), MACHINES["gpu"])


def seconds(cost: Cost) -> float:
    """How long work of this cost should take."""
    here = machine()
    return cost.flops / here.flops + cost.transcendentals / here.transcendentals + cost.bytes / here.bytes


# --- loops ------------------------------------------------------------------------------------------------------------

TRIPS = 8  # of a loop whose trips are not known
STAGES = 6  # of compaction, at most: each is one more copy of the body to compile
FILLED = 4  # times as long as what a step costs beside, the work in a window should take
WORTH = 8  # times as long, that of all lanes, so that there is something to gain
FEWER = 4  # times as many lanes as rows in a window, at least


def stages(axis: Axis, loop: Loop, consts: Sequence[Array], live: Array, state: Sequence[Array]) -> Sequence[Stage]:
    """The stages in which the loop runs, or none: in lockstep.

    Lanes that meet, that act beside computing, or that `jax.vmap` made of others, stay together.
    """
    schedule = axis.divergence.loops
    apart = live.ndim == 1 and axis.mesh_name is None and isinstance(axis.size, int) and axis.size > 1
    if schedule == "lockstep" or not apart or any(_jax.names_axes(x) or acts(x) for x in (loop.cond, loop.body)):
        return ()
    work, overhead = step_seconds(loop)
    if schedule == "auto":
        on_one_device = jax.device_count() == 1 or _jax.varying(live)
        schedule = "refill" if on_one_device and axis.size * work >= WORTH * overhead else "lockstep"
    if schedule == "lockstep":
        return ()
    window = min(_power_of_two(FILLED * overhead / work), max(1, axis.size // FEWER))
    widths = [axis.size, window] if schedule == "refill" else _ladder(axis.size, window)
    leaves = [axis.size // 2, 0] if schedule == "refill" else [*widths[1:], 0]
    moving = _moving(loop, consts, state)
    return tuple(Stage(w, n, moving / (work + overhead / w)) for w, n in zip(widths, leaves, strict=True))


def mesh_axes(axis: Axis, loop: Loop) -> tuple:
    """The axes of the mesh under way over which the lanes are known to lie, each device with as many; none if they meet."""
    mesh, names = jax.sharding.get_abstract_mesh(), axis.spmd_name or axis.mesh_name or ()
    names = names if isinstance(names, tuple) else (names,)
    if not names or not isinstance(axis.size, int) or any(_jax.names_axes(x) or acts(x) for x in (loop.cond, loop.body)):
        return ()
    free = all(name in mesh.axis_names and name not in mesh.manual_axes for name in names)
    return names if free and axis.size % math.prod(mesh.shape[name] for name in names) == 0 else ()


def step_seconds(loop: Loop) -> tuple[float, float]:
    """What a step costs for each lane, and beside that."""
    here, jaxprs = machine(), (loop.cond, loop.body)
    work = sum(seconds(jaxpr_cost(jaxpr, TRIPS)) for jaxpr in jaxprs)
    return work + 1 / here.bytes, here.step + here.equation * sum(map(_unfused, jaxprs))


def _unfused(jaxpr: Any) -> float:
    """How many equations run in `jaxpr` that are not fused with others."""
    return sum(map(_parts, _jax.open_jaxpr(jaxpr).eqns))


def _parts(eqn: Any) -> float:
    inner = list(_jax.inner_jaxprs(eqn))
    times = {"scan": eqn.params.get("length"), "while": TRIPS}.get(eqn.primitive.name, 1)
    return times * sum(map(_unfused, inner)) if inner else float(eqn_cost(eqn).bytes > 0)


def _moving(loop: Loop, consts: Sequence[Array], state: Sequence[Array]) -> float:
    """Seconds to take a lane's row of all that differs by lane, and to put its state back."""
    taken = [*state, *(x for x, d in zip(consts, loop.bdims, strict=True) if d is not None)]
    size = sum(map(_row_bytes, (*taken, *state)))
    return 2 * size / machine().bytes + (len(taken) + len(state)) * machine().row


def _row_bytes(x: Array) -> float:
    aval = jax.typeof(x)
    return np.prod(aval.shape[1:]) * getattr(aval.dtype, "itemsize", 8)


def _power_of_two(x: float) -> int:
    return 1 << max(0, int(np.ceil(np.log2(x))))


def _ladder(start: int, end: int) -> list[int]:
    """From `start` down to `end`, by halves if that takes few stages, else by a larger factor."""
    rungs = min(STAGES - 1, max(1, round(np.log2(start / end))))
    widths = [round(start * (end / start) ** (i / rungs)) for i in range(rungs + 1)]
    return sorted({*widths}, reverse=True)
