"""Which rows two runs of a script computed, and whether their numbers say so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests.proof.script_traces import build_step, write_script_trace
from unisono.proof.recording.trace import write_tensors
from unisono.proof.scripts.judging.script_rows import count_shared_rows_once, drop_own_numbers, explain_other_rows
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace
from unisono.proof.scripts.recording.rows_seen import FetchedRows


def write_runs(
    folder: Path,
    ranks: list[list[list[int]]],
    whole: list[list[int]],
    inputs: tuple[list[str], ...] = ([], [], []),
    lengths: tuple[int, ...] = (8, 8, 8),
    shapes: tuple[str, ...] = ("", "", ""),
) -> tuple[ScriptTrace, ScriptTrace]:
    """Traces of two processes and of one, with rows step by step; the rest is of process 1, of 2 and of the one."""
    traces = []
    for name, steps, own in (("many", ranks, range(2)), ("one", [[rows] for rows in whole], [2])):
        seen = [[RankFacts(inputs=inputs[n], shape=shapes[n], sources=[lengths[n]]) for n in own] for _ in steps]
        traces.append(write_script_trace(folder / name, seen, [build_step(by_rank) for by_rank in steps]))
    return traces[0], traces[1]


def follow_rows(folder: Path, ranks: list[list[list[int]]], whole: list[list[int]]) -> str:
    """What is said of the rows of two processes, step by step, and of those of one."""
    return explain_other_rows(*write_runs(folder, ranks, whole))[0]


def test_a_rank_that_takes_its_stride_of_another_draw_is_told_from_ranks_that_draw_for_themselves(
    tmp_path: Path,
) -> None:
    whole = [[0, 1, 2, 3], [4, 5, 6, 6]]
    assert follow_rows(tmp_path / "stride", [[[0, 2], [7, 9]], [[4, 6], [1, 1]]], whole) == ""
    drawn = follow_rows(tmp_path / "own", [[[0, 1], [7, 7]], [[2, 3], [1, 1]]], whole)
    assert "no fault if every process draws its own" in drawn
    assert "shuffles otherwise" in follow_rows(tmp_path / "shuffled", [[[9, 4], [0, 7]], [[1, 3], [5, 2]]], whole)


class Loading:
    """Like the iterator of a `DataLoader`."""

    _dataset = range(8)


def test_a_batch_is_one_of_an_evaluation_only_until_a_backward_pass_begins() -> None:
    fetched, iterator = FetchedRows(), Loading()
    for rows in ([0, 1], [2, 3], [4, 5]):
        fetched.draw(iterator, rows)
    fetched.fetch(iterator)
    fetched.drop_latest()
    assert not fetched.has_latest
    for _ in range(2):
        fetched.fetch(iterator)
    fetched.begin_pass()
    assert not fetched.has_latest
    fetched.drop_latest()
    assert [fetched.take_pass() for _ in range(3)] == [[2, 3], [4, 5], []]


DEALT = (["r", "t"], ["s", "u"], ["r", "s", "t", "u"])  # to two ranks, and the same on one process
SCALED = (["r1", "t1"], ["s2", "u2"], ["r", "s", "t", "u"])  # by statistics of the part that a rank has
SHARED = (["r", "s"], ["r", "s"], ["r", "s", "t", "u"])


@pytest.mark.parametrize(
    ("inputs", "lengths", "own"),
    [
        (DEALT, (4, 4, 8), True),  # a part of the data on each rank
        (SCALED, (4, 4, 8), True),
        (SCALED, (5, 5, 9), True),  # filled up
        (SCALED, (22, 29, 48), True),  # dealt out by a hash, which each rank has its own of
        (DEALT, (8, 8, 8), True),  # a data set that skips the rows of others by itself
        (SHARED, (4, 4, 8), False),  # both ranks have the same part
        (SCALED, (8, 8, 8), False),  # the same rows, each with its own augmentation
        (SCALED, (7, 7, 8), False),  # cut off at the end
        (SCALED, (2, 2, 2), False),  # of two rows
        (([], [], []), (4, 4, 8), True),  # given to the model as no tensors
        (([], [], []), (8, 8, 8), False),
    ],
)
def test_numbers_of_rows_are_those_of_a_rank_where_it_has_a_data_set_of_its_own(
    tmp_path: Path, inputs: tuple[list[str], ...], lengths: tuple[int, ...], own: bool
) -> None:
    mine, reference = write_runs(tmp_path, [[[0, 1], [0, 1]]], [[0, 1, 2, 3]], inputs, lengths)
    assert drop_own_numbers(mine, reference) == own
    assert mine.facts.steps[0].by_rank == ([[], []] if own else [[0, 1], [0, 1]])
    assert ("scaled by statistics" in explain_other_rows(mine, reference)[0]) == (own and inputs is SCALED)


@pytest.mark.parametrize(
    ("inputs", "drawn", "other"),
    [
        ([["a", "b"], ["c", "d"]], {}, True),
        ([["a", "b"], ["a", "b"]], {}, False),  # the same rows
        ([["a", "b"], ["c", "d"]], {"torch": 1}, False),  # the same rows, augmented
    ],
)
def test_equal_numbers_of_other_rows_are_no_proof_that_all_ranks_read_the_same(
    tmp_path: Path, inputs: list[list[str]], drawn: dict[str, int], other: bool
) -> None:
    """Every rank may make rows of its own, as many as one process does."""
    seen = [[RankFacts(inputs=[f"{row} {step}" for row in rows], drawn=drawn) for rows in inputs] for step in range(2)]
    many = write_script_trace(tmp_path / "many", seen, [build_step([[0, 1], [0, 1]]), build_step([[2, 3], [2, 3]])])
    alone = [[RankFacts(inputs=[f"a {step}", f"b {step}"])] for step in range(2)]
    one = write_script_trace(tmp_path / "one", alone, [build_step([[0, 1]]), build_step([[2, 3]])])
    assert ("a data set of its own" in explain_other_rows(many, one)[0]) == other


def test_numbers_of_one_data_set_are_kept(tmp_path: Path) -> None:
    mine, reference = write_runs(tmp_path, [[[0, 2], [1, 3]]], [[0, 1, 2, 3]], DEALT)
    assert not drop_own_numbers(mine, reference)
    assert mine.facts.steps[0].rows == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shapes", "rows", "gradients", "shared"),
    [
        (("4", "4", "8"), [[0, 1], [0, 1]], 1.0, True),  # each rank has a part of the sequence
        (("8", "8", "8"), [[0, 1], [0, 1]], 2.0, True),  # each computes a part of the model
        (("8", "8", "8"), [[0, 1], [0, 1]], 1.0, False),  # all compute the same
        (("4", "4", "8"), [[0, 1], [2, 3]], 1.0, False),
    ],
)
def test_rows_whose_parts_ranks_compute_count_once(
    tmp_path: Path, shapes: tuple[str, ...], rows: list[list[int]], gradients: float, shared: bool
) -> None:
    mine, reference = write_runs(tmp_path, [rows], [[0, 1]], (["r"], ["r"], ["r"]), shapes=shapes)
    for number, value in enumerate((1.0, gradients)):
        write_tensors(mine.folder, f"local gradients {number}", 0, {"0/a": np.full(3, value)})
    assert count_shared_rows_once(mine, reference) == shared
    assert (mine.facts.steps[0].rows == [0, 1]) == shared
    assert all(rank.parted == shared for rank in mine.ranks[0])


@pytest.mark.parametrize(
    ("one", "many", "told"),
    [
        (["r", "s", "t", "u"], ["s"], "is given 4 rows on one process, and all but 1 of them on many"),
        (["r", "s", "t"], ["s", "u"], "is given 4 rows on many, and all but 1 of them on one process"),
        (["r", "s", "y", "x"], ["s"], "other inputs than on one process"),
    ],
)
def test_rows_that_are_left_out_of_a_later_step_are_told(
    tmp_path: Path, one: list[str], many: list[str], told: str
) -> None:
    mine, reference = write_runs(tmp_path, [[[], []], [[], []]], [[], []], DEALT)
    reference.ranks[1][-1].inputs, mine.ranks[1][-1].inputs = one, many
    why, since = explain_other_rows(mine, reference)
    assert (told in why, since) == (True, 2), why


def test_other_inputs_explain_nothing_of_the_steps_before(tmp_path: Path) -> None:
    mine, reference = write_runs(tmp_path, [[[0], [1]], [[2], [3]]], [[0, 1], [2, 3]], DEALT)
    mine.ranks[1][-1].inputs = ["x", "u"]
    why, since = explain_other_rows(mine, reference)
    assert ("rows of the same numbers gave other inputs" in why, since) == (True, 2)


@pytest.mark.parametrize(
    ("shapes", "shared"),
    [
        (("int64 (8,)", "int64 (8,)", "int64 (16,)"), True),
        (("int64 (9,)", "int64 (7,)", "int64 (16,)"), True),  # to the last token
        (("int64 (8,)", "int64 (7,)", "int64 (16,)"), False),  # padding
        (("int64 (16,)", "int64 (16,)", "int64 (16,)"), False),  # twice the rows
    ],
)
def test_parts_of_rows_without_numbers_are_no_larger_batch(
    tmp_path: Path, shapes: tuple[str, ...], shared: bool
) -> None:
    """As where ranks share a sequence, and no `DataLoader` says which one it is."""
    inputs = (["a", "b"], ["c", "d"], ["e", "f"])
    many, one = write_runs(tmp_path, [[[], []]], [[]], inputs, shapes=shapes)
    why, step = explain_other_rows(many, one)
    assert ("share every row" in why, step) == (shared, 1)
    assert ("the global batch is another" in why) == (not shared)
