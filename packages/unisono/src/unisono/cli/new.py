"""The verb `unisono new`: creates a recipe's package, with a test that proves it, as a starting point."""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path
from typing import Any

from unisono.runtime.console import say

SKELETON = Path(__file__).parent / "skeleton"
TEXT = "create the package of a new recipe: task, configuration, a verb, and a test that proves it"


def add_verb(verbs: Any) -> None:
    """Add the verb."""
    verb = verbs.add_parser("new", help=TEXT, description=TEXT)
    verb.add_argument("name", metavar="NAME", help="name of the recipe and its package, e.g. my_recipe")
    verb.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="where to create the package's folder")
    verb.set_defaults(run=_new)


def _new(parsed: argparse.Namespace) -> int:
    folder = create_recipe(parsed.name, parsed.dir)
    say(
        f"{folder} is a recipe. Next:\n"
        f"  cd {folder}\n  pip install -e '.[dev]'\n  pytest\n  unisono train {parsed.name}"
    )
    return 0


def create_recipe(name: str, within: Path) -> Path:
    """Write a recipe's package.

    Args:
        name: Of the recipe, its package and, in camel case, its task.
        within: Parent of the package's folder.

    Returns:
        The package's folder.

    Raises:
        ConfigError: If the name is not a valid package name or belongs to another recipe, or the folder exists.
    """
    from unisono.config.code import recipes
    from unisono.runtime.errors import ConfigError
    from unisono.runtime.files import atomic_folder

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"'{name}' cannot be the name of a package: use lower-case letters, digits and underscores")
    if name in recipes.recipe_names():
        raise ConfigError(f"a recipe called '{name}' already exists; choose another name")
    folder = within / name
    words = {"skeleton": name, "Skeleton": "".join(part.capitalize() for part in name.split("_"))}
    try:
        with atomic_folder(folder) as temporary:
            for source in sorted(SKELETON.rglob("*.template")):
                path = temporary / re.sub("skeleton", name, str(source.relative_to(SKELETON).with_suffix("")))
                path.parent.mkdir(parents=True, exist_ok=True)
                text = re.sub("skeleton|Skeleton", lambda word: words[word[0]], source.read_text(encoding="utf-8"))
                path.write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"{folder} already exists and is not overwritten; choose another name or --dir") from error
    return folder
