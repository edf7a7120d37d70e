"""What a process says when its work fails, and where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.launch import cluster
from unisono.launch.processes import rank_process
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import CheckpointError, ConfigError, GuardError, NonFiniteError, RunError, SaveError


class Left(BaseException):
    """Instead of the end of this process."""


@pytest.fixture(autouse=True)
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> Any:
        raise Left(code)

    monkeypatch.setattr(rank_process, "exit_now", leave)


def ended(error: Exception, rank: int, report: Path | None = None) -> int:
    """The exit code of a process of two whose work raises."""

    def work() -> None:
        raise error

    with pytest.raises(Left) as caught:
        rank_process.run_and_exit(work, ProcessInfo(rank, 2, rank, 2, "torchrun"), report)
    code: int = caught.value.args[0]
    return code


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, GuardError, RuntimeError])
def test_a_fault_that_may_be_of_one_rank_alone_is_told_by_that_rank(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
):
    ended(kind("the sky fell"), 1)
    told = capsys.readouterr().err
    assert told.startswith("unisono: error on rank 1: ")
    assert "the sky fell" in told and "Traceback" not in told


@pytest.mark.parametrize("kind", [RunError, NonFiniteError])
def test_what_the_ranks_agreed_on_is_told_by_the_first_alone(kind: type[Exception], capsys: pytest.CaptureFixture[str]):
    codes = {ended(kind("the sky fell"), rank) for rank in (0, 1)}
    assert capsys.readouterr().err == "unisono: error on rank 0: the sky fell\n"
    assert len(codes) == 1


@pytest.mark.parametrize(
    ("error", "code", "called"),
    [
        (CheckpointError("the sky fell"), 2, ""),
        (GuardError("the sky fell", fault="Replicas drift apart"), 4, "Replicas drift apart"),
        (KeyError("the sky fell"), 1, ""),
    ],
)
def test_a_fault_and_what_it_is_called_are_left_to_the_launcher_that_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int, called: str
):
    assert ended(error, 1, tmp_path / "fault.json") == code
    assert capsys.readouterr().err == ""
    told = json.loads((tmp_path / "fault.json").read_text())
    assert "the sky fell" in told["text"]
    assert (told["rank"], told["kind"], told["code"], told["fault"]) == (1, type(error).__name__, code, called)


@pytest.mark.parametrize(
    ("error", "line"),
    [(CheckpointError("the sky fell"), " rank 3 ERROR: the sky fell"), (KeyError("x"), "KeyError: 'x'")],
)
def test_a_fault_is_in_the_rank_s_log(tmp_path: Path, error: Exception, line: str):
    with pytest.raises(type(error)), rank_process.log_errors(tmp_path, ProcessInfo(3, 4, 1, 2, "slurm")):
        raise error
    assert (tmp_path / "logs" / "rank-00003.log").read_text().splitlines()[-1].endswith(line)


def test_a_fault_that_the_folder_has_no_room_for_is_left_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(heartbeat.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "logs").touch()  # nothing can be written into it
    ended(SaveError("no space"), 1, tmp_path / "logs" / "rank-00001.fault.json")
    assert json.loads((tmp_path / "rank-00001.fault.json").read_text())["text"] == "no space"


def test_a_process_without_our_launcher_leaves_its_fault_for_whoever_explains_the_run(tmp_path: Path):
    with pytest.raises(SaveError), rank_process.record_errors(tmp_path, ProcessInfo(0, 1, 0, 1)):
        raise SaveError("no space")
    told = json.loads((tmp_path / "logs" / "rank-00000.fault.json").read_text())
    assert (told["text"], told["code"]) == ("no space", 7)
    assert (tmp_path / "logs" / "rank-00000.log").read_text().splitlines()[-1].endswith("no space")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends a process with its parent")
@pytest.mark.parametrize("killed", [False, True])
def test_a_process_whose_launcher_was_killed_before_it_came_to_itself_ends_at_once(killed: bool) -> None:
    launcher = os.getpid() if not killed else os.getpid() + 1
    run_id = f"unisono-{launcher}"
    program = "from unisono.launch.processes import rank_process; rank_process.die_with_parent(); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, cluster.RUN_ID_VARIABLE: run_id, "TORCHELASTIC_RUN_ID": run_id},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == ((-signal.SIGKILL, "") if killed else (0, "goes on\n"))


def test_a_process_that_another_launcher_has_started_has_none_of_ours() -> None:
    assert cluster.launcher_pid({}) is None
    assert cluster.launcher_pid({cluster.RUN_ID_VARIABLE: "unisono-7", "TORCHELASTIC_RUN_ID": "theirs"}) is None
    assert cluster.launcher_pid({cluster.RUN_ID_VARIABLE: "unisono-7", "TORCHELASTIC_RUN_ID": "unisono-7"}) == 7
