"""How far the estimates of `minibatch.explain` agree with XLA: `python bench/agreement.py` prints the table in the docs."""

from __future__ import annotations

import pathlib
import sys
import warnings

import jax

import minibatch

sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests"))

from golden.programs import PROGRAMS, Program, f32

SKIPPED = ("effect", "no_rule")  # XLA sees no host call, and of a loop over lanes one step


def block(params: dict, x: jax.Array) -> jax.Array:
    """A transformer block on [time, features]."""
    y = jax.nn.standardize(x)
    query, key, value = (y @ params[name] for name in ("q", "k", "v"))
    x = x + jax.nn.softmax(query @ key.T / 8) @ value
    return x + jax.nn.gelu(jax.nn.standardize(x) @ params["up"]) @ params["down"]


BLOCK = {"q": f32(64, 64), "k": f32(64, 64), "v": f32(64, 64), "up": f32(64, 256), "down": f32(256, 64)}
TRANSFORMER = Program(jax.grad(lambda p, x: (block(p, x) ** 2).sum()), (BLOCK, f32(32, 16, 64)), {"in_axes": (None, 0)})


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore", minibatch.MissingRuleWarning)
    print(f"JAX {jax.__version__}, {jax.default_backend()}: what is estimated, over what XLA counts.\n")
    print("| program | operations | bytes moved | memory at the peak |\n| --- | --- | --- | --- |")
    for name, program in {**PROGRAMS, "transformer block, gradient": TRANSFORMER}.items():
        if name not in SKIPPED:
            print(f"| {name} | {' | '.join(f'{x:.2f}' for x in ratios(program))} |")


def ratios(program: Program) -> tuple[float, float, float]:
    """Estimated over counted by XLA: operations, bytes moved, memory."""
    compiled = minibatch.vmap(program.fun, **program.options).lower(*program.args).compile()
    analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    found = minibatch.explain(program.fun, **program.options)(*program.args).to_dict()
    after = found["cost"]["after"]
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return after["flops"] / analysis["flops"], after["bytes"] / analysis["bytes accessed"], found["memory"]["peak"] / taken


if __name__ == "__main__":
    main()
