"""The emitted program: no more equations than `jax.vmap` emits, its avals right, what can be shared left so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import assert_close
from workloads import EMITTED, WORKLOADS, Workload

import minibatch

STAGES = {  # loops whose lanes stop at different times: they have equations for the lanes that have stopped
    "adaptive Runge-Kutta, while",
    "Levenberg-Marquardt, while",
}
COUNTED = [workload for workload in (*WORKLOADS, *EMITTED) if workload.name not in STAGES]


def program(workload: Workload, vmap: Callable) -> Any:
    """The workload mapped over three lanes, as a jaxpr."""
    return jax.make_jaxpr(vmap(workload.fun(vmap), workload.in_axes))(*workload.args(3))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner jaxprs too."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("workload", COUNTED, ids=lambda workload: workload.name)
def test_no_more_equations_than_jax_emits(workload: Workload) -> None:
    ours, theirs = (sum(1 for _ in equations(program(workload, vmap))) for vmap in (minibatch.vmap, jax.vmap))
    assert ours <= theirs


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if "flat" in w.name or "perceptron" in w.name], ids=lambda w: w.name)
def test_what_is_known_about_results_is_what_jax_infers(workload: Workload) -> None:
    """Equations are put into the jaxpr with avals that are known: evaluating it infers each of them again."""
    jaxpr = program(workload, minibatch.vmap)
    again = jax.make_jaxpr(lambda *args: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args))(*jaxpr.in_avals)
    known, inferred = ([v.aval for eqn in equations(j) for v in eqn.outvars] for j in (jaxpr, again))
    assert known == inferred


def test_an_activation_used_twice_is_lifted_once() -> None:
    jaxpr = jax.make_jaxpr(minibatch.vmap(lambda x: jax.nn.relu(jax.nn.relu(x) + 1)))(jnp.ones((3, 2)))
    first, second = (eqn.params["call_jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "custom_jvp_call")
    assert first is second


def test_lanes_stay_where_they_are_through_an_activation() -> None:
    def layer(x: Any, w: Any) -> Any:
        return jax.nn.relu(x @ w)

    jaxpr = jax.make_jaxpr(minibatch.vmap(layer, in_axes=(None, 0), out_axes=1))(jnp.ones((4, 2)), jnp.ones((3, 2, 5)))
    assert "transpose" not in {eqn.primitive.name for eqn in equations(jaxpr)}


LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CHWN", "HIOW", "HNWC")]


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_convolutions_of_own_kernels_and_their_gradients(layout: tuple[str, str, str]) -> None:
    sizes = {"N": 2, "H": 5, "W": 4, "C": 3, "I": 3, "O": 2}
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, *(sizes[d] for d in layout[0]))), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(3, *(2 if d in "HW" else sizes[d] for d in layout[1]))), jnp.float32)

    def energy(kernel: Any, x: Any) -> Any:
        out = lax.conv_general_dilated(x, kernel, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=layout)
        return (out**2).sum(), out

    def both(vmap: Callable) -> Any:
        mapped = vmap(jax.value_and_grad(energy, (0, 1), has_aux=True))
        outer = jax.grad(lambda kernel: vmap(energy)(kernel, x)[0].sum())
        return mapped(kernel, x), outer(kernel)

    assert_close(jax.jit(lambda: both(minibatch.vmap))(), jax.jit(lambda: both(jax.vmap))(), 1e-4)
