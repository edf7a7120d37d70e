"""Rows that are shared out among several devices of one process make the sums of all rows.

There are no two accelerators here. What torch does with them, copying the model and running it in threads, is left out:
the same module stands on "three devices" that are all the CPU. The rest is what a run on accelerators does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packages.unisono.tests import processes
from packages.unisono.tests.runs import assert_same, configuration, distance, trace
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.engines.torch.parallel import data_parallel, wrap
from unisono.engines.torch.parallel.data_parallel import DataParallel, split_batch, sum_losses
from unisono.proof import judgement
from unisono.proof.cases import Case
from unisono.proof.recording.trace import RunFacts
from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, Loss

CPU = torch.device("cpu")


class OnOneDevice(DataParallel):
    """Without copies and threads."""

    rows: ClassVar[list[list[int]]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.device_ids, self.output_device, self.src_device_obj = [0, 1, 2], 0, CPU

    def _place(self, number: Any) -> torch.device:
        return CPU

    def replicate(self, module: Any, device_ids: Any) -> Any:
        return [module] * len(device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.rows.append([len(next(iter(batch.values()))) for batch, *_ in inputs])
        return [replica(*each) for replica, each in zip(replicas, inputs, strict=True)]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A host with three devices; returns the rows of each, pass by pass."""
    monkeypatch.setattr(data_parallel, "device_indices", lambda device: [0, 1, 2])
    monkeypatch.setattr(data_parallel, "DataParallel", OnOneDevice)
    monkeypatch.setattr(OnOneDevice, "rows", [])
    return OnOneDevice.rows


def run(strategy: str, task: Any = None) -> Any:
    config = configuration(
        layout={"strategy": strategy, "micro_batch": 4},
        train={"epochs": 1, "global_batch": 12, "precision": "fp64", "clip_norm": 0.5},
    )
    return processes.alone(trace, task or TransformerTask(), config)


def test_several_devices_make_the_sums_of_one(three: list[list[int]]) -> None:
    mine = run("dp")
    assert [2, 1, 1] in three, "rows do not go round"
    assert [1, 1, 1] in three, "and the last batch is short"
    reference = run("single")
    assert reference.evaluation["accuracy"] >= 0
    assert_same(mine, reference)


def test_means_of_devices_would_be_seen(three: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def averaged(made: Any, first: torch.device) -> tuple[Tensor, Loss]:
        total, loss = sum_losses(made, first)
        return total / len(made), loss

    monkeypatch.setattr(data_parallel, "sum_losses", averaged)
    with pytest.raises(AssertionError):
        assert_same(run("dp"), run("single"))


class Balanced(TransformerTask):
    """A loss that needs a sum over the whole global batch."""

    def totals(self, outputs: Tensor, batch: Batch, context: Context) -> dict[str, Tensor]:
        return {"mean": outputs.mean(dim=(1, 2)).sum(), "rows": torch.tensor(float(len(outputs)))}

    def loss(self, outputs: Tensor, batch: Batch, context: Context) -> Loss:
        made = super().loss(outputs, batch, context)
        totals = context.totals
        share = (outputs.mean(dim=(1, 2)) * (totals["mean"] / totals["rows"])).sum() if context.training else 0.0
        return replace(made, sums={**made.sums, "length": made.sums["length"] + share})


def test_sums_that_a_loss_needs_first_are_those_of_all_devices(three: list[list[int]]) -> None:
    reference = run("single", Balanced())
    assert max(distance(reference.gradients, run("single").gradients).values()) > 1e-6
    assert_same(run("dp", Balanced()), reference)


class Carrying(LinearTask):
    """Each row keeps what it came to in the step before."""

    def initial_carry(self, batch: Batch) -> dict[str, Tensor]:
        return {"before": torch.zeros(len(batch["x"]), 1, dtype=batch["x"].dtype)}

    def loss(self, outputs: Tensor, batch: Batch, context: Context) -> Loss:
        assert context.carry is not None
        made = super().loss(outputs + 0.5 * context.carry["before"], batch, context)
        return replace(made, carry={"before": outputs.detach()})


def test_state_of_rows_follows_them_to_their_device(three: list[list[int]]) -> None:
    reference = run("single", Carrying())
    assert reference.losses[1:] != run("single", LinearTask()).losses[1:]
    assert_same(run("dp", Carrying()), reference)


def test_outputs_of_a_loss_across_samples_come_together_in_the_order_of_rows(three: list[list[int]]) -> None:
    class Outputs(nn.Module):
        def forward(self, batch: Any, context: Any, scales: Any) -> Any:
            return {"a": batch["x"] * 2, "b": {"c": batch["x"].sum(1)}}

    wrapped = OnOneDevice(Outputs(), True, "fp32", CPU, [0, 1, 2])
    x = torch.randn(7, 3)
    made = wrapped({"x": x}, Context(0, training=True), None)
    assert torch.equal(made["a"], x * 2)
    assert torch.equal(made["b"]["c"], x.sum(1))
    assert three == [[3, 2, 2]]


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"x": torch.zeros(4, 2), "y": torch.zeros(5)}, "must be the row; here it has {'x': 4, 'y': 5}"),
        ({"x": torch.zeros(())}, "must be the row; here it has {'x': None}"),
        ({"x": torch.zeros(4), "names": ["a", "b"]}, "cannot split 'names', a list"),
    ],
)
def test_what_cannot_be_cut_by_row_is_refused(batch: Batch, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_batch(batch, Context(0, training=True), None, [CPU, CPU])
    assert told in str(caught.value)


def test_terms_that_depend_on_the_rows_are_refused() -> None:
    parts = [(torch.zeros(()), Loss({"a": torch.zeros(())})), (torch.zeros(()), Loss({"b": torch.zeros(())}))]
    with pytest.raises(ConfigError, match="devices report different terms"):
        sum_losses(parts, CPU)
    weighted = [(torch.zeros(()), Loss({"a": torch.zeros(())}, weights={"a": weight})) for weight in (0.0, -0.0)]
    assert sum_losses(weighted, CPU)[1].weights == {"a": 0.0}  # equal, however they are printed


def test_with_one_device_the_step_is_not_wrapped() -> None:
    config = configuration(layout={"strategy": "dp"})
    step = wrap.StepModule(LinearTask(), LinearTask().build())
    assert wrap.wrap(step, config.layout, "fp32", CPU, 1, 60.0) is step
    assert data_parallel.device_indices(CPU) == []


# proofs ---------------------------------------------------------------------------------------------------------------

CASE = Case("dp m4 fp64", 1, {"strategy": "dp", "micro_batch": 4}, "fp64", "single m4 fp64")


class Recorded:
    def __init__(self, **facts: Any) -> None:
        self.facts = RunFacts(**facts)


@pytest.mark.parametrize(
    ("mine", "reference", "why"),
    [
        ({}, {}, "fewer than two accelerators"),
        ({"devices": 2, "random": True}, {"random": True}, "every device draws for its own rows"),
        ({"devices": 2}, {"neighbours": True}, "only those on the same device count"),
        ({"devices": 2}, {}, ""),
    ],
)
def test_a_proof_says_what_of_several_devices_it_cannot_compare(mine: Any, reference: Any, why: str) -> None:
    one: Any = Recorded(**reference)
    two: Any = Recorded(**mine)
    told = judgement.reason_to_abstain(CASE, two, one, one)
    assert (why in told) if why else told == ""


def test_a_batch_of_fewer_rows_than_devices_goes_to_some() -> None:
    parts = split_batch({"x": np.zeros(0), "y": torch.arange(2)}, Context(0, training=True), None, [CPU] * 5)
    assert [part[0]["y"].tolist() for part in parts] == [[0], [1]]
