"""Samples of a whole micro-batch in one call: the same bits as one by one, and the same errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.unisono.tests.data import made
from packages.unisono.tests.data.made import SIZE
from unisono import Joined, SampleColumns, SampleContext, SampleContexts, Task, Vectorised, generators
from unisono.data.loading.checksum import checksum, checksums
from unisono.data.loading.loader import check_draws
from unisono.runtime.errors import DataError
from unisono.runtime.rng import generator, key


class Single(Task):
    """Numbers with noise, one by one."""

    bad: tuple[int, ...] = ()

    def data(self) -> Any:
        return Numbers()

    def sample(self, record: Any, context: SampleContext) -> dict[str, Any]:
        if int(record) in self.bad:
            raise ValueError("a bad number")
        noise = context.rng.random(5)
        return {"row": np.int64(record), "noise": noise[:4].reshape(2, 2), "part": np.float32(noise[4]), "of": "a"}

    def counts(self, batch: Any) -> dict[str, float]:
        return {"term": float(len(batch["row"]))}

    def build(self) -> Any:
        raise NotImplementedError

    outputs = loss = build


class Numbers:
    """A source that reads many rows in one call, and remembers how it was asked."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, row: int) -> int:
        return row

    def __getitems__(self, rows: Sequence[int]) -> np.ndarray[Any, Any]:
        self.calls.append(list(rows))
        return np.asarray(rows)


class Together(Single):
    """The same, all at once."""

    def sample_batch(self, records: Any, contexts: SampleContexts) -> SampleColumns:
        if set(self.bad) & set(np.asarray(records).tolist()):
            raise ValueError("some bad number")
        noise = contexts.rng.random(5)
        return SampleColumns(
            row=np.asarray(records, dtype=np.int64),
            noise=noise[:, :4].reshape(-1, 2, 2),
            part=noise[:, 4].astype(np.float32),
            of=["a"] * len(contexts),
        )


@given(
    seed=st.integers(0, 2**62),
    rows=st.lists(st.lists(st.integers(-5, 2**40), min_size=2, max_size=2), max_size=5),
    count=st.integers(0, 21),
)
def test_generators_of_many_rows_draw_what_each_alone_draws(seed: int, rows: list[list[int]], count: int) -> None:
    many = generators(seed, "purpose", rows=rows)
    assert many.keys.tolist() == [key(seed, "purpose", *row) for row in rows]
    assert many.random(count).shape == (len(rows), count)
    for row, own, drawn in zip(rows, many, many.random(count), strict=True):
        assert drawn.tolist() == own.random(count).tolist() == generator(seed, "purpose", *row).random(count).tolist()


@pytest.mark.parametrize(
    "how", [{}, {"workers": 2}, {"workers": 2, "worker_kind": "processes"}, {"world": 4, "micro": 3}]
)
def test_a_vectorised_task_builds_the_same_batches_and_content_as_one_by_one(how: dict[str, Any]) -> None:
    each, together = (made.steps(one, contents=True, **how) for one in (Single(), Together()))
    made.same(together, each)
    for one, other in zip(chain(*together), chain(*each), strict=True):
        assert one.info.contents.tolist() == other.info.contents.tolist() and one.rows.tolist() == other.rows.tolist()
        assert {name: array.dtype for name, array in one.arrays.items()} == {
            name: array.dtype for name, array in other.arrays.items()
        }


def test_a_source_is_read_in_one_call_for_each_micro_batch_alone_and_within_a_mixture() -> None:
    source = Numbers()
    (first, *_), *_ = made.steps(Together(), rows=source)
    assert first.rows.tolist() in source.calls and len(first.rows) == 4
    joined, other = Joined({"a": source, "b": [7, 8]}), len(source.calls)
    assert np.asarray(joined.__getitems__([3, 1])).tolist() == [3, 1] and source.calls[-1] == [3, 1]
    assert joined.__getitems__([3, SIZE + 1]) == [3, 8] and len(source.calls) == other + 1


def test_a_sample_that_cannot_be_built_is_named_or_masked_as_one_by_one() -> None:
    task = Together()
    task.bad = (3, 17)
    with pytest.raises(
        DataError, match=r"row (3|17) of the source: building the sample failed: ValueError: a bad number"
    ):
        made.steps(task)
    alone = Single()
    alone.bad = task.bad
    both = [made.steps(one, on_error="mask", contents=True) for one in (task, alone)]
    made.same(*both)
    masked = [[sample.row for step in steps for micro in step for sample in micro.info.masked] for steps in both]
    assert masked[0] == masked[1] and set(masked[0]) == {3, 17}


def test_a_fault_of_sample_batch_alone_is_told_as_such() -> None:
    class Broken(Together):
        def sample_batch(self, records: Any, contexts: SampleContexts) -> SampleColumns:
            raise KeyError("width")

    with pytest.raises(
        DataError, match=r"sample_batch\(\) of Broken failed, while sample\(\) builds each of them: KeyError"
    ):
        made.steps(Broken())

    class Short(Together):
        def sample_batch(self, records: Any, contexts: SampleContexts) -> Any:
            return super().sample_batch(records, contexts)[:2]

    with pytest.raises(DataError, match=r"sample_batch\(\) returned 2 samples for 4 records"):
        made.steps(Short())


@pytest.mark.parametrize("training", [True, False])
def test_a_task_whose_two_ways_differ_is_refused_before_the_first_step(training: bool) -> None:
    class Other(Together):
        draws_in_evaluation = True

        def sample_batch(self, records: Any, contexts: SampleContexts) -> SampleColumns:
            columns = super().sample_batch(records, contexts)
            columns.fields["part"] = columns.fields["part"].astype(np.float64)
            return columns

    with pytest.raises(DataError, match=r"Other: sample_batch\(\) builds another sample for row 0 of the source than"):
        check_draws(Other(), Numbers(), training=training)
    Together.draws_in_evaluation = True
    check_draws(Together(), Numbers(), training=training)


def test_columns_have_the_checksums_of_their_samples() -> None:
    columns = SampleColumns(
        a=np.array([0.0, -0.0, np.nan, 1e-30, 3.5]), b=np.arange(10).reshape(5, 2), c=[None, "x", 1, (2,), "x"],
        d=["x", "y", "x", "x", "z"], e=np.array([True, False, True, True, False]), f=np.arange(5).astype("M8[D]"),
        g=np.arange(20).reshape(2, 5, 2).swapaxes(0, 1), h=np.arange(5, dtype=np.longdouble),
        i=np.arange(5, dtype="f2"),
    )  # fmt: skip
    assert checksums(columns) == [checksum(columns[number]) for number in range(5)]
    assert checksums([1, "a"]) == [checksum(1), checksum("a")]
    assert checksums(columns[1:3]) == checksums(columns)[1:3]
    with pytest.raises(DataError, match="must have an entry for each sample"):
        SampleColumns(a=[1, 2], b=[1, 2, 3])


def test_only_tasks_that_define_the_method_are_vectorised() -> None:
    assert isinstance(Together(), Vectorised) and not isinstance(Single(), Vectorised)
