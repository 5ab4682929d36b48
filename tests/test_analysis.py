"""`explain(..., analyze=True)`: steps and branches are those that each lane takes by itself; times are joined with lines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.programs import PROGRAMS, f32
from jax import lax

from minibatch import explain


def analyzed(f, *args, **options):
    return explain(f, analyze=True, **options)(*args)


def halvings(x):
    """Steps until below one."""
    return lax.while_loop(lambda s: s[0] >= 1, lambda s: (s[0] / 2, s[1] + 1), (x, 0))[1]


def test_steps_are_those_that_each_lane_takes():
    x = jnp.array([0.5, 3.0, 100.0, 3.0])
    report = analyzed(halvings, x, divergence="lockstep")
    steps = np.array([int(halvings(lane)) for lane in x])
    (trips,) = report.analysis.loops.values()
    assert (trips.min, trips.mean, trips.max) == (steps.min(), steps.mean(), steps.max())
    assert trips.useful == steps.mean() / steps.max()
    assert sum(trips.histogram) == len(x)
    (found,) = [each for each in report.findings if each.id == "MB-DV01"]
    assert "min 0, mean 2.75, max 7 steps, so that 39 % are of use" in found.detail


def test_a_loop_in_stages_works_for_the_lanes_that_go_on():
    x = jnp.concatenate([jnp.full(60, 1.5), jnp.array([1e9] * 4)])
    after = [analyzed(halvings, x, divergence=d).to_dict()["cost"]["after"]["flops"] for d in ("lockstep", "refill")]
    assert after[1] < after[0] / 4


def test_lanes_that_stop_together_do_not_diverge():
    report = analyzed(halvings, jnp.array([5.0, 6.0]))
    assert report.findings == []
    assert "run once" in str(report) and "not known" not in str(report)


def test_steps_of_a_loop_in_a_loop_are_counted_in_all():
    def f(x):
        return lax.fori_loop(0, 3, lambda i, c: c + halvings(x), 0)

    (trips,) = [t for t in analyzed(f, jnp.array([4.0, 16.0])).analysis.loops.values()]
    assert (trips.min, trips.max) == (9, 15)


def test_the_work_of_loops_is_that_of_their_steps():
    def cost(x):
        return analyzed(halvings, x, divergence="lockstep").to_dict()["cost"]

    few, many = cost(jnp.array([1.5, 1.5])), cost(jnp.array([1.5, 100.0]))
    assert many["after"]["flops"] == pytest.approx(7 * few["after"]["flops"])  # all wait for the lane that takes seven
    assert many["before"]["flops"] == pytest.approx(4 * few["before"]["flops"])  # one takes one, the other seven


def test_what_a_loop_calls_at_two_places_counts_as_its_steps_once():
    def f(x):
        def step(s):
            x, n = s
            x = jnp.where(x > 50, x / 4, x / 2)  # two calls of one jaxpr
            return x, jnp.where(x < 1, n + 1, n + 2)

        return lax.while_loop(lambda s: s[0] >= 1, step, (x, jnp.float32(0)))[1]

    def operations(x, **options):
        return explain(f, divergence="lockstep", **options)(x).to_dict()["cost"]["after"]["flops"]

    x = jnp.array([100.0, 3.0])  # six and two steps
    assert operations(x, analyze=True) == pytest.approx(6 * operations(x), rel=0.2)


def test_a_fusion_takes_the_time_of_all_lines_in_it():
    report = analyzed(lambda x: jnp.sin(x) + jnp.cos(x) * x, jnp.ones((64, 5000)))
    assert [line.measured for line in report.lines if line.measured] == [pytest.approx(1.0)]
    numbers = [n for n, e in report._equations.items() if e.name in ("sin", "cos", "mul")]
    assert all(report.analysis.seconds.get(n, 0) > 0 for n in numbers)


def test_lanes_are_counted_by_branch():
    def f(x):
        return lax.switch(jnp.int32(x), [jnp.sin, jnp.cos, jnp.tan], x)

    report = analyzed(f, jnp.array([0.0, 1.0, 1.0, 2.0, 1.0]))
    assert list(report.analysis.branches.values()) == [(1, 3, 1)]
    assert "taken by 1 and 3 and 1 lanes" in report.findings[0].detail


def test_branches_inside_a_loop_count_each_lane_once():
    def f(x):
        return lax.fori_loop(0, 4, lambda i, c: lax.cond(c > 2, lambda c: c - 1, lambda c: c, c), x)

    assert list(analyzed(f, jnp.array([5.0, 1.0])).analysis.branches.values()) == [(2, 1)]


def test_times_go_to_the_lines_that_take_them():
    def f(x, w):
        y = jnp.sin(x)
        for _ in range(20):
            w = w @ w / 10
        return y + w

    report = analyzed(f, jnp.ones((2, 200, 200)), jnp.ones((2, 200, 200)) / 200)
    dear = max(report.lines, key=lambda line: line.measured)
    assert "w @ w" in dear.text and dear.measured > 0.5
    assert sum(line.measured for line in report.lines) == pytest.approx(1)
    assert report.to_dict()["analysis"]["seconds"] == pytest.approx(sum(line.seconds for line in report.lines))


def test_estimates_far_from_the_times_are_marked():
    def slow(x):  # the model takes a callback for next to nothing
        return jax.pure_callback(lambda x: sum(range(10**6)) * 0 + x, jax.ShapeDtypeStruct((), "float32"), x)

    def f(x, w):
        y = (w @ w).sum() * x
        return slow(y)

    report = analyzed(f, jnp.ones(2), jnp.ones((8, 8)), in_axes=(0, None))
    assert any(line.misjudged for line in report.lines)
    assert "!|" in report.text(width=100)


def test_effects_happen_once_for_each_run():
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x * 2

    analyzed(f, jnp.array([1.0, 2.0]))
    jax.effects_barrier()
    assert sorted(seen) == [1.0, 1.0, 2.0, 2.0]  # once to count, once to take times


def test_shapes_without_values_are_refused():
    with pytest.raises(ValueError, match=r"explain\(..., analyze=True\) runs the program, and so needs arrays with values"):
        analyzed(PROGRAMS["loop"].fun, f32(3), f32(), in_axes=(0, None))
