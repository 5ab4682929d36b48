"""Maps over arrays on a mesh: the tests of eight_devices.py, in a process that simulates as many."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import minibatch


def test_on_eight_simulated_devices() -> None:
    file = pathlib.Path(__file__).with_name("eight_devices.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    path = os.pathsep.join([str(file.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=file.parent.parent)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX has it since 0.11")
def test_a_layout_left_to_xla_stays_so() -> None:
    from jax._src.layout import AutoLayout  # no public name yet
    from jax.experimental.layout import explicit_layout

    double = explicit_layout(lambda x: 2 * x, in_layouts=(AutoLayout,))
    np.testing.assert_array_equal(minibatch.vmap(double, in_axes=1)(np.ones((2, 3))), np.full((3, 2), 2))
