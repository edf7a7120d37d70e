"""Packed rows are those of the order, whoever computes them, wherever a run was interrupted."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.data import Data, Packing
from unisono.config.schema.run import Train
from unisono.data.order.order import Indices, Order
from unisono.data.order.packed_plan import PackedPlan
from unisono.data.order.packing import pack_concatenated, pack_offline, pack_online
from unisono.data.order.plan import SampleIndices
from unisono.runtime.errors import CheckpointError, ConfigError, DataError

ROWS, BATCH, LANES, CAPACITY, CHUNK = 301, 48, 24, 16, 5
LENGTHS = np.random.default_rng(0).integers(0, 40, size=ROWS)  # some are empty, many longer than a row
METHODS = ("online", "offline", "concatenate")
WORLDS = (1, 2, 3, 4, 8)


class Asked:
    """Lengths that keep count of how many were asked for, and of which."""

    def __init__(self, lengths: Indices = LENGTHS) -> None:
        self.lengths, self.queries, self.samples = lengths, 0, Counter[tuple[int, int]]()

    def __call__(self, rows: Indices, epochs: Indices) -> Indices:
        self.queries += 1
        self.samples.update(zip(rows.tolist(), epochs.tolist(), strict=True))
        return self.lengths[rows] + epochs % 2  # a sample can have another length in another epoch


def plan(method: str = "online", asked: Asked | None = None, steps: int = 12, **how: Any) -> PackedPlan:
    packing = Packing(method=method, open_bins=3, chunk=CHUNK, **how.pop("packing", {}))  # type: ignore[arg-type]
    given = {"capacity": CAPACITY, "global_batch": BATCH, "lanes": LANES, **how}
    return PackedPlan(Order(ROWS, seed=3), asked or Asked(), packing, steps=steps, **given)


Pieces = list[tuple[int, int, int, int, int]]


def pieces(taken: SampleIndices) -> Pieces:
    return list(taken)


def parts(world: int) -> list[range]:
    """Rows of the global batch that each process owns."""
    share = BATCH // world
    return [range(rank * share, (rank + 1) * share) for rank in range(world)]


def whole(plans: list[PackedPlan], step: int) -> Pieces:
    """What all processes together take in a step."""
    return [p for one, rows in zip(plans, parts(len(plans)), strict=True) for p in pieces(one.samples(step, rows))]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[Pieces]]:
    return {method: [pieces(plan(method).samples(step, range(BATCH))) for step in range(12)] for method in METHODS}


# what rows hold -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_row_holds_something_and_no_row_too_much(method: str, reference: dict[str, list[Pieces]]) -> None:
    for step in reference[method]:
        used = np.zeros(BATCH, dtype=np.int64)
        for slot, row, epoch, first, last in step:
            used[slot] += (LENGTHS[row] + epoch % 2 if last == -1 else last) - first
        assert ((used >= 1) & (used <= CAPACITY)).all()
        assert [piece[0] for piece in step] == sorted(piece[0] for piece in step)


@pytest.mark.parametrize("method", METHODS)
def test_each_lane_takes_every_unit_of_its_chunks_once(method: str) -> None:
    """The chunks of a lane, one after the other, with nothing lost where they meet; empty samples lie in no row."""
    one, steps = plan(method), 24
    index = _index(method)
    share = BATCH // LANES
    for lane in (0, 7, 23):
        chunks = int(np.searchsorted(index[lane], steps * share, side="right")) - 1  # that lie whole in these steps
        ends = int(index[lane, chunks])
        found: Counter[tuple[int, int, int]] = Counter()
        for step in range(steps):
            rows = [slot for slot in range(lane * share, (lane + 1) * share) if step * share + slot % share < ends]
            if rows:
                for _, row, epoch, first, last in pieces(one.samples(step, range(rows[0], rows[-1] + 1))):
                    end = LENGTHS[row] + epoch % 2 if last == -1 else last
                    found.update((row, epoch, unit) for unit in range(first, end))
        order = Order(ROWS, seed=3)
        positions = np.concatenate([(c * LANES + lane) * CHUNK + np.arange(CHUNK) for c in range(chunks)])
        expected: Counter[tuple[int, int, int]] = Counter()
        for row, epoch in zip(order(positions).tolist(), order.epochs(positions).tolist(), strict=True):
            expected.update((row, epoch, unit) for unit in range(int(LENGTHS[row]) + epoch % 2))
        assert chunks > 3
        assert found == expected


def test_a_sample_that_is_not_cut_is_taken_whole(reference: dict[str, list[Pieces]]) -> None:
    taken = [piece for step in reference["online"] for piece in step]
    cut = [(row, epoch) for _, row, epoch, _, last in taken if last != -1]
    kept = [(row, epoch) for _, row, epoch, _, last in taken if last == -1]
    assert cut and all(LENGTHS[row] + epoch % 2 > CAPACITY for row, epoch in cut)
    assert kept and all(LENGTHS[row] + epoch % 2 <= CAPACITY for row, epoch in kept)


def test_rows_that_were_packed_the_longest_first_do_not_come_in_that_order() -> None:
    """How many samples share a row says when best-fit-decreasing made it, and must not say when it comes."""
    lengths = np.random.default_rng(1).lognormal(5, 1.1, size=8000).astype(np.int64)
    made = np.bincount(pack_offline(lengths, 2048).bin)
    how = Packing(method="offline", chunk=8000)
    one = PackedPlan(Order(8000, 0), Asked(lengths), how, capacity=2048, global_batch=1, lanes=1, steps=len(made))
    sizes = np.array([len(one.samples(step, range(1))) for step in range(len(made))])
    assert len(made) > 800
    assert abs(np.corrcoef(made, np.arange(len(made)))[0, 1]) > 0.3
    assert abs(np.corrcoef(sizes, np.arange(len(made)))[0, 1]) < 0.1


# who computes them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", WORLDS)
def test_rows_are_the_same_on_any_number_of_processes(
    method: str, world: int, reference: dict[str, list[Pieces]]
) -> None:
    plans = [plan(method) for _ in range(world)]
    assert [whole(plans, step) for step in range(12)] == reference[method]
    assert len(set(map(tuple, reference[method]))) == 12


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6])
def test_rows_are_the_same_in_micro_batches_of_any_size(micro_batch: int, reference: dict[str, list[Pieces]]) -> None:
    split = BatchSplit.create(BATCH, 8, micro_batch)
    for rank in range(8):
        one = plan()
        for step in range(12):
            mine = [
                p for number in split.micro_batches(rank) for p in pieces(one.samples(step, split.rows(number, BATCH)))
            ]
            own = range(rank * 6, rank * 6 + 6)
            assert mine == [piece for piece in reference["online"][step] if piece[0] in own]


def test_a_process_asks_only_for_the_lengths_of_its_own_lanes_and_once_for_each() -> None:
    asked = [Asked() for _ in range(4)]
    plans = [plan(asked=one) for one in asked]
    for step in range(12):
        whole(plans, step)
    together = sum((one.samples for one in asked), Counter[tuple[int, int]]())
    assert set(together.values()) == {1}
    alone = Asked()
    other = plan(asked=alone)
    for step in range(12):
        other.samples(step, range(BATCH))
    assert alone.samples == together
    assert alone.queries == sum(one.queries for one in asked)


# interruptions --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    method=st.sampled_from(METHODS), before=st.sampled_from(WORLDS), after=st.sampled_from(WORLDS),
    step=st.integers(0, 11), ahead=st.integers(0, 4),
)  # fmt: skip
def test_a_run_goes_on_as_if_nothing_had_happened_on_any_other_number_of_processes(
    reference: dict[str, list[Pieces]], method: str, before: int, after: int, step: int, ahead: int
) -> None:
    first = [plan(method) for _ in range(before)]
    for done in range(step + ahead):  # the loader is ahead of the step that is saved
        whole(first, done)
    states = [one.state(step, rows) for one, rows in zip(first, parts(before), strict=True)]
    states = json.loads(json.dumps(states))
    asked = [Asked() for _ in range(after)]
    second = [plan(method, one) for one in asked]
    for one in second:
        one.samples(0, range(2))  # what an engine sees before a resume
        one.resume(states)
    queries = [one.queries for one in asked]
    for at in range(step, 12):
        assert whole(second, at) == reference[method][at]
        if at == step:  # nothing but the chunks that hold these rows was packed again
            again = [one.queries - before for one, before in zip(asked, queries, strict=True)]
            assert again == [_chunks_of(method, step, rows) for rows in parts(after)]


def _chunks_of(method: str, step: int, rows: range) -> int:
    """Chunks that hold these rows of a step."""
    index, share = _index(method), BATCH // LANES
    lanes = range(rows.start // share, rows.stop // share)
    ends = [np.searchsorted(index[lane], [step * share, (step + 1) * share - 1], side="right") for lane in lanes]
    return sum(int(last - first) + 1 for first, last in ends)


@cache
def _index(method: str) -> Indices:
    """Rows of each lane before each of its first chunks, (lanes, chunks + 1)."""
    pack = {"online": partial(pack_online, open_bins=3), "offline": pack_offline, "concatenate": pack_concatenated}
    rows, epochs = Order(ROWS, seed=3).locate(np.arange(20 * LANES * CHUNK))
    chunks = (LENGTHS[rows] + epochs % 2).reshape(20, LANES, CHUNK)
    bins = [[pack[method](chunk, CAPACITY).bins for chunk in lane] for lane in chunks.swapaxes(0, 1)]
    return np.cumsum(np.pad(bins, ((0, 0), (1, 0))), axis=1)


def test_a_resume_packs_one_chunk_of_each_lane_again_and_not_those_before_it() -> None:
    one = plan()
    state = one.state(100, range(BATCH))
    asked = Asked()
    other = plan(asked=asked)
    other.resume([state])
    assert asked.queries == 0
    other.samples(100, range(1))
    assert asked.queries == 1
    alone = Asked()
    plan(asked=alone).samples(100, range(1))
    assert alone.queries > 20  # without a cursor: every chunk of the lane from the first on


def test_any_step_can_be_asked_for_in_any_order_without_a_cursor_and_before_the_resume(
    reference: dict[str, list[Pieces]],
) -> None:
    fresh, resumed = plan(), plan()
    resumed.resume([plan().state(9, range(BATCH))])
    for one, steps in ((fresh, (7, 2, 11, 0, 11, 3)), (resumed, (9, 8, 0, 10))):
        for step in steps:
            assert pieces(one.samples(step, range(BATCH))) == reference["online"][step]


def test_a_state_after_a_resume_is_the_one_of_a_run_that_was_not_interrupted() -> None:
    one, other = plan(), plan()
    one.resume([plan().state(5, range(BATCH))])
    for step in (5, 6, 9):
        assert one.state(step, range(BATCH)) == other.state(step, range(BATCH))


@pytest.mark.parametrize("method", METHODS)
def test_a_state_can_be_asked_for_while_another_thread_asks_for_what_comes(
    method: str, reference: dict[str, list[Pieces]]
) -> None:
    class Slow(Asked):
        def __call__(self, rows: Indices, epochs: Indices) -> Indices:
            time.sleep(0.002)  # so that the other thread comes in between
            return super().__call__(rows, epochs)

    expected = [plan(method).state(step, range(BATCH)) for step in range(12)]
    one = plan(method, Slow())
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(lambda: [pieces(one.samples(step, range(BATCH))) for step in range(12)])
        states = [one.state(step, range(BATCH)) for step in range(12)]
    assert coming.result() == reference[method]
    assert states == expected


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def states() -> list[Any]:
    one = plan()
    return [one.state(4, rows) for rows in parts(4)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: [s[0], *s[2:]], r"lacks the packing cursors of 6 of 24 lanes, \[6, 7, 8, 9, 10, 11\]"),
        (lambda s: [*s, s[1]], r"lane 6 twice, from ranks 1 and 4"),
        (lambda s: [s[0], {**s[1], "step": 5}, *s[2:]], "from step 4 for rank 0 but from step 5 for rank 1"),
        (lambda s: [None, None], "no packing cursors of rank 0"),
    ],
)
def test_a_resume_from_cursors_that_do_not_fit_together_is_refused(states: list[Any], change: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        plan().resume(change(states))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"lanes": 12}, "data.lanes=24, but this run has 12"),
        ({"capacity": 17}, "data.packing.length=16, but this run has 17"),
        ({"method": "offline"}, "data.packing.method=online, but this run has offline"),
    ],
)
def test_a_resume_of_another_packing_names_the_setting(how: dict[str, Any], told: str, states: list[Any]) -> None:
    with pytest.raises(CheckpointError, match=told):
        plan(**how).resume(states)


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda: plan().state(0, range(3)), r"not whole lanes of 2 rows; use a world size that divides data.lanes=24"),
        (lambda: plan("concatenate", packing={"cut": "never"}), "method=concatenate cuts samples"),
    ],
)
def test_what_cannot_be_packed_or_kept_is_refused(act: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        act()


def test_a_sample_that_must_not_be_cut_is_named_by_its_row() -> None:
    lengths = np.full(ROWS, 4)
    lengths[37] = CAPACITY + 1
    one = plan(asked=Asked(lengths), packing={"cut": "never"})
    with pytest.raises(DataError, match=r"row 37 of the source has 17 units, but a packed row holds only 16"):
        for step in range(12):
            one.samples(step, range(BATCH))


def test_samples_without_anything_in_them_are_an_error_and_no_endless_search() -> None:
    with pytest.raises(DataError, match="consecutive samples are all empty"):
        PackedPlan(
            Order(9, 0), lambda rows, epochs: 0 * rows, Packing(chunk=4), capacity=4, global_batch=1, lanes=1, steps=1
        ).samples(0, range(1))


def _of(train: dict[str, Any], data: dict[str, Any], lengths: Any = LENGTHS) -> PackedPlan:
    packing = Data(packing=Packing(chunk=CHUNK), **data)
    return PackedPlan.from_config(Order(ROWS, 3), lengths, Train(**train), packing, capacity=CAPACITY, lanes=4)


def test_a_run_counted_in_epochs_is_refused_with_an_estimate_in_steps() -> None:
    epoch = LENGTHS.sum() / (CAPACITY * 8)
    told = rf"train.epochs=2 does not work.*about {epoch:.1f} steps, so train.steps={round(2 * epoch)} is close"
    with pytest.raises(ConfigError, match=told):
        _of({"epochs": 2.0, "global_batch": 8}, {})
    with pytest.raises(ConfigError, match=r"set train.steps and train.epochs=null$"):
        _of({"epochs": 2.0, "global_batch": 8}, {}, Asked())


def test_a_plan_of_a_run_packs_to_what_the_task_or_the_setting_says() -> None:
    one = _of({"steps": 2, "global_batch": 8}, {})
    assert (one.capacity, one.steps, one.rows(1), one.lanes, one.seed) == (CAPACITY, 2, 8, 4, 3)
    data = Data(packing=Packing(length=9))
    assert PackedPlan.from_config(Order(9, 0), LENGTHS, Train(steps=1), data, capacity=5, lanes=1).capacity == 9
