"""What a pattern of differences is called. Faults that can be made in a real run are in `tests/proofs/zoo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.proof import diagnosis
from unisono.proof.comparison import Compared, Difference
from unisono.proof.diagnosis import of_error
from unisono.proof.fault_names import Diagnosis
from unisono.proof.recording.trace import QUANTITIES, Facts, StepFacts, Trace, write_facts, write_tensors


def trace(folder: Path, counts: list[list[int]], gradient: Any = None, loss: float | None = 1.0, **facts: Any) -> Trace:
    """Steps in which ranks computed so many rows; of no row twice."""
    folder.mkdir()
    steps, row = [], 0
    for number, of_ranks in enumerate(counts):
        by_rank = []
        for count in of_ranks:
            by_rank.append(list(range(row, row + count)))
            row += count
        rows = [row for rank in by_rank for row in rank]
        steps.append(StepFacts(rows, by_rank, loss, {}, 1.0, [[0.1]] * len(of_ranks), [{}] * len(of_ranks)))
        write_tensors(folder, "raw gradients", number, gradient or {"a": np.ones(3), "b": np.arange(3.0)})
        write_tensors(folder, "clipped gradients", number, gradient or {"a": np.ones(3), "b": np.arange(3.0)})
    write_facts(folder, Facts(["a", "b"], ["frozen"], steps=steps, **facts))
    return Trace(folder)


OTHER = {"a": np.array([1.0, -2.0, 1.0]), "b": np.array([2.0, 1.0, 0.0])}  # of another direction
EVEN, UNEVEN = [[4, 4], [4, 4]], [[4, 4], [4, 2]]


def told(
    folder: Path, first: Compared, *more: Compared, counts: Any = EVEN, starts: Any = (), **facts: Any
) -> Diagnosis:
    folder.mkdir(exist_ok=True)
    mine = trace(folder / "mine", counts, **facts)
    reference = trace(folder / "one", [[sum(step)] for step in counts])
    found = diagnosis.diagnose(mine, reference, [first, *more], 2, starts)
    assert found is not None
    return found


def failed(
    quantity: str, step: int, name: str = "a", size: float = 0.5, mine: Any = None, reference: Any = None
) -> Compared:
    return Compared(quantity, "FAIL", Difference(size, step, name, mine, reference))


def passed(quantity: str) -> Compared:
    return Compared(quantity, "PASS")


def test_every_quantity_has_a_rule() -> None:
    assert set(QUANTITIES) <= set(diagnosis._RULES)


def test_nothing_is_told_where_nothing_failed(tmp_path: Path) -> None:
    one = trace(tmp_path / "one", EVEN)
    assert diagnosis.diagnose(one, one, [passed("loss")], 2) is None


# outputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("random", "starts", "fault"),
    [
        (False, (), "The forward pass depends on the layout"),
        (True, (), "Randomness depends on the rank"),
        (True, (1,), "The state was not carried on"),
        (False, (1,), "The state was not carried on"),
    ],
)
def test_outputs_that_differ_first(tmp_path: Path, random: bool, starts: Any, fault: str) -> None:
    assert told(tmp_path, failed("outputs", 2), random=random, starts=starts).fault == fault


# the loss -------------------------------------------------------------------------------------------------------------


def loss(step: int, mine: float = 1.1) -> Compared:
    return failed("loss", step, "loss", mine=mine, reference=1.0)


def test_a_loss_that_differs_from_the_first_uneven_step_on_is_a_mean_of_means(tmp_path: Path) -> None:
    found = told(tmp_path, loss(2), counts=UNEVEN, random=True)
    assert (found.fault, "[4, 2]" in found.because) == ("A mean of means", True)


def test_a_loss_of_right_outputs_is_no_matter_of_random_numbers(tmp_path: Path) -> None:
    assert told(tmp_path, loss(1), passed("outputs"), random=True).fault == "A mean of means"


def test_a_loss_that_differs_where_the_model_draws(tmp_path: Path) -> None:
    assert told(tmp_path, loss(1), random=True).fault == "Randomness depends on the rank"


def test_a_loss_that_differs_after_a_resume(tmp_path: Path) -> None:
    assert told(tmp_path, loss(2), starts=[1]).fault == "The state was not carried on"


def test_a_loss_that_differs_alone(tmp_path: Path) -> None:
    assert told(tmp_path, loss(1), passed("raw gradients")).fault == "The loss is not summed over ranks"


@pytest.mark.parametrize("first", ["outputs", "loss"])
def test_what_differs_where_replicas_differ_after_it_comes_of_other_weights(tmp_path: Path, first: str) -> None:
    found = told(tmp_path, failed(first, 2, mine=1.1, reference=1.0), failed("replicas", 2), random=True)
    assert found.fault == "Replicas drift apart"


@pytest.mark.parametrize("mine", [2.0, 0.5])
def test_a_loss_that_is_off_by_the_number_of_processes(tmp_path: Path, mine: float) -> None:
    assert told(tmp_path, loss(1, mine), failed("raw gradients", 1)).fault == "The loss is scaled by N"


# gradients ------------------------------------------------------------------------------------------------------------


def of_terms(folder: Path, ours: dict[str, float], theirs: dict[str, float], crosses: str) -> str:
    folder.mkdir(exist_ok=True)
    mine, reference = trace(folder / "mine", EVEN, crosses=crosses), trace(folder / "one", [[8], [8]])
    mine.facts.steps[0].terms, reference.facts.steps[0].terms = ours, theirs
    found = diagnosis.diagnose(mine, reference, [failed("loss", 1), failed("raw gradients", 1)], 2)
    assert found is not None
    return found.fault


@pytest.mark.parametrize(
    ("ours", "crosses", "fault"),
    [
        ({"pairs": 0.5, "own": 2.0}, "rows", "Pairs across processes are missing"),
        ({"pairs": 0.5, "own": 2.0}, "whole", "Pairs across processes are missing"),
        ({"pairs": 0.5, "own": 2.5}, "rows", "A mean of means"),
        ({"pairs": 0.5, "own": 2.0}, "", "A mean of means"),
    ],
)
def test_a_loss_across_samples_of_which_another_term_agrees(
    tmp_path: Path, ours: dict[str, float], crosses: str, fault: str
) -> None:
    assert of_terms(tmp_path, ours, {"pairs": 1.0, "own": 2.0}, crosses) == fault


@pytest.mark.parametrize(
    ("size", "crosses", "fault"),
    [
        (6e-2, "rows", "Gathered rows carry no gradient"),
        (3e-3, "rows", "Gradients are reduced in a lower precision"),
        (6e-2, "whole", "Gradients are reduced in a lower precision"),
        (6e-2, "", "Gradients are reduced in a lower precision"),
    ],
)
def test_gradients_of_another_direction_where_the_loss_crosses_samples(
    tmp_path: Path, size: float, crosses: str, fault: str
) -> None:
    first = failed("raw gradients", 1, size=size)
    assert told(tmp_path, first, gradient=OTHER, crosses=crosses).fault == fault


def test_gradients_that_differ_from_the_first_uneven_step_on_are_a_mean_of_means(tmp_path: Path) -> None:
    found = told(tmp_path, failed("raw gradients", 2), counts=UNEVEN, gradient=OTHER)
    assert found.fault == "A mean of means"


def test_gradients_that_differ_in_an_even_step_are_not(tmp_path: Path) -> None:
    found = told(tmp_path, failed("raw gradients", 2), gradient=OTHER)
    assert found.fault == "Gradients are those of a part of the batch"
    assert "no loss was recorded" not in found.because


def test_gradients_of_a_script_that_records_no_loss_may_be_of_means_too(tmp_path: Path) -> None:
    found = told(tmp_path, failed("raw gradients", 2), gradient=OTHER, loss=None)
    assert found.because.endswith("no loss was recorded, and without it a mean of means looks the same")


def test_gradients_after_which_replicas_differ_are_not_synchronised(tmp_path: Path) -> None:
    more = failed("replicas", 1, "'a' is not the same on ranks [0] and [1]")
    found = told(tmp_path, failed("raw gradients", 1), more, gradient=OTHER)
    assert found.fault == "Gradients are not synchronised"


ADAPTERS = {"a.A": np.zeros(3), "b.A": np.zeros(3), "a.B": np.ones(3), "b.B": np.arange(3.0)}  # in their first step


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"a.B": 2 * np.ones(3), "b.B": 2 * np.arange(3.0)}, "All gradients are scaled by N"),
        ({"a.B": OTHER["a"], "b.B": OTHER["b"]}, "Gradients are those of a part of the batch"),
        ({"a.B": OTHER["a"]}, "Some parameters are not synchronised"),
    ],
)
def test_matrices_of_adapters_without_a_gradient_yet_say_nothing(tmp_path: Path, change: Any, fault: str) -> None:
    mine = trace(tmp_path / "mine", EVEN, {**ADAPTERS, **change})
    reference = trace(tmp_path / "one", [[sum(step)] for step in EVEN], ADAPTERS)
    found = diagnosis.diagnose(mine, reference, [failed("raw gradients", 1)], 2)
    assert found is not None
    assert found.fault == fault


@pytest.mark.parametrize(("factor", "by"), [(2.0, True), (0.5, True), (4.0, False)])
def test_gradients_that_are_scaled(tmp_path: Path, factor: float, by: bool) -> None:
    scaled = {"a": factor * np.ones(3), "b": factor * np.arange(3.0)}
    found = told(tmp_path, failed("raw gradients", 1), gradient=scaled)
    assert (found.fault, "by the number of processes" in found.because) == ("All gradients are scaled by N", by)


def test_a_gradient_that_is_not_there(tmp_path: Path) -> None:
    found = told(tmp_path, failed("raw gradients", 1, size=float("inf")), gradient={"a": np.ones(3)})
    assert (found.fault, found.because) == ("Parameters are left out", "no gradient for b")


# the update and after it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", ["update", "optimizer state"])
@pytest.mark.parametrize(
    ("starts", "fault"),
    [((), "The update is computed otherwise"), ((1,), "The state of the optimizer was lost")],
)
def test_an_update_that_differs_first(tmp_path: Path, quantity: str, starts: Any, fault: str) -> None:
    assert told(tmp_path, failed(quantity, 2), starts=starts).fault == fault


def test_an_average_of_weights_that_differs_first(tmp_path: Path) -> None:
    assert told(tmp_path, failed("EMA", 2)).fault == "The moving average drifts"


def test_an_average_that_differs_only_after_a_resume_was_lost(tmp_path: Path) -> None:
    assert told(tmp_path, failed("EMA", 2), starts=[1]).fault == "The moving average was lost"


def test_a_learning_rate_that_differs_after_a_resume(tmp_path: Path) -> None:
    found = told(tmp_path, failed("learning rate", 2, mine=0.1, reference=0.2), starts=[1])
    assert found.fault == "The state was not carried on"


# resumes and rounding -------------------------------------------------------------------------------------------------

THREE = [[4, 4], [4, 4], [4, 4]]


def test_a_second_resume_that_drifts_is_told_with_what_it_would_be_by_itself(tmp_path: Path) -> None:
    found = told(tmp_path, failed("optimizer state", 3), counts=THREE, starts=[1, 2])
    assert found.fault == "A second resume drifts"
    assert "'The state of the optimizer was lost'" in found.because


def test_starts_count_wherever_they_are(tmp_path: Path) -> None:
    late = told(tmp_path / "late", failed("optimizer state", 4), counts=EVEN * 2, starts=[2, 3])
    assert late.fault == "A second resume drifts"
    before = told(tmp_path / "before", failed("optimizer state", 2), counts=EVEN * 2, starts=[2, 3])
    assert before.fault == "The update is computed otherwise"  # no start lies before it


def test_a_first_resume_that_drifts_is_not_a_second(tmp_path: Path) -> None:
    found = told(tmp_path, failed("optimizer state", 2), counts=THREE, starts=[1, 2])
    assert found.fault == "The state of the optimizer was lost"


def test_a_difference_of_rounding_where_bits_have_to_be_equal(tmp_path: Path) -> None:
    found = told(tmp_path, failed("raw gradients", 1, size=2e-16))
    assert found.fault == "Sums are added in another order"


def test_initial_parameters_are_no_sums(tmp_path: Path) -> None:
    found = told(tmp_path, failed("initial parameters", 0, size=1e-16))
    assert found.fault == "Initialisation depends on the layout"


# errors ---------------------------------------------------------------------------------------------------------------


def test_an_error_that_told_its_name(tmp_path: Path) -> None:
    one = trace(tmp_path / "one", EVEN, fault="GuardError: …", called="The optimizer was built before wrapping")
    found = diagnosis.diagnose(one, one, [], 2)
    assert found is not None
    assert found.fault == "The optimizer was built before wrapping"


@pytest.mark.parametrize("called", ["", "not in the book"])
def test_any_other_error_has_a_page_too(called: str) -> None:
    assert of_error(called).fault == "The run ended with an error"
