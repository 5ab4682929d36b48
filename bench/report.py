"""`python bench/report.py`: run the benchmarks and write docs/benchmarks.md."""

from __future__ import annotations

import datetime
import json
import pathlib
import sys
import tempfile
from importlib.metadata import version

import jax
import pytest
from table import Measured, markdown

DIVERGING = ("diverging", "grad(vmap)", "vmap(grad)")
QUANTITIES = ("call", "loop", "start", "run", "dispatch", "tracing", "retracing", "compile", *DIVERGING)
HERE = pathlib.Path(__file__).parent


def main() -> int:
    """Run, and write the page if all went well."""
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.json"
        status = pytest.main([str(HERE), "-n", "0", "-q", f"--benchmark-json={results}", "--benchmark-columns=median,rounds"])
        if status == 0:
            (HERE.parent / "docs" / "benchmarks.md").write_text(page(json.loads(results.read_text())))
    return int(status)


def page(results: dict) -> str:
    """The page: what was measured, where and when, and the ratios."""
    machine = results["machine_info"]
    cpu = machine["cpu"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "numpy"))
    measured = [
        Measured(one["group"], one["extra_info"]["workload"], one["extra_info"]["medians"])
        for one in results["benchmarks"]
    ]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `python bench/report.py`. Median times of minibatch, and their ratios to those of `jax.vmap` on the",
            "same program with the same arguments; below 1, minibatch takes less. The sides take turns, in changing order.",
            "",
            "- *call*: the same call again and again. *loop*: one turn of a loop that maps or meets something new each time.",
            "- *start*: CPU time in a process of its own; the import beside that of `jax`.",
            "- *run*: a call on many lanes, compiled before. *dispatch*: the same on one lane, by turns with the others.",
            "- *tracing*: from a function never seen to the batched jaxpr. *retracing*: of the same function on another",
            "  number of lanes each time. Both in CPU time. *compile*: from a function never seen to compiled code.",
            "- *diverging*: a call whose lanes take different branches or numbers of steps; *grad(vmap)*, *vmap(grad)*: the",
            "  gradient of all that lanes make together, and of each.",
            "- `jit(jax.vmap)`: `jax.vmap` inside `jax.jit`, as a careful user writes it. `jax.vmap`: called as it is.",
            "",
            "The same command measures on a GPU, where JAX finds one."
            f"{'' if jax.default_backend() == 'gpu' else ' No GPU was measured for this table.'}",
            "",
            f"{datetime.date.today()}; {cpu.get('brand_raw', machine['machine'])}, {cpu.get('count')} cores; "
            f"{machine['system']}; Python {machine['python_version']}, {packages}.",
            "",
            *markdown(sorted(measured, key=lambda one: QUANTITIES.index(one.quantity))),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
