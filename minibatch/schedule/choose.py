"""Which schedule should take least time: a model of the machine, in a few constants, and what follows from it.

The constants of a machine are in one table, and `python bench/divergence.py --calibrate` measures them but for the last two.
They need not be exact: schedules differ by factors, and each is entered such that a wrong guess costs little. They are on the
safe side: of a machine that others use too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from minibatch import _jax
from minibatch._batched import Array, Axis
from minibatch._cost import Cost, eqn_cost, jaxpr_cost, nbytes, runs, words
from minibatch._interpreter import fact
from minibatch.schedule.borrow import CALLS_OUT_OF_XLA, careful, hands_through, reads
from minibatch.schedule.live import acts
from minibatch.schedule.loop import Loop
from minibatch.schedule.stages import Stage


class Machine(NamedTuple):
    """A device: what it does in a second, and in seconds what it takes beside that work."""

    flops: float  # in a second, in cache, as the next two
    transcendentals: float
    bytes: float
    move: float  # bytes of lanes in a second, to and from memory
    step: float  # of a loop, whatever is in it
    equation: float  # in a step, small, and not fused with others
    launch: float  # of an operation that does little
    ask: float  # on the device, whether a branch is taken by anybody
    row: float  # to take from one array, or to put into another, beside the bytes
    place: float  # to find for a lane among those of its branch
    compare: float  # in a sort
    call: float  # of a library, for each matrix that is factorized
    alone: float  # work of a kernel, as XLA counts it, that is left to one thread; to share little out costs more than it saves
    fewest: int  # lanes that run as fast side by side as many
    chunks: int  # at most so many for a branch: the last of them is not full


MACHINES = {
    "cpu": Machine(
        flops=3e10, transcendentals=1e9, bytes=3e10, move=1e10, step=3e-7, equation=2.5e-7, launch=7e-8, ask=2e-6,
        row=1e-9, place=3e-8, compare=2e-8, call=3e-7, alone=2e5, fewest=32, chunks=64,
    ),
    "gpu": Machine(
        flops=1e13, transcendentals=1e12, bytes=1e12, move=1e12, step=2e-5, equation=1e-6, launch=5e-6, ask=5e-5,
        row=1e-11, place=1e-10, compare=1e-10, call=1e-6, alone=math.inf, fewest=4096, chunks=8,
    ),
    "tpu": Machine(
        flops=1e13, transcendentals=1e12, bytes=1e12, move=1e12, step=5e-6, equation=1e-6, launch=5e-6, ask=5e-5,
        row=1e-9, place=1e-10, compare=1e-10, call=1e-6, alone=math.inf, fewest=4096, chunks=8,
    ),
}  # fmt: skip


def machine() -> Machine:
    """The machine that programs are made for just now."""
    return MACHINES.get(jax.default_backend(), MACHINES["gpu"])


def seconds(jaxpr: Any, trips: float) -> float:
    """How long the work of one run of `jaxpr` should take. `trips`: of the loops in it."""
    here, cost = machine(), _work(jaxpr, trips)
    return cost.flops / here.flops + cost.transcendentals / here.transcendentals + cost.bytes / here.bytes


_work = fact(jaxpr_cost)


# --- loops ------------------------------------------------------------------------------------------------------------

TRIPS = 8  # of a loop whose trips are not known
STAGES = 6  # of compaction, at most: each is one more copy of the body to compile
FILLED = 4  # times as long as what a step costs beside, the work in a window should take
WORTH = 8  # times as long, that of all lanes, so that there is something to gain
FEWER = 4  # times as many lanes as rows in a window, at least
SOON = 2  # steps: if moving a lane costs less, it may be for nothing
FULL = 16  # times as long as FILLED's, the work in a window in which all lanes step from the start


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
        schedule = "refill" if on_one_device(axis, live) and axis.size * work >= WORTH * overhead else "lockstep"
    if schedule == "lockstep":
        return ()
    moving, most = _moving(loop, consts, state), max(1, axis.size // FEWER)
    window = min(most, _power_of_two(FILLED * overhead / work))
    if schedule == "compact":
        widths = _ladder(axis.size, window)
    elif moving < SOON * work:
        widths = [max(window, min(most, _power_of_two(FULL * overhead / work), _by_one_thread(loop, state)))]
    else:
        widths = [axis.size, window]
    leaves = [axis.size // 2, 0] if schedule == "refill" else [*widths[1:], 0]
    return tuple(Stage(w, n, moving / (work + overhead / w)) for w, n in zip(widths, leaves[-len(widths) :], strict=True))


def _by_one_thread(loop: Loop, state: Sequence[Array]) -> int:
    """How many lanes may step before XLA has several threads share the work: what it computes is more than what it moves."""
    cost = sum((_fused(jaxpr) for jaxpr in (loop.cond, loop.body)), Cost())
    work, moved = cost.flops + 2 * cost.transcendentals, 2 * sum(map(_row_bytes, state))
    limit = machine().alone / (work + 10 * moved)
    return _power_of_two(limit) // 2 if moved < work and limit < math.inf else np.iinfo(np.int32).max


def _fused(jaxpr: Any) -> Cost:
    """What `jaxpr` costs, but for what has kernels of its own."""
    total = Cost()
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        inside = runs(eqn, TRIPS)
        if inside:
            total = sum((_fused(run.jaxpr) * run.times for run in inside), total)
        elif eqn.primitive.name not in KERNELS:
            total += eqn_cost(eqn)
    return total


def mesh_axes(axis: Axis, jaxprs: Sequence[Any]) -> tuple:
    """The axes of the mesh under way over which the lanes are known to lie, each device with as many; none if they meet."""
    mesh, names = jax.sharding.get_abstract_mesh(), axis.spmd_name or axis.mesh_name or ()
    names = names if isinstance(names, tuple) else (names,)
    if not names or not isinstance(axis.size, int) or any(_jax.names_axes(x) or acts(x) for x in jaxprs):
        return ()
    free = all(name in mesh.axis_names and name not in mesh.manual_axes for name in names)
    return names if free and axis.size % math.prod(mesh.shape[name] for name in names) == 0 else ()


def on_one_device(axis: Axis, x: Array) -> bool:
    """Whether the lanes of `x` are known to lie on one device: there is but one, or this is each device's own part."""
    return jax.device_count() == 1 or bool(axis.manual) or bool(_jax.varying(x))


def step_seconds(loop: Loop) -> tuple[float, float]:
    """What a step costs for each lane, and beside that."""
    here, jaxprs = machine(), (loop.cond, loop.body)
    work = sum(seconds(jaxpr, TRIPS) for jaxpr in jaxprs)
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


# --- branches ---------------------------------------------------------------------------------------------------------


ROUNDS = 50.0  # of a loop in a branch, if they are not known: to take too many costs little, too few may cost a lot
GAIN = 15.0  # a partition must save so much more than it costs
HANDED = 10.0  # a skipped branch must save so much more than it takes to move what it makes, and a quarter of what it reads
LOSS = 0.07  # of the time may be lost by running in chunks if all lanes take one branch
HOST = 1e-4  # seconds for a call of a lane out of XLA

FACTORIZATIONS = words("""
    cholesky cholesky_update eig eigh hessenberg householder_product geqrf lu qr schur svd triangular_solve tridiagonal
    tridiagonal_solve
""")
KERNELS = FACTORIZATIONS | words("""
    conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general fft sort top_k
""")  # of their own, apart from what is elementwise
LOOPS = words("scan while")


class Plan(NamedTuple):
    """How a partition runs: `numbers` of the branches whose lanes come together, in chunks of `width` lanes.

    `recompute` says of each whether its reverse pass computes again what it needs, rather than to keep it: what a branch
    keeps is kept, as zeros, by chunks of the other branches too.
    """

    numbers: tuple[int, ...]
    width: int
    recompute: tuple[bool, ...]


def plan(axis: Axis, branches: Sequence[Any], index: Array, batched: Sequence[bool]) -> Plan | None:
    """Which of the branches, whose number `index` [B] gives, should run for their own lanes alone, if any.

    Those that cost more than to move what they make, and read of operands that are `batched`; as long as nothing is lost
    if all lanes take one branch. What all lanes share is computed once in a branch that runs for all, but in each chunk anew.
    """
    asked, here = axis.divergence.branches, machine()
    able = [k for k, branch in enumerate(branches) if _only_computes(branch)]
    if asked == "select" or not able or not isinstance(axis.size, int) or axis.size < 2 or axis.mesh_name is not None:
        return None
    own = [differing(branch, batched) for branch in branches]
    times = [*map(lane_seconds, own)]
    moves = [here.place + 2 * _moved(branch, batched) / here.move for branch in branches]
    numbers = [k for k in able if times[k] > moves[k]] if asked == "auto" else able
    most = max(numbers, default=None, key=times.__getitem__)
    if most is None:
        return None
    width = max(here.fewest, -(-axis.size // here.chunks))
    if asked == "auto":
        chunk = launches(own[most]) * here.launch + lane_seconds(branches[most]) - times[most]  # beside that of its lanes
        width = max(width, _power_of_two(max(1, chunk / (LOSS * sum(times)))))
        if axis.size < 2 * width or sum(times) < GAIN * moves[most] or not on_one_device(axis, index):
            return None
    recompute = tuple(lane_seconds(branches[k]) < kept(branches[k]) / here.move for k in numbers)
    return Plan(tuple(numbers), min(width, -(-axis.size // 2)), recompute)


def guarded(axis: Axis, branch: Any, batched: Sequence[bool]) -> bool:
    """Whether a branch that runs for all lanes should be skipped if no lane takes it.

    It must be if it is careful of what it sees. Otherwise if that saves more than to ask costs; much more if it is but
    elementwise, for it fuses with the choice, and then the compiler may skip it lane by lane; and much more than it costs
    that what goes in and out, as what a reverse pass needs does, is made in memory instead of fused with what is around.
    """
    if careful(branch) or not isinstance(axis.size, int):
        return careful(branch)
    here, whole, own = machine(), lane_seconds(branch), lane_seconds(differing(branch, batched))
    saved = own + (whole - own) / max(1, axis.size)
    within, without = _moved(branch, batched), _moved(branch, [False] * len(batched))
    enough = 2 * GAIN * here.ask * (1 if launches(branch) else 10)
    return axis.size * saved > enough and saved > HANDED * (without + (within - without) / 4) / here.move


def differing(jaxpr: Any, batched: Sequence[bool]) -> Any:
    """What of `jaxpr` is done for each lane: the equations that come of an input which is `batched`."""
    bare = _jax.open_jaxpr(jaxpr)
    differ = {v for v, b in zip(bare.invars, batched, strict=True) if b}
    eqns = []
    for eqn in bare.eqns:
        if not differ.isdisjoint(_variables(eqn.invars)):
            differ.update(eqn.outvars)
            eqns.append(eqn)
    if len(eqns) == len(bare.eqns):
        return jaxpr
    read = dict.fromkeys(v for atoms in (*(eqn.invars for eqn in eqns), bare.outvars) for v in _variables(atoms))
    return _jax.with_leading_inputs(jaxpr, [v for v in read if v not in {*bare.invars, *differ}], eqns)


def lane_seconds(jaxpr: Any) -> float:
    """How long one of many lanes of `jaxpr` should take."""
    return seconds(jaxpr, ROUNDS) + _beside(jaxpr, machine())


@fact
def _beside(jaxpr: Any, here: Machine) -> float:
    """How long it should take beside its work."""

    def beside(eqn: Any) -> float:
        name = eqn.primitive.name
        if name in ("sort", "top_k"):
            return here.compare * eqn_cost(eqn).flops
        return here.call * (name in FACTORIZATIONS) + HOST * (name in CALLS_OUT_OF_XLA)

    return _all(jaxpr, beside)


@fact
def launches(jaxpr: Any) -> float:
    """How many operations `jaxpr` starts one after the other."""

    def started(eqn: Any) -> float:
        inside = runs(eqn, ROUNDS)
        return 2 * inside[-1].times if inside and eqn.primitive.name in LOOPS else eqn_cost(eqn).bytes > 0

    return _all(jaxpr, started)


def kept(jaxpr: Any) -> float:
    """Bytes of what a reverse pass may need of one run of `jaxpr`: at most all that it makes."""
    return _all(jaxpr, lambda eqn: 0 if runs(eqn) else sum(map(nbytes, eqn.outvars)))


def _only_computes(branch: Any) -> bool:
    """Whether a branch computes something of each lane by itself, whichever number it has, and does nothing else."""
    computes = _jax.open_jaxpr(branch).eqns and None in hands_through(branch)
    return bool(computes) and not acts(branch) and not _jax.names_axes(branch)


def _variables(atoms: Sequence[Any]) -> list:
    return [v for v in atoms if not isinstance(v, _jax.Literal)]


def _moved(branch: Any, batched: Sequence[bool]) -> float:
    """Bytes of one lane that go into `branch` and out."""
    inputs = zip(_jax.open_jaxpr(branch).invars, reads(branch), batched, strict=True)
    outputs = zip(_jax.open_jaxpr(branch).outvars, hands_through(branch), strict=True)
    return sum(nbytes(v) for v, *both in inputs if all(both)) + sum(nbytes(v) for v, origin in outputs if origin is None)


def _all(jaxpr: Any, of: Callable[[Any], float]) -> float:
    """The sum `of` all equations that one run of `jaxpr` goes through."""
    total = 0.0
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        total += of(eqn) + sum(run.times * _all(run.jaxpr, of) for run in runs(eqn, ROUNDS) or ())
    return total
