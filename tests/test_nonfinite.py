"""`find_nonfinite`: which lanes turned NaN, where and on what; `check`: which rule computes something else than its lanes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.programs import PROGRAMS, f32
from jax import lax

from minibatch import check, extend, find_nonfinite
from minibatch._jax import rebind
from minibatch._registry import RULES, register

NAN = float("nan")


def here(found, event=0):
    """The source line of an event."""
    line = found.events[event].line
    with open(line.file) as file:
        return file.readlines()[line.number - 1].strip()


def test_finite_programs_have_nothing_to_find():
    found = find_nonfinite(lambda x: jnp.sin(x))(jnp.arange(3.0))
    assert not found and found.lanes == ()
    assert str(found) == "minibatch.find_nonfinite  <lambda>: all 3 lanes are finite\n"


def test_the_first_equation_is_named_with_its_line_and_inputs():
    def f(x, w):
        y = x - 2
        z = jnp.log(y)
        return jnp.sin(z * w)

    found = find_nonfinite(f, in_axes=(0, None))(jnp.array([3.0, 1.0, 5.0, 0.0]), 2.0)
    assert found.lanes == (1, 3)
    (event,) = found.events
    assert (event.kind, event.primitive, event.lanes, event.steps) == ("NaN", "log", (1, 3), ())
    assert here(found) == "z = jnp.log(y)"
    assert event.inputs[0] == -1.0 and np.isnan(event.outputs[0])
    assert "lane 1: log(-1.) -> nan" in str(found)


def test_an_infinity_that_turns_nan_is_told_too():
    found = find_nonfinite(lambda x: jnp.exp(x) * 0)(jnp.array([1.0, 1000.0]))
    assert [(e.kind, e.primitive, e.lanes) for e in found.events] == [("NaN", "mul", (1,)), ("infinite", "exp", (1,))]


def test_what_comes_and_goes_is_told_on_request():
    def f(x):
        return jnp.where(x > 0, jnp.log(x), 0.0)

    x = jnp.array([1.0, -1.0])
    assert not find_nonfinite(f)(x)
    assert find_nonfinite(f, everywhere=True)(x).lanes == (1,)


def test_infinities_of_masks_are_no_matter():
    def f(x):
        return jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf))

    assert not find_nonfinite(f)(jnp.ones((2, 3)))
    assert not find_nonfinite(f, everywhere=True)(jnp.ones((2, 3)))


def test_steps_of_loops_are_those_of_the_lane():
    def f(x):
        def step(c, _):
            c = lax.while_loop(lambda y: y > 10, lambda y: y / 2, c)
            return jnp.sqrt(c - 1), None

        return lax.scan(step, x, None, length=5)[0]

    x = jnp.array([100.0, 2.0, 1.5])
    found = find_nonfinite(f)(x)

    def first_nan(y):
        for step in range(5):
            while y > 10:
                y /= 2
            y = np.sqrt(y - 1) if y >= 1 else NAN
            if np.isnan(y):
                return step
        return None

    steps = {lane: first_nan(float(x[lane])) for lane in range(3)}
    assert found.lanes == tuple(lane for lane in steps if steps[lane] is not None)
    assert found.events[0].steps == (steps[found.events[0].lanes[0]],)
    assert found.events[0].primitive == "sqrt"


def test_nested_loops_number_both():
    def f(x):
        def inner(i, y):
            return jnp.log(y)

        return lax.fori_loop(0, 3, lambda i, y: lax.fori_loop(0, 2, inner, y), x)

    found = find_nonfinite(f)(jnp.array([5.0]))  # log 5, log of that, then of what is below zero
    (event,) = found.events
    assert event.steps == (1, 1)
    assert "in step 1 of step 1 (from 0)" in str(found)


def test_only_the_branch_that_a_lane_takes_counts():
    def f(x):
        return lax.cond(x > 0, jnp.log, lambda x: jnp.sqrt(x) if False else x - 1, x)

    assert not find_nonfinite(f, everywhere=True)(jnp.array([1.0, -1.0]))


def test_the_backward_pass_of_a_gradient():
    def f(x):
        return jnp.where(x > 0, jnp.sqrt(x), 0.0)

    found = find_nonfinite(jax.grad(f))(jnp.array([0.0, 4.0]))
    assert found.lanes == (0,)
    assert found.events[0].backward and found.events[0].primitive == "mul"
    assert here(found) == "return jnp.where(x > 0, jnp.sqrt(x), 0.0)"


def test_what_is_in_the_arguments_is_said_so():
    found = find_nonfinite(lambda p, x: p["w"] * x, in_axes=(None, 0))({"w": jnp.array(jnp.inf)}, jnp.array([1.0, NAN]))
    assert [(e.kind, e.primitive, e.lanes) for e in found.events] == [
        ("NaN", "argument x", (1,)),
        ("infinite", "argument p['w']", (0, 1)),
    ]


def test_an_argument_that_is_returned():
    assert find_nonfinite(lambda x: (x, 1.0))(jnp.array([1.0, NAN])).lanes == (1,)


def test_through_jit_and_derivative_rules_and_named_axes():
    @jax.jit
    def inner(x):
        return jax.nn.relu(jnp.log(x))

    @jax.custom_vjp
    def own(x):
        return inner(x) / lax.psum(x, "lanes")

    own.defvjp(lambda x: (own(x), x), lambda x, g: (g,))
    found = find_nonfinite(own, axis_name="lanes")(jnp.array([1.0, -1.0]))
    assert [(e.primitive, e.lanes) for e in found.events if e.kind == "NaN"] == [("log", (1,)), ("div", (0,))]


@pytest.mark.parametrize("find", [find_nonfinite, check])
def test_shapes_without_values_are_refused(find):
    with pytest.raises(ValueError, match=rf"{find.__name__} runs the program, and so needs arrays with values"):
        find(jnp.sin)(f32(3))


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def wrong_rule():
    """A function that gives a primitive a rule until the test is over."""
    before = {}

    def replace(name, rule):
        before[name] = RULES[name]
        extend.rule(name, anywhere=True, replace=True)(rule)

    yield replace
    for name, rule in before.items():
        register(name, rule, replace=True)


def off_by_one(axis, eqn, x):
    (out,) = rebind(eqn, x.value)
    return [extend.Batched(out.at[..., 1 if out.ndim == 1 else 0].add(1), x.bdim)]


def test_programs_agree_with_their_lanes():
    found = check(PROGRAMS["branches"].fun, in_axes=(0, None))(jnp.array([[1.0] * 4, [-1.0] * 4]), jnp.ones((4, 4)))
    assert found and found.first is None
    assert check(PROGRAMS["loop"].fun, in_axes=(0, None))(jnp.array([2.0, 9.0]), 1e-3)


def test_a_rule_that_is_wrong_is_found(wrong_rule):
    wrong_rule("tan", off_by_one)

    def f(x):
        y = x * 2
        z = jnp.tan(y)
        return z + 1

    found = check(f)(jnp.array([0.1, 0.2, 0.3]))
    assert not found
    assert (found.first.primitive, found.first.lane, found.first.steps) == ("tan", 1, ())
    assert "equation 2, tan (rule in test_nonfinite), is the first to disagree" in str(found)
    assert found.first.inputs[0] == pytest.approx(0.4)


def in_scan(x):
    return lax.scan(lambda c, t: (jnp.tan(c * t), t), x, jnp.arange(1.0, 4.0))[0]


def in_while(x):
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.tan(s[0]), s[1] + 1), (x, 0))[0]


def in_cond(x):
    return lax.cond(x > 0.15, lambda: jnp.tan(x), lambda: x)


def in_jit(x):
    return jax.jit(lambda x: jnp.tan(x) + 1)(x)


@pytest.mark.parametrize(("f", "steps"), [(in_scan, (0,)), (in_while, (0,)), (in_cond, ()), (in_jit, ())])
def test_a_rule_that_is_wrong_is_found_inside(f, steps, wrong_rule):
    wrong_rule("tan", off_by_one)
    found = check(f)(jnp.array([0.1, 0.2, 0.3]))
    assert not found
    assert (found.first.primitive, found.first.steps) == ("tan", steps)


def test_a_rule_that_fails_on_values_is_found(wrong_rule):
    calls = []

    def fails_later(axis, eqn, x):
        calls.append(0)
        if len(calls) > 1:
            raise TypeError("no")
        return [extend.Batched(out, x.bdim) for out in rebind(eqn, x.value)]

    wrong_rule("tan", fails_later)
    found = check(lambda x: jnp.tan(x))(jnp.ones(2))
    assert "TypeError('no')" in str(found)


def test_equations_in_which_lanes_meet_are_told_apart():
    found = check(lambda x: lax.psum(jnp.sin(x), "lanes") + 1, axis_name="lanes")(jnp.arange(3.0))
    assert found and len(found.unchecked) == 1
    assert "1 could not be checked, as lanes meet in them" in str(found)


def test_batching_on_other_dims_than_the_first():
    assert check(lambda x, w: jnp.cumsum(x @ w, axis=1), in_axes=(2, None))(jnp.ones((3, 4, 2)), jnp.ones((4, 5)))


def test_random_keys_are_checked_and_shown(wrong_rule):
    keys = jax.random.split(jax.random.key(0), 3)
    assert check(lambda key: jax.random.split(key))(keys)
    found = find_nonfinite(lambda key, x: jax.random.split(key), in_axes=(0, 0))
    assert not found(keys, jnp.ones(3))
    wrong_rule("random_wrap", lambda axis, eqn, x: [extend.Batched(jax.random.wrap_key_data(x.value + 1), x.bdim)])
    wrong = check(lambda x: jax.random.wrap_key_data(x))(jnp.zeros((2, 2), jnp.uint32))
    assert not wrong and "[1,1]" in str(wrong)


def test_no_lanes_cannot_be_checked():
    with pytest.raises(ValueError, match="the mapped axis has size 0"):
        check(lambda x, w: x @ w, in_axes=(0, None))(jnp.ones((0, 3)), jnp.ones(3))


def test_programs_with_references_are_refused():
    def f(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] + 1
        return ref[...]

    with pytest.raises(NotImplementedError, match="makes a reference, which lanes by themselves would each change anew"):
        check(f)(jnp.ones(3))
    assert not find_nonfinite(f)(jnp.ones(3))
