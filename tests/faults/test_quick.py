"""The few that every test run shows."""

from __future__ import annotations

import pytest

from unisono.faults.matrix import Sandbox, Scenario


def test_promises_are_kept(fault: Scenario, ground: Sandbox) -> None:
    outcome = fault.show(ground)
    if outcome.verdict == "ABSTAIN":
        pytest.skip(outcome.abstain)
    assert not outcome.broken_promises, "\n".join(outcome.broken_promises)
