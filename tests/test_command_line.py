"""`python -m minibatch` and its commands."""

from __future__ import annotations

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
