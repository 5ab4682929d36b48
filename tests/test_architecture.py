"""The shape of the house: imports point down, JAX's internals have one door, and nothing calls `jax.vmap`."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

import minibatch

PACKAGE = pathlib.Path(minibatch.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(file.relative_to(PACKAGE)) for file in FILES]

# Each room with those it may import, from the top of the house down.
MAY_IMPORT = {
    "__init__.py": {"_api", "_axes", "_compile", "_divergence", "_errors", "_jax", "extend"},
    "__main__.py": {"_command", "_support", "tour"},
    "_command.py": {"minibatch", "report"},
    "testing.py": {"_api", "report"},
    "tour/": {"minibatch", "tour"},
    "_support.py": {"_registry", "_jax"},
    "_api.py": {
        "_axes", "_batched", "_captured", "_closure", "_compile", "_divergence", "_errors", "_jax", "_keys", "_lanes",
        "_operands", "_trace", "report", "rules",
    },
    "report/": {
        "_batched", "_compile", "_cost", "_divergence", "_errors", "_interpreter", "_jax", "_registry", "_trace", "report",
    },
    "_compile.py": {
        "_axes", "_batched", "_captured", "_closure", "_errors", "_hoist", "_interpreter", "_jax", "_keys", "_lanes",
        "_operands", "_registry", "_structure", "_trace",
    },
    "_operands.py": {"_captured", "_closure", "_errors", "_jax", "_structure", "_trace"},
    "_lanes.py": {"_captured", "_closure", "_interpreter", "_jax", "_keys", "_registry", "_trace"},
    "_structure.py": {"_jax", "_keys"},
    "_closure.py": {"_captured", "_errors", "_jax", "_keys", "_trace"},
    "_keys.py": {"_jax"},
    "_captured.py": {"_jax"},
    "_hoist.py": {"_jax"},
    "_trace.py": {"_axes", "_batched", "_divergence", "_errors", "_hoist", "_jax"},
    "_axes.py": {"_errors", "_jax"},
    "extend.py": {"_batched", "_interpreter", "_jax", "_registry"},
    "rules/__init__.py": {"rules", "fallback"},
    "rules/control_flow.py": {"_batched", "_errors", "_interpreter", "_jax", "_registry", "fallback", "schedule"},
    "rules/": {"_batched", "_divergence", "_errors", "_host", "_interpreter", "_jax", "_registry", "fallback"},
    "schedule/": {"_batched", "_cost", "_divergence", "_errors", "_host", "_interpreter", "_jax", "_registry", "schedule"},
    "_host.py": {"_jax"},
    "_cost.py": {"_jax", "_registry"},
    "_interpreter.py": {"_batched", "_errors", "_jax", "_registry"},
    "_registry.py": {"_batched", "_errors", "_jax"},
    "_errors.py": {"_jax"},
    "_batched.py": {"_divergence", "_jax"},
    "_divergence.py": {"_errors"},
    "_jax.py": set(),
}  # fmt: skip


def imports(file: pathlib.Path) -> Iterator[str]:
    """Every module that `file` imports, dotted, with what is taken from it; those for the type checker alone left out."""
    tree = ast.parse(file.read_text())
    for_types = {id(x) for node in ast.walk(tree) if _is_type_checking(node) for x in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are written from the package on"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def rooms(file: pathlib.Path) -> set[str]:
    """The rooms of the house that `file` imports: modules of the top level, and `fallback` of the rules."""
    found = set()
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "minibatch":
            here = parts[1] if len(parts) > 1 and (PACKAGE / f"{parts[1]}.py").exists() else None
            here = here or (parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "minibatch")
            found.add("fallback" if parts[:3] == ["minibatch", "rules", "fallback"] else here)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name: str) -> None:
    room = next((room for room in MAY_IMPORT if name == room or (room[-1] == "/" and name.startswith(room))), None)
    assert room is not None, f"{name} stands in no room of MAY_IMPORT"
    assert rooms(PACKAGE / name) - MAY_IMPORT[room] == set()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("rules/") and not name.endswith("__init__.py")])
def test_rule_files_do_not_import_each_other(name: str) -> None:
    others = [imported for imported in imports(PACKAGE / name) if imported.startswith("minibatch.rules")]
    assert all(imported.startswith(("minibatch.rules.fallback", "minibatch.rules.fallback.")) for imported in others)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "_jax.py"])
def test_internals_of_jax_have_one_door(name: str) -> None:
    tree = ast.parse((PACKAGE / name).read_text())
    written = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = ("jax._src", "jax.extend", "jax.interpreters")
    assert not [used for used in {*imports(PACKAGE / name), *written} if used.startswith(private)]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("tour/")])  # the tour compares with it
def test_nothing_calls_jax_vmap(name: str) -> None:
    tree = ast.parse((PACKAGE / name).read_text())
    written = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    tables = ("primitive_batchers", "axis_primitive_batchers", "fancy_primitive_batchers")
    assert not {"jax.vmap", "jax.pmap"} & {*written, *imports(PACKAGE / name)}
    if name != "_jax.py":  # which reads JAX's table for primitives of third parties
        assert not [used for used in written if used.endswith(tables)]
