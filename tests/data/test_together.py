"""Mixture, blocks, shuffling, packing, augmentation and masked bad records at once: the same tensors on any layout."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.mixed import Mixed
from tests.runs import configuration
from unisono.config.split import Split
from unisono.data.loader import Loader
from unisono.data.planning import plan_of, source_of
from unisono.place import Place

BATCH, LANES, STEPS = 24, 24, 8
WORLDS = (1, 2, 3, 4, 8)


def running(world: int, states: list[Any] | None, first: int, data: dict[str, Any], last: int) -> tuple[Any, list[Any]]:
    """The global batch of every step from `first` to before `last`, and what each process keeps after them."""
    task = Mixed()
    config = configuration(train={"steps": STEPS, "global_batch": BATCH}, data={**DATA, **data})
    whole = []
    with ExitStack() as opened:
        plans, steps = [], []
        for rank in range(world):
            source = source_of(task, config, world)
            plan, split = plan_of(task, source, config, world), Split.of(BATCH, world, None)
            loader = Loader.of(task, source, plan, split, Place(rank=rank, world_size=world), config)
            opened.callback(loader.close)
            if states is not None:
                plan.resume(states)
            plans.append(plan)
            steps.append(loader.steps(first))
        for _ in range(first, last):
            batches = [batch for one in steps for batch in next(one)]
            arrays = {name: np.concatenate([batch.arrays[name] for batch in batches]) for name in batches[0].arrays}
            masked = sorted(sample.row for batch in batches if batch.made for sample in batch.made.masked)
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


def test_samples_and_tensors_are_the_same_from_worker_processes(reference: list[Any]) -> None:
    how = {"workers": 2, "worker_kind": "processes"}
    first, states = running(1, None, 0, how, 3)
    second, _ = running(2, states, 3, how, STEPS)
    assert first + second == reference


@pytest.mark.parametrize(
    "other",
    [{"packing": {"chunk": 7, "open_bins": 3}}, {"window": 1}, {"mixture": {"weights": {"a": 1, "b": 1, "c": 1}}}],
)
def test_each_part_of_the_order_matters(reference: list[Any], other: dict[str, Any]) -> None:
    assert running(1, None, 0, other, 2)[0] != reference[:2]
