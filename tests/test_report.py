"""`minibatch.explain`: golden reports, and that what they say is so."""

from __future__ import annotations

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from golden.programs import PROGRAMS, f32, i32
from jax import lax

import minibatch
import minibatch.testing
from minibatch import explain
from minibatch._divergence import LOOPS
from minibatch.report.findings import KINDS, SEVERITIES, count
from minibatch.report.memory import in_bytes
from minibatch.report.text import share

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / "golden"
DOCS = HERE.parent / "docs"


def report_of(name):
    program = PROGRAMS[name]
    return explain(program.fun, **program.options)(*program.args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_report_is_the_golden_one(name, request, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    report = report_of(name)
    text = report.text(width=100) + "\n" + report.full(width=100)
    file = GOLDEN / f"{name}.txt"
    if request.config.getoption("--write-golden"):
        file.write_text(text)
    assert text == file.read_text(), "read tests/golden/programs.py on how to write the golden reports anew"


def every_number(data):
    """The numbers in data, in each way that text may write them; of strings, the numbers in them."""
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        return {found for each in data for found in every_number(each)}
    if isinstance(data, str):
        return {*re.findall(r"\d+(?:\.\d+)?", data)}
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        words = (count(data), count(data, "B"), share(data), str(data))
        return {found for word in words for found in re.findall(r"\d+(?:\.\d+)?", word)}
    return set()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_number_of_the_text_is_in_the_data(name):
    report = report_of(name)
    data = json.loads(report.to_json())
    known = every_number({key: value for key, value in data.items() if key != "program"})
    said = {*re.findall(r"\d+(?:\.\d+)?", re.sub(r"[\w.]+\.py", "", report.text(width=200)))}
    assert said <= known


@pytest.mark.parametrize("name", PROGRAMS)
def test_lines_are_as_wide_as_asked_and_without_colours(name):
    text = report_of(name).text(width=70)
    assert max(map(len, text.splitlines())) <= 70
    assert "\033" not in text


def test_colours_only_on_request_and_never_with_no_color(monkeypatch):
    report = report_of("branches")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[" in report.text(colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in report.text(colour=True)


def test_findings_have_a_section_each_and_sections_a_finding():
    sections = {*re.findall(r"^## (MB-\w+)", (DOCS / "findings.md").read_text(), re.MULTILINE)}
    assert sections == {*KINDS}


FOUND = {
    "branches": "MB-BR01", "loop": "MB-DV01", "indexing": "MB-GS01", "scan": "MB-TR01", "effect": "MB-EF01",
    "no_rule": "MB-LL01",
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_program_has_the_finding_that_it_was_made_for(name):
    assert FOUND[name] in [finding.id for finding in report_of(name).findings]


@pytest.mark.parametrize("name", ["layer", "gradient", "collectives"])
def test_nothing_to_fix_is_said_in_one_line(name):
    report = report_of(name)
    assert report.findings == []
    assert report.text(width=100).count("nothing to fix") == 1


def test_copies_are_found():
    def f(x, w):
        return jnp.sort(w, axis=1) @ x, w

    def scanned(x, c):
        return lax.scan(lambda c, _: (c + x, None), c, None, length=3)[0]

    assert "MB-CP01" in [found.id for found in explain(f, in_axes=(0, None))(f32(50, 8), f32(8, 8)).findings]
    assert "MB-CP01" in [found.id for found in explain(scanned, in_axes=(0, None))(f32(50, 64), f32(64)).findings]


@pytest.mark.parametrize("schedule", ["lockstep", "compact", "refill"])
def test_a_loop_says_how_it_runs(schedule):
    report = explain(PROGRAMS["loop"].fun, in_axes=(0, None), divergence=schedule)(f32(1000), f32())
    (found,) = report.findings
    assert found.id == "MB-DV01"
    assert ("all 1000 step until the last has stopped" in found.detail) == (schedule == "lockstep")
    assert ("it runs in stages" in found.detail) == (schedule != "lockstep")


def test_the_cost_of_a_loop_is_that_of_all_lanes_by_every_schedule():
    f = PROGRAMS["loop"].fun
    flops = [explain(f, in_axes=(0, None), divergence=d)(f32(1024), f32()).to_dict()["cost"]["after"]["flops"] for d in LOOPS]
    assert max(flops) < 1.5 * min(flops)


def test_compiling_anew_is_found_and_explained():
    mapped = minibatch.vmap(lambda x: x * 2)
    mapped(jnp.ones(3))
    assert mapped.explain(jnp.ones(3)).findings == []
    mapped(jnp.arange(3))
    (found,) = mapped.explain(jnp.ones(3)).findings
    assert found.id == "MB-RC01"
    assert found.detail == "compiled for 2 different calls; the last because x was f32[3] and then i32[3]"


def test_findings_are_ordered_by_severity_and_cost():
    def f(x, w, i):
        y = lax.cond(x[0] > 0, lambda: (w @ w @ x), lambda: (w @ x))
        return lax.dynamic_slice(y, (i,), (8,))

    found = explain(f, in_axes=(0, None, 0))(f32(50, 64), f32(64, 64), i32(50)).findings
    assert len(found) >= 2
    order = [(SEVERITIES.index(each.severity), each.extra) for each in found]
    assert order == sorted(order, reverse=True)


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_costs_of_equations_add_up(name):
    report = report_of(name)
    data = report.to_dict()

    def total(scope, which):
        return sum(e[which]["flops"] + sum(total(inner, which) for inner in e["inside"]) for e in scope)

    assert total(data["program"], "after") == pytest.approx(data["cost"]["after"]["flops"])
    assert total(data["program"], "before") == pytest.approx(data["cost"]["before"]["flops"])


@pytest.mark.parametrize("name", ["layer", "gradient", "branches", "scan"])
def test_operations_are_those_that_xla_counts(name):
    program = PROGRAMS[name]
    analysis = minibatch.vmap(program.fun, **program.options).lower(*program.args).compile().cost_analysis()
    found = report_of(name).to_dict()["cost"]["after"]["flops"]
    steps = 10 if name == "scan" else 1  # of a loop XLA counts one step
    assert found == pytest.approx(steps * analysis["flops"], rel=0.1)


def test_memory_is_about_what_xla_takes():
    program = PROGRAMS["gradient"]
    analysis = minibatch.vmap(program.fun, **program.options).lower(*program.args).compile().memory_analysis()
    taken = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    assert report_of("gradient").to_dict()["memory"]["peak"] == pytest.approx(taken, rel=0.3)


def test_largest_batch_fits_and_a_larger_one_does_not():
    layer = PROGRAMS["layer"].fun
    fits = explain(layer, in_axes=(0, None), memory="1MB")(f32(128, 16), f32(16, 8)).to_dict()["memory"]["largest_batch"]

    def peak(lanes):
        return explain(layer, in_axes=(0, None))(f32(lanes, 16), f32(16, 8)).to_dict()["memory"]["peak"]

    assert peak(fits) <= 10**6 < peak(fits + 2)


def test_program_for_its_own_number_of_lanes_alone():
    scattered = lambda x: lax.psum_scatter(x * 2, "lanes")
    for memory, fits in (("1GB", 4), (8, 0)):
        report = explain(scattered, axis_name="lanes", memory=memory)(f32(4, 4))
        assert report.to_dict()["memory"]["largest_batch"] == fits
    assert "f32[4,4]" in minibatch.vmap(scattered, axis_name="lanes").jaxpr(f32(4, 4), annotate=True)


def test_memory_that_does_not_grow_with_the_lanes_has_no_largest_batch():
    report = explain(lambda x: x * 2, in_axes=None, axis_size=4, out_axes=None)(f32(3))
    assert report.to_dict()["memory"]["largest_batch"] is None
    assert "any number of lanes fits" in str(report)


@pytest.mark.parametrize(("text", "number"), [("8GB", 8 * 10**9), ("512 MiB", 512 * 2**20), ("1.5kB", 1500), (7, 7), ("7", 7)])
def test_memory_in_words(text, number):
    assert in_bytes(text) == number


def test_memory_in_words_that_are_none():
    with pytest.raises(ValueError, match="memory='much' is not a number of bytes, nor one with a unit such as '8GB'"):
        explain(jnp.sin, memory="much")(f32(3))


# --- why --------------------------------------------------------------------------------------------------------------


def names(steps):
    return [line.split("  (")[0].removeprefix("  <- ") for line in steps.splitlines()]


def test_why_leads_from_an_output_to_an_argument():
    report = report_of("layer")
    assert names(report.why("output")) == ["tanh", "dot_general", "argument x, lanes on axis 0"]


def test_why_leads_through_a_loop_that_lanes_leave_at_different_times():
    report = report_of("loop")
    (loop,) = (e for e in report.to_dict()["program"] if e["primitive"] == "while")
    counted = next(e["number"] for e in loop["inside"][0] + loop["inside"][-1] if e["primitive"] == "add" and
                   e["lane"] == ["i32[]"])  # fmt: skip
    assert names(report.why(counted))[-1] == "argument x, lanes on axis 0"  # though it starts shared and counts by ones


def test_why_leads_through_scan_and_jit():
    @jax.jit
    def inner(h, x):
        return jnp.sin(h) * x

    def f(x, h):
        return lax.scan(lambda h, _: (inner(h, x), None), h, None, length=3)[0]

    report = explain(f, in_axes=(0, None))(f32(5, 3), f32(3))
    assert names(report.why("output"))[-1] == "argument x, lanes on axis 0"


def test_branches_that_only_run_for_their_lanes_are_nothing_to_mend():
    def either(x, w):
        return lax.cond(x.sum() > 0, lambda: lax.fori_loop(0, 30, lambda i, c: jnp.tanh(w @ c), x), lambda: x)

    def found(divergence):
        report = explain(either, in_axes=(0, None), divergence=divergence)(f32(4096, 8), f32(8, 8))
        return [finding.id for finding in report.findings]

    assert found("select") == ["MB-BR01"]
    assert found("partition") == found("auto") == []


def test_why_of_what_all_lanes_share():
    report = explain(lambda x, w: (x + 1, jnp.sin(w)), in_axes=(0, None))(f32(3), f32(3))
    assert report.why("output[1]") == "output[1]: all lanes share it\n"


def test_why_of_a_line_and_of_a_finding():
    report = report_of("branches")
    finding = report.findings[0]
    assert report.why(f"programs.py:{finding.line.number}") == report.why(f"line {finding.line.number}")
    assert report.why(finding) == report.why(finding.equations[0])
    assert report.why(finding).startswith("cond") and "argument x, lanes on axis 0" in report.why(finding)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        (99, "equation 1 (dot_general), equation 2 (tanh)"),
        ("output['loss']", "output"),
        ("line 1", "programs.py:"),
        ("nonsense", ""),
    ],
)
def test_why_of_what_there_is_not_names_the_nearest(asked, nearest):
    with pytest.raises(ValueError, match=r"no such equation, line or output\. Nearest: ") as caught:
        report_of("layer").why(asked)
    assert nearest in str(caught.value)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_nothing_runs():
    ran = []

    def f(x):
        jax.debug.callback(lambda x: ran.append(x), x)
        return jax.pure_callback(lambda x: ran.append(x) or x, x, x, vmap_method="sequential")

    str(explain(f)(jnp.ones(3)))
    jax.effects_barrier()
    assert ran == []


def test_an_error_of_the_function_is_raised_as_it_is():
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        explain(f)(f32(3))


def test_arguments_that_do_not_fit_are_refused_in_the_words_of_vmap():
    with pytest.raises(ValueError, match=r"vmap\(sin\).*at least one positional|vmap"):
        explain(jnp.sin)(f32())


def test_looking_on_leaves_nothing_behind():
    mapped = minibatch.vmap(PROGRAMS["loop"].fun, in_axes=(0, None))
    mapped.explain(jnp.ones(3), 1e-3)
    assert "explain" not in mapped.lower(jnp.ones(3), 1e-3).as_text(debug_info=True)


@pytest.mark.parametrize("size", [0, 1])
def test_few_lanes(size):
    str(explain(PROGRAMS["loop"].fun, in_axes=(0, None))(f32(size), f32()))


def test_containers_keywords_and_shared_python_values():
    def f(x, *, scale, kind):
        return {"y": x["a"] * scale if kind == "mul" else x["a"]}

    report = explain(f)({"a": f32(3, 2)}, scale=f32(3), kind="mul")
    assert [a["name"] for a in report.to_dict()["arguments"]] == ["x['a']", "kwargs['scale']"]


def test_a_mapped_method_explains_itself():
    class Model:
        @minibatch.vmap(in_axes=(None, 0))
        def __call__(self, x):
            return jnp.sin(x)

    assert "sin" in Model.__call__.explain(Model(), f32(3)).full()


# --- jaxprs with their lane axes ----------------------------------------------------------------------------------------


def test_annotated_jaxpr_marks_the_lanes_and_nothing_else():
    def f(x, w):
        return jnp.einsum("ij,kj->ik", x, w), w

    text = minibatch.vmap(f, in_axes=(1, None)).jaxpr(f32(4, 4, 4), f32(4, 4), annotate=True)
    assert "x:f32[4,B:4,4] w:f32[4,4]." in text
    assert re.search(r"\w+:f32\[B:4,4,4\] = (dot_general|transpose)", text)


def test_annotated_jaxpr_of_params_that_cannot_be_compared():
    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, t: (t,))
    assert "f32[B:2,3]" in minibatch.vmap(f).jaxpr(f32(2, 3), annotate=True)


def test_annotated_jaxpr_marks_lanes_inside_loops():
    text = minibatch.vmap(PROGRAMS["loop"].fun, in_axes=(0, None)).jaxpr(f32(8), f32(), annotate=True)
    assert len(re.findall(r"\w+:f32\[B:8\]", text)) > 5


# --- tests of others ----------------------------------------------------------------------------------------------------


def test_assert_batches():
    minibatch.testing.assert_batches(PROGRAMS["layer"].fun, f32(8, 16), f32(16, 8), in_axes=(0, None))
    with pytest.raises(AssertionError, match=r"MB-BR01 \(both branches run\)"):
        minibatch.testing.assert_batches(PROGRAMS["branches"].fun, f32(8, 32), f32(32, 32), in_axes=(0, None), severity="low")
    minibatch.testing.assert_batches(
        PROGRAMS["branches"].fun, f32(8, 32), f32(32, 32), in_axes=(0, None), severity="low", forbid=["ran lane by lane"]
    )
    with pytest.raises(ValueError, match="names no finding; there are MB-DV01"):
        minibatch.testing.assert_batches(jnp.sin, f32(3), forbid=["nonsense"])
    with pytest.raises(ValueError, match="severity='bad' is none of low, medium, high"):
        minibatch.testing.assert_batches(jnp.sin, f32(3), severity="bad")
