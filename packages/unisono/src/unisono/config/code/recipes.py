"""Recipes: installed packages that bring tasks, YAML groups and verbs of their own, found by their entry points.

A package declares a recipe in its `pyproject.toml`, and everything else follows from the object that it names:

    [project.entry-points."unisono.recipes"]
    puzzles = "puzzles:RECIPE"

That object lies in a module that imports nothing heavy: every `unisono --help` looks at it. A recipe whose module
cannot be imported is left out of lists, and is an error when it is asked for by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.config.code import references
from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.errors import ConfigError, nearest

if TYPE_CHECKING:
    from unisono.runtime.code.entry_points import EntryPoint

ENTRY_POINT_GROUP = "unisono.recipes"
EXTRAS = ("birdsong", "language", "microbiome", "puzzles", "speech")  # of `unisono`, each a recipe of ours


@dataclass(frozen=True)
class Recipe:
    """What a recipe brings.

    Attributes:
        tasks: `package.module:Class` by engine; the first is trained where nobody chooses another engine.
        config: folder of the YAML groups, beside the module that holds this object. `NAME.yaml` in it is the recipe's
            own configuration, NAME being that of the entry point.
        weight_names: `package.module:function` from the name of a weight in torch to its name in JAX, for a recipe with
            tasks for both; None where they have the same.
        verbs: `package.module:function` by verb, each with a line that says what it does; see `unisono.cli.verbs`.
        open_folder: `package.module:function` from the folder of a model that no run has written, such as a local one
            of Hugging Face, to the overrides with which the recipe begins with it; to None where it is not of its
            kind. Verbs on runs then take such a folder too.
    """

    tasks: Mapping[str, str]
    config: str = "config"
    weight_names: str | None = None
    verbs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    open_folder: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("a Recipe has at least one task: tasks={'torch': 'package.module:Class'}")

    @property
    def engine(self) -> str:
        """That of its first task, which is trained where nobody chooses another."""
        return next(iter(self.tasks))


def _entry_points() -> Mapping[str, EntryPoint]:
    return find_entry_points(ENTRY_POINT_GROUP)


def recipe_names() -> list[str]:
    """Of all recipes that are installed; none of them is imported."""
    return list(_entry_points())


def resolve_reference(reference: str, engine: str = "auto") -> str:
    """The `file.py:Class` or `package.module:Class` of a reference; of a recipe's tasks the one for the engine.

    Args:
        reference: the name of a recipe, or to a task of the user's own, which stays as it is.
        engine: that a layout asks for; auto: that of the recipe's first task.

    Raises:
        ConfigError: for a name that is no recipe, and for an engine that the recipe has no task for.
    """
    if ":" in reference:
        return reference
    recipe = find_recipe(reference)
    chosen = recipe.engine if engine == "auto" else engine
    if chosen not in recipe.tasks:
        only = f"layout.engine={' or '.join(recipe.tasks)}"
        raise ConfigError(
            f"layout.engine={chosen}: the recipe '{reference}' has no task for it; use {only}, or leave it out"
        )
    return recipe.tasks[chosen]


@cache
def find_recipe(name: str) -> Recipe:
    """A recipe by its name.

    Raises:
        ConfigError: where there is none, or its package cannot be imported.
    """
    entry = _entry_points().get(name)
    if entry is None:
        raise ConfigError(f"unknown recipe '{name}', {suggest_recipe(name)}")
    try:
        found = entry.load()
    except Exception as error:  # whatever a package raises while it is imported
        raise ConfigError(f"recipe '{name}' ({entry.value}) cannot be imported: {error}") from error
    if not isinstance(found, Recipe):
        raise ConfigError(f"recipe '{name}': {entry.value} is a {type(found).__name__}, not a unisono.Recipe")
    return found


def all_recipes() -> dict[str, Recipe]:
    """Every recipe that can be imported, by name."""
    found = {}
    for name in recipe_names():
        try:
            found[name] = find_recipe(name)
        except ConfigError:
            continue
    return found


def config_folder(name: str) -> Path:
    """Where a recipe's YAML groups lie; errors as of `find_recipe`."""
    recipe, module = find_recipe(name), _entry_points()[name].module
    file = sys.modules[module].__file__
    assert file is not None
    return Path(file).parent / recipe.config


def config_folders() -> dict[str, Path]:
    """Where the YAML groups of every recipe lie that has a configuration, by name."""
    found = {name: config_folder(name) for name in all_recipes()}
    return {name: path for name, path in found.items() if (path / f"{name}.yaml").is_file()}


def find_recipe_name(reference: str) -> str | None:
    """The recipe that a reference names, or whose task it is; None for a task of nobody's recipe."""
    if reference in recipe_names():
        return reference
    return next((name for name, recipe in all_recipes().items() if reference in recipe.tasks.values()), None)


def find_folder_recipe(folder: Path) -> tuple[str, list[str]] | None:
    """The recipe that opens the model in a folder without a run, and the overrides by which it does; None for none."""
    if not folder.is_dir():
        return None
    for name, recipe in all_recipes().items():
        if recipe.open_folder is not None:
            module, _, function = recipe.open_folder.rpartition(":")
            words = getattr(references.load_module(f"the recipe {name}", module), function)(folder)
            if words is not None:
                return name, words
    return None


def suggest_recipe(name: str) -> str:
    """The end of an error about a name that is no recipe."""
    if Path(f"{name}.py").is_file():
        return f"did you mean the file {name}.py?"
    if name in EXTRAS and name not in recipe_names():
        return f"which is not installed: pip install 'unisono[{name}]'"
    return f"{nearest(name, recipe_names() or EXTRAS)} (or a task of your own: path/to/file.py:Class)"
