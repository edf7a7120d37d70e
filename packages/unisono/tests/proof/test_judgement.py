"""What two runs that agree on nothing are said to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.proof.test_comparison import trace
from unisono.proof import judgement
from unisono.proof.cases import Case
from unisono.proof.recording.trace import RunFacts
from unisono.proof.report import format_verdicts


def test_runs_without_a_gradient_are_not_said_to_be_equal(tmp_path: Path) -> None:
    def still(facts: RunFacts, tensors: Any) -> None:
        for step in facts.steps:
            step.grad_norm = 0.0

    cases = [Case("one", 1, {}, "fp64"), Case("two", 2, {}, "fp64", "one")]
    traces = {"one": trace(tmp_path / "one", 1, still), "two": trace(tmp_path / "two", 2, still)}
    (judged,), (alone,) = judgement.judge_cases(cases, traces, adaptive=False)
    assert (judged.mark, alone.mark) == ("ABSTAIN", "FAIL")
    assert alone.diagnosis is not None
    assert alone.diagnosis.fault == "There is no gradient"
    moved = {"one": trace(tmp_path / "again", 1), "two": trace(tmp_path / "moved", 2)}
    assert judgement.judge_cases(cases, moved, adaptive=False)[0][0].mark == "PASS"


def test_gradients_that_are_rounding_beside_those_of_other_micro_batches_are_not_compared(tmp_path: Path) -> None:
    def rounding(facts: RunFacts, tensors: Any) -> None:
        for step in facts.steps:
            step.grad_norm = 3e-17

    cases = [
        Case("one", 1, {}, "fp64"),
        Case("small", 1, {}, "fp64", "one", other_micro_batch=True),
        Case("two", 2, {}, "fp64", "small"),
    ]
    traces = {
        case.name: trace(tmp_path / case.name, max(1, n), rounding if n else None) for n, case in enumerate(cases)
    }
    judged = {found.case: found for found in judgement.judge_cases(cases, traces, adaptive=False)[0]}
    assert [c.why for c in judged["two"].compared] == [
        "its gradient and that of small are rounding alone: nothing moves that may differ"
    ]
    assert len(judged["small"].compared) > 1


def test_numbers_that_are_zero_all_the_time_are_told_of_the_reference(tmp_path: Path) -> None:
    def with_metrics(facts: RunFacts, tensors: Any) -> None:
        for number, step in enumerate(facts.steps):
            step.metrics = [{"hits": 0.0, "first": float(number == 0)}]
        facts.evaluation = facts.evaluation_again = [{"loss": 1.0, "hits": 0.0}]

    one = trace(tmp_path / "one", 1, with_metrics)
    (alone,) = judgement.judge_cases([Case("one", 1, {}, "fp64")], {"one": one}, adaptive=False)[1]
    assert alone.mark != "FAIL"
    assert "0 in every step, so that nothing can differ there: metric 'hits', evaluated 'hits'" in alone.notes


def test_what_differs_first_names_the_function_that_makes_it(tmp_path: Path) -> None:
    def known(facts: RunFacts, tensors: Any) -> None:
        facts.places = {"loss": "task.py:12", "outputs": "task.py:9"}

    def other(facts: RunFacts, tensors: Any) -> None:
        for step in facts.steps:
            step.loss = 7.0

    cases = [Case("one", 1, {}, "fp64"), Case("two", 2, {}, "fp64", "one")]
    traces = {"one": trace(tmp_path / "one", 1, known), "two": trace(tmp_path / "two", 2, other)}
    (judged,), _ = judgement.judge_cases(cases, traces, adaptive=False)
    assert (judged.first.quantity, judged.place) == ("loss", "loss() at task.py:12")
    assert "  made by: loss() at task.py:12" in format_verdicts([judged], [])


def test_parameters_that_a_first_pass_has_changed_are_not_said_to_be_made_by_build(tmp_path: Path) -> None:
    def known(facts: RunFacts, tensors: Any) -> None:
        facts.places = {"build": "task.py:5", "outputs": "task.py:9"}
        facts.changed_by_passes = "passes alone, without an update, change w"

    def other(facts: RunFacts, tensors: Any) -> None:
        tensors["initial parameters", None]["w"] += 1.0

    cases = [Case("one", 1, {}, "fp64"), Case("two", 2, {}, "fp64", "one")]
    traces = {"one": trace(tmp_path / "one", 1, known), "two": trace(tmp_path / "two", 2, other)}
    (judged,), _ = judgement.judge_cases(cases, traces, adaptive=False)
    assert (judged.first.quantity, judged.place) == ("initial parameters", "outputs() at task.py:9")


@pytest.mark.parametrize(("called", "mark"), [("", "ABSTAIN"), ("A mean of means", "FAIL")])
def test_a_refused_layout_says_nothing_and_a_refused_loss_fails(tmp_path: Path, called: str, mark: str) -> None:
    """A loss over the hardest half of its rows is refused as a mean where each micro-batch has one row."""

    def refused(facts: RunFacts, tensors: Any) -> None:
        facts.fault, facts.called, facts.steps = "ConfigError: …", called, []

    cases = [Case("one", 1, {}, "fp64"), Case("two", 1, {}, "fp64", "one", other_micro_batch=True)]
    traces = {"one": trace(tmp_path / "one", 1), "two": trace(tmp_path / "two", 1, refused)}
    (judged,), _ = judgement.judge_cases(cases, traces, adaptive=False)
    assert judged.mark == mark


@pytest.mark.parametrize(("off", "mark"), [(1e-3, "ABSTAIN"), (0.5, "FAIL")])
def test_an_evaluation_may_be_off_by_what_a_lower_precision_rounds_and_no_more(
    tmp_path: Path, off: float, mark: str
) -> None:
    def lower(facts: RunFacts, tensors: Any) -> None:
        facts.lower = ["outside of the model: float16"]

    def other(facts: RunFacts, tensors: Any) -> None:
        facts.evaluation = facts.evaluation_again = [{"loss": 1.0 + off}] * 2

    cases = [Case("one", 1, {}, "fp32"), Case("two", 2, {}, "fp32", "one")]
    traces = {"one": trace(tmp_path / "one", 1, lower), "two": trace(tmp_path / "two", 2, other)}
    (judged,), _ = judgement.judge_cases(cases, traces, adaptive=False)
    assert {c.mark for c in judged.compared if c.quantity == "evaluation"} == {mark}
