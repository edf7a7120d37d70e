"""What tests and benchmarks import of this project exists, also where only a slow test would come to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOMES = {"tests": ROOT, "benchmarks": ROOT, "unisono": ROOT / "src"}
IMPORT = re.compile(rf"^[ \t]*(from (?:{'|'.join(HOMES)})\b[\w.]* import (?:\([^)]*\)|[^\n(]+))", re.MULTILINE)


def file_of(module: str) -> Path | None:
    path = HOMES[module.split(".")[0]].joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """Every statement at any depth; expressions, which are most of a source, are passed over."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(block, part, ()):
            yield node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):  # what is in them is theirs
                yield from statements(node)


@cache
def names_in(file: Path) -> frozenset[str]:
    """What a module binds."""
    found: set[str] = set()
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.With | ast.For):
            stored = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
            found.update(name.id for name in stored if isinstance(name.ctx, ast.Store))
    return frozenset(found)


def missing(source: str) -> list[str]:
    """The names that a source imports and that are nowhere."""
    found = []
    for match in IMPORT.finditer(source):
        (node,) = ast.parse(match[1]).body
        assert isinstance(node, ast.ImportFrom) and node.module
        file = file_of(node.module)
        known = names_in(file) if file else frozenset()
        wanted = [alias.name for alias in node.names if not known & {alias.name, "__getattr__"}]
        found += [f"{node.module}.{name}" for name in wanted if not file_of(f"{node.module}.{name}")]
    return found


def test_every_name_that_tests_and_benchmarks_import_exists() -> None:
    files = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    absent = {str(path.relative_to(ROOT)): missing(path.read_text(encoding="utf-8")) for path in files}
    assert {path: names for path, names in absent.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from tests.runs import (\n    Trace,\n    gone as here,\n)", ["tests.runs.gone"]),
        ("def f():\n    from unisono.runtime import errors, gone", ["unisono.runtime.gone"]),
        ("from tests.gone import a, b", ["tests.gone.a", "tests.gone.b"]),
        ("from unisono import train  # comes by __getattr__\nfrom testsuite import x", []),
    ],
)
def test_the_check_itself_sees_a_name_that_is_gone(source: str, found: list[str]) -> None:
    assert missing(source) == found
