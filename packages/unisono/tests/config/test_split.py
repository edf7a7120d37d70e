"""How a global batch is cut, whatever its length, and what is said of one that cannot be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config.batch_split import BatchSplit
from unisono.runtime.errors import ConfigError

SPLITS = st.builds(
    lambda world, passes, micro: BatchSplit(world * passes * micro, world, micro),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 7),
)


def refusal(global_batch: int, world_size: int, micro_batch: int | None) -> str:
    with pytest.raises(ConfigError) as caught:
        BatchSplit.create(global_batch, world_size, micro_batch)
    return str(caught.value)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@given(SPLITS, st.data())
def test_the_processes_together_take_every_row_of_any_batch_once_and_in_order(split: BatchSplit, data: st.DataObject):
    length = data.draw(st.integers(0, split.global_batch))
    taken = [
        row
        for rank in range(split.world_size)
        for micro_batch in split.micro_batches(rank)
        for row in split.rows(micro_batch, length)
    ]
    assert taken == list(range(length))


@given(SPLITS, st.data())
def test_a_micro_batch_has_the_same_rows_on_any_number_of_processes(split: BatchSplit, data: st.DataObject):
    length = data.draw(st.integers(0, split.global_batch))
    alone = BatchSplit.create(split.global_batch, 1, split.micro_batch)
    pieces = [k for rank in range(split.world_size) for k in split.micro_batches(rank)]
    assert pieces == list(alone.micro_batches(0))
    assert [split.rows(k, length) for k in pieces] == [alone.rows(k, length) for k in pieces]


@given(SPLITS)
def test_the_rows_that_a_process_owns_are_those_of_its_micro_batches(split: BatchSplit):
    for rank in range(split.world_size):
        rows = [row for k in split.micro_batches(rank) for row in split.rows(k, split.global_batch)]
        assert list(split.rows_of(rank)) == rows


@given(SPLITS)
def test_all_processes_make_equally_many_passes(split: BatchSplit):
    assert {len(split.micro_batches(rank)) for rank in range(split.world_size)} == {split.passes}


@given(SPLITS)
def test_every_micro_batch_of_a_full_batch_is_full(split: BatchSplit):
    everyone = range(split.world_size * split.passes)
    assert {len(split.rows(k, split.global_batch)) for k in everyone} == {split.micro_batch}


@given(SPLITS)
def test_a_split_can_be_asked_for_by_its_own_numbers(split: BatchSplit):
    assert BatchSplit.create(split.global_batch, split.world_size, split.micro_batch) == split


@given(st.integers(1, 20), st.integers(1, 20))
def test_without_a_micro_batch_each_process_takes_its_rows_in_one_piece(world_size: int, rows: int):
    assert BatchSplit.create(world_size * rows, world_size, None) == BatchSplit(world_size * rows, world_size, rows)


@given(st.integers(1, 60), st.integers(1, 60), st.none() | st.integers(1, 60))
def test_a_split_is_refused_exactly_where_it_would_not_be_even(
    global_batch: int, world_size: int, micro_batch: int | None
):
    even = global_batch % world_size == 0 and (micro_batch is None or global_batch // world_size % micro_batch == 0)
    try:
        BatchSplit.create(global_batch, world_size, micro_batch)
    except ConfigError:
        assert not even
    else:
        assert even


@given(st.integers(1, 60), st.integers(2, 60))
def test_every_world_size_and_global_batch_that_a_refusal_lists_works(global_batch: int, world_size: int):
    if global_batch % world_size == 0 or world_size > global_batch:
        return
    told = refusal(global_batch, world_size, None)
    worlds, batches = (numbers(text) for text in re.findall(r"\[([\d, ]+)\]", told))
    assert worlds
    assert batches
    assert all(BatchSplit.create(global_batch, n, None) for n in worlds)
    assert all(BatchSplit.create(n, world_size, None) for n in batches)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 30))
def test_every_micro_batch_and_global_batch_that_a_refusal_lists_works(world_size: int, rows: int, micro_batch: int):
    if rows % micro_batch == 0:
        return
    told = refusal(world_size * rows, world_size, micro_batch)
    micros, batches = (numbers(text) for text in re.findall(r"\[([\d, ]+)\]", told))
    assert micros
    assert batches
    assert all(BatchSplit.create(world_size * rows, world_size, n) for n in micros)
    assert all(BatchSplit.create(n, world_size, micro_batch) for n in batches)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((4, 6, None), ["layout.world_size=6 is more than the 4 rows of train.global_batch", "at most 4 processes"]),
        (
            (12, 5, None),
            ["train.global_batch=12 cannot be split evenly over layout.world_size=5", "[1, 2, 3, 4, 6, 12]", "[10, 15"],
        ),
        (
            (12, 2, 4),
            [
                "layout.micro_batch=4 does not divide the 6 rows that each of 2 processes has of train.global_batch=12",
                "[1, 2, 3, 6]", "[8, 16]",
            ],
        ),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_names_the_keys_and_the_numbers_that_work(
    numbers: tuple[int, int, int | None], told: list[str]
):
    assert all(text in refusal(*numbers) for text in told)
