"""A name stays only where the run shows what else it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests.proof.script_traces import build_step, write_script_trace
from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.recording.trace import write_tensors
from unisono.proof.scripts.judging.confirmations import confirm
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace
from unisono.runtime.fault_names import FaultName

GRADIENT = np.random.default_rng(3).normal(size=12)


def write(
    folder: Path, size: int = 2, factor: float = 1.0, rows: Sequence[int] = (), clean: bool = True, begun: int = 1
) -> ScriptTrace:
    """One step of so many processes; the last one begins it with other weights, if their digest is not 1."""
    seen = [RankFacts(begun={"w": 1}) for _ in range(size - 1)] + [RankFacts(begun={"w": begun})]
    trace = write_script_trace(folder, [seen], [build_step([[*rows], *([] for _ in seen[1:])], clean=clean)])
    write_tensors(folder, "raw gradients", 0, {"w": factor * GRADIENT})
    return trace


def differing(quantity: str, mine: float = 2.0) -> ComparedQuantity:
    return ComparedQuantity(quantity, "FAIL", Difference(0.5, 1, quantity, mine, 1.0), 1e-9)


@pytest.mark.parametrize(("other", "fault"), [(1, "The loss depends on the layout"), (2, "Replicas drift apart")])
def test_replicas_drift_before_a_loss_only_where_the_update_begins_with_other_weights(
    tmp_path: Path, other: int, fault: str
) -> None:
    mine = write(tmp_path / "many", begun=other)
    drift = build_diagnosis(FaultName.REPLICA_DRIFT, "replicas too")
    assert confirm(drift, differing("loss"), mine, write(tmp_path / "one", 1)).fault == fault


@pytest.mark.parametrize(("factor", "neutral"), [(2.0, False), (1.5, True)])
def test_a_loss_is_scaled_only_where_gradients_are(tmp_path: Path, factor: float, neutral: bool) -> None:
    mine = write(tmp_path / "many", factor=factor)
    scaled = build_diagnosis(FaultName.SCALED_LOSS, "2 instead of 1")
    assert confirm(scaled, differing("loss"), mine, write(tmp_path / "one", 1)).is_neutral == neutral


@pytest.mark.parametrize(("clean", "neutral"), [(True, False), (False, True)])
def test_gradients_that_one_process_begins_with_too_are_not_what_differs(
    tmp_path: Path, clean: bool, neutral: bool
) -> None:
    mine = write(tmp_path / "many", clean=False)
    left = build_diagnosis(FaultName.GRADIENTS_NOT_CLEARED, "step 1 began with gradients")
    assert (
        confirm(left, differing("raw gradients"), mine, write(tmp_path / "one", 1, clean=clean)).is_neutral == neutral
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "fault", "stays"),
    [
        ((1, 2), (1, 2, 3), FaultName.DROPPED_ROWS, True),
        ((1, 4), (1, 2, 3), FaultName.DROPPED_ROWS, False),
        ((1, 2, 2), (1, 2), FaultName.REPEATED_ROWS, True),
        ((1, 2, 4), (1, 2), FaultName.REPEATED_ROWS, False),
    ],
)
def test_rows_are_dropped_or_repeated_only_where_all_others_are_the_same(
    tmp_path: Path, ours: tuple[int, ...], theirs: tuple[int, ...], fault: FaultName, stays: bool
) -> None:
    mine = write(tmp_path / "many", rows=ours)
    found = confirm(
        build_diagnosis(fault, "step 1"), differing("sample ids"), mine, write(tmp_path / "one", 1, rows=theirs)
    )
    assert (found.fault == fault) == stays
    assert stays or found.fault == FaultName.ORDER_BY_WORLD_SIZE
