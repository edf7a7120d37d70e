"""What a loss that differs first is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.proof.patterns import (
    EVEN,
    SUMS,
    UNEVEN,
    diagnose,
    failed,
    name,
    pair,
    passed,
    reported,
    summed,
    told,
    trace,
)
from packages.unisono.tests.proof.script_traces import OWN, combine
from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.recording.trace import Part, write_tensors

# the loss -------------------------------------------------------------------------------------------------------------


def loss(step: int, mine: float = 1.1) -> ComparedQuantity:
    return failed("loss", step, "loss", mine=mine, reference=1.0)


MEANS = (7 / 2 + 30 / 6) / 2


def test_a_mean_of_means_reproduces_the_loss_and_the_gradient(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1 / 4, 1 / 12]))
    told = diagnose(found, reported(found, MEANS), failed("raw gradients", 1))
    assert (told.fault, "reproduces the gradient to rounding, and the loss" in told.because) == (
        "A mean of means",
        True,
    )


@pytest.mark.parametrize(
    ("gradient", "value"),
    [
        (summed([1 / 4, 1 / 12 * (1 + 1e-6)]), MEANS),  # the loss is that of one, the gradient is not
        (summed([1 / 5, 1 / 9]), 4.3),  # neither is
    ],
)
def test_what_a_mean_of_means_does_not_reproduce_is_not_called_so(tmp_path: Path, gradient: Any, value: float) -> None:
    found = pair(tmp_path, gradient)
    fault = name(found, reported(found, value), failed("raw gradients", 1))
    assert fault == "The loss depends on the layout"


def test_a_mean_of_means_with_a_loss_that_is_logged_right(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1 / 4, 1 / 12]))
    assert name(found, passed("loss"), failed("raw gradients", 1)) == "A mean of means"


@pytest.mark.parametrize(
    ("true", "fault"),
    [
        ((0.25, 0.75), "A mean of means"),
        ((0.5 + 1e-7, 0.5 + 1e-7), "The loss depends on the layout"),  # as an epsilon beside a norm makes them
    ],
)
def test_a_plain_mean_is_a_fault_only_where_one_process_weighs_parts_otherwise(
    tmp_path: Path, true: tuple[float, float], fault: str
) -> None:
    mine, reference = (trace(tmp_path / name, [[4], [4]]) for name in ("mine", "one"))
    for rank, own in enumerate(OWN):
        write_tensors(mine.folder, f"local gradients {rank}", 0, {f"0/{name}": value for name, value in own.items()})
    write_tensors(mine.folder, "raw gradients", 0, combine(0.5, 0.5))
    write_tensors(reference.folder, "raw gradients", 0, combine(*true))
    assert diagnose((mine, reference), loss(1)).fault == fault


def test_a_loss_of_which_nothing_is_known_gets_a_neutral_name(tmp_path: Path) -> None:
    assert told(tmp_path, loss(2), counts=UNEVEN).fault == "The loss depends on the layout"
    assert told(tmp_path / "of", loss(1), passed("outputs"), random=True).fault == "The loss depends on the layout"


@pytest.mark.parametrize(("step", "said"), [(1, "a rank takes of its own rows"), (2, "keeps from step to step")])
def test_a_loss_that_differs_only_later_sends_to_what_it_keeps(tmp_path: Path, step: int, said: str) -> None:
    mine, reference = (trace(tmp_path / name, [[4], [4]]) for name in ("mine", "one"))
    for rank in range(2):
        write_tensors(mine.folder, f"local gradients {rank}", step - 1, {"0/a": np.full(3, 1.5 + rank)})
    found = diagnose((mine, reference), loss(step))
    assert (found.fault, said in found.because) == ("The loss depends on the layout", True), found.because


@pytest.mark.parametrize(
    ("ranks", "fault"), [([1], "The loss depends on the process"), ([0, 1], "The loss depends on the layout")]
)
def test_micro_batches_of_one_rank_that_have_other_sums(tmp_path: Path, ranks: list[int], fault: str) -> None:
    found = pair(tmp_path, summed([1.0, 2.0]))
    for rank in ranks:
        found[0].facts.steps[0].parts[rank].sums["next"] *= 1.5
    assert name(found, reported(found, 3.7), failed("raw gradients", 1)) == fault


def test_a_loss_that_is_another_each_time_is_told_before_anything_is_guessed(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1.0, 2.0]))
    found[1].facts.probed, found[1].facts.unstable_loss = True, "'next' of the same outputs came to 1 and then to 2"
    assert name(found, reported(found, 3.7), failed("raw gradients", 1)) == "The loss depends on the call"


@pytest.mark.parametrize("quantity", ["raw gradients", "optimizer state", "parameters", "evaluation"])
def test_what_follows_a_loss_that_is_another_each_time_is_told_so_too(tmp_path: Path, quantity: str) -> None:
    """Rounding was measured with that loss, so that its own difference may pass, and what comes of it not."""
    found = pair(tmp_path, summed([1.0, 2.0]))
    found[1].facts.probed, found[1].facts.unstable_loss = True, "'next' of the same outputs came to 1 and then to 2"
    assert name(found, failed(quantity, 1)) == "The loss depends on the call"


@pytest.mark.parametrize(
    ("size", "fault"), [(1e-3, "The gradients depend on the layout"), (0.0, "The update is not that of the gradients")]
)
def test_gradients_that_agree_only_within_a_wide_rounding_leave_the_update_open(
    tmp_path: Path, size: float, fault: str
) -> None:
    found = pair(tmp_path, summed([1.0, 1.0]))
    within = ComparedQuantity("clipped gradients", "PASS", Difference(size, 1, "a"), allowed=1e-2)
    assert name(found, within, failed("parameters", 1, size=1e-5)) == fault


@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("averaged", "The loss depends on the micro-batch", "the mean, and is divided by their count once more"),
        ("places", "The loss depends on the micro-batch", "noise from a key or seed that is always the same"),
        ("statistic", "A statistic of the batch is taken of its parts", "neither the sum nor a mean"),
    ],
)
def test_what_the_loss_of_some_rows_showed_is_told_of_other_micro_batches(
    tmp_path: Path, kind: str, fault: str, said: str
) -> None:
    found = pair(tmp_path, None)
    found[1].facts.probed, found[1].facts.additivity = True, {"next": kind}
    found[0].facts.steps[0].parts = [Part(n, 0, 2, {"next": 9.0}, {"next": 2.0}, {"next": 1.0}) for n in range(4)]
    told = diagnose(found, reported(found, 5.0), world_size=1)
    assert (told.fault, said in told.because) == (fault, True)


def test_a_metric_and_totals_that_are_no_sums_over_rows_are_named(tmp_path: Path) -> None:
    said = {"metric/hits sum": ["statistic", "of 4 rows is 0.5, …"], "total/norm": ["statistic", "of 4 rows is 2, …"]}
    found = pair(tmp_path, None)
    found[1].facts.probed, found[1].facts.unsummed = True, said
    found[0].facts.steps[0].parts = [Part(n, 0, 2, {"next": 9.0}, {"next": 2.0}, {"next": 1.0}) for n in range(4)]
    told = diagnose(found, ComparedQuantity("metrics", "FAIL", Difference(0.5, 1, "hits")), world_size=1)
    assert (told.fault, told.because) == (
        "A statistic of the batch is taken of its parts",
        "the sum of 'hits' of 4 rows is 0.5, …",
    )
    told = diagnose(found, reported(found, 5.0), world_size=1)
    assert (told.fault, told.remedy) == (
        "A statistic of the batch is taken of its parts",
        "return sums over rows from totals()",
    )


@pytest.mark.parametrize(("second", "twice"), [(30.0, True), (20.0, False)])
def test_sums_that_a_loss_has_reduced_itself_are_told_from_other_wrong_sums(
    tmp_path: Path, second: float, twice: bool
) -> None:
    found = pair(tmp_path, None)
    for trace_, sums in zip(found, ([30.0, second], [10.0, 20.0]), strict=True):
        step = trace_.facts.steps[0]
        step.parts = [Part(n, n, 4, {"next": sums[n]}, {"next": 4.0}, {"next": 1.0}) for n in range(2)]
    told = diagnose(found, reported(found, 7.5), world_size=2)
    assert ("is added up over ranks once more" in told.because) == twice
    assert (told.fault == "The loss is scaled by N") == twice


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("statistic", "A statistic of the batch is taken of its parts"),
        ("largest", "The loss depends on the micro-batch"),  # as where the sum is clamped
        ("", "The loss depends on the micro-batch"),  # a mean would have been refused of the rows that were tried, too
        ("mean", "A mean of means"),
    ],
)
def test_a_mean_that_is_refused_of_some_rows_alone_is_what_more_rows_show(
    tmp_path: Path, kind: str, fault: str
) -> None:
    found = pair(tmp_path, None)
    found[0].facts.fault, found[0].facts.called = "ConfigError: 'next' is a mean", "A mean of means"
    assert diagnose(found, failed("loss", 1)).fault == "A mean of means"
    found[1].facts.probed, found[1].facts.additivity = True, {"next": kind} if kind else {}
    assert diagnose(found, failed("loss", 1)).fault == fault


@pytest.mark.parametrize("kept", ["", "self.best"])
def test_sets_of_rows_say_nothing_of_a_loss_whose_task_keeps_something(tmp_path: Path, kept: str) -> None:
    found = pair(tmp_path, None)
    found[1].facts.probed, found[1].facts.additivity, found[1].facts.kept_by_task = True, {"next": "largest"}, kept
    found[0].facts.steps[0].parts = [Part(n, 0, 2, {"next": 9.0}, {"next": 2.0}, {"next": 1.0}) for n in range(4)]
    told = diagnose(found, reported(found, 5.0), world_size=1)
    assert (told.fault, "a certain row is among them" in told.because) == (
        "The loss depends on the micro-batch",
        not kept,
    )


@pytest.mark.parametrize("quantity", ["outputs", "loss", "evaluation"])
def test_a_model_that_keeps_an_earlier_micro_batch_is_told_wherever_it_shows(tmp_path: Path, quantity: str) -> None:
    found = pair(tmp_path, summed([1.0, 1.0]))
    found[1].facts.probed, found[1].facts.unstable_forward = True, "the model keeps mask of an earlier micro-batch"
    assert name(found, failed(quantity, 1)) == "The forward pass depends on the call"


@pytest.mark.parametrize(
    ("first", "mine", "fault"),
    [
        ("outputs", [[1, 2], [7, 8]], "Randomness depends on the rank"),
        ("outputs", [[1, 2], [3, 5]], "Randomness depends on the rank"),
        ("outputs", [[1, 2], [3, 4]], "The forward pass depends on the layout"),
        ("loss", [[1, 2], [7, 8]], "Randomness depends on the rank"),
        ("loss", [[1, 2], [3, 4]], "The loss depends on the layout"),
    ],
)
def test_randomness_is_named_where_the_random_state_is_another(
    tmp_path: Path, first: str, mine: Any, fault: str
) -> None:
    found = pair(tmp_path, None, random=True)
    for one, draws in zip(found, (mine, [[1, 2], [3, 4]]), strict=True):
        one.facts.steps[0].draws = draws
    assert name(found, loss(1) if first == "loss" else failed("outputs", 1)) == fault


def test_a_loss_that_differs_alone_is_that_of_some_rows_or_nobody_knows(tmp_path: Path) -> None:
    found = pair(tmp_path, None)
    assert name(found, reported(found, 7 / 2), passed("raw gradients")) == "The loss is not summed over ranks"
    assert name(found, reported(found, 3.6), passed("raw gradients")) == "The reported loss depends on the layout"


@pytest.mark.parametrize("first", ["outputs", "loss"])
def test_what_differs_where_replicas_differ_after_it_comes_of_other_weights(tmp_path: Path, first: str) -> None:
    found = told(tmp_path, failed(first, 2, mine=1.1, reference=1.0), failed("replicas", 2), random=True).fault
    assert found == "Replicas drift apart"


@pytest.mark.parametrize(
    ("apart", "fault"),
    [(["ema/a"], "The moving average drifts"), (["a", "ema/a"], "Replicas drift apart")],
    ids=["average", "weights too"],
)
def test_a_loss_that_differs_with_an_average_alone_may_read_it(tmp_path: Path, apart: list[str], fault: str) -> None:
    """As where one rank alone updates the teacher from which all learn."""
    found = trace(tmp_path / "mine", EVEN, random=True), trace(tmp_path / "one", [[8], [8]])
    found[0].facts.steps[1].replicas = [f"'{name}' is not the same on ranks [0] and [1]" for name in apart]
    told = diagnose(found, loss(2), failed("replicas", 2))
    assert told.fault == fault
    assert ("'ema/a' is not the same on ranks [0] and [1], and their weights are" in told.because) == (len(apart) == 1)


@pytest.mark.parametrize("mine", [2.0, 0.5])
def test_a_loss_that_is_off_by_the_number_of_processes(tmp_path: Path, mine: float) -> None:
    assert told(tmp_path, loss(1, mine), failed("raw gradients", 1)).fault == "The loss is scaled by N"


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_term_that_is_off_by_the_number_of_processes_where_another_agrees(tmp_path: Path, factor: float) -> None:
    found = pair(tmp_path, None)
    for step in (found[0].facts.steps[0], found[1].facts.steps[0]):
        step.terms |= {"other": 1.0}
        for part in step.parts:
            part.sums["other"] = part.counts["other"] = 1.0
    mine = found[0].facts.steps[0]
    mine.terms["next"] *= factor
    for part in mine.parts:
        part.sums["next"] *= factor
    diagnosed = diagnose(found, loss(1, 1.5), failed("raw gradients", 1))
    assert diagnosed.fault == "The loss is scaled by N"
    assert "'next' of every micro-batch" in diagnosed.because
    mine.parts[0].sums["next"] *= 1.1
    assert name(found, loss(1, 1.5), failed("raw gradients", 1)) != "The loss is scaled by N"


def test_a_loss_whose_counts_are_those_of_micro_batches_is_not_scaled_by_processes(tmp_path: Path) -> None:
    found = pair(tmp_path, None)
    for one, count in zip(found, (2.0, 1.0), strict=True):
        step = one.facts.steps[0]
        step.parts = [
            Part(n, n, int(8 / count), {"next": 1.0}, {"next": 1.0}, {"next": 1.0}) for n in range(int(count))
        ]
        step.loss = step.terms["next"] = 8 / count
    first = failed("loss", 1, "loss", mine=4.0, reference=8.0)
    assert name(found, first, failed("raw gradients", 1)) == "The loss depends on the micro-batch"


@pytest.mark.parametrize(("off", "said"), [(1e-8, "in single precision"), (0.5, "where others are together")])
def test_counts_that_depend_on_which_rows_are_together(tmp_path: Path, off: float, said: str) -> None:
    found = pair(tmp_path, None)
    step = found[0].facts.steps[0]
    step.terms["next"] *= 1.1
    step.parts = [Part(0, 0, 8, {"next": sum(SUMS)}, {"next": 8.0 * (1 + off)}, {"next": 1.0})]
    diagnosed = diagnose(found, loss(1, 1.5), failed("raw gradients", 1), world_size=1)
    assert diagnosed.fault == "The loss depends on the micro-batch"
    assert diagnosed.because.endswith(said)


@pytest.mark.parametrize("quantity", ["evaluation", "evaluation repeats"])
@pytest.mark.parametrize(
    ("why", "fault"),
    [
        ("it draws from numpy's global generator (a.py:3), which no key seeds", "Evaluation draws at random"),
        ("it changes self.predictions", "The evaluation depends on the call"),
        ("no known generator moves, and no attribute of the task: a clock", "The evaluation depends on the call"),
    ],
)
def test_an_evaluation_that_does_not_repeat_draws_only_where_it_has_drawn(
    tmp_path: Path, quantity: str, why: str, fault: str
) -> None:
    found = pair(tmp_path, None)
    found[0].facts.evaluation = [{"loss": 1.0}, {"loss": 2.0}]  # by rank
    found[1].facts.probed, found[1].facts.unstable_evaluation = True, why
    assert name(found, failed(quantity, 0, "loss")) == fault
