"""Every setting that a recipe of ours declares is looked at by its code, as those of the core are by an engine.

What is found is a name: an attribute that is read, or a text that is a key. So a setting whose name is also that of
something else may escape; one that was added and forgotten does not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono import Settings
from unisono.config.code.recipes import EXTRAS

VALIDATORS = {"model_validator", "field_validator"}


def names_that_are_used(source: str) -> Iterator[str]:
    """Attributes that are read and texts, but for what only refuses settings or describes them."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and any(_called(one) in VALIDATORS for one in node.decorator_list):
            continue
        if isinstance(node, ast.Call) and _called(node) == "Field":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        waiting += ast.iter_child_nodes(node)


def _called(node: ast.AST) -> str:
    return getattr(getattr(node, "func", node), "id", "")


def declared(settings: object) -> Iterator[tuple[str, str]]:
    """Class and name of each setting of a recipe's own; `kind` only chooses a class."""
    for name, kind in inspect.getmembers(settings, inspect.isclass):
        if issubclass(kind, Settings) and kind.__module__ == settings.__name__:  # type: ignore[attr-defined]
            yield from ((name, field) for field in kind.__annotations__ if field in kind.model_fields)


@pytest.mark.parametrize("recipe", EXTRAS)
def test_a_recipe_looks_at_every_setting_that_it_declares(recipe: str) -> None:
    settings = importlib.import_module(f"unisono_{recipe}.settings")
    assert settings.__file__ is not None
    paths = Path(settings.__file__).parent.rglob("*.py")
    used = {name for path in paths for name in names_that_are_used(path.read_text(encoding="utf-8"))}
    own = {(kind, name) for kind, name in declared(settings) if name != "kind"}
    assert len(own) > 5
    assert not sorted(f"{kind}.{name}" for kind, name in own if name not in used)


def test_what_only_refuses_or_describes_a_setting_does_not_use_it() -> None:
    source = (
        "class Mine(Settings):\n    size: int = Field(1, description='size')\n"
        "    @model_validator(mode='after')\n    def _check(self):\n        return self.size\n"
    )
    assert "size" not in set(names_that_are_used(source))
    assert "size" in set(names_that_are_used(f"{source}\nprint(Mine().size)"))
