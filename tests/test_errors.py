"""Whole messages: what a user reads when a call can't be done."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import minibatch
from minibatch import if_batched, vmap

A, B = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
WEIGHTS = jax.numpy.ones(3)


def two(x, y):
    return x + y


def apply(params, x):
    return x


def pair(x):
    return {"p": x, "q": x + 1}


MESSAGES = [
    (
        lambda: vmap(3),
        TypeError,
        "vmap: Expected a callable value, got 3. The first argument of vmap is the function of one lane.",
    ),
    (
        lambda: vmap(two, in_axes=True),
        TypeError,
        "vmap in_axes must be an int, None, or (nested) container with those types as leaves (or callables, asked for each "
        "leaf), but got True of type bool in in_axes=True. Did you mean in_axes=1?",
    ),
    (
        lambda: vmap(two, in_axes=(0, 0.5)),
        TypeError,
        "vmap in_axes must be an int, None, or (nested) container with those types as leaves (or callables, asked for each "
        "leaf), but got 0.5 of type float in in_axes=(0, 0.5).",
    ),
    (
        lambda: vmap(two, in_axes=if_batched(0)),
        TypeError,
        "vmap in_axes must be an int, None, or (nested) container with those types as leaves (or callables, asked for each "
        "leaf), but got if_batched(axis=0) of type if_batched in in_axes=if_batched(axis=0). "
        "if_batched speaks of outputs; for arguments there is if_array.",
    ),
    (
        lambda: vmap(two, divergence=("compact", "lockstp")),
        ValueError,
        "vmap divergence must be 'auto', a schedule of loops ('lockstep', 'compact', 'refill'), one of branches ('select', "
        "'partition'), or a tuple of both, but got 'lockstp'.",
    ),
    (
        lambda: vmap(two, in_axes=(0, 0, None))(A, A),
        ValueError,
        "vmap(two, in_axes=(0, 0, None)): vmap in_axes must be an int, None, or a tuple of entries corresponding to the "
        "positional arguments passed to the function, but got len(in_axes)=3, len(args)=2. The function's parameters are "
        "(x, y): give one entry for each, in order, or a dict from parameter name to axis.",
    ),
    (
        lambda: vmap(two, in_axes=(0,))(A, A),
        ValueError,
        "vmap(two, in_axes=(0,)): vmap in_axes must be an int, None, or a tuple of entries corresponding to the positional "
        "arguments passed to the function, but got len(in_axes)=1, len(args)=2. The function's parameters are (x, y): give "
        "one entry for each, in order, or a dict from parameter name to axis.",
    ),
    (
        lambda: vmap(two, in_axes={"z": 0})(A, A),
        ValueError,
        "vmap(two, in_axes={'z': 0}): vmap in_axes, as a dict, goes by parameter name, but no parameter is called 'z'. The "
        "function's parameters are (x, y). For a single argument that is a dict, wrap it in a tuple: in_axes=({...},).",
    ),
    (
        lambda: vmap(apply, in_axes=({"w": 0, "q": None}, 0))({"w": A, "b": B}, A),
        ValueError,
        "vmap(apply, in_axes=({'w': 0, 'q': None}, 0)): vmap in_axes specification must be a tree prefix of the "
        "corresponding value; in_axes[0] does not fit args[0].\n"
        "  Mismatch details: different children\n"
        "  in_axes[0] is dict with children ['q'], ['w']\n"
        "  args[0] is dict with children ['b'], ['w']\n"
        "At in_axes[0] there may stand an int or None for everything below args[0], a callable asked for each leaf, or a "
        "dict with an axis for each of its children (['b'], ['w']). Static fields need not agree.",
    ),
    (
        lambda: vmap(apply, in_axes=({"w": (0, 1)}, 0))({"w": A}, A),
        ValueError,
        "vmap(apply, in_axes=({'w': (0, 1)}, 0)): vmap in_axes specification must be a tree prefix of the corresponding "
        "value; in_axes[0]['w'] does not fit args[0]['w'].\n"
        "  Mismatch details: different types\n"
        "  in_axes[0]['w'] is tuple with children [0], [1]\n"
        "  args[0]['w'] is f32[4,3]\n"
        "args[0]['w'] is a leaf: at in_axes[0]['w'] there may stand an int, None or a callable.",
    ),
    (
        lambda: vmap(two, in_axes=(0, 1))(A, A),
        ValueError,
        "vmap(two, in_axes=(0, 1)): vmap got inconsistent sizes for array axes to be mapped:\n"
        "  * one axis had size 4: axis 0 of argument x of type float32[4,3];\n"
        "  * one axis had size 3: axis 1 of argument y of type float32[4,3]",
    ),
    (
        lambda: vmap(apply, axis_size=7)({"w": A, "b": B}, x=A),
        ValueError,
        "vmap(apply, axis_size=7): vmap got inconsistent sizes for array axes to be mapped:\n"
        "  * the `axis_size` argument was 7;\n"
        "  * most axes (3 of them) had size 4, e.g. axis 0 of argument params['b'] of type float32[4,2]",
    ),
    (
        lambda: vmap(two)(A, y=A.T),
        ValueError,
        "vmap(two): vmap got inconsistent sizes for array axes to be mapped:\n"
        "  * one axis had size 4: axis 0 of argument x of type float32[4,3];\n"
        "  * one axis had size 3: axis 0 of kwargs['y'] of type float32[3,4]",
    ),
    (
        lambda: vmap(two, in_axes=(2, 0))(A, A),
        ValueError,
        "vmap(two, in_axes=(2, 0)): vmap was requested to map its argument along axis 2, which implies that its rank should "
        "be at least 3, but is only 2 (its shape is (4, 3)): argument x of type float32[4,3]. Use None in in_axes for what "
        "all lanes share.",
    ),
    (
        lambda: vmap(two)(A, 1.0),
        ValueError,
        "vmap(two): vmap was requested to map its argument along axis 0, which implies that its rank should be at least 1, "
        "but is only 0 (its shape is ()): argument y of type float32[]. Use None in in_axes for what all lanes share.",
    ),
    (
        lambda: vmap(two, in_axes=None)(A, 1.0),
        ValueError,
        "vmap(two, in_axes=None): vmap must have at least one non-None value in in_axes or axis_size must be specified; "
        "every leaf of the arguments is shared: argument x, argument y.",
    ),
    (
        lambda: vmap(pair)(),
        ValueError,
        "vmap(pair): vmap wrapped function must be passed at least one argument containing an array or axis_size must be "
        "specified.",
    ),
    (
        lambda: vmap(pair, out_axes={"p": 0, "q": None})(A),
        ValueError,
        "vmap(pair, out_axes={'p': 0, 'q': None}): at vmap out_axes['q'], got axis spec None but output was batched on "
        "axis 0. The output differs by lane: give the axis where its lanes go, or reduce over the lanes first.",
    ),
    (
        lambda: vmap(two, out_axes=None, axis_name="i")(A, A),
        ValueError,
        "vmap(two, out_axes=None, axis_name='i'): at vmap out_axes, got axis spec None but output was batched on axis 0. "
        "vmap has mapped output (axis_name=i) but out_axes is None. The output differs by lane: give the axis where its "
        "lanes go, or reduce over the lanes first.",
    ),
    (
        lambda: vmap(pair, out_axes=(0, 0))(A),
        ValueError,
        "vmap(pair, out_axes=(0, 0)): vmap out_axes specification must be a tree prefix of the corresponding value; "
        "out_axes does not fit the output.\n"
        "  Mismatch details: different types\n"
        "  out_axes is tuple with children [0], [1]\n"
        "  the output is dict with children ['p'], ['q']\n"
        "At out_axes there may stand an int or None for everything below the output, a callable asked for each leaf, or a "
        "dict with an axis for each of its children (['p'], ['q']). Static fields need not agree.",
    ),
    (
        lambda: vmap(lambda x: (x, "text"))(A),
        TypeError,
        "vmap(<lambda>): Output from batched function 'text' with type <class 'str'> is not a valid JAX type (the output at "
        "[1]). An output that no array can hold has no lanes: give it None in out_axes, or use out_axes=if_array(0).",
    ),
    (
        lambda: vmap(two, out_axes=3)(A, A),
        ValueError,
        "vmap(two, out_axes=3): at vmap out_axes, axis 3 is out of bounds for an output of dimension 2 with its lanes: one "
        "lane's output is f32[3]; an axis from -2 to 1 was expected.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), MESSAGES)
@pytest.mark.parametrize("how", ["compiled", "inside jit"])
def test_messages(call, kind, message, how):
    with pytest.raises(kind) as error:
        call() if how == "compiled" else jax.jit(call)()
    assert str(error.value) == message
    assert type(error.value) is kind


@pytest.mark.parametrize("call", [call for call, kind, _ in MESSAGES if kind is not TypeError])
def test_messages_keep_what_people_search_for(call, monkeypatch):
    """Where `jax.vmap` refuses the same call, it is with the same class, and a phrase of its message is in ours."""
    with pytest.raises(ValueError) as ours:
        call()
    monkeypatch.setitem(globals(), "vmap", jax.vmap)
    try:
        call()
    except ValueError as error:
        phrase = " ".join(str(error).split()[:4]).rstrip(";:,")
        assert phrase in " ".join(str(ours.value).split()) or "axis" in phrase
    except TypeError as error:  # a dict as in_axes, or a schedule, which jax.vmap does not know
        assert "in_axes" in str(error) or "divergence" in str(error)


def choose(x, limit):
    if x.sum() > limit:
        return x
    return -x


@pytest.mark.parametrize(
    ("fun", "kind"),
    [
        (choose, jax.errors.TracerBoolConversionError),
        (lambda x, _: np.sin(x), jax.errors.TracerArrayConversionError),
        (lambda x, _: list(range(x[0].astype(int))), jax.errors.TracerIntegerConversionError),
        (lambda x, _: float(x[0]), jax.errors.ConcretizationTypeError),
        (lambda x, _: float((x * WEIGHTS).sum()), jax.errors.ConcretizationTypeError),
    ],
)
def test_a_lane_is_never_concrete(fun, kind):
    with pytest.raises(kind) as error:
        vmap(fun, (0, None))(A, 1.0)
    assert type(error.value) is kind
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"{fun.__name__} asked for the concrete value of something that differs by lane, at ")
    assert f"test_errors.py:{fun.__code__.co_firstlineno + (fun is choose)} ({fun.__name__})" in first


def test_a_bad_call_leaves_nothing_half_done():
    f = vmap(choose, (0, None))
    for _ in range(2):
        with pytest.raises(jax.errors.TracerBoolConversionError):
            f(A, 1.0)
    g = vmap(lambda x: x * 2, axis_size=4)
    with pytest.raises(ValueError, match="inconsistent sizes"):
        g(A.T)
    np.testing.assert_allclose(g(A), A * 2)


def test_messages_of_jax_name_the_users_file():
    with pytest.raises(TypeError, match=f"while tracing the function <lambda> at {__file__}"):
        vmap(lambda n: jax.numpy.zeros((2, n)))(np.ones(3))


def test_an_error_in_the_function_is_the_users_own():
    class OwnError(Exception):
        pass

    def broken(x):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        vmap(broken)(A)


def test_missing_rule_names_the_primitive_and_the_line():
    from jax.extend.core import Primitive

    lonely_p = Primitive("lonely")
    lonely_p.def_abstract_eval(lambda x: x)
    with pytest.warns(minibatch.MissingRuleWarning, match=r"lonely has no batching rule.*4 lanes.*test_errors.py"):
        vmap(lambda x: lonely_p.bind(x)).jaxpr(A)
