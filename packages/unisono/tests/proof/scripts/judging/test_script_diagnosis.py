"""What a run shows by itself decides the name of what differs first, and the line of the loss stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.proof.script_traces import build_step, write_script_trace
from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.scripts.judging.script_diagnosis import diagnose_script, find_line
from unisono.proof.scripts.judging.self_check import BUFFERS, SelfCheck
from unisono.proof.scripts.recording.rank_facts import RankFacts
from unisono.proof.verdict import Verdict
from unisono.runtime.fault_names import FaultName


@pytest.mark.parametrize(
    ("quantity", "because", "line"),
    [
        ("loss", "it differs", "backward() at train.py:7"),
        ("raw gradients", "all_gather in train.py, line 3 has no backward pass", ""),
        ("parameters", "'w' differs", ""),
    ],
)
def test_the_line_of_the_loss_is_said_where_no_other_is_known(
    tmp_path: Path, quantity: str, because: str, line: str
) -> None:
    mine = write_script_trace(tmp_path, [[RankFacts(line="train.py:7"), RankFacts()]])
    differs = ComparedQuantity(quantity, "FAIL", Difference(0.1, 1, "w"))
    found = build_diagnosis(FaultName.LOSS_BY_LAYOUT, because)
    assert find_line(Verdict("2 processes", "1 process", False, [differs], diagnosis=found), mine) == line


@pytest.mark.parametrize(("step", "fault"), [(1, FaultName.LOCAL_BUFFERS), (2, FaultName.LOSS_BY_LAYOUT)])
def test_a_check_of_the_run_by_itself_gives_the_name_of_its_own_step_alone(
    tmp_path: Path, step: int, fault: FaultName
) -> None:
    mine = write_script_trace(tmp_path / "many", [[RankFacts(), RankFacts()]] * 2)
    one = write_script_trace(tmp_path / "one", [[RankFacts()]] * 2)
    loss = ComparedQuantity("loss", "FAIL", Difference(0.1, 1, "loss", 2.2, 2.0), 1e-9)
    buffers = ComparedQuantity(BUFFERS, "FAIL", Difference(0.1, step, "n"))
    likely = build_diagnosis(FaultName.LOCAL_BUFFERS, "ranks differ in n")
    check = SelfCheck([buffers], [], [], 2, "mean", failed=buffers, diagnosis=likely)
    found = diagnose_script(Verdict("2 processes", "1 process", False, [loss], [buffers]), check, mine, one)
    assert found is not None and found.fault == fault


@pytest.mark.parametrize(
    ("apart", "fault"),
    [
        (["'ema/w' is not the same on ranks [0] and [1]"], FaultName.EMA_DRIFT),
        (["'ema/w' is not the same on ranks [0] and [1]", "'w' is not"], FaultName.LOSS_BY_LAYOUT),
        ([], FaultName.LOSS_BY_LAYOUT),
    ],
)
def test_a_teacher_that_ranks_hold_apart_with_the_second_update_is_behind_the_first_loss(
    tmp_path: Path, apart: list[str], fault: FaultName
) -> None:
    """Copied from weights that ranks drew by themselves, before a wrapper brought these together."""
    steps = [build_step([[], []]), build_step([[], []], replicas=apart)]
    mine = write_script_trace(tmp_path / "many", [[RankFacts(), RankFacts()]] * 2, steps)
    one = write_script_trace(tmp_path / "one", [[RankFacts()]] * 2)
    loss = ComparedQuantity("loss", "FAIL", Difference(0.1, 1, "loss", 2.2, 2.0), 1e-9)
    found = diagnose_script(
        Verdict("2 processes", "1 process", False, [loss]), SelfCheck([], [], [], 2, "mean"), mine, one
    )
    assert found is not None and found.fault == fault
