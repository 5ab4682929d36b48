"""Which schedule should take least time: a model of the machine, in a few constants, and what follows from it.

The constants are what `python bench/divergence.py --calibrate` measures. They need not be exact: schedules differ by
factors, and each is entered such that guessing wrong costs little.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from minibatch._cost import Cost


class Machine(NamedTuple):
    """What a device does in a second, and what a step of a loop costs it beside the work."""

    flops: float
    transcendentals: float
    bytes: float
    step: float  # seconds


MACHINES = {
    "cpu": Machine(flops=4e9, transcendentals=4e8, bytes=1e10, step=5e-6),
    "gpu": Machine(flops=1e13, transcendentals=1e12, bytes=1e12, step=5e-5),
    "tpu": Machine(flops=1e13, transcendentals=1e12, bytes=1e12, step=1e-5),
}


def machine() -> Machine:
    """The machine that programs are made for just now."""
    return MACHINES.get(jax.default_backend(), MACHINES["gpu"])


def seconds(cost: Cost) -> float:
    """How long work of this cost should take."""
    here = machine()
    return cost.flops / here.flops + cost.transcendentals / here.transcendentals + cost.bytes / here.bytes
