"""A job that has to go: real processes and signals; the command that it prints goes on as if nothing had been."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from packages.unisono.tests.launch import jobs
from unisono.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
LOGIN = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
TRAIN = ("train", "small.py:Small", *jobs.QUIET, "run.name=a", "train.steps=40", "task.dropout=0.2", "eval.every=3")


def words(folder: Path, *more: str, world: int = 2) -> list[str]:
    slow = (f"task.marks={folder}/marks", "task.sleep=0.01", "task.hold=0.3")
    return [jobs.UNISONO, *TRAIN, f"layout.world_size={world}", *slow, *more]


def interrupted(
    folder: Path, number: int, command: Sequence[str], *, rank: int | None = None, world: int = 2
) -> tuple[int, str]:
    """The exit code of a command, and what it said, once it got a signal while it trained: the launcher, or a rank."""
    with jobs.started(command, folder) as process:
        pids = jobs.training(folder / "marks", world)
        os.kill(process.pid if rank is None else pids[rank], number)
        _, errors = process.communicate(timeout=60)
        assert jobs.all_gone(folder, 30)
    return process.returncode, errors


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "runs" / "a" / "checkpoints").glob("step-*"))


def newest(folder: Path) -> dict[str, np.ndarray]:
    path = folder / "runs" / "a" / "checkpoints" / f"step-{saved(folder)[-1]:08d}"
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    jobs.task_file(folder)
    done = jobs.unisono(*TRAIN, "layout.world_size=2", f"task.marks={folder}", "task.sleep=0.01", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_that_was_preempted_twice_ends_as_one_that_never_was(here: Path, whole: Path):
    (here / "held").touch()  # so that it is not over before the signals come
    code, told = interrupted(here, signal.SIGTERM, words(here))  # its launcher
    (step,) = saved(here)
    assert 1 <= step < 40
    assert code == 75
    typed = [word for word in words(here)[1:] if word != "run.name=a"]
    resume = f"Resume with:\n  {shlex.join(['unisono', *typed, 'run.name=a'])}\n"
    assert told == f"unisono: preempted after step {step} of 40, which is saved. {resume}"
    for mark in (here / "marks").iterdir():
        mark.unlink()
    with jobs.started(words(here), here) as process:  # and, on its way again, one rank alone
        ranks = jobs.training(here / "marks", 2)
        jobs.wait_for(lambda: len(jobs.events(here / "runs" / "a")) > 1.4 * step + 3, 60)
        os.kill(ranks[-1], signal.SIGUSR1)
        _, told = process.communicate(timeout=60)
    (here / "held").unlink()
    assert process.returncode == 75, told
    assert saved(here)[-1] > step
    assert told == f"unisono: preempted after step {saved(here)[-1]} of 40, which is saved. {resume}"
    resumed = jobs.unisono(*words(here)[1:], cwd=here)
    assert resumed.returncode == 0, resumed.stderr
    assert saved(here)[-1] == 40
    mine, theirs = newest(here), newest(whole)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert sum(np.abs(value).sum() for value in mine.values()) > 0
    steps = [(event["step"], bool(event.get("eval"))) for event in jobs.events(here / "runs" / "a")]
    assert steps == [(event["step"], bool(event.get("eval"))) for event in jobs.events(whole / "runs" / "a")]


def test_a_rank_that_does_not_come_to_a_boundary_is_ended_by_the_deadline(here: Path):
    with jobs.started(words(here, "task.hangs=1", "launch.preempt_deadline=2"), here) as process:
        jobs.training(here / "marks", 2)
        jobs.wait_for(lambda: len(jobs.events(here / "runs" / "a")) == 2, 60)
        time.sleep(0.5)
        process.terminate()
        _, told = process.communicate(timeout=60)
        assert jobs.all_gone(here, 30)
    assert process.returncode == 75, told
    assert told.startswith(
        "unisono: preempted: the deadline of 2 s (launch.preempt_deadline) passed before all ranks"
    ), told


def test_one_process_saves_too_and_a_second_signal_changes_nothing(here: Path):
    with jobs.started(words(here, "train.steps=3000", world=1), here) as process:
        jobs.training(here / "marks", 1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        _, told = process.communicate(timeout=60)
    (step,) = saved(here)
    assert process.returncode == 75, told
    assert told.startswith(f"unisono: preempted after step {step} of 3000, which is saved.")
    assert not list((here / "runs" / "a" / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_whose_terminal_is_gone_saves_and_ends(here: Path, world: int):
    terminal, side = pty.openpty()
    started = [*words(here, "train.steps=3000", world=world), "observe.progress=true"]
    login = [sys.executable, "-c", LOGIN, *started]  # a session of its own, whose terminal this is
    process = subprocess.Popen(login, cwd=here, env=jobs.environment(), stdin=side, stdout=side, stderr=side)
    os.close(side)
    try:
        jobs.training(here / "marks", world)
        os.close(terminal)
        assert process.wait(60) == 75
        assert jobs.all_gone(here, 30)
    finally:
        for pid in {process.pid, *jobs.working_in(here)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    (step,) = saved(here)
    assert 1 <= step < 3000


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_under_nohup_outlives_its_terminal(here: Path, world: int):
    with jobs.started(["nohup", *words(here, "train.steps=3000", world=world)], here) as process:
        jobs.training(here / "marks", world)
        before = len(jobs.events(here / "runs" / "a"))
        process.send_signal(signal.SIGHUP)
        jobs.wait_for(lambda: len(jobs.events(here / "runs" / "a")) > before + 20, 60)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 75


def test_a_run_can_be_asked_to_save_and_to_stop(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(here)
    run = here / "runs" / "a"
    with jobs.started(words(here, "train.steps=3000", "eval.every=5000", world=1), here) as process:
        jobs.training(here / "marks", 1)
        assert main.main(["save", str(run)]) == 0
        jobs.wait_for(lambda: (run / "checkpoints").is_dir() and len(saved(here)) == 1, 60)
        (first,) = saved(here)
        assert main.main(["stop", str(run)]) == 0
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    last = saved(here)[-1]
    assert first < last < 3000
    assert jobs.events(run)[-1]["step"] == last
    assert main.main(["stop", str(run)]) == 2


def test_torchruns_processes_answer_its_signal(here: Path):
    command = jobs.torchrun("--nproc-per-node=2", "--no-python")
    code, told = interrupted(here, signal.SIGTERM, [*command, *words(here, "train.steps=3000")])
    (step,) = saved(here)
    assert code == 1  # torchrun's own, after a signal
    kept = f"unisono: ended on rank 0: preempted after step {step} of 3000, which is saved. "
    assert f"{kept}Resume (under torchrun, as before) with:\n  unisono train " in told


@pytest.mark.slow
def test_a_loader_process_leaves_signals_to_whoever_asks(here: Path):
    more = ("train.steps=3000", "data.workers=1", "data.worker_kind=processes")
    with jobs.started(words(here, *more, world=1), here) as process:
        pid = jobs.training(here / "marks", 1)[0]
        children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        assert children
        for child in children:
            os.kill(int(child), signal.SIGUSR1)
        os.kill(pid, signal.SIGUSR1)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
