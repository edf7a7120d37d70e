"""Which number of an optimizer is named, where equal gradients have become other parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.proof.script_traces import write_script_trace
from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.scripts.judging.optimizer_settings import add_settings
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace
from unisono.runtime.fault_names import FaultName

Groups = list[dict[str, list[float]]]
DECAY: Groups = [{"weight_decay": [0.1], "betas": [0.9, 0.99]}]
BY_LOSS: Groups = [{"weight_decay": [0.14], "betas": [0.9, 0.99]}]
ROUNDED: Groups = [{"weight_decay": [0.1 + 1e-16], "betas": [0.9, 0.99]}]
OF_GRADIENTS: Groups = [{"weight_decay": [0.1 * (1 + 3e-8)], "betas": [0.9, 0.99]}]
TWO_GROUPS: Groups = [*DECAY, {"weight_decay": [0.0], "betas": [0.9, 0.95]}]
OTHER_BETAS: Groups = [*DECAY, {"weight_decay": [0.0], "betas": [0.9, 0.9]}]


def write(folder: Path, *steps: list[Groups]) -> ScriptTrace:
    """A trace with these settings, step by step and rank by rank."""
    return write_script_trace(folder, [[RankFacts(settings=of_rank) for of_rank in step] for step in steps])


@pytest.mark.parametrize(
    ("ranks", "one", "told"),
    [
        ([DECAY, BY_LOSS], DECAY, "weight_decay of the optimizer is 0.1 on rank 0, and 0.14 on rank 1 in step 2"),
        ([BY_LOSS, BY_LOSS], DECAY, "weight_decay of the optimizer is 0.14 instead of 0.1 in step 2"),
        (
            [TWO_GROUPS, TWO_GROUPS],
            OTHER_BETAS,
            "betas of group 1 of the optimizer is 0.9 and 0.95 instead of 0.9 and 0.9 in step 2",
        ),
        ([ROUNDED, DECAY], DECAY, ""),
        ([OF_GRADIENTS, DECAY], OF_GRADIENTS, ""),
        ([TWO_GROUPS, DECAY], TWO_GROUPS, ""),  # a rank that keeps the state of some parameters alone
    ],
    ids=["by rank", "by layout", "second group", "rounding", "rounding of gradients", "parts"],
)
def test_the_setting_that_differs_first_is_named(tmp_path: Path, ranks: list[Groups], one: Groups, told: str) -> None:
    mine = write(tmp_path / "many", [DECAY, DECAY], ranks, [BY_LOSS, DECAY])
    reference = write(tmp_path / "one", [DECAY], [one], [DECAY])
    drift = build_diagnosis(FaultName.REPLICA_DRIFT, "gradients agree")
    found = add_settings(drift, mine, reference, 2, 1e-7)
    assert found.because == (f"gradients agree; {told}" if told else "gradients agree")
    assert found.fault == drift.fault
    assert (found.remedy != drift.remedy) == bool(told)
    scaled = build_diagnosis(FaultName.SCALED_GRADIENTS, "by 2")
    assert add_settings(scaled, mine, reference, 2, 1e-7) is scaled  # of gradients, which no setting changes


def test_a_parameter_in_another_group_is_named_with_its_setting(tmp_path: Path) -> None:
    """And an update that the script could also have changed by itself is then one of the optimizer."""
    mine, reference = write(tmp_path / "many", [TWO_GROUPS, TWO_GROUPS]), write(tmp_path / "one", [TWO_GROUPS])
    mine.facts.steps[0].groups = [{"a": 0, "b": 0}] * 2
    reference.facts.steps[0].groups = [{"a": 0, "b": 1}]
    by_hand = build_diagnosis(FaultName.UPDATE_NOT_OF_GRADIENTS, "'b' differs")
    found = add_settings(by_hand, mine, reference, 1, 1e-7)
    assert found.fault == FaultName.UPDATE_BY_LAYOUT
    assert found.because == (
        "'b' differs; the optimizer holds b in another group, whose weight_decay is 0.1 instead of 0 in step 1"
    )
    assert "before the model is wrapped" in found.remedy
