"""A transformer with dropout on two processes of two devices makes the steps of one device; also after a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests import jax_tasks
from packages.unisono.tests.engines.jax import matrix
from packages.unisono.tests.engines.jax.matrix import Case
from packages.unisono.tests.engines.jax.test_processes import TWO_BY_TWO, assert_same_runs, steps, unisono
from packages.unisono.tests.runs import Trace, assert_same, saved_arrays

pytestmark = pytest.mark.slow
KINDS = ("2 processes × 2, ddp", "2 processes × 2, fsdp", "2 processes × 2, hsdp")
CASES = [Case("transformer", "fp64", kind, 3) for kind in KINDS]  # four passes
TRAIN = (
    "train", f"{jax_tasks.__file__}:TransformerTask", "task.dropout=0.1", "optim.kind=sgd", "optim.lr=0.1",
    "train.global_batch=12", "train.steps=8", "train.precision=fp64", "checkpoint.every=3", "layout.micro_batch=3",
    "run.dir=runs",
)  # fmt: skip


@pytest.fixture(scope="module")
def traces() -> dict[Case, Trace]:
    return matrix.run([CASES[0].reference, *CASES], timeout=280)


def test_the_run_that_others_are_held_against_trains(traces: dict[Case, Trace]) -> None:
    one = traces[CASES[0].reference]
    assert len(one.losses) == 10 and one.losses[-1] < 0.95 * one.losses[0]
    assert all(norm > 0.1 for norm in one.norms) and any(norm > 0.5 for norm in one.norms)  # some are clipped
    assert all(np.any(gradient) for gradient in one.gradients.values())
    assert len(one.rows[-1]) == 5 and len(set(one.rows[0])) == matrix.BATCH  # every device has rows of its own
    assert len({metrics["next"] for metrics in one.metrics}) == 10


@pytest.mark.parametrize("case", CASES, ids=KINDS)
def test_two_processes_of_two_devices_compute_what_one_device_computes(traces: dict[Case, Trace], case: Case) -> None:
    assert_same(traces[case], traces[case.reference])


def test_a_transformer_that_was_killed_goes_on_bit_for_bit_and_elsewhere_up_to_rounding(tmp_path: Path) -> None:
    """Dropout goes on with the draws that an uninterrupted run makes."""

    def train(name: str, *words: str, code: int = 0) -> Path:
        done = unisono(tmp_path, *TRAIN, f"run.name={name}", *words)
        assert done.returncode == code, done.stderr
        return tmp_path / "runs" / name

    whole = train("whole", *TWO_BY_TWO)
    losses = [step["loss"] for step in steps(whole)]
    assert len(losses) == 8 and losses[-1] < losses[0]
    for name in ("same", "other"):
        train(name, *TWO_BY_TWO, "--fault", "rank=1,step=5,phase=forward,act=kill", code=9)
    assert_same_runs(train("same", *TWO_BY_TWO), whole, 0.0)
    other = train("other", "layout.world_size=1", "layout.devices=2", "layout.strategy=ddp")
    assert_same_runs(other, whole, 1e-12)
    assert any(
        np.any(saved_arrays(other)[name] != value) for name, value in saved_arrays(whole).items()
    )  # it was another layout
