"""An evaluation that reads other rows than one process fails where what comes of it is another number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from packages.unisono.tests.proof.script_traces import write_script_trace
from unisono.proof.comparison import ComparedQuantity, Mark
from unisono.proof.scripts.judging.evaluation_rows import judge_evaluation
from unisono.proof.scripts.recording.evaluations_seen import EvaluationsSeen
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace
from unisono.proof.scripts.replay.reading import ReadingFacts, write_reading

SAME = [ComparedQuantity("initial parameters", "PASS"), ComparedQuantity("parameters", "PASS")]


def write_run(
    folder: Path, rows: list[list[int]], numbers: list[float], *others: list[float], length: int = 5, after: int = 3
) -> ScriptTrace:
    """Ranks that have evaluated these rows and read the same numbers, or each its own."""
    trace = write_script_trace(folder, [[RankFacts() for _ in rows]])
    for rank, own in enumerate(rows):
        read = [numbers, *others][rank] if others else numbers
        facts = ReadingFacts(
            True, False, "", evaluated=own, evaluated_of=length, evaluated_after=after, numbers_of_it=read
        )
        write_reading(folder, rank, facts, [])
    return trace


@pytest.mark.parametrize(
    ("rows", "numbers", "mark"),
    [
        ([[0, 2, 4], [1, 3]], [0.5], "PASS"),
        ([[0, 1, 2, 3, 4]] * 2, [0.5], "PASS"),  # every rank evaluates all
        ([[0, 1, 2, 3, 4], []], [0.5], "PASS"),  # rank 0 alone
        ([[0, 2, 4], [1, 3, 0]], [0.5], "FAIL"),
        ([[0, 2, 4], [1, 3, 0]], [7.0, 0.6], "PASS"),  # the row that is there twice was left out of the metric
        ([[0, 2, 4], [1, 3, 0]], [0.6, 7.0], "ABSTAIN"),
        ([[0, 2, 4], [1, 3, 0]], [], "ABSTAIN"),
        ([[0, 2], [1, 3]], [0.5], "FAIL"),
    ],
)
def test_rows_of_an_evaluation_are_counted_and_held_against_its_numbers(
    tmp_path: Path, rows: list[list[int]], numbers: list[float], mark: str
) -> None:
    one = write_run(tmp_path / "one", [[0, 1, 2, 3, 4]], [0.6])
    found, likely = judge_evaluation(write_run(tmp_path / "many", rows, numbers), one, SAME)
    assert found is not None
    assert (found.mark, likely is not None) == (mark, mark == "FAIL")


@pytest.mark.parametrize(
    ("numbers", "mark"),
    [
        (([0.4], []), "ABSTAIN"),  # the loss that rank 0 has trained with, printed beside an accuracy
        (([0.4], [0.7]), "ABSTAIN"),  # the loss of each
        (([0.4, 0.5], [0.5, 0.7]), "FAIL"),
        (([0.5], [0.5, 0.6]), "ABSTAIN"),  # one of them has what one process has
    ],
)
def test_a_number_of_a_rank_alone_is_none_of_the_evaluation(
    tmp_path: Path, numbers: tuple[list[float], list[float]], mark: Mark
) -> None:
    one = write_run(tmp_path / "one", [[0, 1, 2, 3, 4]], [0.6])
    many = write_run(tmp_path / "many", [[0, 2, 4], [1, 3, 0]], *numbers)
    found, likely = judge_evaluation(many, one, SAME)
    assert found is not None
    assert (found.mark, likely is not None) == (mark, mark == "FAIL")


@pytest.mark.parametrize(
    ("after", "parameters", "mark"),
    [(3, "PASS", "FAIL"), (3, "ABSTAIN", "ABSTAIN"), (6, "PASS", "ABSTAIN"), (0, "PASS", "ABSTAIN")],
)
def test_numbers_of_other_weights_say_nothing_of_rows(tmp_path: Path, after: int, parameters: Mark, mark: Mark) -> None:
    one = write_run(tmp_path / "one", [[0, 1, 2, 3, 4]], [0.6])
    many = write_run(tmp_path / "many", [[0, 2, 4], [1, 3, 0]], [0.5], after=after)
    found, likely = judge_evaluation(many, one, [SAME[0], ComparedQuantity("parameters", parameters)])
    assert found is not None
    assert (found.mark, likely is not None) == (mark, mark == "FAIL")


def test_weights_before_the_first_update_are_the_initial_ones(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [[0, 1, 2, 3, 4]], [0.6], after=0)
    many = write_run(tmp_path / "many", [[0, 2, 4], [1, 3, 0]], [0.5], after=0)
    found, _ = judge_evaluation(many, one, [SAME[0], ComparedQuantity("parameters", "ABSTAIN")])
    assert found is not None and found.mark == "FAIL"


def test_rows_of_other_data_sets_are_not_compared_by_number(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [[0, 1, 2, 3, 4]], [0.6])
    many = write_run(tmp_path / "many", [[0, 1, 2], [0, 1]], [0.5], length=3)
    assert judge_evaluation(many, one, SAME) == (None, None)


def test_numbers_are_those_after_the_last_exchange_and_before_training_goes_on() -> None:
    seen, iterator = EvaluationsSeen(), iter(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2))
    value = torch.tensor(0.25)
    seen.hear("item", [value])
    seen.add(iterator, [0, 1])
    seen.end_reading(iterator, 4, 3)
    seen.hear("item", [value])
    seen.exchange()
    seen.hear("item", [2 * value])
    seen.hear("add", [value])
    seen.hear("item", [(3 * value).requires_grad_()])  # a loss of the training
    seen.begin_training()
    seen.hear("item", [value])
    assert (seen.rows, seen.length, seen.updates, seen.numbers) == ([0, 1], 4, 3, [0.5])


def test_a_batch_that_is_labelled_without_gradients_before_it_is_trained_on_is_none_of_an_evaluation() -> None:
    data = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2)
    seen, training, held_out = EvaluationsSeen(), iter(data), iter(data)
    for batch in ([0, 1], [2, 3]):
        seen.add(training, batch)
        seen.begin_training()
    seen.end_reading(training, 4, 2)
    assert seen.rows == []
    seen.add(held_out, [0, 1])
    seen.end_reading(held_out, 2, 2)
    assert seen.rows == [0, 1]
