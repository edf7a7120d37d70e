"""A decay is known by the one factor of the weights by which gradients or parameters differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests.proof.script_traces import write_script_trace
from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.recording.trace import Array, write_tensors
from unisono.proof.scripts.judging.weight_changes import add_changes
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace, begun_moment
from unisono.runtime.fault_names import FaultName

DRAW = np.random.default_rng(2)
WEIGHTS = {"a": DRAW.normal(size=(3, 4)), "b": DRAW.normal(size=4)}
GRADIENT = {"a": DRAW.normal(size=(3, 4)), "b": DRAW.normal(size=4)}
OPEN = build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, "they differ")


def add(*parts: tuple[float, dict[str, Array]]) -> dict[str, Array]:
    return {name: sum(factor * values[name] for factor, values in parts) for name in WEIGHTS}  # type: ignore[misc]


def write(folder: Path, size: int, tensors: dict[str, dict[str, Array]], step: int = 0) -> ScriptTrace:
    """A trace of so many processes that begin with `WEIGHTS`, with tensors of a step."""
    trace = write_script_trace(folder, [[RankFacts() for _ in range(size)]] * (step + 1))
    write_tensors(folder, "initial parameters", None, WEIGHTS)
    for moment, values in tensors.items():
        write_tensors(folder, moment, step, values)
    return trace


def differing(quantity: str, step: int = 1) -> ComparedQuantity:
    return ComparedQuantity(quantity, "FAIL", Difference(0.1, step, "a"), 1e-9)


@pytest.mark.parametrize(("own", "fault"), [(0.02, FaultName.TERM_PER_MICRO_BATCH), (0.0, OPEN.fault)])
def test_a_penalty_is_named_only_where_one_process_adds_its_part_by_hand(
    tmp_path: Path, own: float, fault: FaultName
) -> None:
    """Of three processes each adds 0.02 times the weights; a loss that has it shows no part of its own."""
    many = write(tmp_path / "many", 3, {"raw gradients": add((1, GRADIENT), (0.06, WEIGHTS))})
    local = {f"0/{name}": value.ravel() for name, value in add((1, GRADIENT), (0.02 - own, WEIGHTS)).items()}
    whole = {"raw gradients": add((1, GRADIENT), (0.02, WEIGHTS)), "local gradients 0": local}
    found = add_changes(OPEN, differing("raw gradients"), many, write(tmp_path / "one", 1, whole))
    assert found.fault == fault
    assert "the gradients of all parameters are those of one process and 0.04 times the weights" in found.because


def test_a_difference_of_another_direction_is_no_decay(tmp_path: Path) -> None:
    many = write(tmp_path / "many", 2, {"raw gradients": add((1, GRADIENT), (0.04, GRADIENT))})
    one = write(tmp_path / "one", 1, {"raw gradients": GRADIENT})
    assert add_changes(OPEN, differing("raw gradients"), many, one) is OPEN


def test_parameters_that_decay_by_another_factor_are_said(tmp_path: Path) -> None:
    """Those of one name alone, too; a name that is known already stays."""
    update = build_diagnosis(FaultName.UPDATE_NOT_OF_GRADIENTS, "'a' differs")
    moved = add((1, WEIGHTS), (-0.1, GRADIENT))
    many = write(tmp_path / "many", 2, {"parameters": {**moved, "a": moved["a"] - 0.01 * WEIGHTS["a"]}})
    one = write(tmp_path / "one", 1, {"parameters": moved})
    found = add_changes(update, differing("parameters"), many, one)
    assert found.fault == update.fault and "of a it differs by -0.01 times what it was" in found.because
    known = build_diagnosis(FaultName.NOT_SYNCHRONISED, "it is their own")
    assert add_changes(known, differing("parameters"), many, one) is known


def test_weights_that_the_script_has_changed_otherwise_are_named_before_the_loss_that_reads_them(
    tmp_path: Path,
) -> None:
    """A decay after the update is seen when the next one begins, whose loss differs first."""
    moment = begun_moment(0)
    many = write(tmp_path / "many", 2, {moment: add((0.998, WEIGHTS))}, step=1)
    one = write(tmp_path / "one", 1, {moment: WEIGHTS}, step=1)
    loss = build_diagnosis(FaultName.LOSS_BY_LAYOUT, "it differs")
    found = add_changes(loss, differing("loss", 2), many, one)
    assert found.fault == FaultName.UPDATE_NOT_OF_GRADIENTS
    assert "changes a, b before update 2" in found.because and "0.998 times these" in found.because
    same = write(tmp_path / "same", 1, {moment: add((0.998, WEIGHTS))}, step=1)
    for trace in (many, same):
        write_tensors(trace.folder, "parameters", 0, WEIGHTS)
        write_tensors(trace.folder, "raw gradients", 1, GRADIENT)
    assert add_changes(loss, differing("loss", 2), many, same) is loss
