"""What it costs to begin: the import, and the first call of a small function, each in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

START = """
import json, sys, time
now = time.process_time
start = now()
import jax
loaded = now()
import minibatch
imported = now()
x, y = jax.numpy.ones((8, 4)), jax.numpy.ones(4)
mapped = {"minibatch": minibatch.vmap, "jit(jax.vmap)": lambda f, axes: jax.jit(jax.vmap(f, axes))}[sys.argv[1]]
jax.block_until_ready(jax.jit(lambda x: x + 1)(x))  # what the first compiled program of all costs is neither's
before = now()
jax.block_until_ready(mapped(lambda x, y: jax.numpy.tanh(x) * y + 1, (0, None))(x, y))
print(json.dumps({"import": [imported - loaded, loaded - start], "first call": now() - before}))
"""


@pytest.fixture
def begun(tmp_path: pathlib.Path) -> Callable:
    """The CPU seconds of a fresh process that finds its modules compiled to bytecode, as an installed package's are."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def begin(side: str) -> dict:
        command = [sys.executable, "-c", START, side]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout)

    begin("minibatch")
    return begin


def test_import(recorded: Callable, begun: Callable) -> None:
    """`import minibatch` beside `import jax`, of which it is a part."""
    found = [begun("minibatch")["import"] for _ in range(5)]
    ours, theirs = (sorted(times)[2] for times in zip(*found, strict=True))
    recorded("start", "import, over that of jax", {"minibatch": ours, "jit(jax.vmap)": theirs})


def test_first_call(recorded: Callable, begun: Callable) -> None:
    """The first call of a small function."""
    found = [(begun("minibatch")["first call"], begun("jit(jax.vmap)")["first call"]) for _ in range(5)]
    ours, theirs = (sorted(times)[2] for times in zip(*found, strict=True))
    recorded("start", "first call of a small function", {"minibatch": ours, "jit(jax.vmap)": theirs})
