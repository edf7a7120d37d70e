"""The few that every test run shows."""

from __future__ import annotations

import pytest

from unisono.faults.matrix import Fault, Ground


def test_promises_are_kept(fault: Fault, ground: Ground) -> None:
    outcome = fault.show(ground)
    if outcome.verdict == "ABSTAIN":
        pytest.skip(outcome.abstain)
    assert not outcome.wrong, "\n".join(outcome.wrong)
