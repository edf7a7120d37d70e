"""What a process tells is read whole, by whoever looks and whenever, and costs next to nothing."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.runtime import heartbeat


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    heartbeat.start(tmp_path, 3)
    yield heartbeat.heartbeat_path(tmp_path, 3)
    heartbeat.stop()


def read(path: Path) -> heartbeat.HeartbeatRecord:
    record = heartbeat.read_record(path)
    assert record is not None
    return record


def test_without_a_start_nothing_is_told_and_nothing_fails():
    heartbeat.stop()
    with heartbeat.phase("compute"), heartbeat.restore_phase():
        heartbeat.record_step(3, 0.1)
        heartbeat.mark_waiting("nobody")
    assert not heartbeat.is_active()


def test_a_phase_is_told_with_what_is_around_it_and_then_the_one_around_it_again(told: Path):
    heartbeat.record_step(4)
    with heartbeat.phase("compute"):
        assert (read(told).phase, read(told).step) == ("compute", 5)
        with heartbeat.phase("wait", "the gradients of step 5"):
            record = read(told)
            assert (record.phase, record.outer, record.detail) == ("wait", "compute", "the gradients of step 5")
            assert record.wait_detail == "the gradients of step 5"
        assert (read(told).phase, read(told).detail) == ("compute", "")
    assert (read(told).rank, read(told).pid, read(told).phase) == (3, os.getpid(), "start")


@pytest.mark.parametrize(("phase", "step"), [("data", 5), ("compute", 5), ("save", 4), ("evaluate", 4), ("record", 4)])
def test_what_is_saved_and_evaluated_belongs_to_the_step_before(told: Path, phase: str, step: int):
    heartbeat.record_step(4)
    with heartbeat.phase("record"), heartbeat.phase(phase):
        assert read(told).step == heartbeat.current_step() == step
        with heartbeat.phase("wait", "x"):
            assert read(told).step == step


def test_a_backward_pass_becomes_a_wait_and_what_comes_after_is_none(told: Path):
    with heartbeat.phase("compute", "a new shape"):
        with heartbeat.restore_phase():
            heartbeat.mark_waiting("the gradients of step 1")
            assert (read(told).phase, read(told).outer) == ("wait", "compute")
        assert (read(told).phase, read(told).detail) == ("compute", "a new shape")


def test_what_failed_stays_told_with_the_exit_code(told: Path):
    with pytest.raises(KeyError), heartbeat.phase("compute"), heartbeat.phase("wait", "the sums of step 1"):
        raise KeyError
    heartbeat.stop(5)
    record = read(told)
    assert (record.phase, record.code, record.outer, record.wait_detail) == ("left", 5, "wait", "the sums of step 1")


def test_durations_and_times_of_phases_add_up(told: Path):
    for made in range(1, 101):
        heartbeat.record_step(made, made / 10)
    with heartbeat.phase("data"):
        time.sleep(0.02)
        with heartbeat.phase("wait", "x"):
            time.sleep(0.05)
    record = read(told)
    assert record.durations == tuple(made / 10 for made in range(37, 101))
    assert record.totals["data"] >= 0.02e9
    assert record.totals["wait"] >= 0.05e9
    assert sum(record.totals.values()) == record.since - record.began


def test_other_threads_tell_nothing(told: Path):
    def elsewhere() -> None:
        with heartbeat.phase("wait", "a save in the background"):
            assert read(told).phase == "start"

    thread = threading.Thread(target=elsewhere)
    before = read(told).number
    thread.start()
    thread.join()
    assert read(told).number == before


def test_long_and_foreign_words_are_cut_and_kept(told: Path):
    with heartbeat.phase("wait", "é" * 500):
        assert read(told).detail.startswith("é" * 99)


def write(directory: Path, over: Any) -> None:
    heartbeat.start(directory, 0)
    number = 0
    while not over.is_set():
        number += 1
        with heartbeat.phase("wait", str(number) * 20):
            heartbeat.record_step(number, float(number))


def test_a_record_is_never_torn(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    over = context.Event()
    process = context.Process(target=write, args=(tmp_path, over))
    process.start()
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 200 and time.monotonic() < deadline:
        record = heartbeat.read_record(heartbeat.heartbeat_path(tmp_path, 0))
        if record is not None and record.phase == "wait":
            number = record.detail[: len(record.detail) // 20]
            assert record.detail == number * 20
            assert record.steps_done in (int(number) - 1, int(number))
            assert not record.durations or record.durations[-1] in (
                record.steps_done,
                record.steps_done + 1,
                record.steps_done + 2,
            )
            seen.add(record.number)
    over.set()
    process.join()
    assert len(seen) > 20


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes):
    assert heartbeat.read_record(tmp_path / "none") is None
    (tmp_path / "some").write_bytes(content)
    assert heartbeat.read_record(tmp_path / "some") is None


def test_a_file_that_was_changed_is_no_record(told: Path):
    content = bytearray(told.read_bytes())
    content[60] ^= 1
    told.with_name("other").write_bytes(content)
    assert heartbeat.read_record(told.with_name("other")) is None


def test_an_update_is_cheap(told: Path):
    def took() -> float:
        began = time.perf_counter()
        for _ in range(2000):
            with heartbeat.phase("wait", "the gradients of step 4"):
                pass
        return (time.perf_counter() - began) / 4000

    assert min(took() for _ in range(5)) < 50e-6  # 1.4 µs where nothing else runs
