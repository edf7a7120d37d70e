"""What two runs that agree on nothing are said to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.proof.test_comparison import trace
from unisono.proof import judgement
from unisono.proof.cases import Case
from unisono.proof.recording.trace import RunFacts


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
