"""The three scripts of other libraries: the proof finds the fault of each, and finds none once it is mended."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from unisono.config import references
from unisono.proof import compare

EXAMPLES = Path(__file__).parents[2] / "examples" / "foreign"
FOUND = {
    "plain_torch": ("loss", 1, "A mean of means"),
    "with_accelerate": ("learning rate", 2, "The schedule is stepped once per process"),
    "with_fabric": ("sample ids", 3, "Rows are repeated to fill the batch"),
}


def script(name: str) -> ModuleType:
    path = EXAMPLES / f"{name}.py"
    return references.module_of(f"{path}:train", str(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_the_fault_is_found_and_named(name: str) -> None:
    report = compare(script(name).train, quiet=True)
    (verdict,) = report.verdicts
    assert (report.exit_code, verdict.mark) == (1, "FAIL"), report.lines
    assert verdict.first is not None
    assert verdict.diagnosis is not None
    assert (verdict.first.quantity, verdict.first.worst.step, verdict.diagnosis.fault) == FOUND[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_the_mended_script_passes_to_rounding(name: str) -> None:
    report = compare(script(name).train_mended, quiet=True)
    assert report.exit_code == 0, report.lines
    (verdict,) = report.verdicts
    sizes = {c.quantity: c.worst.size for c in verdict.compared if c.mark == "PASS"}
    assert {"sample ids", "loss", "raw gradients", "learning rate", "optimizer state", "parameters"} <= set(sizes)
    assert max(sizes.values()) < 1e-14
