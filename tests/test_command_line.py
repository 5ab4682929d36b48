"""`python -m minibatch` and its commands."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import jax.numpy as jnp
import pytest

from minibatch.__main__ import main
from minibatch.tour import Program, stops, visit


def test_rules_are_printed(capsys: pytest.CaptureFixture) -> None:
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("dot_general "))
    assert line.split() == ["dot_general", "contractions", "rules/contractions.py", "a", "rule"]


def test_rules_are_printed_as_a_page(capsys: pytest.CaptureFixture) -> None:
    assert main(["rules", "--markdown"]) == 0
    assert "| `dot_general` | contractions | `rules/contractions.py` | a rule |" in capsys.readouterr().out


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["walk"])
    assert exit_.value.code == 2
    assert "invalid choice: 'walk'" in capsys.readouterr().err


def test_the_tour_notices_a_program_that_differs(capsys: pytest.CaptureFixture) -> None:
    program = next(stops())
    assert visit(program)
    x = jnp.arange(3.0)
    wrong = Program("wrong", lambda x: x + 1, 0, (x,), 3, lambda i: (x[i] + 1,))
    assert not visit(wrong)
    assert "differs from its lanes" in capsys.readouterr().out


# --- explain ----------------------------------------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parent.parent
ATTENTION = str(ROOT / "docs/examples/attention.py")
ATTEND = ["explain", f"{ATTENTION}:attend", "f32[512,64]", "f32[100,64]", "f32[100,64]", "i32[512]"]
AXES = ["--in-axes", "0,None,None,0"]


def test_commands_in_the_docs_print_what_the_docs_say(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```text\n\$ python -m minibatch (.*)\n((?s:.*?))```", (ROOT / "docs/explain.md").read_text())
    assert blocks
    for command, said in blocks:
        main(shlex.split(command))
        assert capsys.readouterr().out.rstrip() == said.rstrip()


def test_exit_status_says_whether_there_are_findings(capsys: pytest.CaptureFixture) -> None:
    assert main([*ATTEND, *AXES]) == 0
    assert main([*ATTEND, *AXES, "--fail-on", "medium"]) == 1
    assert main([*ATTEND, *AXES, "--fail-on", "never"]) == 0


def test_explain_as_json_in_full_and_why(capsys: pytest.CaptureFixture) -> None:
    main([*ATTEND, *AXES, "--json", "--memory", "1GB"])
    data = json.loads(capsys.readouterr().out)
    assert (data["lanes"], data["memory"]["given"]) == (512, 10**9)
    main([*ATTEND, *AXES, "--full"])
    assert "all 512 lanes" in capsys.readouterr().out
    main([*ATTEND, *AXES, "--why", "output"])
    assert capsys.readouterr().out.endswith("<- argument i, lanes on axis 0\n")


def test_explain_takes_arguments_from_the_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "given.py"
    file.write_text(
        "import jax.numpy as jnp, minibatch\n"
        "def f(x, w): return x @ w\n"
        "def arguments(): return jnp.ones((5, 3)), jnp.ones(3)\n"
        "mapped = minibatch.vmap(f, in_axes=(0, None))\n"
    )
    assert main(["explain", f"{file}:f", "--args-from", "arguments", "--in-axes", "0,None"]) == 0
    assert main(["explain", f"{file}:mapped", "--args-from", "arguments"]) == 0
    assert capsys.readouterr().out.count("5 lanes") == 2
    assert main(["explain", f"{file}:mapped", "--args-from", "arguments", "--in-axes", "0"]) == 2
    assert "mapped is mapped already, with axes of its own: leave out --in_axes" in capsys.readouterr().err


def test_explain_analyzes_on_random_arguments(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", f"{ATTENTION}:halvings", "f32[8]", "--analyze", "--fail-on", "never"]) == 0
    assert "run once" in capsys.readouterr().out


def test_explain_writes_a_page(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*ATTEND, *AXES, "--html", str(tmp_path / "report.html")]) == 0
    assert "became gather/scatter" in (tmp_path / "report.html").read_text()
    assert main([*ATTEND, *AXES, "--html", str(tmp_path / "no" / "report.html")]) == 2
    said = capsys.readouterr()
    assert "the page cannot be written (No such file or directory)" in said.err
    assert said.out.count("BECAME GATHER/SCATTER") == 2


UNUSABLE = {
    "no_such_module_at_all:f": "there is no module 'no_such_module_at_all'",
    "no_such_file.py:f": "there is no file 'no_such_file.py'",
    f"{ATTENTION}:attent": "attention has no function 'attent'",
    "attend": "'attend' is no FILE_OR_MODULE:FUNCTION",
    f"{ATTENTION}:attend": "say what attend takes: each argument, with its lanes, as dtype[shape]",
}


@pytest.mark.parametrize("function", UNUSABLE, ids=["module", "file", "function", "form", "arguments"])
def test_what_cannot_be_explained_is_said(function: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", function]) == 2
    assert UNUSABLE[function] in capsys.readouterr().err


def test_arguments_and_axes_that_are_none(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", f"{ATTENTION}:attend", "g32[3]"]) == 2
    assert "'g32[3]' is no argument: write dtype[shape], such as f32[128,3]" in capsys.readouterr().err
    assert main([*ATTEND, "--in-axes", "0,Nun"]) == 2
    assert "'0,Nun' says no axes" in capsys.readouterr().err


def test_an_error_of_the_function_is_shown_as_it_is(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "failing.py"
    file.write_text("def f(x):\n    raise KeyError('mine')\n")
    assert main(["explain", f"{file}:f", "f32[3]"]) == 2
    assert "KeyError: 'mine'" in capsys.readouterr().err
