"""What a pattern of differences is called. Faults that can be made in a real run are in `tests/proofs/zoo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.proof import diagnosis, predictions
from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnosis import diagnose_error
from unisono.proof.fault_names import Diagnosis
from unisono.proof.recording.trace import QUANTITIES, Part, RunFacts, StepFacts, Trace, write_facts, write_tensors


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
    write_facts(folder, RunFacts(["a", "b"], ["frozen"], steps=steps, **facts))
    return Trace(folder)


def known(found: tuple[Trace, Trace], counts: list[float], gradient: bool = True) -> None:
    """Write down, in both traces, what two ranks with one micro-batch each add: to the loss, and to the gradient."""
    mine, reference = found
    for trace in found:
        for step in trace.facts.steps:
            step.parts = [
                Part(n, n if trace is mine else 0, 4, {"next": total}, {"next": count}, {"next": 1.0})
                for n, (total, count) in enumerate(zip(SUMS, counts, strict=True))
            ]
            step.terms = {"next": sum(SUMS) / sum(counts)}
            step.loss = step.terms["next"]
    for number in range(len(reference.facts.steps) if gradient else 0):
        values = {f"next/{n}/{name}": value for n, part in enumerate(TERMS) for name, value in part.items()}
        write_tensors(reference.folder, "term gradients", number, values)
        for moment in ("raw gradients", "clipped gradients"):
            write_tensors(reference.folder, moment, number, summed([1 / sum(counts)] * 2))


def summed(weights: list[float]) -> dict[str, Any]:
    return {name: sum(w * part[name] for w, part in zip(weights, TERMS, strict=True)) for name in ("a", "b")}


def pair(folder: Path, observed: Any, counts: Any = (2.0, 6.0), **facts: Any) -> tuple[Trace, Trace]:
    """A run on two ranks with this gradient, and its reference; what micro-batches add is known."""
    folder.mkdir(exist_ok=True)
    result = trace(folder / "mine", EVEN, observed, **facts), trace(folder / "one", [[8], [8]])
    known(result, list(counts))
    return result


def name(found: tuple[Trace, Trace], *compared: ComparedQuantity, world_size: int = 2) -> str:
    """Of what differs first."""
    diagnosed = diagnosis.diagnose(*found, compared, world_size)
    assert diagnosed is not None
    return diagnosed.fault


SUMS = [7.0, 30.0]
RNG = np.random.default_rng(5)
TERMS = [{"a": RNG.normal(size=6), "b": RNG.normal(size=8)} for _ in range(2)]  # gradients of the micro-batches' sums
OTHER = {"a": np.array([1.0, -2.0, 1.0]), "b": np.array([2.0, 1.0, 0.0])}  # of another direction
EVEN, UNEVEN = [[4, 4], [4, 4]], [[4, 4], [4, 2]]


def told(
    folder: Path, first: ComparedQuantity, *more: ComparedQuantity, counts: Any = EVEN, starts: Any = (), **facts: Any
) -> Diagnosis:
    folder.mkdir(exist_ok=True)
    mine = trace(folder / "mine", counts, **facts)
    reference = trace(folder / "one", [[sum(step)] for step in counts])
    found = diagnosis.diagnose(mine, reference, [first, *more], 2, starts)
    assert found is not None
    return found


def failed(
    quantity: str, step: int, name: str = "a", size: float = 0.5, mine: Any = None, reference: Any = None
) -> ComparedQuantity:
    return ComparedQuantity(quantity, "FAIL", Difference(size, step, name, mine, reference))


def passed(quantity: str) -> ComparedQuantity:
    return ComparedQuantity(quantity, "PASS")


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
        (True, (), "The forward pass depends on the layout"),
        (True, (1,), "The state was not carried on"),
        (False, (1,), "The state was not carried on"),
    ],
)
def test_outputs_that_differ_first(tmp_path: Path, random: bool, starts: Any, fault: str) -> None:
    assert told(tmp_path, failed("outputs", 2), random=random, starts=starts).fault == fault


# the loss -------------------------------------------------------------------------------------------------------------


def loss(step: int, mine: float = 1.1) -> ComparedQuantity:
    return failed("loss", step, "loss", mine=mine, reference=1.0)


def reported(found: tuple[Trace, Trace], value: float) -> ComparedQuantity:
    """A loss that is the first to differ, in step 1."""
    step, one = found[0].facts.steps[0], found[1].facts.steps[0].loss
    step.terms, step.loss = {"next": value}, value
    return failed("loss", 1, "loss", size=0.3, mine=value, reference=one)


MEANS = (7 / 2 + 30 / 6) / 2


def test_a_mean_of_means_reproduces_the_loss_and_the_gradient(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1 / 4, 1 / 12]))
    told = diagnosis.diagnose(*found, [reported(found, MEANS), failed("raw gradients", 1)], 2)
    assert told is not None
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


def test_a_loss_of_which_nothing_is_known_gets_a_neutral_name(tmp_path: Path) -> None:
    assert told(tmp_path, loss(2), counts=UNEVEN).fault == "The loss depends on the layout"
    assert told(tmp_path / "of", loss(1), passed("outputs"), random=True).fault == "The loss depends on the layout"


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


def test_a_loss_that_differs_after_a_resume(tmp_path: Path) -> None:
    assert told(tmp_path, loss(2), starts=[1]).fault == "The state was not carried on"


def test_a_loss_that_differs_alone_is_that_of_some_rows_or_nobody_knows(tmp_path: Path) -> None:
    found = pair(tmp_path, None)
    assert name(found, reported(found, 7 / 2), passed("raw gradients")) == "The loss is not summed over ranks"
    assert name(found, reported(found, 3.6), passed("raw gradients")) == "The reported loss depends on the layout"


@pytest.mark.parametrize("first", ["outputs", "loss"])
def test_what_differs_where_replicas_differ_after_it_comes_of_other_weights(tmp_path: Path, first: str) -> None:
    found = told(tmp_path, failed(first, 2, mine=1.1, reference=1.0), failed("replicas", 2), random=True)
    assert found.fault == "Replicas drift apart"


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
    diagnosed = diagnosis.diagnose(*found, [loss(1, 1.5), failed("raw gradients", 1)], 2)
    assert diagnosed is not None
    assert diagnosed.fault == "The loss is scaled by N"
    assert "'next' of every micro-batch" in diagnosed.because
    mine.parts[0].sums["next"] *= 1.1
    assert name(found, loss(1, 1.5), failed("raw gradients", 1)) != "The loss is scaled by N"


@pytest.mark.parametrize(("off", "said"), [(1e-8, "in single precision"), (0.5, "where others are together")])
def test_counts_that_depend_on_which_rows_are_together(tmp_path: Path, off: float, said: str) -> None:
    found = pair(tmp_path, None)
    step = found[0].facts.steps[0]
    step.terms["next"] *= 1.1
    step.parts = [Part(0, 0, 8, {"next": sum(SUMS)}, {"next": 8.0 * (1 + off)}, {"next": 1.0})]
    diagnosed = diagnosis.diagnose(*found, [loss(1, 1.5), failed("raw gradients", 1)], 1)
    assert diagnosed is not None
    assert diagnosed.fault == "The loss depends on the micro-batch"
    assert diagnosed.because.endswith(said)


# what passes leave behind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "fault"),
    [
        ("outputs", "The forward pass changes parameters"),
        ("update", "The forward pass changes parameters"),
        ("initial parameters", "The forward pass changes parameters"),
        ("frozen parameters did not move", "The forward pass changes parameters"),
        ("learning rate", "The learning rate depends on the world size"),
    ],
)
def test_parameters_that_passes_change_explain_what_follows(tmp_path: Path, quantity: str, fault: str) -> None:
    found = pair(tmp_path, summed([1.0, 1.0]))
    found[1].facts.probed, found[1].facts.changed_by_passes = True, "passes alone, without an update, change a"
    numbers = {"mine": 0.2, "reference": 0.1} if quantity == "learning rate" else {}
    assert name(found, failed(quantity, 1, **numbers)) == fault


def test_a_cause_that_is_reproduced_is_told_before_parameters_that_passes_change(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1 / 4, 1 / 12]))
    found[1].facts.probed, found[1].facts.changed_by_passes = True, "passes alone, without an update, change a"
    assert name(found, failed("raw gradients", 1)) == "A mean of means"


@pytest.mark.parametrize("quantity", ["raw gradients", "parameters", "evaluation"])
def test_a_gradient_that_is_another_each_time_is_told_so(tmp_path: Path, quantity: str) -> None:
    found = pair(tmp_path, summed([1.0, 2.0]))
    found[1].facts.probed, found[1].facts.unstable_gradient = True, "a second backward pass gave another gradient"
    assert name(found, failed(quantity, 1)) == "The gradients depend on the call"


def test_what_passes_change_in_the_task_is_told_beside_a_neutral_name(tmp_path: Path) -> None:
    found = pair(tmp_path, None)
    found[1].facts.probed, found[1].facts.kept_by_task = True, "self.calls"
    diagnosed = diagnosis.diagnose(*found, [failed("outputs", 1)], 2)
    assert diagnosed is not None
    assert diagnosed.because.endswith("every pass changes self.calls, of which each process has its own")


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
        ({"pairs": 0.5, "own": 2.0}, "rows", "The loss across samples depends on the layout"),
        ({"pairs": 0.5, "own": 2.0}, "whole", "The loss across samples depends on the layout"),
        ({"pairs": 0.5, "own": 2.5}, "rows", "The loss depends on the layout"),
        ({"pairs": 0.5, "own": 2.0}, "", "The loss depends on the layout"),
    ],
)
def test_a_loss_across_samples_of_which_another_term_agrees(
    tmp_path: Path, ours: dict[str, float], crosses: str, fault: str
) -> None:
    assert of_terms(tmp_path, ours, {"pairs": 1.0, "own": 2.0}, crosses) == fault


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("statistic", "A statistic of the batch is taken of its parts"),
        ("constant", "A term is added once per micro-batch"),
        ("mean", "A mean of means"),
        ("", "The loss depends on the micro-batch"),
        ("places", "The loss depends on the micro-batch"),
    ],
)
def test_a_term_of_other_micro_batches_is_what_it_is_on_some_rows(tmp_path: Path, kind: str, fault: str) -> None:
    found = pair(tmp_path, None)
    for step in found[0].facts.steps:
        step.parts = [replace(part, counts={"next": part.counts["next"] / 2}) for part in step.parts * 2]
    found[1].facts.probed, found[1].facts.additivity = True, {"next": kind} if kind else {}
    assert name(found, reported(found, 3.7), failed("raw gradients", 1), world_size=1) == fault


@pytest.mark.parametrize(
    ("size", "crosses", "fault"),
    [
        (6e-2, "rows", "The gradients across samples depend on the layout"),
        (3e-3, "rows", "The gradients depend on the layout"),
        (6e-2, "whole", "The gradients depend on the layout"),
        (6e-2, "", "The gradients depend on the layout"),
    ],
)
def test_gradients_of_another_direction_where_the_loss_crosses_samples(
    tmp_path: Path, size: float, crosses: str, fault: str
) -> None:
    first = failed("raw gradients", 1, size=size)
    assert told(tmp_path, first, gradient=OTHER, crosses=crosses).fault == fault


EIGHTH = [1 / 8, 1 / 8]


@pytest.mark.parametrize(
    ("observed", "fault"),
    [
        (summed([1 / 8, 0]), "Gradients are not synchronised"),  # rank 0's own
        (summed([0, 2 / 8]), "Gradients are not synchronised"),  # rank 1's, whose loss was scaled for an average
        ({**summed(EIGHTH), "b": summed([2 / 8, 0])["b"]}, "Some parameters are not synchronised"),
        ({**summed(EIGHTH), "b": summed([1 / 4, 1 / 12])["b"]}, "The gradients depend on the layout"),
        (summed([1 / 4, 1 / 12]), "A mean of means"),
        (summed([1.3 / 8, 0.9 / 8]), "The gradients depend on the layout"),
        ({n: 1.37 * v for n, v in summed(EIGHTH).items()}, "The gradients depend on the layout"),
        ({n: v * (1 + 1e-3) ** (n == "b") for n, v in summed(EIGHTH).items()}, "The gradients depend on the layout"),
    ],
)
def test_gradients_are_what_reproduces_them(tmp_path: Path, observed: Any, fault: str) -> None:
    assert name(pair(tmp_path, observed), failed("raw gradients", 1)) == fault


def test_gradients_of_rounded_parts_are_of_a_lower_precision_and_others_are_not(tmp_path: Path) -> None:
    rounded = {n: sum(predictions.round_to(part[n] / 4, 8) for part in TERMS) / 2 for n in ("a", "b")}
    fault = name(pair(tmp_path, rounded), failed("raw gradients", 1, size=3e-3))
    assert fault == "Gradients are reduced in a lower precision"
    noisy = {n: v * (1 + 3e-3 * RNG.normal(size=v.shape)) for n, v in summed(EIGHTH).items()}
    fault = name(pair(tmp_path / "noisy", noisy), failed("raw gradients", 1, size=3e-3))
    assert fault == "The gradients depend on the layout"


def test_gradients_of_which_nothing_is_known_get_a_neutral_name(tmp_path: Path) -> None:
    more = failed("replicas", 2, "'a' is not the same on ranks [0] and [1]")
    found = told(tmp_path, failed("raw gradients", 2), more, counts=UNEVEN, gradient=OTHER, loss=None)
    assert found.fault == "The gradients depend on the layout"
    assert "what each micro-batch adds was not recorded" in found.because and found.because.endswith(
        "no loss was recorded"
    )


ADAPTERS = {"a.A": np.zeros(3), "b.A": np.zeros(3), "a.B": np.ones(3), "b.B": np.arange(3.0)}  # in their first step


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"a.B": 2 * np.ones(3), "b.B": 2 * np.arange(3.0)}, "All gradients are scaled by N"),
        ({"a.B": OTHER["a"], "b.B": OTHER["b"]}, "The gradients depend on the layout"),
        ({"a.B": OTHER["a"]}, "The gradients depend on the layout"),
    ],
)
def test_matrices_of_adapters_without_a_gradient_yet_say_nothing(tmp_path: Path, change: Any, fault: str) -> None:
    mine = trace(tmp_path / "mine", EVEN, {**ADAPTERS, **change})
    reference = trace(tmp_path / "one", [[sum(step)] for step in EVEN], ADAPTERS)
    found = diagnosis.diagnose(mine, reference, [failed("raw gradients", 1)], 2)
    assert found is not None
    assert found.fault == fault


@pytest.mark.parametrize(("factor", "by"), [(2.0, ""), (0.5, ""), (4.0, ", twice")])
def test_gradients_that_are_scaled(tmp_path: Path, factor: float, by: str) -> None:
    scaled = {"a": factor * np.ones(3), "b": factor * np.arange(3.0)}
    found = told(tmp_path, failed("raw gradients", 1), gradient=scaled)
    assert found.fault == "All gradients are scaled by N"
    assert found.because.endswith(f"by the number of processes{by}")


WIDE = {"a": RNG.normal(size=(4, 3)), "b": RNG.normal(size=(6, 2))}


def scaled_shards(factors: list[float]) -> dict[str, Any]:
    """What two ranks make of a gradient whose shards each of them scales by itself."""
    return {
        n: np.concatenate([f * half for f, half in zip(factors, np.split(v, 2), strict=True)]) for n, v in WIDE.items()
    }


@pytest.mark.parametrize("known", [True, False])
def test_a_clipping_by_hand_with_the_norm_of_shards_is_known_by_their_norms(tmp_path: Path, known: bool) -> None:
    whole = np.sqrt(sum(np.square(v).sum() for v in WIDE.values()))
    norms = [np.sqrt(sum(np.square(np.split(v, 2)[rank]).sum() for v in WIDE.values())) for rank in range(2)]
    observed = scaled_shards([whole / norm if known else 1.3 + norm / 99 for norm in norms])
    mine, reference = trace(tmp_path / "mine", EVEN, observed), trace(tmp_path / "one", [[8], [8]], WIDE)
    for found in (mine, reference):  # no call of torch's clipping was seen
        write_tensors(found.folder, "clipped gradients", 0, {})
    diagnosed = diagnosis.diagnose(mine, reference, [failed("raw gradients", 1)], 2)
    assert diagnosed is not None
    assert diagnosed.fault == ("Clipped by a local norm" if known else "The gradients depend on the layout")
    assert known or diagnosed.because.endswith("a clipping by hand would be in them")


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


def rates(found: tuple[Trace, Trace], ours: list[float], theirs: list[float]) -> ComparedQuantity:
    for one, values in zip(found, (ours, theirs), strict=True):
        one.facts.steps = [replace(one.facts.steps[0], lr=[[value]] * 2) for value in values]
    step = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return failed("learning rate", step + 1, mine=ours[step], reference=theirs[step])


@pytest.mark.parametrize(
    ("ours", "fault"),
    [
        ([0.0, 0.75, 0.25], "The schedule is stepped once per process"),
        ([0.0, 2.0, 1.5], "The learning rate depends on the world size"),
        ([0.5, 0.75, 0.25], "The learning rate depends on the world size"),  # wrong at step 1
    ],
)
def test_a_rate_is_stepped_too_often_only_if_it_is_that_of_later_updates(
    tmp_path: Path, ours: list[float], fault: str
) -> None:
    found = pair(tmp_path, None)
    first = rates(found, ours, [0.0, 1.0, 0.75])
    assert name(found, first) == fault


SQUARE = {"a": np.arange(1.0, 9.0), "b": np.arange(12.0).reshape(4, 3)}


@pytest.mark.parametrize(
    ("norm", "fault"),
    [
        (float(np.sqrt(np.square(SQUARE["a"][4:]).sum() + np.square(SQUARE["b"][2:]).sum())), "that of a part"),
        (float(np.sqrt(2 * sum(np.square(v).sum() for v in SQUARE.values()))), "that of a part"),
        (26.625, "added up in too low a precision"),  # 26.64… in bf16
        (20.1, "depends on the layout"),
    ],
)
def test_a_norm_is_one_of_shards_or_of_a_precision_or_nobody_knows(tmp_path: Path, norm: float, fault: str) -> None:
    exact = float(np.sqrt(sum(np.square(v).sum() for v in SQUARE.values())))
    norm = float(predictions.round_to(np.array([exact]), 8)[0]) if norm == 26.625 else norm
    found = told(tmp_path, failed("gradient norm", 1, mine=norm, reference=exact), gradient=SQUARE)
    assert fault in found.fault


def test_clipping_by_the_norm_of_shards_has_their_factors(tmp_path: Path) -> None:
    found = pair(tmp_path, SQUARE)
    limit = 2.0
    write_tensors(found[1].folder, "clipped gradients", 0, {"a": np.array([limit, 0.0])})
    halves = [{"a": SQUARE["a"][:4], "b": SQUARE["b"][:2]}, {"a": SQUARE["a"][4:], "b": SQUARE["b"][2:]}]
    norms = [float(np.sqrt(sum(np.square(v).sum() for v in half.values()))) for half in halves]
    for factors, fault in (
        ([limit / norm for norm in norms], "Clipped by a local norm"),
        ([0.1, 0.1], "The clipping depends on the layout"),
    ):
        clipped = {n: np.concatenate([f * half[n] for f, half in zip(factors, halves, strict=True)]) for n in SQUARE}
        write_tensors(found[0].folder, "clipped gradients", 0, clipped)
        assert name(found, failed("clipped gradients", 1)) == fault


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


def test_a_buffer_that_begins_otherwise_on_a_rank_is_told_as_such(tmp_path: Path) -> None:
    found = told(
        tmp_path, failed("initial parameters", 0), initial_buffers=["'b' is not the same on ranks [0] and [1]"]
    )
    assert (found.fault, found.because[:10]) == ("Initialisation depends on the rank", "buffer 'b'")


def test_what_the_task_counts_and_no_checkpoint_has_is_told_after_a_resume(tmp_path: Path) -> None:
    """Even after a second one, of which nothing else is known."""
    found = told(tmp_path, failed("outputs", 2), starts=(1, 1), kept_by_task="self.calls", probed=True)
    assert found.fault == "The state was not carried on"
    assert found.because.endswith("every pass changes self.calls, which no checkpoint has")


@pytest.mark.parametrize(
    ("step", "where", "fault"),
    [
        (1, "micro-batches [0, 3]", "The samples depend on the call"),
        (1, "micro-batches [2, 3]", "The samples depend on the process"),
        (2, "micro-batches [0, 3]", "The samples depend on the process"),
    ],
)
def test_samples_that_every_rank_makes_alike_say_nothing_of_others(
    tmp_path: Path, step: int, where: str, fault: str
) -> None:
    ours = trace(tmp_path / "mine", EVEN, first_samples=[[[1, 2]], [[1, 2]]])
    theirs = trace(tmp_path / "one", EVEN, first_samples=[[[1, 2]]])
    assert name((ours, theirs), failed("samples", step, where)) == fault


def test_an_error_that_told_its_name(tmp_path: Path) -> None:
    one = trace(tmp_path / "one", EVEN, fault="GuardError: …", called="The optimizer was built before wrapping")
    found = diagnosis.diagnose(one, one, [], 2)
    assert found is not None
    assert found.fault == "The optimizer was built before wrapping"


@pytest.mark.parametrize("called", ["", "not in the book"])
def test_any_other_error_has_a_page_too(called: str) -> None:
    assert diagnose_error(called).fault == "The run ended with an error"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("RuntimeError: Expected to have finished reduction in the prior iteration …", "Parameters are left out"),
        ("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3", "Processes wait for each other"),
        ("Detected mismatch between collectives on ranks …", "Ranks made different collectives"),
        ("KeyError: 'a'", "The run ended with an error"),
    ],
)
def test_errors_of_torch_and_gloo_are_known_by_their_words(text: str, fault: str) -> None:
    assert diagnose_error("", text).fault == fault
    assert diagnose_error("Nothing is learnt", text).fault == "Nothing is learnt"  # what says its name is believed
