"""Examples in docstrings are right."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("recipes/*/src")])
MODULES = [
    ".".join(path.relative_to(source).with_suffix("").parts)
    for source in SOURCES
    for path in sorted(source.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str) -> None:
    module = import_module(name.removesuffix(".__init__"))
    found = doctest.testmod(module)
    assert found.attempted > 0 == found.failed, f"{name}: {found.failed} of {found.attempted} examples fail"
