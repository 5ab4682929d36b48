"""What has a rule, held against JAX: nothing that it batches is forgotten, nothing is registered that it does not know."""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
import re

import cases
import jax

from minibatch import _jax
from minibatch._registry import RULES
from minibatch._support import NO_RULE_NEEDED, looped

OWN = {name for name, rule in RULES.items() if rule.module.startswith("minibatch.rules")}
CASES = [case for m in pkgutil.iter_modules(cases.__path__) for case in importlib.import_module(f"cases.{m.name}").CASES]

# Names of primitives that not every supported JAX has, with the versions that do.
ONLY_IN = {
    "0.10": "call closed_call pbroadcast_done pbroadcast_start psum_start reduced_vary_cast_p unreduced_psum_start "
    "unreduced_reduce_scatter_start vary_unreduced_cast_p",
    "0.12": "log2 one_minus_square pbroadcast_dynamic polynomial reduced_vary_cast relayout unreduced_pmax unreduced_pmin "
    "vary_unreduced_cast",
}

# Rules that no Case names, by where they are tested and why there.
NO_CASE = {
    "test_fallback.py, as JAX's own marks, which no program writes": "assert_consumed_value consume",
    "test_sharding.py, on a mesh of simulated devices": """
        all_gather_invariant all_gather_reduced device_put layout_constraint pbroadcast_dynamic preduced psum_invariant pvary
        reduced_vary_cast reduced_vary_cast_p relayout reshard shard_map sharding_constraint unreduced_pmax unreduced_pmin
        unreduced_psum unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p
    """,
    "test_collectives.py, by the whole that they start": """
        all_gather_reduced_start pbroadcast_done pbroadcast_start psum_invariant_start unreduced_psum_start
        unreduced_reduce_scatter_start
    """,
    "test_contractions.py, by what their equations mean: no CPU runs them": "scaled_matmul scaled_matmul_wrapper",
    "test_fallback.py, with primitives and kernels of its own": "call_hi_primitive call_hi_primitive_linearized pallas_call",
    "test_programs.py, by its jaxpr: no CPU runs it": "fused_call",
    "test_derivatives.py: only the linear half of a custom_vjp has it, never a program of one lane": "custom_lin",
}


def test_every_primitive_that_jax_batches_has_a_rule_or_a_reason() -> None:
    assert looped() == []


def test_reasons_are_given_only_where_there_is_no_rule() -> None:
    assert not OWN & set(NO_RULE_NEEDED)


def test_every_rule_is_of_a_primitive_that_some_jax_has() -> None:
    known = set(_jax.primitives_of_jax())
    assert OWN - known - {name for names in ONLY_IN.values() for name in names.split()} == set()
    for version, names in ONLY_IN.items():
        if jax.__version__.startswith(version):
            assert set(names.split()) - known == set()


def test_every_rule_has_a_case_or_a_reason() -> None:
    named = {name for case in CASES for name in case.primitives.split()}
    elsewhere = {name for names in NO_CASE.values() for name in names.split()}
    assert sorted(OWN - named - elsewhere) == []
    assert not named & elsewhere
    assert elsewhere <= OWN
    assert all((pathlib.Path(__file__).parent / re.match(r"\w+\.py", place)[0]).exists() for place in NO_CASE)


def test_cases_name_only_primitives_with_a_rule() -> None:
    assert {name for case in CASES for name in case.primitives.split()} - OWN == set()
