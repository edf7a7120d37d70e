"""What a comparison of two traces finds, and what it calls the first difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.proof.comparison import ComparedQuantity, Difference, compare_traces, first_failure, relative_distances
from unisono.proof.invariants import check_invariants
from unisono.proof.recording.trace import (
    INITIAL_BUFFERS,
    QUANTITIES,
    RunFacts,
    StepFacts,
    Trace,
    write_facts,
    write_tensors,
)

EXACT = {"sample ids": 0.0, "samples": 0.0, "initial parameters": 0.0, "learning rate": 0.0, "replicas": 0.0}
TOLERANCE = {**dict.fromkeys(QUANTITIES, 1e-12), **EXACT}
SKETCH = {"out": [2.0, 1.0]}
Change = Callable[[RunFacts, dict[tuple[str, int | None], dict[str, np.ndarray]]], Any]


def step(number: int, world: int) -> StepFacts:
    rows = list(range(4 * number, 4 * number + 4))
    by_rank = [rows[: 4 // world], rows[4 // world :]] if world > 1 else [rows]
    return StepFacts(
        rows, by_rank, 2.0 - number, {"a": 2.0 - number}, 1.5, [[0.1]] * world, [{"m": 0.5}] * world,
        samples=["x", "y"], outputs=[SKETCH, {"out": [3.0, -1.0]}],
    )  # fmt: skip


def trace(folder: Path, world: int = 1, change: Change | None = None) -> Trace:
    """Two steps of a model with two parameters, one of which has no true gradient."""
    facts = RunFacts(
        ["w", "silent"], ["still"], steps=[step(0, world), step(1, world)],
        evaluation=[{"loss": 1.0}] * world, evaluation_again=[{"loss": 1.0}] * world,
    )  # fmt: skip
    begun = {"w": np.ones(3), "silent": np.ones(2), "still": np.ones(2)}
    tensors: dict[tuple[str, int | None], dict[str, np.ndarray]] = {("initial parameters", None): begun}
    for number in (0, 1):
        gradient = {"w": np.arange(1.0, 4.0), "silent": np.full(2, 1e-17)}
        moved = {"w": np.ones(3) - 0.1 * (number + 1), "silent": np.full(2, 1.0), "still": np.ones(2)}
        tensors |= {
            ("raw gradients", number): gradient,
            ("clipped gradients", number): {name: value / 3 for name, value in gradient.items()},
            ("optimizer state", number): {f"optimizer/{name}/m": value for name, value in gradient.items()},
            ("parameters", number): moved,
            ("buffers", number): {"b": np.ones(1)},
            ("EMA", number): {name: value.copy() for name, value in moved.items()},
        }
    tensors["update", 1] = {**tensors["parameters", 1], **tensors["optimizer state", 1]}
    if change:
        change(facts, tensors)
    folder.mkdir()
    for (moment, number), values in tensors.items():
        write_tensors(folder, moment, number, values)
    write_facts(folder, facts)
    return Trace(folder)


def quantities(mine: Trace, reference: Trace, adaptive: bool = False, **allowed: float) -> dict[str, ComparedQuantity]:
    tolerance = TOLERANCE | {name.replace("_", " "): size for name, size in allowed.items()}
    return {one.quantity: one for one in compare_traces(mine, reference, tolerance, adaptive)}


def compared(tmp_path: Path, change: Change | None = None, adaptive: bool = False) -> dict[str, ComparedQuantity]:
    return quantities(trace(tmp_path / "mine", 2, change), trace(tmp_path / "one"), adaptive)


def with_facts(**values: Any) -> Change:
    return lambda facts, tensors: [setattr(facts, name, value) for name, value in values.items()]


def with_step(number: int, **values: Any) -> Change:
    return lambda facts, tensors: [setattr(facts.steps[number], name, value) for name, value in values.items()]


def with_tensor(moment: str, number: int | None, name: str, value: Any = None) -> Change:
    """Another tensor; without a value what is there, a little larger."""

    def change(facts: RunFacts, tensors: Any) -> None:
        tensors[moment, number][name] = tensors[moment, number][name] * (1 + 1e-9) if value is None else value

    return change


def test_equal_runs_pass_in_every_quantity(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert list(found) == list(QUANTITIES)
    assert {one.mark for one in found.values()} == {"PASS"}
    assert {one.worst.size for one in found.values()} == {0.0}


@pytest.mark.parametrize(
    ("change", "quantity", "at", "name"),
    [
        (with_step(1, rows=[0, 1, 2, 3]), "sample ids", 2, "rows of the global batch"),
        (with_step(0, samples=["x", "z"]), "samples", 1, "micro-batches [1]"),
        (with_step(1, outputs=[SKETCH, {"out": [3.0, -1.0 + 1e-9]}]), "outputs", 2, "out of micro-batch 1"),
        (with_step(1, loss=1 + 1e-9), "loss", 2, "loss"),
        (with_step(0, lr=[[0.1], [0.2]]), "learning rate", 1, "group 0"),
        (with_step(0, metrics=[{"m": 0.5}, {"m": 0.4}]), "metrics", 1, "m"),
        (with_facts(evaluation=[{"loss": 1.0}, {"loss": 1.1}]), "evaluation", 0, "loss"),
        (with_step(1, replicas=["w"]), "replicas", 2, "w"),
        (with_tensor("initial parameters", None, "w"), "initial parameters", 0, "w"),
        (with_tensor("raw gradients", 1, "w"), "raw gradients", 2, "w"),
        (with_tensor("clipped gradients", 0, "w"), "clipped gradients", 1, "w"),
        (with_tensor("update", 1, "optimizer/w/m"), "update", 2, "optimizer/w/m"),
        (with_tensor("optimizer state", 0, "optimizer/w/m"), "optimizer state", 1, "optimizer/w/m"),
        (with_tensor("parameters", 1, "w"), "parameters", 2, "w"),
        (with_tensor("buffers", 0, "b"), "buffers", 1, "b"),
        (with_tensor("EMA", 1, "w"), "EMA", 2, "w"),
    ],
)
def test_one_difference_fails_one_quantity_at_its_step(
    tmp_path: Path, change: Change, quantity: str, at: int, name: str
) -> None:
    found = compared(tmp_path, change)
    assert [one.quantity for one in found.values() if one.mark == "FAIL"] == [quantity]
    assert (found[quantity].worst.step, found[quantity].worst.name) == (at, name)


@pytest.mark.parametrize(
    ("ours", "rates", "name"),
    [
        ({"w": 0, "silent": 0}, [0.1, 0.3], "'silent'"),  # which has the rate 0.3 on one process
        ({"w": 1, "silent": 0}, [0.3, 0.1], ""),  # the same in another order
        ({"w": 0, "silent": 1}, [0.1, 0.2], "group 1"),
    ],
)
def test_rates_are_those_of_parameters_where_groups_hold_others(
    tmp_path: Path, ours: dict[str, int], rates: list[float], name: str
) -> None:
    mine = trace(tmp_path / "mine", 2, with_step(0, lr=[rates] * 2, groups=[ours] * 2))
    one = trace(tmp_path / "one", 1, with_step(0, lr=[[0.1, 0.3]], groups=[{"w": 0, "silent": 1}]))
    found = quantities(mine, one)["learning rate"]
    assert (found.mark, found.worst.name if name else "") == ("FAIL" if name else "PASS", name)


@pytest.mark.parametrize(("before", "mark"), [(1.0, "PASS"), (1e-9, "FAIL")])
def test_a_state_whose_gradients_cancel_is_compared_with_what_was_in_it(
    tmp_path: Path, before: float, mark: str
) -> None:
    """As the momentum of a bias whose gradient changes its sign, under bf16."""

    def small(value: float) -> Change:
        def change(facts: RunFacts, tensors: dict[Any, Any]) -> None:
            tensors["optimizer state", 0] = {"optimizer/w/m": np.full(3, before)}
            tensors["optimizer state", 1] = {"optimizer/w/m": np.full(3, value)}

        return change

    mine, one = trace(tmp_path / "mine", 2, small(1e-13)), trace(tmp_path / "one", 1, small(1.5e-13))
    assert quantities(mine, one)["optimizer state"].mark == mark


def test_where_rounding_alone_goes_far_agreement_says_nothing(tmp_path: Path) -> None:
    found = quantities(trace(tmp_path / "mine", 2), trace(tmp_path / "one"), raw_gradients=0.8)
    assert found["raw gradients"].mark == "ABSTAIN"
    assert "rounding alone comes to a relative difference of 0.8" in found["raw gradients"].why
    assert found["loss"].mark == "PASS"


def test_a_run_with_fewer_steps_fails(tmp_path: Path) -> None:
    assert compared(tmp_path, lambda facts, tensors: facts.steps.pop())["sample ids"].mark == "FAIL"


def test_a_tensor_on_one_side_only_fails(tmp_path: Path) -> None:
    worst = compared(tmp_path, with_tensor("parameters", 0, "another", np.ones(1)))["parameters"].worst
    assert (worst.name, worst.size) == ("another", math.inf)


def test_what_is_not_a_number_fails(tmp_path: Path) -> None:
    not_finite = with_tensor("raw gradients", 0, "w", np.full(3, np.nan))
    assert compared(tmp_path, not_finite)["raw gradients"].mark == "FAIL"


def test_parameters_without_a_true_gradient_are_left_out_under_adaptive_optimizers_only(tmp_path: Path) -> None:
    change = with_tensor("parameters", 0, "silent")
    found = compared(tmp_path, change, adaptive=True)
    assert found["parameters"].mark == "PASS"
    assert found["parameters"].left_out == ("silent",)
    (tmp_path / "plain").mkdir()
    assert compared(tmp_path / "plain", change)["parameters"].mark == "FAIL"


def test_statistics_of_one_process_are_not_compared(tmp_path: Path) -> None:
    def statistics(facts: RunFacts, tensors: Any) -> None:
        facts.per_process = ["b"]
        facts.evaluation[0] = {"loss": 1.3}
        tensors["buffers", 0]["b"] = np.zeros(1)

    found = compared(tmp_path, statistics)
    for quantity in ("buffers", "evaluation"):
        assert found[quantity].mark == "ABSTAIN"
        assert found[quantity].why == "statistics of one process: b"


@pytest.mark.parametrize("whose", ["a process", "all"])
def test_buffers_begin_alike_unless_they_are_statistics_of_one_process(tmp_path: Path, whose: str) -> None:
    def shifted(by: float, ranks: list[str]) -> Change:
        def change(facts: RunFacts, tensors: Any) -> None:
            tensors[INITIAL_BUFFERS, None] = {"shift": np.full(2, by)}
            facts.initial_buffers = ranks
            facts.per_process = ["shift"] if whose == "a process" else []

        return change

    one = trace(tmp_path / "one", change=shifted(0.0, []))
    for folder, by, ranks in (("mine", 1.0, []), ("ranks", 0.0, ["'shift' is not the same on ranks [0] and [1]"])):
        mine = trace(tmp_path / folder, 2, shifted(by, ranks))
        found = quantities(mine, one)["initial parameters"]
        alike = whose == "a process" and not ranks
        assert found.mark == ("PASS" if alike else "FAIL") and (alike or "shift" in found.worst.name)


def test_a_small_tensor_is_measured_against_all_of_them() -> None:
    reference = {"large": np.full(4, 100.0), "small": np.full(4, 1e-9)}
    mine = {"large": np.full(4, 100.0), "small": np.full(4, 2e-9)}
    assert relative_distances(mine, reference) == {"large": 0.0, "small": pytest.approx(2e-9 / 0.2)}


def test_the_first_fault_is_that_of_the_earliest_step() -> None:
    late = ComparedQuantity("loss", "FAIL", Difference(1.0, 2))
    early = ComparedQuantity("parameters", "FAIL", Difference(1.0, 1))
    end = ComparedQuantity("evaluation", "FAIL", Difference(1.0))
    assert first_failure([late, early, end]) is early
    assert first_failure([late, end]) is late
    assert first_failure([end, ComparedQuantity("loss", "PASS")]) is end
    assert first_failure([ComparedQuantity("loss", "PASS")]) is None
    begun = ComparedQuantity("initial parameters", "FAIL", Difference(1.0))
    assert first_failure([early, begun]) is begun


def no_norm(facts: RunFacts, tensors: Any) -> None:
    for one in facts.steps:
        one.grad_norm = 0.0


def unmoved(facts: RunFacts, tensors: Any) -> None:
    for number in (0, 1):
        tensors["parameters", number]["w"] = np.ones(3)


def test_parameters_that_come_back_to_where_they_began_have_moved(tmp_path: Path) -> None:
    """Updates of a fixed size, as those by the sign of a gradient, may end there."""
    found = check_invariants(trace(tmp_path / "one", 1, with_tensor("parameters", 1, "w", np.ones(3))))
    assert {one.quantity: one.mark for one in found}["trained parameters moved"] == "PASS"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (unmoved, "trained parameters moved"),
        (with_tensor("parameters", 1, "still", np.zeros(2)), "frozen parameters did not move"),
        (with_step(0, by_rank=[[0, 1], [0, 1]]), "ranks computed different rows"),
        (with_step(1, loss=2.0), "the loss moved"),
        (no_norm, "there is a gradient"),
        (with_step(1, clean=False), "steps begin without gradients"),
        (with_facts(evaluation_again=[{"loss": 0.9}, {"loss": 1.0}]), "evaluation repeats"),
        (with_facts(evaluation_left=["training mode"]), "evaluation leaves things as they were"),
    ],
)
def test_what_must_hold_of_a_single_run(tmp_path: Path, change: Change, name: str) -> None:
    good = check_invariants(trace(tmp_path / "good", 2))
    assert name in {one.quantity for one in good}
    assert all(one.mark != "FAIL" for one in good)
    bad = check_invariants(trace(tmp_path / "bad", 2, change))
    assert [one.quantity for one in bad if one.mark == "FAIL"] == [name]


def test_a_surrogate_of_constant_value_that_has_a_gradient_abstains_in_a_script(tmp_path: Path) -> None:
    flat = trace(tmp_path / "flat", 2, with_step(1, loss=2.0))
    flat.facts.optimizer = "SGD"
    marks = {one.quantity: one.mark for one in check_invariants(flat)}
    assert marks["the loss moved"] == "ABSTAIN"


def test_a_step_without_a_gradient_is_said_and_does_not_fail(tmp_path: Path) -> None:
    skipped = trace(tmp_path / "mine", 1, with_step(1, grad_norm=0.0))
    found = {one.quantity: one for one in check_invariants(skipped)}
    assert found["there is a gradient"].mark == "ABSTAIN"
    assert "in step 2;" in found["there is a gradient"].why


def test_a_difference_from_zeros_has_no_size() -> None:
    assert relative_distances({"w": np.ones(2)}, {"w": np.zeros(2)}) == {"w": math.inf}


def test_rows_that_differ_come_before_steps_that_are_missing(tmp_path: Path) -> None:
    def doubled(facts: RunFacts, tensors: Any) -> None:
        facts.steps[0].rows = list(range(8))
        del facts.steps[1]

    worst = compared(tmp_path, doubled)["sample ids"].worst
    assert (worst.step, worst.name) == (1, "rows of the global batch")


def test_nothing_is_said_of_what_was_not_recorded(tmp_path: Path) -> None:
    def bare(facts: RunFacts, tensors: Any) -> None:
        for one in facts.steps:
            one.rows, one.by_rank, one.loss, one.terms, one.grad_norm, one.clean = [], [[], []], None, {}, None, None
            one.metrics, one.samples, one.outputs = [], [], []
        facts.evaluation, facts.evaluation_again, facts.evaluation_left = [], [], None
        for key in list(tensors):
            if key[0] not in ("initial parameters", "raw gradients", "parameters"):
                del tensors[key]

    mine, one = trace(tmp_path / "mine", 2, bare), trace(tmp_path / "one", 1, bare)
    told = quantities(mine, one)
    passed = {name for name, c in told.items() if c.mark == "PASS"}
    assert passed == {"initial parameters", "raw gradients", "learning rate", "parameters", "replicas"}
    assert {c.why for c in told.values() if c.mark != "PASS"} == {"there is none"}
    moved = {"trained parameters moved", "frozen parameters did not move"}
    assert {c.quantity for c in check_invariants(mine) if c.mark == "PASS"} == moved


def test_a_parameter_without_gradient_is_named_and_nothing_is_said_of_it(tmp_path: Path) -> None:
    found = {one.quantity: one for one in check_invariants(trace(tmp_path / "mine"))}
    one = found["every trainable parameter got a gradient"]
    assert one.mark == "ABSTAIN"
    assert "silent" in one.why


def test_a_term_of_the_loss_that_is_rounding_is_measured_against_the_whole_loss(tmp_path: Path) -> None:
    def near(value: float) -> Change:
        def change(facts: RunFacts, tensors: Any) -> None:
            for step in facts.steps:
                step.terms = {"near": value}

        return change

    one, rounding, other = (trace(tmp_path / str(value), 1, near(value)) for value in (0.0, 1e-32, 1e-4))
    assert [quantities(mine, one)["loss"].mark for mine in (rounding, other)] == ["PASS", "FAIL"]


def test_a_moment_with_the_bits_of_the_reference_is_a_link_and_equal(tmp_path: Path) -> None:
    first, second = trace(tmp_path / "one"), trace(tmp_path / "two", world=2)
    bits = first.tensors("raw gradients", 0)
    write_tensors(second.folder, "raw gradients", 0, bits, first.folder)
    assert second.shares(first, "raw gradients", 0)
    third = trace(tmp_path / "three", world=2)
    linked, copied = (compare_traces(one, first, TOLERANCE, adaptive=True) for one in (second, third))
    assert [(c.quantity, c.mark, c.left_out) for c in linked] == [(c.quantity, c.mark, c.left_out) for c in copied]


def test_other_bits_and_values_that_are_not_numbers_are_no_link(tmp_path: Path) -> None:
    first, second = trace(tmp_path / "one"), trace(tmp_path / "two", world=2)
    for value in ({"w": np.nextafter(np.arange(1.0, 4.0), 9)}, {"w": np.arange(1.0, 4.0, dtype=np.float32)}):
        write_tensors(second.folder, "raw gradients", 0, value, first.folder)
        assert not second.shares(first, "raw gradients", 0)
    for one in (first, second):
        write_tensors(one.folder, "raw gradients", 0, {"w": np.full(3, np.nan)}, first.folder)
    assert not second.shares(first, "raw gradients", 0)
    assert first_failure(compare_traces(second, first, TOLERANCE, adaptive=False)) is not None


def test_what_is_written_again_leaves_the_reference_as_it_was(tmp_path: Path) -> None:
    first, second = trace(tmp_path / "one"), trace(tmp_path / "two", world=2)
    kept = first.tensors("parameters", 1)
    write_tensors(second.folder, "parameters", 1, kept, first.folder)
    write_tensors(second.folder, "parameters", 1, {"w": np.zeros(3)}, first.folder)
    assert np.array_equal(first.tensors("parameters", 1)["w"], kept["w"])


def test_tensors_are_read_as_they_were_written_and_changes_to_them_are_not(tmp_path: Path) -> None:
    arrays = {
        "wide": np.arange(6.0).reshape(2, 3), "none": np.zeros((0, 4)), "yes": np.array([True, False, True]),
        "half": np.arange(3, dtype=np.float16), "count": np.array([5]), "byte": np.arange(3, dtype=np.uint8),
        "single": np.ones(5, np.float32), "short": np.arange(3, dtype=np.int16),
    }  # fmt: skip
    one = trace(tmp_path / "one")
    for chosen in (arrays, {name: value for name, value in arrays.items() if name != "short"}):
        write_tensors(one.folder, "buffers", 0, chosen)
        found = one.tensors("buffers", 0)
        assert {name: (a.dtype, a.shape, a.tolist()) for name, a in found.items()} == {
            name: (a.dtype, a.shape, a.tolist()) for name, a in chosen.items()
        }
        found["wide"][0] = 7
        assert one.tensors("buffers", 0)["wide"][0, 1] == 1


def test_data_of_another_length_differ_though_the_first_steps_have_the_same_rows(tmp_path: Path) -> None:
    one, other = trace(tmp_path / "one", 2), trace(tmp_path / "other", 2)
    one.facts.source_rows, other.facts.source_rows = [40, 40], [41]
    found = quantities(one, other)["sample ids"]
    assert (found.mark, found.worst.name) == ("FAIL", "rows of data()")
