"""Every fault of the zoo is caught and called by its name, and the clean twin of each passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs.zoo import trial, zoo
from tests.proofs.zoo.zoo import FAULTS
from unisono.proof.verdict import Verdict

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    return zoo.verdicts(tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_called_by_its_name(found: dict[str, Verdict], name: str) -> None:
    verdict, fault = found[name], FAULTS[name]
    assert zoo.mark_of(verdict) == fault.mark
    if fault.mark == "FAIL":
        assert verdict.diagnosis is not None
        assert verdict.diagnosis.fault == fault.named


@pytest.mark.parametrize("name", zoo.CLEAN)
def test_its_clean_twin_passes(found: dict[str, Verdict], name: str) -> None:
    verdict = found[name]
    assert verdict.mark == "PASS", (verdict.first, verdict.fault)
    assert {c.quantity for c in verdict.compared if c.mark == "PASS"} >= {"sample ids", "raw gradients", "parameters"}


def test_faults_that_no_rule_was_written_for_are_caught_and_none_is_called_by_a_wrong_name(tmp_path: Path) -> None:
    found = {verdict.case: trial.name_verdict(verdict, trial.FAULTS[verdict.case]) for verdict in trial.judge(tmp_path)}
    assert len(found) == len(trial.FAULTS)
    assert set(found.values()) == {"right", "neutral"}, found
