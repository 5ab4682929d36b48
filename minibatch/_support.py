"""The table of support: which primitive has which rule, and what runs lane by lane."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from minibatch import _jax
from minibatch._registry import RULES, Rule

ATTENTION = "cuDNN's attention, emitted on GPUs by an implementation asked for by name; lane by lane until it is tried on one"
KERNELS = "met inside Pallas kernels, or made of them by a TPU or GPU compiler; the kernel as a whole has a rule"
PROCESSES = "arrays of several processes; lane by lane until it is tried on more than one"
NO_RULE_NEEDED: dict[str, str] = {
    "dot_product_attention_bwd_wrapper": ATTENTION,
    "dot_product_attention_fp8_bwd_wrapper": ATTENTION,
    "dot_product_attention_fp8_fwd_wrapper": ATTENTION,
    "dot_product_attention_fwd_wrapper": ATTENTION,
    **dict.fromkeys(["bitcast", "emit_pipeline", "mosaic_gpu_reduce_max", "mosaic_gpu_reduce_min", "mosaic_gpu_reduce_prod",
                     "mosaic_gpu_reduce_sum", "touch", "tpu_custom_call"], KERNELS),
    **dict.fromkeys(["global_array_to_host_local_array", "host_local_array_to_global_array"], PROCESSES),
    "add_dependency": "orders an operand after a token, of which there is one for all lanes; lane by lane it keeps its meaning",
    "empty": "has no operand that could differ by lane",
    "fusible": "marks a function for Pallas's fuser, which takes it apart before anything is mapped",
    "mpmd_map": "Pallas programs for several cores of a TPU, without a meaning elsewhere",
    "precv": "one half of an exchange between the devices of a mesh; lanes could go together, which nothing here can try",
    "psend": "the other half",
}
"""Primitives that `jax.vmap` has a rule for and this project none, each with the reason. It can only shrink."""


class Row(NamedTuple):
    """One primitive with a rule. `in_jax`: what `jax.vmap` has for it."""

    primitive: str
    family: str
    file: str
    in_jax: str


def rows() -> list[Row]:
    """The primitives that have a rule, by file and name."""
    known = _jax.primitives_of_jax()
    words = {True: "a rule", False: "no rule", None: "not in this JAX"}

    def row(key: Any, rule: Rule) -> Row:
        in_jax = words[known.get(key)] if isinstance(key, str) else "not JAX's own"
        return Row(str(key), rule.family, file_of(rule.module), in_jax)

    table = [row(key, rule) for key, rule in RULES.items() if key != "fallback"]
    return sorted(table, key=lambda row: (row.file, row.primitive))


def file_of(module: str) -> str:
    """Where `module` of this package is, from the package on; another's name as it is."""
    return module.removeprefix("minibatch.").replace(".", "/") + ".py" if module.startswith("minibatch.") else module


def looped() -> list[str]:
    """The primitives that `jax.vmap` has a rule for and that run lane by lane here."""
    batched = {name for name, has_rule in _jax.primitives_of_jax().items() if has_rule}
    return sorted(batched - {row.primitive for row in rows()} - set(NO_RULE_NEEDED))


def text() -> str:
    """The table for a terminal."""
    paragraphs = (textwrap.fill(line, 110, subsequent_indent="  ") for line in _summary())
    return "\n".join([*_aligned([HEAD, *rows()]), "", *paragraphs])


def page() -> str:
    """The table as the page docs/support.md."""
    source = "Written by `python -m minibatch rules --markdown`."
    cells = [HEAD, ("---",) * len(HEAD), *((f"`{row.primitive}`", row.family, f"`{row.file}`", row.in_jax) for row in rows())]
    return "\n".join(["# Support", "", source, "", *_summary(), "", *(f"| {' | '.join(row)} |" for row in cells)])


HEAD = ("primitive", "family", "file", "jax.vmap has")


def _aligned(cells: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _summary() -> Iterator[str]:
    table, rest = rows(), looped()
    counts = Counter(row.family for row in table)
    yield f"{len(table)} primitives have a rule: {', '.join(f'{family} {n}' for family, n in counts.most_common())}."
    yield ""
    yield f"Of what JAX {jax.__version__} batches, run lane by lane, with a MissingRuleWarning: {', '.join(rest) or 'none'}."
    if NO_RULE_NEEDED:
        yield ""
        yield "Without a rule, for a reason:"
        yield ""
        yield from (f"- {name}: {reason}" for name, reason in sorted(NO_RULE_NEEDED.items()))
