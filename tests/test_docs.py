"""The examples in the documentation run: code blocks of the pages, and docstrings of the package."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import pkgutil

import pytest
from sybil import Sybil
from sybil.evaluators.doctest import NUMBER
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

import minibatch

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MODULES = [m.name for m in pkgutil.walk_packages(minibatch.__path__, "minibatch.") if not m.name.endswith("__main__")]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: pathlib.Path) -> None:
    sybil = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=FLAGS | NUMBER), SkipParser()])
    for example in sybil.parse(page).examples():
        example.evaluate()


@pytest.mark.parametrize("name", ["minibatch", *MODULES])
def test_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0
