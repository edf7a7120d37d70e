"""Mixture, blocks, shuffling, packing, augmentation and masked bad records at once: the same tensors on any layout."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.unisono.tests.data.made import audited
from packages.unisono.tests.data.mixed import Mixed
from packages.unisono.tests.runs import configuration
from unisono.config.batch_split import BatchSplit
from unisono.data.ledger import Ledger
from unisono.data.loading.loader import Loader
from unisono.data.order.planning import build_plan, build_source
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.task import SampleContext

BATCH, LANES, STEPS = 24, 24, 8
WORLDS = (1, 2, 3, 4, 8)


def running(
    world: int, states: list[Any] | None, first: int, data: dict[str, Any], last: int, folder: Path | None = None
) -> tuple[Any, list[Any]]:
    """The global batch of every step from `first` to before `last`, and what each process keeps after them."""
    task = Mixed()
    config = configuration(train={"steps": STEPS, "global_batch": BATCH}, data={**DATA, **data})
    whole = []
    with ExitStack() as opened:
        plans, steps, books = [], [], []
        for rank in range(world):
            source = build_source(task, config, world)
            plan, split = build_plan(task, source, config, world), BatchSplit.create(BATCH, world, None)
            place = ProcessInfo(rank=rank, world_size=world)
            loader = Loader.from_config(task, source, plan, split, place, config, contents=folder is not None)
            opened.callback(loader.close)
            if folder is not None:
                books.append(opened.enter_context(Ledger(folder, rank, world, first, f"{first} on {world}")))
            if states is not None:
                plan.resume(states)
            plans.append(plan)
            steps.append(loader.steps(first))
        for step in range(first, last):
            ranks = [next(one) for one in steps]
            for book, own in zip(books, ranks, strict=False):
                book.step(step, own)
            batches = [batch for own in ranks for batch in own]
            arrays = {name: np.concatenate([batch.arrays[name] for batch in batches]) for name in batches[0].arrays}
            masked = sorted(sample.row for batch in batches if batch.info for sample in batch.info.masked)
            rows = np.concatenate([batch.rows for batch in batches]).tolist()
            whole.append((rows, {name: array.tobytes() for name, array in arrays.items()}, masked))
        share = BATCH // world
        kept = [plan.state(last, range(rank * share, (rank + 1) * share)) for rank, plan in enumerate(plans)]
    return whole, json.loads(json.dumps(kept))


DATA = {
    "mixture": {"weights": {"a": 1, "b": 2, "c": 1}, "block": 40},
    "shuffle": "blocks",
    "window": 2,
    "lanes": LANES,
    "packing": {"chunk": 6, "open_bins": 3},
    "on_error": "mask",
}


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    whole = running(1, None, 0, {}, STEPS)[0]
    assert len({json.dumps(rows) for rows, _, _ in whole}) == STEPS
    assert sum(len(masked) for _, _, masked in whole) > 10  # bad records
    assert {row < 200 for rows, _, _ in whole for row in rows} == {True, False}  # of several sources
    return whole


@settings(max_examples=12, deadline=None)
@given(
    before=st.sampled_from(WORLDS), after=st.sampled_from(WORLDS), step=st.integers(0, STEPS - 1),
    workers=st.sampled_from([1, 4]), prefetch=st.integers(1, 6),
)  # fmt: skip
def test_samples_and_tensors_are_the_same_interrupted_anywhere_on_any_layout(
    reference: list[Any], before: int, after: int, step: int, workers: int, prefetch: int
) -> None:
    how = {"workers": workers, "prefetch": prefetch}
    first, states = running(before, None, 0, how, step)
    second, _ = running(after, states, step, how, STEPS)
    assert first + second == reference


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_as_many_workers_as_it_takes_are_found_where_lengths_are_measured(reference: list[Any], kind: str) -> None:
    assert running(1, None, 0, {"workers": "auto", "worker_kind": kind}, STEPS)[0] == reference


def test_samples_and_tensors_are_the_same_from_worker_processes(reference: list[Any]) -> None:
    how = {"workers": 2, "worker_kind": "processes"}
    first, states = running(1, None, 0, how, 3)
    second, _ = running(2, states, 3, how, STEPS)
    assert first + second == reference


@pytest.mark.parametrize(("before", "after", "step"), [(1, 8, 1), (8, 1, 3), (2, 3, 6)])
def test_the_ledger_of_a_run_that_goes_on_with_other_processes_passes_its_audit(
    tmp_path: Path, before: int, after: int, step: int
) -> None:
    _, states = running(before, None, 0, {}, step, tmp_path)
    running(after, states, step, {}, STEPS, tmp_path)
    task, config = Mixed(), configuration(train={"steps": STEPS, "global_batch": BATCH}, data=DATA)
    source = build_source(task, config)
    report = audited(tmp_path, build_plan(task, source, config, 1), task, source, checkpoint=STEPS)
    assert report.faults == []
    assert (report.steps, report.starts) == (STEPS, [(0, before), (step, after)])


class Sized(list[int]):
    """Rows that say how long they are."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([row % 9 + 1 for row in self])


class Known(Mixed):
    """Two sources of samples whose lengths are known before, and not alike."""

    def data(self) -> Any:
        return {"a": Sized(range(0, 900, 3)), "b": Sized(range(1000, 1900, 2))}

    def sample(self, record: Any, context: SampleContext) -> np.ndarray:
        return np.full(record % 9 + 1, float(record))


def test_weights_that_change_do_so_at_about_their_step_where_rows_are_packed() -> None:
    task, mixture = Known(), {"weights": {"a": 1, "b": 0}, "changes": [{"step": 20, "weights": {"a": 0, "b": 1}}]}
    data = {"mixture": mixture, "packing": {"chunk": 16, "open_bins": 4}, "lanes": 4}
    config = configuration(train={"steps": 40, "global_batch": 8}, data=data)
    source = build_source(task, config, 1)
    plan = build_plan(task, source, config, 1)
    of_b = [(plan.samples(step, range(8)).rows >= 300).mean() for step in range(40)]
    assert all(share == 0 for share in of_b[:15])
    assert all(share == 1 for share in of_b[25:])
    states = [json.loads(json.dumps(plan.state(18, range(4 * rank, 4 * rank + 4)))) for rank in range(2)]
    again = build_plan(task, source, config, 4)
    again.resume(states)
    for step in range(18, 30):
        mine, reference = again.samples(step, range(8)), plan.samples(step, range(8))
        assert np.array_equal(mine.rows, reference.rows) and np.array_equal(mine.slots, reference.slots)


def test_weights_that_change_need_lengths_where_rows_are_packed() -> None:
    changes = [{"step": 2, "weights": {"a": 2, "b": 2, "c": 1}}]
    config = configuration(
        train={"steps": STEPS, "global_batch": BATCH},
        data={**DATA, "mixture": {"weights": {"a": 1, "b": 2, "c": 1}, "changes": changes}},
    )
    source = build_source(Mixed(), config, 1)
    with pytest.raises(ConfigError, match=r"^data.mixture.changes with data.packing needs the lengths .* 'a' has no"):
        build_plan(Mixed(), source, config, 1)


@pytest.mark.parametrize(
    "other",
    [{"packing": {"chunk": 7, "open_bins": 3}}, {"window": 1}, {"mixture": {"weights": {"a": 1, "b": 1, "c": 1}}}],
)
def test_each_part_of_the_order_matters(reference: list[Any], other: dict[str, Any]) -> None:
    assert running(1, None, 0, other, 2)[0] != reference[:2]
