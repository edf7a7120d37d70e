"""A task in a package: called by its file or its name, and imported as that package imports it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import unisono
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.launch.test_start import SHORT
from unisono.launch import task_objects
from unisono.launch.trained.run import evaluate
from unisono.task_config import find_task


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


# how a task is called -----------------------------------------------------------------------------------------------

PACKAGED = """
from .. import helper
from packages.unisono.tests.tasks import LinearTask


class Mine(LinearTask):
    answer = helper.ANSWER
"""


def package(here: Path, name: str, init: bool) -> Path:
    """A task whose module imports from the package above it."""
    path = here / name / "deep" / "task.py"
    path.parent.mkdir(parents=True)
    (here / name / "helper.py").write_text("ANSWER = 42\n")
    path.write_text(PACKAGED)
    for parent in (path.parent, path.parent.parent) if init else ():
        (parent / "__init__.py").touch()
    return path


def test_a_task_of_a_package_is_called_by_its_file_and_imported_with_its_package(here: Path):
    path = package(here, "packaged", init=True)
    found = find_task(f"{path}:Mine")
    assert (found.__module__, vars(found)["answer"]) == ("packaged.deep.task", 42)
    assert task_objects.reference_to(found) == f"{path}:Mine"
    assert unisono.train(found, SHORT).step == 3


def test_a_task_of_a_package_without_init_files_is_called_by_its_name(here: Path, monkeypatch: pytest.MonkeyPatch):
    package(here, "bare", init=False)
    monkeypatch.syspath_prepend(str(here))
    found = find_task("bare.deep.task:Mine")
    assert task_objects.reference_to(found) == "bare.deep.task:Mine"
    assert unisono.train(found, SHORT).step == 3


def test_a_package_of_the_same_name_elsewhere_is_not_taken_for_it(here: Path):
    first, second = package(here / "a", "twice", init=True), package(here / "b", "twice", init=True)
    assert find_task(f"{first}:Mine").__module__ == "twice.deep.task"
    second.write_text("from packages.unisono.tests.tasks import LinearTask\n\n\nclass Mine(LinearTask):\n    pass\n")
    assert "answer" not in vars(find_task(f"{second}:Mine"))


def test_a_finished_run_is_evaluated_from_anywhere(here: Path, monkeypatch: pytest.MonkeyPatch):
    jobs.task_file(here)
    result = unisono.train("small.py:Small", {**SHORT, "run.name": "a"})
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert evaluate(here / "runs" / "a")["loss"] == result.evaluation["loss"]
