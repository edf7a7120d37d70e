"""A look at the samples from any position on: they are those that a run takes there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.data.order.test_planning import CHANGES, WEIGHTS, sources, task
from packages.unisono.tests.runs import configuration
from unisono.data.order.plan import SampleIndices, StreamPlan
from unisono.data.order.planning import build_plan, build_source
from unisono.data.preview import abbreviate, format_table, preview
from unisono.runtime.errors import ConfigError, DataError


def config(**data: Any) -> Any:
    return configuration(train={"global_batch": 24, "steps": 10}, layout={"micro_batch": 3}, data=data)


MIXED = config(mixture={"weights": WEIGHTS, "changes": CHANGES}, shuffle="blocks", lanes=24)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_what_is_shown_is_what_the_run_takes_there(world_size: int) -> None:
    shown = preview(task(sources()), MIXED, position=100, count=70, world_size=world_size)
    source = build_source(task(sources()), MIXED)
    plan = build_plan(task(sources()), source, MIXED)
    assert [sample.position for sample in shown] == list(range(100, 170))
    assert len({sample.source for sample in shown}) > 1
    for sample in shown:
        taken = plan.samples(sample.step, range(sample.slot, sample.slot + 1))
        assert source.name(int(taken.rows[0])) == (sample.source, sample.row)  # type: ignore[attr-defined]
        assert taken.epochs[0] == sample.epoch
        assert (sample.step, sample.slot) == divmod(sample.position, 24)
        assert sample.micro_batch == sample.slot // 3
        assert sample.rank == sample.slot // (24 // world_size)
        assert sample.record == repr(sources()[sample.source][sample.row])


def test_a_single_source_has_no_name_and_no_column_for_it() -> None:
    shown = preview(task(range(100)), config(shuffle="none"), position=22, count=4, world_size=4)
    assert format_table(shown) == [
        "position  step  slot  rank  micro_batch  row  epoch  record",
        "      22     0    22     3            7   22      0  22",
        "      23     0    23     3            7   23      0  23",
        "      24     1     0     0            0   24      0  24",
        "      25     1     1     0            0   25      0  25",
    ]


def test_packed_rows_show_each_of_their_samples_and_what_is_taken_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(self: StreamPlan, step: int, rows: range) -> SampleIndices:
        slots = np.repeat(np.arange(rows.start, rows.stop), 2)
        return SampleIndices(slots, slots, slots * 0, slots * 0, np.where(np.arange(len(slots)) % 2, -1, 5))

    monkeypatch.setattr(StreamPlan, "samples", two)
    shown = preview(task(range(100)), config(), position=23, count=2, world_size=1)
    assert [(s.position, s.slot, s.units) for s in shown] == [
        (23, 23, (0, 5)),
        (23, 23, None),
        (24, 0, (0, 5)),
        (24, 0, None),
    ]
    assert "  0:5  " in format_table(shown)[1]


def test_a_record_that_cannot_be_read_is_shown_as_such() -> None:
    class Broken(list[int]):
        def __getitem__(self, row: Any) -> int:
            if row > 10:
                raise DataError("shard 3 is cut off")
            return row

    shown = preview(task(Broken(range(100))), config(shuffle="none"), position=10, count=2, world_size=1)
    assert [sample.record for sample in shown] == ["10", "'cannot be read: DataError: shard 3 is cut off'"]


def test_the_end_of_the_run_ends_what_is_shown() -> None:
    assert len(preview(task(range(100)), config(), position=235, count=50, world_size=1)) == 5


@pytest.mark.parametrize(
    ("position", "count", "world_size", "message"),
    [
        (240, 1, 1, r"position=240 is outside this run's 240 rows; choose 0 to 239"),
        (-1, 1, 1, r"position=-1 is outside"),
        (0, 0, 1, r"count=0: choose at least 1 row"),
        (0, 1, 5, r"cannot be split evenly over layout\.world_size=5"),
    ],
)
def test_what_cannot_be_shown_is_refused(position: int, count: int, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preview(task(range(100)), config(), position, count, world_size)


def test_a_layout_that_lanes_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"world_size=5 does not divide the 6 lanes"):
        preview(
            task(sources()), configuration(train={"global_batch": 30}, data={"shuffle": "blocks", "lanes": 6}), 0, 1, 5
        )


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (7, "7"),
        ("a\nb", r"'a\nb'"),
        ("x" * 99, "'" + "x" * 38 + "…"),
        (b"\0" * 9, "9 bytes"),
        (np.arange(3), "[0 1 2]"),
        (np.zeros((2, 3)), "[0.0 0.0 0.0 0.0 0.0 0.0] (2 × 3)"),
        (np.arange(1000), "[0 1 2 3 4 5 6 7 8 9 10 11 12 …] (1000)"),
        ({"text": "hello", "n": 3}, "text='hello' n=3"),
        (None, "None"),
    ],
)
def test_a_record_is_told_in_short(record: Any, told: str) -> None:
    assert abbreviate(record, 40) == told


@pytest.mark.parametrize(
    "record", ["y" * 10**6, np.arange(10**6), {"a": "z" * 999, "b": np.zeros((9, 99))}, list(range(999))]
)
def test_no_record_is_told_at_length(record: Any) -> None:
    assert 20 < len(abbreviate(record, 60)) <= 66
