"""Who may write into a run's folder: real processes that live, die, sleep and wake up again."""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from packages.unisono.tests.checkpoint.saved import save
from packages.unisono.tests.launch import jobs
from unisono.checkpoint.core import commit
from unisono.launch.resolving import run_directory as runs
from unisono.runtime.errors import RunError, SaveError
from unisono.runtime.untrusted import safe_paths
from unisono.supervise import identity, run_lock

OWNER = """
import sys, time
from pathlib import Path
from unisono.runtime.errors import RunError, SaveError
from unisono.supervise import run_lock
folder = Path(sys.argv[1])
with run_lock.hold_lock(folder, interval=0.1) as mine:
    print(mine.token, flush=True)
    for _ in sys.stdin:  # a commit, whenever it is asked for
        try:
            mine.check_held()
            (folder / "commit").touch()
            print("committed", flush=True)
        except RunError as error:
            print(error, flush=True)
"""


@contextmanager
def owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lease."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def asked(process: subprocess.Popen[str]) -> str:
    """What an owner says when it is to commit."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a process; returns once none of its threads can write another heartbeat."""
    process.send_signal(signal.SIGSTOP)
    threads = list(Path(f"/proc/{process.pid}/task").iterdir())
    jobs.wait_for(lambda: all(" T " in (thread / "stat").read_text() for thread in threads), 60)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on another host than those that it starts."""
    monkeypatch.setattr(identity, "machine_id", lambda: "elsewhere")


def refused(folder: Path, **how: float) -> str:
    with pytest.raises(RunError) as caught, run_lock.hold_lock(folder, **how):
        pass
    return str(caught.value)


def test_a_living_owner_is_named_and_a_dead_one_is_replaced_at_once(tmp_path: Path):
    with owner(tmp_path) as process:
        told = refused(tmp_path)
        assert told.startswith(
            f"{tmp_path} is in use by process {process.pid} on {platform.node()}, which is training this run"
        )
        assert (run_lock.find_holder(tmp_path) or {})["pid"] == process.pid
        assert asked(process) == "committed"
        process.kill()
        process.wait()
        assert run_lock.find_holder(tmp_path) is None
        began = time.monotonic()
        with run_lock.hold_lock(tmp_path, patience=600) as mine:
            assert (mine.token, mine.seized) == (2, True)
        assert time.monotonic() - began < 300, "no process waited for a heartbeat"


def test_who_lets_go_leaves_nothing_to_wait_for_and_tokens_only_grow(tmp_path: Path, elsewhere: None):
    for token in range(1, 9):
        with run_lock.hold_lock(tmp_path) as mine:
            assert (mine.token, mine.seized) == (token, False)
        assert run_lock.find_holder(tmp_path) is None
    assert len(list((tmp_path / "lease").glob("*.json"))) == 5


def test_an_owner_on_another_host_is_refused_once_its_counter_moves(
    tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with owner(tmp_path) as process:
        for wrong in (0.0, 4e9):  # no clock is asked
            monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
            os.utime(tmp_path / "lease" / "00000001.beat", (wrong, wrong))
            began = time.monotonic()
            assert f"in use by process {process.pid} on {platform.node()}" in refused(tmp_path, patience=600)
            assert time.monotonic() - began < 300
    assert "which cannot be checked from this host; waiting 600 s for a heartbeat" in capsys.readouterr().err


def test_an_owner_that_slept_too_long_is_replaced_and_commits_nothing_when_it_wakes_up(tmp_path: Path, elsewhere: None):
    with owner(tmp_path) as process:
        assert asked(process) == "committed"
        (tmp_path / "commit").unlink()
        stop(process)
        began = time.monotonic()
        with run_lock.hold_lock(tmp_path, patience=1.0) as mine:
            assert time.monotonic() - began >= 1.0
            assert (mine.token, mine.seized) == (2, True)
            process.send_signal(signal.SIGCONT)
            told = asked(process)
            assert told.startswith(
                f"{tmp_path} was taken over by process {os.getpid()} on {platform.node()}, because this run"
            )
            assert not (tmp_path / "commit").exists()
            mine.check_held()
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()
    assert run_lock.find_holder(tmp_path) is None  # what the old one lets go of is not the new one's


def test_of_many_who_find_a_dead_owner_one_takes_its_place(tmp_path: Path):
    with owner(tmp_path) as process:
        process.kill()
        process.wait()
    won: list[int] = []
    lost: list[str] = []
    ready, over = threading.Barrier(8), threading.Event()

    def challenge() -> None:
        ready.wait()
        try:
            taken = run_lock._acquire(tmp_path, 1.0, 1.0)
            won.append(taken.token)
        except RunError as error:
            lost.append(str(error))
        over.set()

    threads = [threading.Thread(target=challenge) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [2]
    assert len(lost) == 7


def test_an_owner_that_is_being_written_or_damaged_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "00000004.json").write_text("{")
    with run_lock.hold_lock(tmp_path, patience=0.3) as mine:
        assert mine.token == 5
    assert "last used by process 0 on an unknown host" in capsys.readouterr().err


@contextmanager
def failing(name: str, code: int, times: int = 10**6) -> Iterator[None]:
    """Calls that open, look at or list what has a name fail, as on a file server that is away."""
    left = [times]

    def fail(real: Any) -> Any:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path).endswith(name) and left[0] > 0:
                left[0] -= 1
                raise OSError(code, os.strerror(code), os.fspath(path))
            return real(path, *arguments, **options)

        return call

    with mock.patch.multiple(os, **{call: fail(getattr(os, call)) for call in ("open", "stat", "listdir")}):
        yield


def test_an_owner_whose_record_cannot_be_read_for_a_moment_is_not_replaced(tmp_path: Path, elsewhere: None):
    """It was taken for dead at once, and two processes wrote into one run."""
    with owner(tmp_path), failing("00000001.json", errno.ESTALE):
        began = time.monotonic()
        assert "is in use by" in refused(tmp_path, patience=600)
        assert time.monotonic() - began < 300


def test_leases_that_cannot_be_listed_are_not_taken_for_none(tmp_path: Path, elsewhere: None):
    with owner(tmp_path), failing("lease", errno.ESTALE), pytest.raises(OSError, match="Stale file handle"):
        run_lock._acquire(tmp_path, 1.0, 1.0)
    assert [path.name for path in (tmp_path / "lease").glob("*.json")] == ["00000001.json"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("name", ["lease", "00000001.beat"])
def test_a_lock_holds_while_the_file_system_does_not_answer(tmp_path: Path, code: int, name: str):
    """After ESTALE a run ended because somebody had replaced its folder, which nobody had."""
    with run_lock.hold_lock(tmp_path, interval=0.01):
        lock = run_lock.inherited_lock(tmp_path)
        assert lock is not None
        with failing(name, code):
            time.sleep(0.05)  # heartbeats that fail
            lock.check_held()
            if name == "lease":
                assert run_lock.find_holder(tmp_path) is None and not run_lock.was_released(tmp_path)
        lock.check_held()
        before = lock.counter_file.read_text()
        jobs.wait_for(lambda: lock.counter_file.read_text() != before, 60)  # they come again


def without_links(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def none(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", none)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV], ids=errno.errorcode.get)
def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    """EXDEV is what some give that keep files of a folder on several disks."""
    without_links(monkeypatch, code)
    with run_lock.hold_lock(tmp_path) as mine:
        assert mine.token == 1
        assert "is in use by" in refused(tmp_path)
    assert json.loads((tmp_path / "lease" / "00000001.json").read_text())["released"]


def test_a_lock_that_was_half_written_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The quota was used up: the next start waited 20 s for whoever had that lock, and called it an unknown host."""

    class Full(io.BytesIO):
        def read(self, _: int | None = -1) -> bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    without_links(monkeypatch, errno.EPERM)
    with monkeypatch.context() as patch:
        patch.setattr(safe_paths, "open_inside", lambda *_: Full())
        with (
            pytest.raises(RunError, match=rf"cannot write to {tmp_path}: Disk quota exceeded; choose"),
            runs.hold_directory(tmp_path),
        ):
            pass
    assert not list((tmp_path / "lease").glob("*.json*"))
    with run_lock.hold_lock(tmp_path) as mine:
        assert not mine.seized


def test_processes_of_an_owner_know_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(run_lock.LOCK_VARIABLE, raising=False)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with run_lock.hold_lock(tmp_path / "a") as mine:
        found = run_lock.inherited_lock(tmp_path / "a")
        assert found is not None and found.token == mine.token
        assert run_lock.inherited_lock(tmp_path / "b") is None
    assert run_lock.inherited_lock(tmp_path / "a") is None
    assert run_lock.LOCK_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("become", "told"),
    [
        (
            lambda run: run.rename(run.with_name("b")),
            "was renamed to {0}/b while the run trained in it. Rename it back",
        ),
        (shutil.rmtree, "was deleted, with its checkpoints, while"),
        (lambda run: shutil.rmtree(run / "lease"), "has lost its lock (00000001.beat)"),
        (lambda run: shutil.copytree(run.rename(run.with_name("b")), run), "was renamed to {0}/b while"),
    ],
)
def test_a_lock_holds_only_while_its_own_folder_is_there(tmp_path: Path, become: Any, told: str):
    """A run went on to its end in silence, and made a new folder for its checkpoints."""
    run = tmp_path / "a"
    run.mkdir()
    with run_lock.hold_lock(run):
        lock = run_lock.inherited_lock(run)
        assert lock is not None
        lock.check_held()
        become(run)
        with pytest.raises(RunError) as caught:
            lock.check_held()
    assert str(caught.value).startswith(f"{run} {told.format(tmp_path)}")
    assert str(caught.value).endswith("The run ends here, and writes nothing more")


def test_no_save_creates_the_folder_of_a_run(tmp_path: Path):
    with pytest.raises(SaveError, match="No such file or directory"):
        save(tmp_path / "gone" / "checkpoints", 4)
    assert not (tmp_path / "gone").exists()


def test_who_takes_over_removes_what_the_last_one_was_writing(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    with owner(run) as process:
        process.kill()
        process.wait()
    half = run / "checkpoints" / ".writing-step-00000007"
    half.mkdir(parents=True)
    with runs.hold_directory(run):
        assert not half.exists()


# a whole run --------------------------------------------------------------------------------------------------------

LONG = ("train.steps=5000", "task.sleep=0.02", "checkpoint.every=20", "eval.at_end=false", "layout.world_size=1")


def test_a_run_that_slept_while_another_host_took_it_over_ends_without_a_commit(tmp_path: Path, elsewhere: None):
    jobs.task_file(tmp_path)
    marks = tmp_path / "marks"
    marks.mkdir()
    words = ("train", "small.py:Small", *jobs.QUIET, "run.name=a", *LONG, f"task.marks={marks}")
    run = tmp_path / "runs" / "a"
    with jobs.started([jobs.UNISONO, *words], tmp_path) as process:
        jobs.training(marks, 1)
        jobs.wait_for(lambda: (run / "checkpoints" / "step-00000020").is_dir(), 60)
        stop(process)
        with run_lock.hold_lock(run, patience=1.0):
            before = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
            process.send_signal(signal.SIGCONT)
            _, told = process.communicate(timeout=60)
            assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == before
    assert process.returncode == 2
    assert f"was taken over by process {os.getpid()} on " in told


@pytest.mark.parametrize("gone", ["renamed", "deleted"])
def test_a_run_whose_folder_vanishes_ends_at_its_next_look_and_creates_nothing(tmp_path: Path, gone: str):
    jobs.task_file(tmp_path)
    marks = tmp_path / "marks"
    marks.mkdir()
    words = ("train", "small.py:Small", *jobs.QUIET, "run.name=a", *LONG, f"task.marks={marks}")
    run, kept = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    with jobs.started([jobs.UNISONO, *words], tmp_path) as process:
        jobs.training(marks, 1)
        jobs.wait_for(lambda: (run / "checkpoints" / "step-00000020").is_dir(), 60)
        run.rename(kept)
        if gone == "deleted":
            shutil.rmtree(kept)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 2, told
    assert ("was renamed to" if gone == "renamed" else "was deleted, with its checkpoints") in told
    assert "Traceback" not in told
    assert not run.exists()
    if gone == "renamed":
        commit.open_checkpoint(commit.find_checkpoints(kept / "checkpoints")[-1])
