"""What is true of all distributions of the workspace together."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from unisono.config.code.recipes import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECTS = {
    project["name"]: project
    for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("recipes/*/pyproject.toml")]
    for project in [tomllib.loads(path.read_text())["project"]]
}
EXTRA = re.compile(r"(?<![\w.-])(unisono(?:-\w+)?)\[([\w,-]+)\]")  # not unisono[{extra}], which has its own test


def test_every_extra_that_an_error_or_a_page_names_exists():
    """A command that an error offers installs what it says."""
    named = {}
    folders = [ROOT / name for name in ("packages", "recipes", "docs", "examples")]
    for path in [ROOT / "README.md", *(p for folder in folders for p in folder.rglob("*"))]:
        if path.suffix in (".py", ".md", ".template") and path.stem not in ("log", "decisions"):
            for name, extras in EXTRA.findall(path.read_text(encoding="utf-8")):
                named |= {(name, extra): path for extra in extras.split(",")}
    assert len(named) > 10
    unknown = {
        f"{name}[{extra}]": str(path)
        for (name, extra), path in named.items()
        if extra not in PROJECTS.get(name, {}).get("optional-dependencies", {})
    }
    assert not unknown


def test_every_recipe_of_ours_is_an_extra_of_the_core_by_its_own_name():
    assert {path.name for path in ROOT.glob("recipes/*") if (path / "pyproject.toml").is_file()} == set(EXTRAS)
    assert all(PROJECTS["unisono"]["optional-dependencies"][name] == [f"unisono-{name}"] for name in EXTRAS)
