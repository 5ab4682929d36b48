"""Derivatives of the table's cases to second order, in both modes and of both: of the map, and mapped.

A few cases, each by one way to differentiate; `--whole` for all of them by all.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Case, arguments, bdims_of

from minibatch import vmap

FAMILIES = [(m.name, importlib.import_module(f"cases.{m.name}")) for m in pkgutil.iter_modules(cases.__path__)]
TABLE = [(name, case) for name, family in FAMILIES for case in family.CASES if case.grad]


def forward(f: Callable) -> Callable:
    """The derivative of f along its argument."""
    return lambda t: jax.jvp(f, (t,), (jnp.ones_like(t),))[1]


def linear(f: Callable) -> Callable:
    """The same, by way of the linearized function."""
    return lambda t: jax.linearize(f, t)[1](jnp.ones_like(t))


def reverse(f: Callable) -> Callable:
    """The derivative of the sum of f."""
    return jax.grad(lambda t: f(t).sum())


def pulled(f: Callable) -> Callable:
    """The same, by way of vjp."""

    def derivative(t: Any) -> Any:
        y, pull = jax.vjp(f, t)
        return pull(jnp.ones_like(y))[0]

    return derivative


ORDERS = {
    "forward": forward,
    "linear": linear,
    "reverse": reverse,
    "pulled": pulled,
    "forward-of-forward": lambda f: forward(forward(f)),
    "forward-of-reverse": lambda f: forward(reverse(f)),
    "reverse-of-forward": lambda f: reverse(forward(f)),
    "reverse-of-reverse": lambda f: reverse(reverse(f)),
    "linear-of-pulled": lambda f: linear(pulled(f)),
    "jacfwd-of-jacrev": lambda f: lambda t: jax.jacfwd(jax.jacrev(f))(t) if t.ndim == 0 else forward(reverse(f))(t),
    "hessian": lambda f: lambda t: jax.hessian(lambda t: f(t).sum())(t) if t.ndim == 0 else reverse(forward(f))(t),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("--whole"):
        drawn = [(order, family, case) for family, case in TABLE for order in ORDERS]
    else:
        drawn = [([*ORDERS][i % len(ORDERS)], *TABLE[k]) for i, k in enumerate(range(0, len(TABLE), 14))]
    ids = [f"{order}-{family}:{case.name}" for order, family, case in drawn]
    metafunc.parametrize(("order", "case"), [(order, case) for order, _, case in drawn], ids=ids)


def test_derivatives_agree(order: str, case: Case) -> None:
    derivative = ORDERS[order]

    def along(args: Any) -> Callable:
        """One lane's floats as a function of how far they have moved."""

        def f(t: Any) -> Any:
            moved = [x + t.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in args]
            leaves = [x for x in jax.tree.leaves(case.fun(*moved)) if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum((jnp.sin(jnp.abs(x) if jnp.iscomplexobj(x) else x).sum() for x in leaves), jnp.float32(0))

        return f

    def check(bdims: tuple) -> None:
        stacked, per_lane = arguments(case, bdims, 3)
        one = jax.jit(lambda t, *args: derivative(along(args))(t))
        within = vmap(lambda t, *args: derivative(along(args))(t), (0, *bdims))
        try:
            wanted = jnp.stack([one(jnp.float32(0), *args) for args in per_lane])
        except (NotImplementedError, ValueError) as error:  # JAX cannot even for one lane: the ones inside are jax.vmap's own
            with pytest.raises(type(error)):
                within(jnp.zeros(3), *stacked)
            return
        close = {"rtol": 100 * case.tol, "atol": 100 * case.tol}
        np.testing.assert_allclose(within(jnp.zeros(3), *stacked), wanted, **close)
        mapped = vmap(lambda t, *args: along(args)(t), (0, *bdims))
        around = jax.jit(lambda t, *args: derivative(lambda t: mapped(t, *args))(t))
        np.testing.assert_allclose(around(jnp.zeros(3), *stacked), wanted, **close)

    combos = list(bdims_of(case))
    check(combos[0])
    if len(combos) > 1:
        check(combos[-1])
