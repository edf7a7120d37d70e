"""A run that this user made may import its own task without a word; whatever else names code is asked about."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import unisono
from packages.unisono.tests.security.runs import stranger
from unisono.config.code import foreign_run, own_runs
from unisono.config.code.foreign_run import TrustError, resolve_task
from unisono.data.audit import audit
from unisono.launch.trained.replay import replay
from unisono.launch.trained.run import evaluate

TASK = """
import unisono
from beside import Rows

class Mine(Rows):
    def held_out(self):
        return self.data()[:7]

def shape(run: unisono.Run):
    return str(tuple(run.load_model().weight.shape))

VERBS = {"shape": shape}
"""
SMALL = {
    "train.steps": 2, "train.global_batch": 8, "layout.world_size": 1, "layout.threads": 1, "layout.device": "cpu",
    "observe.progress": False, "checkpoint.every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a task in a file that imports another one, and the two files."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(TASK)
    (folder / "beside.py").write_text("from packages.unisono.tests.tasks import LinearTask as Rows\n")
    unisono.train(str(folder / "mine.py"), {**SMALL, "run.dir": str(folder), "run.name": "run"})
    return folder


@pytest.fixture
def mine(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same, with copies of what a test may spoil put back, in a process that has not imported the task."""
    monkeypatch.setattr(foreign_run, "is_imported", lambda reference: False)
    monkeypatch.setenv("XDG_STATE_HOME", os.environ["XDG_STATE_HOME"])
    kept = {path: path.read_bytes() for path in (*made.glob("*.py"), *made.glob("run/*.*"), own_runs.key_file())}
    yield made
    for path, content in kept.items():
        path.unlink(missing_ok=True)
        path.touch(0o600)
        path.write_bytes(content)


def refusal(run: Path) -> str:
    with pytest.raises(TrustError, match="--trust") as caught:
        resolve_task(run)
    return str(caught.value)


USES: dict[str, Callable[..., Any]] = {
    "evaluate": evaluate,
    "replay": replay,
    "audit": audit,
    "load_model": unisono.load_model,
    "open_run": unisono.open_run,
}


@pytest.mark.parametrize("use", USES)
def test_whatever_opens_a_run_opens_one_s_own_without_a_word(mine: Path, use: str):
    assert USES[use](mine / "run") is not None


def test_the_command_needs_no_word_for_one_s_own_run(mine: Path):
    """In a new process, which has imported nothing: the default verb, and one of the user's file."""
    for verb, told in (("predict", "loss: "), ("shape", "(1, ")):
        command = [sys.executable, "-m", "unisono", verb, str(mine / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, told in done.stdout) == (0, True), done.stderr


def test_a_run_may_be_moved(mine: Path, tmp_path: Path):
    shutil.copytree(mine / "run", tmp_path / "moved")
    assert resolve_task(tmp_path / "moved") == f"{mine}/mine.py:Mine"


@pytest.mark.parametrize("name", ["mine.py", "beside.py"])
def test_code_that_has_changed_since_is_asked_about_with_its_file(mine: Path, name: str):
    with (mine / name).open("a") as file:
        file.write("changed = True\n")
    assert f"You made this run, but its code has changed since: {mine / name}" in refusal(mine / "run")


def test_a_module_that_would_now_be_imported_instead_of_another_is_asked_about(mine: Path):
    (mine / "packages.py").write_text("")
    try:
        assert f"{mine}/packages.py" in refusal(mine / "run").partition("its code has changed since: ")[2]
    finally:
        (mine / "packages.py").unlink()


@pytest.mark.parametrize("change", [{"recipe": "evil.py:Evil"}, {"callbacks": ["evil.py:Evil"]}, {"run": {}}])
def test_a_configuration_that_has_changed_since_is_asked_about(mine: Path, change: dict[str, Any]):
    path = mine / "run" / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    assert "You made this run, but its config.yaml has changed since" in refusal(mine / "run")


def test_a_run_of_somebody_else_is_asked_about_also_under_a_mark_of_one_s_own(mine: Path, tmp_path: Path):
    theirs, touched = stranger(tmp_path)
    assert "Nothing shows that you made this run" in refusal(theirs)
    shutil.copy(mine / "run" / "mark.json", theirs)
    assert "its config.yaml has changed since" in refusal(theirs)
    assert not touched.exists()


def test_a_copied_run_that_another_user_made_is_asked_about(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # as of another user: another key, or none
    assert "It was made by somebody else" in refusal(mine / "run")
    own_runs.mark_run(tmp_path, {})
    assert "It was made by somebody else" in refusal(mine / "run")


@pytest.mark.parametrize(
    "forge",
    [
        lambda mark: {**mark, "mac": "0" * 64},
        lambda mark: {**mark, "mac": "\ud800"},
        lambda mark: {**mark, "mac": None},
        lambda mark: {**mark, "files": {**mark["files"], "/more.py": "0"}},
        lambda mark: {**mark, "files": [1]},
        lambda mark: {},
        lambda mark: [mark],
    ],
)
def test_a_forged_mark_is_refused(mine: Path, forge: Callable[[Any], Any]):
    path = mine / "run" / "mark.json"
    path.write_text(json.dumps(forge(json.loads(path.read_text()))))
    assert "It was made by somebody else" in (told := refusal(mine / "run")) or "mark.json cannot be read" in told


def test_a_mark_that_is_a_link_is_refused(mine: Path, tmp_path: Path):
    path = mine / "run" / "mark.json"
    path.rename(tmp_path / "mark.json")
    path.symlink_to(tmp_path / "mark.json")
    assert "mark.json cannot be read" in refusal(mine / "run")


# the key ------------------------------------------------------------------------------------------------------------


def test_the_key_is_made_once_and_only_its_user_can_read_it(mine: Path, tmp_path: Path):
    key = own_runs.key_file()
    assert (key.stat().st_mode & 0o777, len(before := key.read_bytes())) == (0o600, 32)
    own_runs.mark_run(tmp_path, {})
    assert (key.read_bytes(), [path.name for path in key.parent.iterdir()]) == (before, [key.name])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_key_that_others_can_read_or_write_is_not_used(
    mine: Path, tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
):
    own_runs.key_file().chmod(mode)
    assert "is not a file that only you can read" in refusal(mine / "run")
    (tmp_path / "mark.json").write_text("from before")
    own_runs.mark_run(tmp_path, {})
    assert "WARNING" in capsys.readouterr().err and not (tmp_path / "mark.json").exists()


def test_a_key_that_somebody_else_owns_is_not_used(mine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert f"owner {os.getuid()}). It was not used" in refusal(mine / "run")


def test_a_link_in_place_of_the_key_is_not_followed(mine: Path, tmp_path: Path):
    key = own_runs.key_file()
    key.rename(tmp_path / "key")
    key.symlink_to(tmp_path / "key")
    assert "--trust" in refusal(mine / "run")


def test_without_a_place_for_the_key_a_run_trains_and_is_asked_about(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    own_runs.mark_run(mine / "run", {})
    assert "Nothing shows that you made this run" in refusal(mine / "run")
