"""Mixture, shuffle, packing, augmentation and bad records together: one global sequence, however it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.made import BAD, Everything
from tests.runs import configuration
from unisono.config.batch_split import BatchSplit
from unisono.config.schema.data import Data
from unisono.config.schema.run import RunConfig
from unisono.data import audit as audits
from unisono.data.audit import AuditReport
from unisono.data.ledger import Ledger
from unisono.data.loading.loader import Loader, MicroBatch
from unisono.data.order.planning import build_plan, build_source
from unisono.runtime.communicator import ProcessInfo

ROWS, MICRO, STEPS = 24, 1, 5


def _config(**how: Any) -> RunConfig:
    data = {
        "mixture": {"weights": {"a": 2, "b": 1}, "block": 12}, "packing": {"length": 9, "chunk": 6, "open_bins": 3},
        "lanes": 24, "on_error": "mask", **how,
    }  # fmt: skip
    config = configuration(train={"global_batch": ROWS, "steps": STEPS})
    return config.model_copy(update={"data": Data.model_validate(data)})


def _run(
    world: int, first: int = 0, last: int = STEPS, states: Any = None, folder: Path | None = None, **how: Any
) -> tuple[list[list[MicroBatch]], list[Any]]:
    """The micro-batches of all ranks, in order, for each step; and what a checkpoint then keeps of their plans."""
    config, task = _config(**how), Everything()
    found: list[list[MicroBatch]] = [[] for _ in range(first, last)]
    kept = []
    for rank in range(world):
        place = ProcessInfo(rank, world, rank, world, "test")
        source = build_source(task, config, world)
        plan = build_plan(task, source, config, world)
        if states is not None:
            plan.resume(states)
        split = BatchSplit.create(ROWS, world, MICRO)
        loader = Loader.from_config(task, source, plan, split, place, config, contents=True)
        ledger = None if folder is None else Ledger(folder, rank, world, first, f"{first} on {world}")
        try:
            running = loader.steps(first)
            for step in range(first, last):
                batches = next(running)
                found[step - first] += batches
                if ledger is not None:
                    ledger.step(step, batches)
            kept.append(plan.state(last, split.rows_of(rank)) if last < STEPS else None)
        finally:
            loader.close()
            if ledger is not None:
                ledger.__exit__(None, None, None)
    return found, kept


def _same(mine: list[list[MicroBatch]], theirs: list[list[MicroBatch]]) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert [batch.number for batch in one] == [batch.number for batch in other] == list(range(ROWS // MICRO))
        for a, b in zip(one, other, strict=True):
            assert a.info is not None
            assert b.info is not None
            for name in ("slots", "rows", "epochs", "first", "last"):
                assert getattr(a.info.samples, name).tolist() == getattr(b.info.samples, name).tolist()
            assert (a.counts, a.work, a.info.masked) == (b.counts, b.work, b.info.masked)
            assert a.arrays.keys() == b.arrays.keys()
            assert all(array.tobytes() == b.arrays[name].tobytes() for name, array in a.arrays.items())


@pytest.fixture(scope="module")
def reference() -> list[list[MicroBatch]]:
    return _run(1)[0]


def test_the_reference_has_all_of_it(reference: list[list[MicroBatch]]) -> None:
    made = [batch.info for step in reference for batch in step if batch.info is not None]
    rows = np.concatenate([part.samples.rows for part in made])
    epochs = np.concatenate([part.samples.epochs for part in made])
    assert 0.6 < (rows < 31).mean() < 0.72  # the first of the two sources, of weight 2 / 3
    assert epochs.max() > 0
    assert {m.row for part in made for m in part.masked} == set(BAD)
    assert any(len(part.samples) > 1 for part in made)  # micro-batches are of one row
    assert sum(len(part.samples) for part in made) > ROWS * STEPS
    noise = [row.tobytes() for step in reference for batch in step for row in batch.arrays["noise"]]
    assert len(set(noise)) == len(noise)


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (2, {"workers": 4}),
        (3, {"prefetch": 1}),
        (4, {"prefetch_mb": 1e-6, "workers": 2}),
        (8, {}),
        (2, {"worker_kind": "processes", "prefetch": 8}),
        (1, {"worker_kind": "processes", "workers": 4}),
    ],
)
def test_all_layouts_and_workers_load_the_same(
    reference: list[list[MicroBatch]], world: int, how: dict[str, Any]
) -> None:
    _same(_run(world, **how)[0], reference)


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_run_goes_on_from_any_step_with_other_processes_and_its_audit_passes(
    reference: list[list[MicroBatch]], tmp_path: Path, stop: int
) -> None:
    before, after = [(1, 8), (8, 1), (2, 3), (4, 2)][stop - 1]
    first, states = _run(before, last=stop, folder=tmp_path)
    how = {"worker_kind": "processes", "workers": 2} if after == 1 else {}
    second, _ = _run(after, stop, states=states, folder=tmp_path, **how)
    _same(first + second, reference)
    report, task, config = AuditReport(tmp_path), Everything(), _config()
    source = build_source(task, config)
    plan = build_plan(task, source, config, 1)
    starts = audits.collect_starts(sorted((tmp_path / "ledger").glob("rank-*.jsonl")), report)
    counted = audits.check_starts(starts, plan, STEPS, report)
    audits.rebuild_steps(counted, plan, task, source, 2, report)
    assert report.faults == []
    assert (report.steps, report.starts) == (STEPS, [(0, before), (stop, after)])
