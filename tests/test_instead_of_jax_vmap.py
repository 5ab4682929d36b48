"""The plugin that runs others' suites with our `vmap` replaces it for them, and for nobody else."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

SUITE = """
import jax, jax.numpy as jnp
from jax import vmap
import minibatch

def test_ours():
    assert isinstance(jax.vmap(jnp.sin), minibatch.Vmapped) and isinstance(vmap(jnp.sin), minibatch.Vmapped)

def test_of_jax():
    assert jax.jacfwd(jnp.sin)(jnp.ones(2)).shape == (2, 2)
"""


@pytest.mark.parametrize(("deep", "calls"), [("0", 2), ("1", 3)])
def test_plugin(tmp_path: pathlib.Path, deep: str, calls: int) -> None:
    (tmp_path / "test_theirs.py").write_text(SUITE)
    tests = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tests.parent, tests])), "DEEP": deep}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "instead_of_jax_vmap", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stdout
    assert f"{calls} calls of jax.vmap were calls of minibatch.vmap" in run.stdout
