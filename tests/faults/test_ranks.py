"""Ranks that wait, or do not do the same."""

from __future__ import annotations

import pytest

from unisono.faults.matrix import Fault, Ground

pytestmark = pytest.mark.slow
GROUP = "B"


def test_promises_are_kept(fault: Fault, ground: Ground) -> None:
    outcome = fault.show(ground)
    if outcome.verdict == "ABSTAIN":
        pytest.skip(outcome.abstain)
    assert not outcome.wrong, "\n".join(outcome.wrong)
