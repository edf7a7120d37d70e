"""Clocks that are wrong, or jump, change neither a run nor what is read of it."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.launch import jobs
from unisono import train
from unisono.data import cache_lock
from unisono.runtime.errors import DataError
from unisono.supervise import run_status

OVERRIDES = {
    "train.steps": 6, "train.global_batch": 8, "layout.micro_batch": 4, "checkpoint.every": 2, "run.name": "a",
    "observe.progress": False,
}  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in jobs.events(folder / "a") if not event.get("eval")]


def test_a_clock_that_jumps_by_years_changes_no_run_and_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, jumping = tmp_path / "plain", tmp_path / "jumping"
    train(tasks.LinearTask, {**OVERRIDES, "run.dir": str(plain)})
    jumps = itertools.cycle([0.0, 2.0**31 + 7, -3600.0, 1e11])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    train(tasks.LinearTask, {**OVERRIDES, "run.dir": str(jumping), "run.stop_after": 4})
    for number, path in enumerate(sorted((jumping / "a").rglob("*"))):  # as of a file server with another clock
        os.utime(path, (times := [0, 2**31 + 7, 4 * 10**9][number % 3], times))
    assert run_status.read_status(jumping / "a").age >= 0
    train(tasks.LinearTask, {**OVERRIDES, "run.dir": str(jumping)})
    assert losses(jumping) == losses(plain)
    assert run_status.read_status(jumping / "a").state == "finished"


def test_a_wait_that_began_in_the_future_is_not_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`for -3600 s`."""
    entry = tmp_path / "entry"
    with cache_lock.lock_entry(entry, 1.0):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 3600)
        with (
            pytest.raises(DataError, match=r"computed by process \d+ on \S+, for 0 s"),
            cache_lock.lock_entry(entry, 0.1),
        ):
            pass
