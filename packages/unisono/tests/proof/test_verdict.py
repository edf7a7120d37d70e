"""What a proof says: marks, exit codes and the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.invariants import NEIGHBOURS
from unisono.proof.report import format_outcome, format_verdicts
from unisono.proof.verdict import Verdict, exit_code
from unisono.runtime.fault_names import FaultName

GOOD = Verdict("ddp:2 fp64", "single fp64", False, [ComparedQuantity("loss", "PASS", Difference(3e-16, 1, "loss"))])
BAD = Verdict(
    "fsdp:2 fp64", "single fp64", False,
    [
        ComparedQuantity("loss", "PASS"),
        ComparedQuantity("raw gradients", "FAIL", Difference(0.5, 2, "layer.weight", 2.0, 1.0)),
        ComparedQuantity("parameters", "FAIL", Difference(0.1, 2, "layer.weight", 2.0, 1.0)),
    ],
    diagnosis=build_diagnosis(FaultName.SCALED_GRADIENTS, "every tensor is 2 times what it should be"),
)  # fmt: skip
SILENT = Verdict(
    "ddp:2 m1", "single m1", False, [ComparedQuantity("the run", "ABSTAIN", why="single m1 could not be run")]
)
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
    told = "\n".join(format_verdicts([GOOD, BAD], [], full=True))
    assert "raw" in told
    assert "PASS" in told
    assert "3e-16" in told
    assert "equal" in told
    assert "5e-01" in told


def test_the_table_has_a_line_for_every_run_and_fits_a_terminal() -> None:
    long = replace(GOOD, case="single m4 resumed from hsdp:2x2 bf16")
    exact = replace(GOOD, case="exact", compared=[ComparedQuantity("loss", "PASS")])
    far = ComparedQuantity("initial parameters", "FAIL", Difference(float("inf"), 0, "weight"))
    other = replace(BAD, case="ddp:2 m4 attention by matmul fp64", compared=[far])
    told = format_verdicts([long, exact, BAD, other, SILENT], [])
    head = next(number for number, line in enumerate(told) if "largest difference" in line)
    table = told[head : told.index("", head)]
    assert [" ".join(line.split()) for line in table[2:]] == [
        "single m4 resumed from hsdp:2x2 bf16 PASS 3e-16 loss",
        "exact PASS equal",
        "fsdp:2 fp64 FAIL 5e-01 raw gradients",
        "ddp:2 m4 attention by matmul fp64 FAIL differs initial parameters",
        "ddp:2 m1 ABSTAIN –",
    ]
    assert max(map(len, table)) <= 80


def test_a_figure_that_was_not_judged_is_not_beside_a_pass() -> None:
    unknown = ComparedQuantity("outputs", "ABSTAIN", Difference(3e-2, 1, "w"), why="other padding")
    told = "\n".join(format_verdicts([replace(GOOD, compared=[*GOOD.compared, unknown])], []))
    assert "3e-16 loss, in part" in told
    assert "3e-02" not in told


def test_a_run_whose_gradients_were_not_compared_does_not_pass() -> None:
    unknown = ComparedQuantity("raw gradients", "ABSTAIN", why="other padding")
    assert replace(GOOD, compared=[*GOOD.compared, unknown]).mark == "ABSTAIN"
    nothing = replace(unknown, why="there is none")
    assert replace(GOOD, compared=[*GOOD.compared, nothing]).mark == "PASS"


def test_quantities_that_abstain_for_one_reason_stand_side_by_side() -> None:
    unknown = [ComparedQuantity(name, "ABSTAIN", why="other padding") for name in ("outputs", "metrics")]
    told = format_verdicts([replace(GOOD, compared=[*GOOD.compared, *unknown])], [])
    assert "ddp:2 fp64: ABSTAIN outputs, metrics: other padding" in told


def test_a_note_of_several_runs_is_told_once() -> None:
    noted = [replace(GOOD, case=case, notes=["0 in every step"]) for case in ("a", "b")]
    assert "a and 1 more case: 0 in every step" in format_verdicts(noted, [])


def test_one_reason_of_several_runs_is_told_once() -> None:
    told = format_verdicts([SILENT, replace(SILENT, case="fsdp:2 m1"), replace(SILENT, case="fsdp:2 m2")], [])
    assert "ddp:2 m1 and 2 more cases: ABSTAIN the run: single m1 could not be run" in told


def test_the_last_word_names_what_a_pass_leaves_out() -> None:
    assert format_outcome([GOOD]) == "PASS"
    assert format_outcome([GOOD, SILENT]) == "PASS; not judged: ddp:2 m1 against single m1"
    local = ComparedQuantity("buffers", "ABSTAIN", why="statistics of one process")
    there = [replace(GOOD, case=name, compared=[*GOOD.compared, local]) for name in ("a", "b")]
    expected = "PASS; not judged: ddp:2 m1 against single m1; buffers (a and 1 more case)"
    assert format_outcome([*there, SILENT]) == expected
    nothing = replace(GOOD, compared=[*GOOD.compared, ComparedQuantity("EMA", "ABSTAIN", why="there is none")])
    assert format_outcome([nothing]) == "PASS"
    assert format_outcome([BAD, SILENT]) == "FAIL"
    assert format_outcome([SILENT]) == "ABSTAIN"


def test_the_first_fault_is_told_with_tensor_step_values_meaning_and_remedy() -> None:
    told = format_verdicts([GOOD, BAD], [])
    (line,) = [text for text in told if "FAIL raw gradients" in text]
    assert line == (
        "fsdp:2 fp64: FAIL raw gradients: step 2, layer.weight: norm 2.0 instead of 1.0 (relative difference 5.0e-01)"
    )
    assert told[:2] == ["FAIL: 1 of 2 cases", line], "the verdict comes first, and then what differs first"
    assert told[2:5] == [
        "  likely: All gradients are scaled by N (every tensor is 2 times what it should be)",
        "  remedy: sum over ranks and divide once: DDP and FSDP themselves divide by their number",
        "  more: unisono explain all-gradients-are-scaled-by-n",
    ]
    assert not any("FAIL parameters" in text for text in told), "only the first, the others follow from it"


def test_rows_are_told_as_they_are() -> None:
    rows = ComparedQuantity(
        "sample ids", "FAIL", Difference(float("inf"), 1, "rows of the global batch", [0, 0], [0, 1])
    )
    told = format_verdicts([replace(BAD, compared=[rows])], [])
    assert any("rows of the global batch: [0, 0] instead of [0, 1]" in line for line in told)


def test_why_nothing_is_said_is_told() -> None:
    assert "ddp:2 m1: ABSTAIN the run: single m1 could not be run" in format_verdicts([SILENT], [])


def test_a_run_that_ended_with_an_error_is_told() -> None:
    assert any("GuardError: replicas differ" in text for text in format_verdicts([FAULTY], []))


def test_cases_that_fail_alike_stand_in_one_line_and_no_error_is_repeated() -> None:
    again = [replace(BAD, case=f"fsdp:{n} fp64") for n in range(4, 10)]
    told = format_verdicts([BAD, *again], [])
    assert told[0] == "FAIL: 7 of 7 cases"
    assert sum("All gradients are scaled by N" in line for line in told) == 1
    assert told[5] == (
        "  also: fsdp:4 fp64 (raw gradients, step 2); fsdp:5 fp64 (raw gradients, step 2); "
        "fsdp:6 fp64 (raw gradients, step 2); fsdp:7 fp64 (raw gradients, step 2) and 2 more"
    )
    errors = [replace(FAULTY, case=f"ddp:{n}", fault=f"rank {n}: it ended\n  logs: /tmp/{n}/logs/x") for n in (1, 2)]
    told = format_verdicts(errors, [])
    assert sum("it ended" in line for line in told) == 1
    assert "  also: ddp:2" in told


def test_of_cases_that_fail_alike_the_one_that_differs_first_is_shown() -> None:
    early = replace(BAD, case="early", compared=[replace(BAD.compared[1], worst=Difference(0.5, 1, "w", 2.0, 1.0))])
    assert format_verdicts([BAD, early], [])[1].startswith("early: FAIL raw gradients: step 1")


def test_the_name_of_a_case_is_explained() -> None:
    one = Verdict("single m4 fp64", "", False)
    line = "single m4 fp64: one process, which the others have to equal; 4 rows in a micro-batch; double precision"
    assert line in format_verdicts([GOOD], [one])


def test_a_proof_that_is_left_open_says_why_in_its_first_line() -> None:
    open_ = replace(GOOD, compared=[*GOOD.compared, ComparedQuantity(NEIGHBOURS, "ABSTAIN", why="batch statistics")])
    assert format_verdicts([open_], [])[0] == "ABSTAIN: batch statistics"
    assert format_verdicts([GOOD], [], mark="ABSTAIN")[0] == "ABSTAIN: nothing could be compared"
    assert format_verdicts([GOOD, SILENT], [])[0] == "PASS; not judged: ddp:2 m1 against single m1"


def test_what_a_run_shows_comes_before_the_update_that_the_proof_makes() -> None:
    """An optimizer that counts its updates by itself fails in both."""

    def failing(case: str, quantity: str) -> Verdict:
        named = build_diagnosis(FaultName.OPTIMIZER_STATE_LOST, quantity)
        compared = [ComparedQuantity(quantity, "FAIL", Difference(1.0, 2, "a"))]
        return Verdict(case, "single", False, compared, diagnosis=named)

    told = format_verdicts([failing("ddp:2", "update"), failing("ddp:2 resumed", "parameters")], [])
    assert told[1].startswith("ddp:2 resumed: FAIL parameters"), told
