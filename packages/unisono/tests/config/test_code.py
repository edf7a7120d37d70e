"""Which files a run's code is: found by reading imports, known by their content alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.runtime.code.test_source_files import plug_in
from unisono.config.code import code_digest
from unisono.runtime.code import source_files
from unisono.task_config import find_task

TASK = """
import json
import numpy as np
import unisono
import near
from models import net

class Mine(unisono.Task):
    def data(self):
        import late
        return [0]
    def build(self): ...
    def counts(self, batch): ...
    def outputs(self, model, batch, context): ...
    def loss(self, outputs, batch, context): ...
"""
FILES = {
    "mine.py": TASK,
    "near.py": "",
    "late.py": "import importlib\nimportlib.import_module('literal')\n",
    "literal.py": "",
    "unrelated.py": "",
    "models/__init__.py": "from .parts import block as Block\n",
    "models/net.py": "from . import norm\nfrom .parts.block import Block\n",
    "models/norm.py": "from models import net  # each imports the other\n",
    "models/other.py": "",
    "models/parts/block.py": "Block = 1\n",
}


def project(folder: Path) -> str:
    """Files of a project; returns its task."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return f"{folder}/mine.py:Mine"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))
    return project(tmp_path)


def of_project(recipe: str) -> dict[str, str]:
    return {
        name: digest for name, digest in code_digest.digest_sources(recipe).items() if not name.startswith("unisono/")
    }


def test_the_code_is_unisono_the_task_and_what_it_imports_early_or_late(recipe: str):
    found = code_digest.digest_sources(recipe)
    assert {"unisono/training/loop.py", "unisono/engines/torch/engine.py"} <= found.keys()
    assert of_project(recipe).keys() == FILES.keys() - {"unrelated.py", "models/other.py"}


def test_code_is_read_and_nothing_of_it_is_run(recipe: str):
    code_digest.digest_sources(recipe)
    assert not {"near", "late", "models", "models.net"} & sys.modules.keys()


def test_code_is_the_same_in_another_folder_and_with_other_line_ends(recipe: str, tmp_path: Path):
    before = of_project(recipe)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in FILES:
        (moved / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(tmp_path / name, moved / name)
        (moved / name).write_bytes((moved / name).read_bytes().replace(b"\n", b"\r\n"))
    sys.path[0] = str(moved)
    assert of_project(f"{moved}/mine.py:Mine") == before


@pytest.mark.parametrize("name", ["mine.py", "near.py", "late.py", "literal.py", "models/parts/block.py"])
def test_a_file_that_changes_is_named(recipe: str, tmp_path: Path, name: str):
    before = code_digest.digest_sources(recipe)
    (tmp_path / name).write_text(FILES[name] + "# another line\n")
    assert code_digest.describe_changes(before, code_digest.digest_sources(recipe)) == [f"{name} has changed"]


def test_an_import_that_is_new_is_named(recipe: str, tmp_path: Path):
    before = code_digest.digest_sources(recipe)
    (tmp_path / "near.py").write_text("import unrelated\n")
    assert code_digest.describe_changes(before, code_digest.digest_sources(recipe)) == [
        "near.py has changed",
        "unrelated.py is new",
    ]


def test_what_cannot_be_parsed_still_counts_by_its_content(recipe: str, tmp_path: Path):
    (tmp_path / "late.py").write_text("this is no Python\n")
    assert "late.py" in code_digest.digest_sources(recipe)


def test_what_is_installed_does_not_count_by_its_content(recipe: str, tmp_path: Path):
    place = tmp_path / ".venv" / "lib" / "site-packages"
    place.mkdir(parents=True)
    (place / "near.py").write_text("")
    (tmp_path / "near.py").unlink()
    sys.path.insert(0, str(place))
    assert "near.py" not in code_digest.digest_sources(recipe)


def test_a_task_that_is_installed_counts_with_its_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "site-packages"
    project(place / "whole")
    (place / "whole" / "mine.py").write_text(TASK.replace("import near", "from . import near"))
    monkeypatch.syspath_prepend(str(place))
    assert of_project("whole.mine:Mine").keys() == {"whole/mine.py", "whole/near.py"}


def test_an_installed_plug_in_that_the_task_imports_counts(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What `unisono_audio` computes is part of a run, as it was when it lay in the core."""
    place = tmp_path / "site-packages"
    place.mkdir()
    plug_in(place, monkeypatch, "unisono.data_verbs")
    monkeypatch.setattr(code_digest, "installed_packages", source_files.installed_packages)
    (tmp_path / "near.py").write_text("import sounds.codec\n")
    assert {"sounds/__init__.py", "sounds/codec.py"} <= of_project(recipe).keys()


def test_a_task_of_a_package_counts_with_the_packages_above_it():
    recipe = f"{tasks.__file__}:LinearTask"
    find_task(recipe)
    above = {f"packages/{folder}__init__.py" for folder in ("", "unisono/", "unisono/tests/")}
    assert of_project(recipe).keys() == above | {f"packages/unisono/tests/{name}.py" for name in ("tasks", "rows")}


def test_a_packaged_recipe_counts_although_it_is_installed(spirals: Path):
    find_task("spirals")
    found = code_digest.digest_sources("spirals")
    assert {"spirals/task.py", "unisono/task.py"} <= found.keys()
    assert {name.split("/")[0] for name in found} == {"unisono", "spirals"}
