"""What it costs to begin: the import, and the first call of a small function, each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable

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


def begun(side: str) -> dict:
    """The CPU seconds of a fresh process."""
    return json.loads(subprocess.run([sys.executable, "-c", START, side], check=True, capture_output=True, text=True).stdout)


def test_import(recorded: Callable) -> None:
    """`import minibatch` beside `import jax`, of which it is a part."""
    found = [begun("minibatch")["import"] for _ in range(5)]
    ours, theirs = (sorted(times)[2] for times in zip(*found, strict=True))
    recorded("start", "import, over that of jax", {"minibatch": ours, "jit(jax.vmap)": theirs})


def test_first_call(recorded: Callable) -> None:
    """The first call of a small function."""
    found = [(begun("minibatch")["first call"], begun("jit(jax.vmap)")["first call"]) for _ in range(5)]
    ours, theirs = (sorted(times)[2] for times in zip(*found, strict=True))
    recorded("start", "first call of a small function", {"minibatch": ours, "jit(jax.vmap)": theirs})
