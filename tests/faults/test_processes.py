"""Processes that die or freeze."""

from __future__ import annotations

import pytest

from unisono.faults.matrix import Sandbox, Scenario

pytestmark = pytest.mark.slow
GROUP = "A"


def test_promises_are_kept(fault: Scenario, ground: Sandbox) -> None:
    outcome = fault.show(ground)
    if outcome.verdict == "ABSTAIN":
        pytest.skip(outcome.abstain)
    assert not outcome.broken_promises, "\n".join(outcome.broken_promises)
