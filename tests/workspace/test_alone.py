"""The tests of each package need what its pyproject declares and pytest, and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.workspace import alone
from tests.workspace.test_packages import ROOT

pytestmark = pytest.mark.slow
CORE = ROOT / "packages" / "unisono"
FOLDERS = sorted(path.parent for path in [*ROOT.glob("packages/*/tests"), *ROOT.glob("recipes/*/tests")])
CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


@pytest.mark.parametrize("project", sorted({*FOLDERS} - {CORE}), ids=lambda project: project.name)
def test_quick_tests_pass_with_nothing_but_what_the_package_declares(project: Path, tmp_path: Path) -> None:
    """A test that trains another recipe, or needs a library of an extra without a word, fails."""
    done = alone.run(project, tmp_path / "environment", "-m", "not slow", "-rs", **CAPTURED)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_core_s_tests_are_found_with_nothing_but_what_it_declares(tmp_path: Path) -> None:
    """To run them takes ten minutes: `make alone PACKAGE=unisono`."""
    done = alone.run(CORE, tmp_path / "environment", "--collect-only", "-q", **CAPTURED)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(re.findall(r"^\S+/test_\w+\.py: \d+$", done.stdout, re.MULTILINE)) > 100


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
