"""Recordings through the loader: the same bits for any ranks, workers and interruptions, bad rows masked."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.made import audited
from tests.data.recordings.written import BAD, ROWS, Listener, write
from unisono.audio import native_core
from unisono.config.batch_split import BatchSplit
from unisono.data.ledger import Ledger
from unisono.data.loading import worker_autotuning
from unisono.data.loading.loader import Loader
from unisono.data.loading.worker_autotuning import StageTimes, cpus_to_request
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.runtime.errors import DataError

pytest.importorskip("soundfile")
BATCH, STEPS = 8, 6
native = pytest.mark.skipif(native_core.module() is None, reason="the native core was not built")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("recordings"), "arrow stream"))


def _plan() -> StreamPlan:
    return StreamPlan.create(Order(ROWS, 5), BATCH, STEPS, None)


def _steps(
    task: Listener, world: int = 1, first: int = 0, last: int = STEPS, folder: Path | None = None, **how: Any
) -> list[dict[str, np.ndarray]]:
    """The global batches of some steps, put together from those of all ranks; and their ledger, if it is wanted."""
    found: list[dict[str, Any]] = [{"features": [], "row": [], "masked": []} for _ in range(first, last)]
    with ExitStack() as opened:
        for rank in range(world):
            book = folder and opened.enter_context(Ledger(folder, rank, world, first, f"{first} on {world}"))
            split = BatchSplit.create(BATCH, world, 2)
            loader = Loader(task, task.data(), _plan(), split, rank, on_error="mask", contents=True, **how)
            with closing(loader):
                running = loader.steps(first)
                for step in range(first, last):
                    batches = next(running)
                    if book is not None:
                        book.step(step, batches)
                    for micro in batches:
                        assert micro.info is not None
                        found[step - first]["masked"] += [(m.row, m.reason) for m in micro.info.masked]
                        if not micro.idle:
                            found[step - first]["features"].append(micro.arrays["features"])
                            found[step - first]["row"].append(micro.arrays["row"])
    return [
        {"features": np.concatenate(s["features"]), "row": np.concatenate(s["row"]), "masked": s["masked"]}
        for s in found
    ]


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(one) == len(other) and all(
        (a["features"] == b["features"]).all() and (a["row"] == b["row"]).all() and a["masked"] == b["masked"]
        for a, b in zip(one, other, strict=True)
    )


@native
def test_tensors_are_the_same_bits_on_any_ranks_and_workers_and_after_an_interruption(
    path: str, tmp_path: Path
) -> None:
    reference = _steps(Listener(path))
    seen = {row for step in reference for row in step["row"]}
    assert seen == set(range(ROWS)) - set(BAD)
    assert {row for step in reference for row, _ in step["masked"]} == set(BAD)
    epochs = [step["features"][list(step["row"]).index(0)] for step in reference if 0 in step["row"]]
    assert len(epochs) > 1
    assert not (epochs[0] == epochs[1]).all()  # windows and masks are drawn anew in each epoch
    for world, how in ((4, {}), (1, {"workers": 3}), (2, {"workers": 2, "worker_kind": "processes"})):
        assert _same(_steps(Listener(path), world, **how), reference), (world, how)
    resumed = _steps(Listener(path), 1, 0, 4)[:3] + _steps(Listener(path), 4, 3, STEPS)
    assert _same(resumed, reference)


@native
def test_an_audit_passes_over_masked_recordings_and_tells_those_that_changed(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    task = Listener(path)
    _steps(task, 1, 0, 4, folder)
    _steps(task, 4, 3, STEPS, folder)
    report = audited(folder, _plan(), task, task.data())
    assert report.is_clean, str(report)
    assert {row for _, row, _ in report.masked} == set(BAD)
    other, good = Listener(path), task.data()[1]["audio"]
    other.data = lambda: [{**task.data()[row], "audio": good} for row in range(ROWS)]  # type: ignore[method-assign]
    assert "its rows now differ" in str(audited(folder, _plan(), other, other.data()))


def test_the_reason_names_the_file_and_the_row(path: str) -> None:
    masked = dict(pair for step in _steps(Listener(path)) for pair in step["masked"])
    assert masked[4].startswith("row 4 of the source: ")
    assert "part-0.arrow, row 4 (from 0), clip-4.bin is cut off" in masked[4]
    assert "part-1.arrow, row 1 (from 0), clip-11.bin" in masked[11]
    task = Listener(path)
    loader = Loader(task, task.data(), _plan(), BatchSplit.create(BATCH, 1, 8), 0)
    with closing(loader), pytest.raises(DataError, match=r"row (4|11|12) of the source: .*clip-\d+.bin"):
        for _ in loader.steps():
            pass


@pytest.mark.parametrize(("locked", "kind"), [(0.02, "thread"), (0.9, "process")])
def test_threads_or_processes_are_chosen_by_what_holds_pythons_lock(
    path: str, monkeypatch: pytest.MonkeyPatch, locked: float, kind: str
) -> None:
    monkeypatch.setattr(worker_autotuning, "measure_stages", lambda maker, request: StageTimes(1e-3, 1e-3, 0.1, locked))
    task = Listener(path)
    loader = Loader(task, task.data(), _plan(), BatchSplit.create(BATCH, 1, 8), 0, worker_kind="auto", on_error="mask")
    assert f"1 {kind}," in loader.facts()


def test_more_workers_than_cores_are_warned_of(path: str) -> None:
    task = Listener(path)
    loader = Loader(task, task.data(), _plan(), BatchSplit.create(BATCH, 1, 8), 0, workers=999, on_error="mask")
    with closing(loader):
        loader.start()
        assert any("data.workers=999 with 1 process on this host is more than its" in line for line in loader.news())


def test_a_cluster_job_asks_for_the_cpus_that_its_memory_pays_for() -> None:
    assert cpus_to_request(128, 4) == 12
    assert cpus_to_request(32, 16) == 16


def test_a_loader_counts_what_it_built(path: str) -> None:
    task = Listener(path)
    loader = Loader(task, task.data(), _plan(), BatchSplit.create(BATCH, 1, 8), 0, on_error="mask", prefetch=2)
    with closing(loader):
        running = loader.steps()
        masked = sum(len(micro.info.masked) for _ in range(STEPS) for micro in next(running) if micro.info)
        counted = loader.counters()
    assert (counted["built"], counted["masked"]) == (BATCH * STEPS - masked, masked)
    assert masked > 0 < counted["collate_seconds"]
