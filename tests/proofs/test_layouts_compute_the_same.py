"""The promise: whatever the layout, the run is the one that a single process makes.

Raw gradients of the first step, norms, losses, metrics, consumed rows, evaluation, and the parameters after ten updates
are compared with those of one process. The core, of one model in fp64, is in every test run; the rest is a long matrix.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests.runs import Trace, assert_same, without_gradient
from tests.proofs import matrix
from tests.proofs.matrix import CASES, TOLERANCE, Case

CORE = {
    Case("transformer", dropout, "fp64", layout)
    for dropout, layouts in ((0.0, ("single m3", "ddp×2", "fsdp×2")), (0.25, ("ddp×2 m3", "fsdp×2 m3")))
    for layout in layouts
}


class Traces(dict[Case, Trace]):
    """Runs, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, case: Case) -> Trace:
        self.update(matrix.run(self.folder, [case]))
        return self[case]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Trace]:
    return Traces(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in CORE else pytest.mark.slow) for case in CASES]
)
def test_layout_equals_one_process(traces: dict[Case, Trace], case: Case) -> None:
    _is_not_vacuous(traces[case.reference])
    assert_same(traces[case], traces[case.reference], TOLERANCE[case.precision])


def _is_not_vacuous(reference: Trace) -> None:
    """Equality says something only if something happened."""
    assert len(reference.losses) == 10
    assert len(set(reference.losses)) == 10
    assert all(norm > 1e-3 for norm in reference.norms)
    assert any(norm > 0.5 for norm in reference.norms), "clipping was never needed"
    assert len(reference.rows[-1]) == 5
    assert sorted(reference.rows[0]) != reference.rows[0], "the order is not shuffled"
    assert all(np.any(gradient) for gradient in reference.gradients.values())
    assert without_gradient(reference) <= {"blocks.0.attention.key.bias", "blocks.1.attention.key.bias"}
    still = {name for name, before in reference.before.items() if not np.any(reference.parameters[name] != before)}
    assert still <= without_gradient(reference)


@pytest.mark.parametrize("model", ["transformer", pytest.param("language", marks=pytest.mark.slow)])
def test_dropout_changes_the_run(traces: dict[Case, Trace], model: str) -> None:
    without, dropped = (traces[Case(model, p, "fp64", "single m3")] for p in (0.0, 0.25))
    assert without.losses[0] != pytest.approx(dropped.losses[0], rel=1e-6)


@pytest.mark.parametrize("model", ["transformer", pytest.param("language", marks=pytest.mark.slow)])
def test_dropout_is_drawn_per_micro_batch(traces: dict[Case, Trace], model: str) -> None:
    """Else the runs with dropout would agree whatever the draws are keyed by."""
    sixes, threes = (traces[Case(model, 0.25, "fp64", f"single m{m}")] for m in (6, 3))
    assert sixes.losses[0] != pytest.approx(threes.losses[0], rel=1e-6)
