"""Recordings through the loader: the same bits for any ranks, workers and interruptions, bad rows masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.data import made
from unisono.data.loading import worker_autotuning
from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.loading.worker_autotuning import StageTimes
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.runtime.errors import DataError

from ..backends import native
from .written import BAD, ROWS, Listener, write

pytest.importorskip("soundfile")
STEPS = 6
PLAN = StreamPlan.create(Order(ROWS, 5), 8, STEPS, None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("recordings"), "arrow stream"))


def _steps(path: str, world: int = 1, first: int = 0, last: int = STEPS, **how: Any) -> list[list[MicroBatch]]:
    return made.steps(Listener(path), world, 2, first, last, of=PLAN, **{"on_error": "mask", "contents": True, **how})


def _masked(steps: list[list[MicroBatch]]) -> dict[int, str]:
    return {m.row: m.reason for step in steps for micro in step if micro.info for m in micro.info.masked}


@native
def test_tensors_are_the_same_bits_on_any_ranks_and_workers_and_after_an_interruption(path: str) -> None:
    reference = _steps(path)
    rows = [(row, micro.arrays["features"][n]) for step in reference for micro in step if not micro.idle
            for n, row in enumerate(micro.arrays["row"])]  # fmt: skip
    assert {row for row, _ in rows} == set(range(ROWS)) - set(BAD)
    assert set(_masked(reference)) == set(BAD)
    one, other, *_ = (features for row, features in rows if row == 0)
    assert not (one == other).all()  # windows and masks are drawn anew in each epoch
    for world, how in ((4, {}), (1, {"workers": 3}), (2, {"workers": 2, "worker_kind": "processes"})):
        made.same(_steps(path, world, **how), reference)
    made.same(_steps(path, 1, 0, 4)[:3] + _steps(path, 4, 3), reference)


@native
def test_an_audit_passes_over_masked_recordings_and_tells_those_that_changed(path: str, tmp_path: Path) -> None:
    folder, task = tmp_path / "run", Listener(path)
    made.recorded(task, folder, 0, 4, start="one", of=PLAN)
    made.recorded(task, folder, 3, STEPS, 4, start="four", of=PLAN)
    report = made.audited(folder, PLAN, task, task.data())
    assert report.is_clean, str(report)
    assert {row for _, row, _ in report.masked} == set(BAD)
    other, good = Listener(path), task.data()[1]["audio"]
    other.data = lambda: [{**task.data()[row], "audio": good} for row in range(ROWS)]  # type: ignore[method-assign]
    assert "its rows now differ" in str(made.audited(folder, PLAN, other, other.data()))


def test_the_reason_names_the_file_and_the_row(path: str) -> None:
    masked = _masked(_steps(path))
    assert masked[4].startswith("row 4 of the source: ")
    assert "part-0.arrow, row 4 (from 0), clip-4.bin is cut off" in masked[4]
    assert "part-1.arrow, row 1 (from 0), clip-11.bin" in masked[11]
    with pytest.raises(DataError, match=r"row (4|11|12) of the source: .*clip-\d+.bin"):
        _steps(path, on_error="stop")


@pytest.mark.parametrize(("locked", "kind"), [(0.02, "thread"), (0.9, "process")])
def test_threads_or_processes_are_chosen_by_what_holds_pythons_lock(
    path: str, monkeypatch: pytest.MonkeyPatch, locked: float, kind: str
) -> None:
    monkeypatch.setattr(worker_autotuning, "measure_stages", lambda *_: StageTimes(1e-3, 1e-3, 0.1, locked))
    with made.loader(Listener(path), of=PLAN, worker_kind="auto", on_error="mask") as loader:
        assert f"1 {kind}," in loader.facts()
