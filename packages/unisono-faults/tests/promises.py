"""The claim of every row of the fault matrix; a module per group chooses its rows, so that groups run side by side."""

from __future__ import annotations

import pytest

from unisono_faults.matrix import Sandbox, Scenario


def test_promises_are_kept(fault: Scenario, sandbox: Sandbox) -> None:
    outcome = fault.show(sandbox)
    if outcome.verdict == "ABSTAIN":
        pytest.skip(outcome.abstain)
    assert not outcome.broken_promises, "\n".join(outcome.broken_promises)
