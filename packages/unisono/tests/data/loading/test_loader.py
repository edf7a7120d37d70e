"""From positions to micro-batches: what is in them depends on the plan alone, never on who prepares them or when."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from packages.unisono.tests.data import made
from packages.unisono.tests.data.made import BATCH, SIZE, until
from unisono.data.loading.loader import check_draws
from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.runtime.errors import ConfigError, DataError
from unisono.task import SampleContext, Task


class Rows(Task):
    """Samples that say which row they are and what was drawn for them."""

    def data(self) -> Any:
        return np.arange(SIZE)

    def sample(self, record: Any, context: SampleContext) -> dict[str, Any]:
        time.sleep(int(record) % 3 * 2e-4)  # so that threads finish out of order
        return {"row": record, "draw": context.rng.integers(2**62), "noise": context.rng.normal(size=2)}

    def counts(self, batch: Any) -> dict[str, float]:
        return {"term": float(len(batch["row"])), "other": float(batch["row"].sum())}

    def work(self, batch: Any) -> dict[str, float]:
        return {"tokens": 3.0 * len(batch["row"])}

    def build(self) -> Any:
        raise NotImplementedError

    outputs = loss = build


def _steps(task: Task | None = None, micro: int = BATCH, **how: Any) -> list[list[MicroBatch]]:
    return made.steps(task or Rows(), micro=micro, **how)


def _whole(step: list[MicroBatch]) -> dict[str, np.ndarray]:
    """The global batch that the micro-batches of a step make up."""
    busy = [micro for micro in step if not micro.idle]
    return {name: np.concatenate([micro.arrays[name] for micro in busy]) for name in busy[0].arrays}


def _same(mine: list[list[MicroBatch]], theirs: list[list[MicroBatch]]) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(map(_whole, mine), map(_whole, theirs), strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def reference() -> list[list[MicroBatch]]:
    return _steps()


layouts = st.sampled_from([1, 2, 3, 4, 6, 12]).flatmap(
    lambda world: st.tuples(
        st.just(world), st.sampled_from([m for m in range(1, BATCH + 1) if BATCH // world % m == 0])
    )
)


# what is in a batch -----------------------------------------------------------------------------------------------


def test_one_process_loads_the_rows_of_the_plan_in_order(reference: list[list[MicroBatch]]) -> None:
    plan = made.plan()
    assert plan.steps == len(reference) == 6
    for step, batches in enumerate(reference):
        assert np.array_equal(_whole(batches)["row"], plan.batch(step))


@settings(max_examples=25, deadline=None)
@given(layout=layouts, workers=st.sampled_from([1, 2, 4]), prefetch=st.integers(1, 8))
def test_all_ranks_together_load_the_same_batch_on_any_layout(
    reference: list[list[MicroBatch]], layout: tuple[int, int], workers: int, prefetch: int
) -> None:
    world, micro = layout
    steps = _steps(world=world, micro=micro, workers=workers, prefetch=prefetch)
    _same(steps, reference)
    for step, batches in enumerate(steps):  # micro-batches are consecutive rows of the global batch
        rows = made.plan().batch(step)
        assert [batch.number for batch in batches] == list(range(BATCH // micro))
        for batch in batches:
            if not batch.idle:
                assert np.array_equal(batch.rows, rows[batch.number * micro :][:micro])
                assert np.array_equal(batch.arrays["row"], batch.rows)


@pytest.mark.parametrize(("world", "micro"), [(1, 12), (1, 4), (2, 3), (4, 1)])
def test_every_rank_makes_equally_many_passes_in_a_short_step(world: int, micro: int) -> None:
    for rank in range(world):
        with made.loader(Rows(), world=world, micro=micro, rank=rank) as loader:
            assert [len(batches) for batches in loader.steps()] == [BATCH // world // micro] * 6


# idle ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "lacking"), [(1, [8, 9, 10, 11]), (3, [3])])
def test_the_micro_batches_that_a_short_batch_lacks_are_idle_and_count_nothing(size: int, lacking: list[int]) -> None:
    """They hold the first rows of the batch again, so that no shape is new."""
    idle = [micro for micro in _steps(world=4, micro=size)[-1] if micro.idle]
    assert [micro.number for micro in idle] == lacking
    for micro in idle:
        assert micro.counts == {"term": 0.0, "other": 0.0}
        assert micro.work == {"tokens": 0.0, "rows": 0.0}
        assert np.array_equal(micro.arrays["row"], made.plan().batch(5)[:size])


def test_a_busy_micro_batch_counts_its_own_rows() -> None:
    for micro in _steps(world=2, micro=3)[0]:
        assert micro.counts == {"term": 3.0, "other": float(micro.rows.sum())}
        assert micro.work == {"tokens": 9.0, "rows": 3.0}


def test_counts_of_a_step_are_those_of_its_rows_on_any_layout() -> None:
    alone, several = _steps(), _steps(world=4, micro=1)
    for one, other in zip(alone, several, strict=True):
        for name in ("term", "other"):
            assert sum(micro.counts[name] for micro in one) == sum(micro.counts[name] for micro in other)


# randomness ---------------------------------------------------------------------------------------------------------


def _draws(steps: list[list[MicroBatch]]) -> list[tuple[int, int]]:
    return [
        (int(row), int(draw))
        for step in map(_whole, steps)
        for row, draw in zip(step["row"], step["draw"], strict=True)
    ]


def test_a_row_draws_differently_in_every_epoch(reference: list[list[MicroBatch]]) -> None:
    draws = _draws(reference)
    assert len({row for row, _ in draws}) == SIZE < len(draws)
    assert len({draw for _, draw in draws}) == len(draws)


def test_draws_belong_to_the_epoch_and_the_row_not_to_the_step(reference: list[list[MicroBatch]]) -> None:
    assert _draws(_steps(of=StreamPlan.create(Order(SIZE, 0), 4, None, 2.2), micro=2)) == _draws(reference)


def test_evaluation_and_another_seed_draw_differently_from_training(reference: list[list[MicroBatch]]) -> None:
    theirs = {draw for _, draw in _draws(reference)}
    for other in (_steps(purpose="eval"), _steps(of=made.plan(seed=1))):
        assert not {draw for _, draw in _draws(other)} & theirs


# resume -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize(("world", "micro", "workers", "prefetch"), [(1, 12, 1, 4), (2, 3, 4, 8)])
def test_a_resume_loads_the_remaining_batches_bit_for_bit(
    reference: list[list[MicroBatch]], first: int, world: int, micro: int, workers: int, prefetch: int
) -> None:
    _same(_steps(world=world, micro=micro, first=first, workers=workers, prefetch=prefetch), reference[first:])


def test_one_loader_can_be_read_again_from_any_step(reference: list[list[MicroBatch]]) -> None:
    with made.loader(Rows(), micro=None) as loader:
        next(loader.steps())
        _same(list(loader.steps(3)), reference[3:])
        _same(list(loader.steps()), reference)


# sources ------------------------------------------------------------------------------------------------------------


class Squares(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"row": torch.tensor(row), "square": torch.tensor(float(row)) ** 2}


class SquaresTask(Rows):
    def data(self) -> Any:
        return Squares()

    def sample(self, record: Any, context: SampleContext) -> Any:
        return record


def test_a_map_style_torch_dataset_is_a_source(reference: list[list[MicroBatch]]) -> None:
    for mine, theirs in zip(_steps(SquaresTask()), reference, strict=True):
        assert np.array_equal(_whole(mine)["row"], _whole(theirs)["row"])
        assert np.array_equal(_whole(mine)["square"], _whole(theirs)["row"] ** 2.0)


def test_a_source_is_asked_for_python_integers() -> None:
    """A NumPy integer would be refused by many sources, and be a whole array's shape to others."""

    class Asked(list[int]):
        def __getitem__(self, row: Any) -> Any:
            assert type(row) is int
            return super().__getitem__(row)

    class AskedTask(Rows):
        def data(self) -> Any:
            return Asked(range(SIZE))

    _steps(AskedTask())


# errors -------------------------------------------------------------------------------------------------------------


class Broken(Rows):
    """A task whose one method fails at row 17."""

    where = "sample"
    act: Callable[[Any], Any]

    def sample(self, record: Any, context: SampleContext) -> Any:
        return self._maybe("sample", record) or {"row": record}

    def collate(self, samples: Any) -> Any:
        return self._maybe("collate", [s["row"] for s in samples]) or super().collate(samples)

    def counts(self, batch: Any) -> Any:
        return self._maybe("counts", batch["row"]) or super().counts(batch)

    def work(self, batch: Any) -> Any:
        return self._maybe("work", batch["row"]) or super().work(batch)

    def _maybe(self, here: str, rows: Any) -> Any:
        return type(self).act(rows) if here == self.where and np.any(np.equal(rows, 17)) else None


def _raise(rows: Any) -> Any:
    raise ValueError("no such thing")


def _parse(rows: Any) -> Any:
    return json.loads("{")  # raises deep inside the standard library


def _unstackable(rows: Any) -> Any:
    return np.stack([np.zeros(2), np.zeros(3)])  # raises deep inside NumPy


def _failing(where: str, act: Callable[[Any], Any]) -> str:
    task = type("Failing", (Broken,), {"where": where, "act": staticmethod(act)})()
    with pytest.raises(DataError) as caught:
        _steps(task, micro=4)
    return str(caught.value)


def _line(function: Callable[[Any], Any]) -> str:
    """Where the body of a function stands, as an error names it."""
    return f"{Path(__file__)}:{function.__code__.co_firstlineno + 1} in {function.__name__}"


@pytest.mark.parametrize("where", ["collate", "counts", "work"])
def test_an_error_in_a_batch_names_its_rows(where: str) -> None:
    plan = made.plan()
    rows = next(r for step in range(6) for r in np.split(plan.batch(step), 3) if 17 in r)
    assert f"rows {', '.join(map(str, rows))} of the source: building the batch failed" in _failing(where, _raise)


@pytest.mark.parametrize("where", ["sample", "collate", "counts", "work"])
@pytest.mark.parametrize("act", [_raise, _parse, _unstackable])
def test_an_error_names_the_line_of_the_user_and_what_was_raised(where: str, act: Callable[[Any], Any]) -> None:
    told = _failing(where, act)
    assert _line(act) in told
    assert where != "sample" or "row 17 of the source" in told
    assert act is not _raise or "ValueError: no such thing" in told


def test_a_row_that_the_source_does_not_have_is_named() -> None:
    class Short(Rows):
        def data(self) -> Any:
            return list(range(20))

    with pytest.raises(DataError, match=r"row (2\d|30) of the source: building the sample failed: IndexError"):
        _steps(Short())
    with pytest.raises(DataError, match=r"row (2\d|30) of the held-out rows: building the sample failed: IndexError"):
        _steps(Short(), purpose="eval")


def test_a_fault_that_the_task_explains_itself_is_not_explained_again() -> None:
    def refuse(rows: Any) -> Any:
        raise ConfigError("use another tokenizer")

    task = type("Refusing", (Broken,), {"where": "sample", "act": staticmethod(refuse)})()
    with pytest.raises(ConfigError, match=r"^use another tokenizer$"):
        _steps(task)


def test_an_error_ahead_does_not_spoil_the_steps_before_it() -> None:
    plan = next(plan for seed in range(99) if 17 in (plan := made.plan(seed=seed, epochs=1)).batch(2))
    task = type("Failing", (Broken,), {"act": staticmethod(_raise)})()
    with made.loader(task, of=plan, micro=None, prefetch=8) as loader:
        steps = loader.steps()
        assert [len(next(steps)) for _ in range(2)] == [1, 1]
        with pytest.raises(DataError):
            next(steps)


# threads ------------------------------------------------------------------------------------------------------------


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("unisono-test")}


@pytest.mark.parametrize("workers", [1, 3])
def test_close_stops_all_threads(workers: int) -> None:
    with made.loader(Rows(), of=made.plan(epochs=20), purpose="test", workers=workers, prefetch=8) as loader:
        next(loader.steps())
        assert len(_threads()) == workers
    assert not _threads()


def test_close_does_not_prepare_what_was_only_asked_for() -> None:
    built: list[Any] = []
    gate = threading.Event()

    class Slow(Rows):
        def collate(self, samples: Any) -> Any:
            built.append(samples)
            if len(built) > BATCH:
                gate.wait(60)
            return super().collate(samples)

    with made.loader(Slow(), micro=1, prefetch=8, workers=1) as loader:
        steps = loader.steps()
        next(steps)  # twelve micro-batches
        until(lambda: len(built) == BATCH + 1)

        waiting = loader._workers._waiting

        def pending() -> int:
            return sum(not future.done() and not future.running() for future in list(waiting))

        def open_gate() -> None:  # once the loader is closing, which waits for the one that is under way
            until(lambda: pending() == 0)
            gate.set()

        until(lambda: pending() >= 4)

        threading.Thread(target=open_gate).start()
    assert len(built) == BATCH + 1


# draws ----------------------------------------------------------------------------------------------------------------


class Drawing(Rows):
    draw: Callable[[np.random.Generator], Any]

    def sample(self, record: Any, context: SampleContext) -> Any:
        type(self).draw(context.rng)
        return record


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda rng: random.random(), "Python's random"),
        (lambda rng: np.random.rand(), "NumPy's global generator"),
        (lambda rng: torch.rand(1), "torch's global generator"),
    ],
)
def test_a_task_that_draws_from_a_shared_generator_and_not_its_own_is_refused(draw: Any, name: str) -> None:
    task = type("Drawing", (Drawing,), {"draw": staticmethod(draw)})()
    with pytest.raises(DataError, match=f"drew from {name}"):
        check_draws(task, task.data())
    own = type("Drawing", (Drawing,), {"draw": staticmethod(lambda rng: rng.random())})()
    check_draws(own, own.data())


def test_a_client_that_draws_before_it_tries_again_is_not_taken_for_the_task(caplog: pytest.LogCaptureFixture) -> None:
    retries = iter([True])
    task = type("Reading", (Drawing,), {"draw": staticmethod(lambda rng: next(retries, False) and random.random())})()
    check_draws(task, task.data())
    assert "Python's random moved while the first samples were built, but not when they were" in caplog.text
