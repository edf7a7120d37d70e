"""Mistakes that self-supervised objectives invite, made on purpose: a proof fails and calls each by its name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import SGD, configuration
from recipes.birdsong.tests import small
from unisono import Context, Loss
from unisono.proof import judgement
from unisono.proof.cases import Case, ProofSettings
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.proof.verdict import Verdict
from unisono_birdsong import task as birdsong
from unisono_birdsong.objectives import Seen
from unisono_birdsong.objectives.lejepa import Lejepa, sigreg

pytestmark = pytest.mark.slow
PROOF = ProofSettings(global_batch=8, layouts=["ddp:2"])
ONE = Case("one micro-batch", 1, {"micro_batch": 8}, "fp64")
PASSES = Case("four passes", 1, {"micro_batch": 2}, "fp64", ONE.name, other_micro_batch=True)
DEVICES = Case("two devices", 1, {"micro_batch": 4, "devices": 2, "strategy": "ddp"}, "fp64", ONE.name)
DEVICES = replace(DEVICES, other_micro_batch=True)


class OfMicroBatches(birdsong.Birdsong):
    """SIGReg of the rows of each micro-batch."""

    cross_sample = None

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        loss = super().loss(outputs, batch, replace(context, key=jax.random.key(0)))
        rows = len(context.valid)  # a number of each row, or the engine sees that rows count which only pad
        return replace(loss, sums={**loss.sums, "sigreg": jnp.full(rows, loss.sums["sigreg"] / rows)})


def of_devices(projected: jax.Array, *rest: Any) -> jax.Array:
    """The mean of what each of two devices finds in its own rows."""
    return jnp.stack([sigreg(own, *rest) for own in jnp.split(projected, 2)]).mean()


def mixed(self: Lejepa, encoder: Any, batch: Mapping[str, Any]) -> Seen:
    """Views and samples flattened to one axis, which is taken apart in the other order."""
    rows, views = batch["views"].shape[:2]
    flat = jax.vmap(encoder.embedding)(batch["views"].reshape(rows * views, *batch["views"].shape[2:]))
    embeddings = flat.reshape(views, rows, -1).swapaxes(0, 1)
    return Seen({"projected": jax.vmap(jax.vmap(self.projector))(embeddings)}, embeddings)


def verdicts(
    folder: Path, case: Case, made: AbstractContextManager[Any], kind: type[birdsong.Birdsong], reference: bool = True
) -> tuple[Verdict, list[Verdict]]:
    """What a proof says of a case, and of the run on one process that it is held against.

    Args:
        folder: for traces.
        case: to compare.
        made: the context in which it has its fault.
        kind: of the task.
        reference: whether the reference has the fault, too.
    """
    task = small.task("lejepa", data={"held_out": 0})
    for one in (ONE, case):
        config = configuration(
            layout={"engine": "jax", "world_size": 1, "strategy": "single", **one.layout},
            train={"global_batch": 8, "steps": 3, "precision": "fp64"}, optim=SGD,
        )  # fmt: skip

        def run(place: Any, group: Any, one: Case = one, config: Any = config) -> None:
            mine = kind(task.config, model=task.model_config, data=task.data_config)
            case_recorder.record_case(mine, config, place, group, one, PROOF, folder)

        with made if reference or one is case else nullcontext():
            processes.alone(run)
    traces = {one.name: Trace(trace_folder(folder, one.name)) for one in (ONE, case)}
    found, alone = judgement.judge_cases([ONE, case], traces, adaptive=False)
    return found[0], alone


@pytest.mark.parametrize("case", [PASSES, DEVICES], ids=lambda case: case.name)
def test_the_right_objective_passes(tmp_path: Path, case: Case) -> None:
    verdict, alone = verdicts(tmp_path, case, nullcontext(), birdsong.Birdsong)
    assert verdict.mark == "PASS", (verdict.fault, verdict.first)
    assert alone[0].mark != "FAIL", alone[0].first  # by itself, a run is not compared with anything
    assert {c.quantity for c in verdict.compared if c.mark == "PASS"} >= {"loss", "raw gradients", "parameters"}


@pytest.mark.parametrize("case", [PASSES, DEVICES], ids=lambda case: case.name)
def test_sigreg_of_micro_batches_is_named(tmp_path: Path, case: Case) -> None:
    verdict, _ = verdicts(tmp_path, case, nullcontext(), OfMicroBatches)
    assert verdict.mark == "FAIL" and verdict.diagnosis is not None, [c.why for c in verdict.compared]
    assert verdict.diagnosis.fault == "A statistic of the batch is taken of its parts"
    assert "'sigreg'" in verdict.diagnosis.because and "invariance" not in verdict.diagnosis.because


def test_sigreg_of_devices_is_named(tmp_path: Path) -> None:
    fault = mock.patch.object(birdsong, "sigreg", of_devices)
    verdict, _ = verdicts(tmp_path, DEVICES, fault, birdsong.Birdsong, reference=False)
    assert verdict.mark == "FAIL" and verdict.diagnosis is not None, [c.why for c in verdict.compared]
    assert verdict.diagnosis.fault == "The loss across samples depends on the layout"
    assert "'sigreg'" in verdict.diagnosis.because


def test_views_and_samples_mixed_by_a_reshape_are_named(tmp_path: Path) -> None:
    """The run on one process says so by itself: no other layout is needed to see it."""
    fault = mock.patch.object(Lejepa, "__call__", mixed)
    _, alone = verdicts(tmp_path, PASSES, fault, birdsong.Birdsong)
    assert alone[0].mark == "FAIL" and alone[0].diagnosis is not None
    assert alone[0].diagnosis.fault == "Rows of a micro-batch are mixed"
