"""The table of cases under JAX's modes, and in other precisions: what a lane does by itself it does mapped.

A few cases for each mode; `--whole` for all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import Case, Draw, arguments, assert_close, bdims_of, stack_of_lanes

import minibatch

FAMILIES = [(m.name, importlib.import_module(f"cases.{m.name}")) for m in pkgutil.iter_modules(cases.__path__)]
TABLE = [(name, case) for name, family in FAMILIES for case in family.CASES]
SHARE = 120  # of the cases, one in so many for each mode


def as_given(x: Any) -> Any:
    return x


def cast(float_type: Any, complex_type: Any = None, int_type: Any = None) -> Callable:
    """What turns the floats, complex numbers and integers among arguments into these types."""

    def change(x: Any) -> Any:
        for kind, dtype in ((jnp.complexfloating, complex_type), (jnp.floating, float_type), (jnp.signedinteger, int_type)):
            if dtype is not None and jnp.issubdtype(x.dtype, kind):
                return x.astype(dtype)
        return x

    return change


def with_keys(impl: str) -> Callable:
    """What turns keys among arguments into keys of `impl`."""

    def change(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        seeds = np.arange(x.size, dtype=np.uint32)
        return jnp.stack([jax.random.key(seed, impl=impl) for seed in seeds]).reshape(x.shape)

    return change


# name: the mode, what becomes of arguments in it, how close results must be, and whether jax.vmap is asked
MODES: dict[str, tuple[Callable, Callable, float | None, bool]] = {
    "x64": (lambda: jax.enable_x64(True), cast(np.float64, np.complex128, np.int64), None, True),
    "x64-narrow": (lambda: jax.enable_x64(True), as_given, None, True),
    "strict-promotion": (lambda: jax.numpy_dtype_promotion("strict"), as_given, None, True),
    "no-rank-promotion": (lambda: jax.numpy_rank_promotion("raise"), as_given, None, True),
    "debug_nans": (lambda: jax.debug_nans(True), as_given, None, True),
    "debug_infs": (lambda: jax.debug_infs(True), as_given, None, True),
    "disable_jit": (jax.disable_jit, as_given, None, True),
    "enable_checks": (lambda: jax.enable_checks(True), as_given, None, True),
    "leaks": (jax.checking_leaks, as_given, None, True),
    "highest-precision": (lambda: jax.default_matmul_precision("highest"), as_given, None, True),
    "rbg": (contextlib.nullcontext, with_keys("rbg"), None, False),
    "unsafe_rbg": (contextlib.nullcontext, with_keys("unsafe_rbg"), None, False),
    "bfloat16": (contextlib.nullcontext, cast(jnp.bfloat16), 0.1, False),
    "float16": (contextlib.nullcontext, cast(np.float16), 0.02, False),
    "complex": (contextlib.nullcontext, cast(np.complex64), 1e-3, True),
    "float8": (contextlib.nullcontext, cast(jnp.float8_e4m3fn), 0.3, False),
    "int4": (contextlib.nullcontext, cast(jnp.int4, int_type=jnp.int4), 0.3, False),
}


# What JAX cannot do in a mode, in one lane or many: (mode, case). It hands the host int4 arrays packed, XLA aborts over
# random ones, and JAX's check of a closed_call does not know the param that it has.
NOT_IN_JAX = {("int4", "buffers"), ("int4", "rng_uniform"), ("enable_checks", "closed_call")}


def drawn(mode: str, whole: bool) -> list[tuple[str, Case]]:
    """The cases that are run in `mode`: a different few in each."""
    if "rbg" in mode:
        table = [(family, case) for family, case in TABLE if family == "random"]
        return table if whole else table[list(MODES).index(mode) % 8 :: 8]
    return TABLE if whole else TABLE[list(MODES).index(mode) * 7 % SHARE :: SHARE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--whole")
    if "mode" in metafunc.fixturenames and "case" in metafunc.fixturenames:
        params = [
            pytest.param(mode, case, id=f"{mode}-{family}:{case.name}")
            for mode in MODES
            for family, case in drawn(mode, whole)
            if (mode, case.name.partition(",")[0]) not in NOT_IN_JAX
        ]
        metafunc.parametrize(("mode", "case"), params)


def changed(draw: Draw, change: Callable) -> Draw:
    """`draw`, and what it draws changed."""
    return draw._replace(make=lambda rng, size: change(draw.lanes(rng, size)))


def weak(tree: Any) -> list[bool]:
    """Which leaves are weakly typed."""
    return [getattr(x, "weak_type", False) for x in jax.tree.leaves(tree)]


@pytest.mark.filterwarnings("ignore:.*cpu lowering not available:jax.experimental.sparse.util.SparseEfficiencyWarning")
def test_lanes_agree(mode: str, case: Case) -> None:
    enter, change, tol, ask_jax = MODES[mode]
    tol = case.tol if tol is None else max(tol, case.tol)
    combos = list(bdims_of(case))
    bdims = combos[len(combos) // 2]
    with enter():
        stacked, per_lane = arguments(case._replace(args=tuple(changed(draw, change) for draw in case.args)), bdims, 3)
        mapped = minibatch.vmap(case.fun, bdims)
        try:
            wanted = stack_of_lanes(case.fun, per_lane)
        except Exception as error:  # a lane by itself cannot: then neither can the map
            with pytest.raises(type(error)):
                mapped(*stacked)
            return
        found = mapped(*stacked)
        assert_close(found, wanted, tol, "stack of lanes")
        if case.jax and ask_jax:
            theirs = jax.jit(jax.vmap(case.fun, bdims))(*stacked)
            assert_close(found, theirs, tol, "jax.vmap")
            assert weak(found) == weak(theirs)


# --- a number of lanes that is not known yet --------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
OF_ANY_SIZE = {
    "elementwise": lambda x: jax.nn.softmax(jnp.sin(x) * jnp.arange(3)),
    "index": lambda x: (x[jnp.argmax(x)], jnp.zeros(3).at[jnp.argmax(x)].add(x[0])),
    "branch": lambda x: lax.cond(x[0] > 0, lambda x: x * 2, lambda x: -x, x),
    "loop": lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + jnp.abs(c) + 1, x),
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c * y), 0.0, x),
    "solve": lambda x: jnp.linalg.solve(jnp.outer(x, x) + 3 * jnp.eye(3), x),
    "gradient": jax.grad(lambda x: jnp.sin(x @ x)),
    "across": lambda x: x * lax.axis_index("i") + lax.psum(x, "i"),
    "constant": lambda x: 1.0,
}


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_exported_for_any_number_of_lanes(name: str) -> None:
    mapped = minibatch.vmap(OF_ANY_SIZE[name], axis_name="i")
    (size,) = jax.export.symbolic_shape("size")
    exported = jax.export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((size, 3), jnp.float32))
    for few in (X, X[:2]):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), exported.call(few), mapped(few))
