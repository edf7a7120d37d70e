"""The scripts of other libraries: the proof finds the fault of each, and finds none once it is corrected."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from unisono.config.code import references
from unisono.proof import compare
from unisono.proof.scripts.script_proof import ScriptSettings, prove_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "foreign"
FOUND = {
    "plain_torch": ("loss", 1, "A mean of means"),
    "with_accelerate": ("learning rate", 2, "The schedule is stepped once per process"),
    "with_fabric": ("sample ids", 3, "Rows are repeated to fill the batch"),
}


def script(name: str) -> ModuleType:
    path = EXAMPLES / f"{name}.py"
    return references.load_module(f"{path}:train", str(path))


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
def test_the_corrected_script_passes_to_rounding(name: str) -> None:
    report = compare(script(name).train_fixed, quiet=True)
    assert report.exit_code == 0, report.lines
    (verdict,) = report.verdicts
    sizes = {c.quantity: c.worst.size for c in verdict.compared if c.mark == "PASS"}
    assert {"sample ids", "loss", "raw gradients", "learning rate", "optimizer state", "parameters"} <= set(sizes)
    assert max(sizes.values()) < 1e-14


SPEECH = {
    "train_wrapper": ("raw gradients", "Gradients are not synchronised"),
    "train_sampler": ("sample ids", "Every rank reads the same rows"),
    "train": ("sample ids", "Every rank reads the same rows"),  # all of them at once
    # One process makes means as well, of other micro-batches: no sum of what was recorded can show it.
    "train_means": ("loss", "The loss depends on the layout"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPEECH)
def test_each_fault_of_the_speech_trainer_that_depends_on_processes_is_named(name: str) -> None:
    report = compare(getattr(script("speech_before"), name), quiet=True)
    (verdict,) = report.verdicts
    assert (report.exit_code, verdict.mark) == (1, "FAIL"), report.lines
    assert verdict.first is not None and verdict.diagnosis is not None
    assert (verdict.first.quantity, verdict.diagnosis.fault) == SPEECH[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_fixed", "train_shift", "train_last", "train_saves"])
def test_what_is_the_same_on_one_process_passes(name: str) -> None:
    """A missing shift, a dropped window and a file that all write are faults all the same; no comparison shows them."""
    report = compare(getattr(script("speech_before"), name), quiet=True)
    assert report.exit_code == 0, report.lines
    (verdict,) = report.verdicts
    sizes = {c.quantity: c.worst.size for c in verdict.compared if c.mark == "PASS"}
    assert {"loss", "raw gradients", "parameters"} <= set(sizes)
    assert max(sizes.values()) < 1e-13


AS_IT_IS = {  # exit code, and what `unisono prove` calls it
    (): (0, None),
    ("wrapper",): (1, "Gradients are not synchronised"),
    ("sampler",): (1, "Every rank reads the same rows"),
    ("shift",): (0, None),
    ("last",): (0, None),
    ("saves",): (0, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("faults", AS_IT_IS)
def test_the_speech_trainer_is_judged_as_it_is(faults: tuple[str, ...]) -> None:
    report = prove_script(EXAMPLES / "speech_before.py", ["plain", *faults], ScriptSettings(), quiet=True)
    code, fault = AS_IT_IS[faults]
    assert report.exit_code == code, report.lines
    named = [verdict.diagnosis.fault for verdict in report.verdicts if verdict.diagnosis is not None]
    assert named == ([] if fault is None else [fault])
