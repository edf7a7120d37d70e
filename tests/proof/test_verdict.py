"""What a proof says: marks, exit codes and the table."""

from __future__ import annotations

import pytest

from unisono.proof.comparison import Compared, Difference
from unisono.proof.fault_names import named
from unisono.proof.verdict import Verdict, exit_code, lines

GOOD = Verdict("ddp:2 fp64", "single fp64", False, [Compared("loss", "PASS", Difference(3e-16, 1, "loss"))])
BAD = Verdict(
    "fsdp:2 fp64", "single fp64", False,
    [
        Compared("loss", "PASS"),
        Compared("raw gradients", "FAIL", Difference(0.5, 2, "layer.weight", 2.0, 1.0)),
        Compared("parameters", "FAIL", Difference(0.1, 2, "layer.weight", 2.0, 1.0)),
    ],
    diagnosis=named("All gradients are scaled by N", "every tensor is 2 times what it should be"),
)  # fmt: skip
SILENT = Verdict("ddp:2 m1", "single m1", False, [Compared("the run", "ABSTAIN", why="single m1 could not be run")])
FAULTY = Verdict("ddp:2 m4", "single m4", False, fault="GuardError: replicas differ")


@pytest.mark.parametrize(("verdict", "mark"), [(GOOD, "PASS"), (BAD, "FAIL"), (SILENT, "ABSTAIN"), (FAULTY, "FAIL")])
def test_a_run_passes_fails_or_says_nothing(verdict: Verdict, mark: str) -> None:
    assert verdict.mark == mark


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [([GOOD], 0), ([GOOD, SILENT], 0), ([GOOD, BAD], 1), ([FAULTY], 1), ([SILENT], 2), ([], 2)],
)
def test_the_exit_code_says_it_all(verdicts: list[Verdict], code: int) -> None:
    assert exit_code(verdicts) == code


def test_the_table_has_a_mark_and_a_size_for_every_run_and_quantity() -> None:
    told = "\n".join(lines([GOOD, BAD], []))
    assert "raw" in told
    assert "PASS" in told
    assert "3e-16" in told
    assert "equal" in told
    assert "5e-01" in told


def test_the_first_fault_is_told_with_tensor_step_values_meaning_and_remedy() -> None:
    told = lines([GOOD, BAD], [])
    (line,) = [text for text in told if "FAIL raw gradients" in text]
    assert line == (
        "fsdp:2 fp64: FAIL raw gradients: step 2, layer.weight: 2.0 instead of 1.0 (relative difference 5.0e-01)"
    )
    assert told[told.index(line) + 1 :] == [
        "  likely: All gradients are scaled by N (every tensor is 2 times what it should be)",
        "  remedy: sum over ranks and divide once: DDP and FSDP themselves divide by their number",
        "  page: docs/diagnoses.md#all-gradients-are-scaled-by-n",
    ]
    assert not any("FAIL parameters" in text for text in told), "only the first, the others follow from it"


def test_why_nothing_is_said_is_told() -> None:
    assert "ddp:2 m1: ABSTAIN the run: single m1 could not be run" in lines([SILENT], [])


def test_a_run_that_ended_with_an_error_is_told() -> None:
    assert any("GuardError: replicas differ" in text for text in lines([FAULTY], []))
