"""The tests of each package need what its pyproject declares and pytest, and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.workspace import alone
from tests.workspace.test_packages import ROOT

pytestmark = pytest.mark.slow
FOLDERS = sorted(path.parent for path in [*ROOT.glob("packages/*/tests"), *ROOT.glob("recipes/*/tests")])
CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


@pytest.mark.parametrize("project", FOLDERS, ids=lambda project: project.name)
def test_tests_are_found_with_nothing_but_what_the_package_declares(project: Path, tmp_path: Path) -> None:
    """A test that imports another recipe, or a library of an extra without a word, ends the collection."""
    done = alone.run(project, tmp_path / "environment", "--collect-only", "-q", **CAPTURED)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(re.findall(r"^\S+/test_\w+\.py: \d+$", done.stdout, re.MULTILINE)) > 3


def test_the_environment_has_nothing_else(tmp_path: Path) -> None:
    python = alone.make_environment(alone.find_closure(["unisono-audio"]), tmp_path / "environment")
    for name, there in {
        "unisono_audio": True,
        "numpy": True,
        "unisono": False,
        "torch": False,
        "pytest": False,
    }.items():
        done = subprocess.run([str(python), "-I", "-c", f"import {name}"], capture_output=True, text=True, timeout=300)
        assert (done.returncode == 0) == there, f"{name}: {done.stderr}"


def test_sounds_need_neither_the_core_nor_torch(tmp_path: Path) -> None:
    project = ROOT / "packages" / "unisono-audio"
    done = alone.run(project, tmp_path / "environment", "-m", "not slow", **CAPTURED)
    assert done.returncode == 0, done.stdout[-3000:]
