"""Runs of which a proof can say nothing, or less, and why; on real processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packages.unisono.tests import processes
from packages.unisono.tests.runs import ADAMW, configuration
from packages.unisono.tests.tasks import LinearTask
from unisono.callback import Callback
from unisono.proof import judgement
from unisono.proof.cases import EPSILON, Case, ProofSettings
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.proof.verdict import Verdict
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import KernelError
from unisono.task import Batch, Context

PROOF = ProofSettings(global_batch=8, layouts=["ddp:2"])


class Net(nn.Module):
    """Two layers, and something between them that a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def between(self, x: Tensor) -> Tensor:
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class LowerInside(Net):
    def between(self, x: Tensor) -> Tensor:
        class Rounded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return torch.from_numpy(y.detach().numpy().astype(np.float32)).sigmoid().new_tensor(
                    0
                ) + torch.from_numpy(y.detach().numpy().astype(np.float32)).exp().mul(0.5)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient

        return Rounded.apply(x).to(x) + x


class OwnDraws(Net):
    def between(self, x: Tensor) -> Tensor:
        return x * float(np.random.default_rng().uniform(0.5, 1.5))


class OnePerRow(Net):
    """A capacity: of each micro-batch only the row with the largest score is computed."""

    def between(self, x: Tensor) -> Tensor:
        return x * (x.sum(1, keepdim=True) >= x.sum(1).max())


class NoDouble(Net):
    def between(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("\"fancy_kernel\" not implemented for 'Double'")
        return x.tanh()


class NoKernel(LinearTask):
    """A task whose kernel there is not in fp64."""

    def kernels(self, device: str, precision: str) -> dict[str, str]:
        if precision == "fp64":
            raise KernelError("model.kernel=fast cannot be used: it has no fp64")
        return {"kernel": "fast"}


class Adapting(Callback):
    """What a callback changes no proof sees."""


class Chosen(NoKernel):
    def callbacks(self) -> Sequence[Callback]:
        return [Adapting()]

    def kernels(self, device: str, precision: str) -> dict[str, str]:
        return {"kernel": f"slow (fast has no {precision})"}


class ChangingRows(list):  # type: ignore[type-arg]
    """Rows that are other rows each time they are read."""

    def __getitem__(self, row: Any) -> Any:
        found = super().__getitem__(row)
        return {**found, "x": found["x"] + np.random.default_rng().normal(size=3).astype(np.float32)}


def task(net: type[nn.Module], changing: bool = False) -> LinearTask:
    class Own(LinearTask):
        def build(self) -> nn.Module:
            return net()

        def data(self) -> Any:
            return ChangingRows(super().data()) if changing else super().data()

        def outputs(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
            result: Tensor = model(batch["x"])
            return result

    return Own()


TASKS: dict[str, LinearTask] = {
    "plain": task(Net), "lower inside": task(LowerInside), "own draws": task(OwnDraws), "capacity": task(OnePerRow),
    "no double": task(NoDouble), "changing rows": task(Net, changing=True),
    "no kernel": NoKernel(), "chosen": Chosen(),
}  # fmt: skip


def cases_of(name: str) -> list[Case]:
    alone = Case(f"{name} single m2", 1, {"micro_batch": 2}, "fp64")
    layout = {"strategy": "ddp", "micro_batch": 2}
    other = Case(f"{name} single m1", 1, {"micro_batch": 1}, "fp64", alone.name, other_micro_batch=True)
    return [
        alone, Case(f"{name} single m2 perturbed", 1, alone.layout, "fp64", perturbed=EPSILON["fp64"]), other,
        Case(f"{name} ddp m2", 2, layout, "fp64", alone.name),
        Case(f"{name} ddp m2 attention", 2, layout, "fp64", alone.name, attention="MATH"),
        Case(f"{name} ddp m2 reversed", 2, layout, "fp64", alone.name, reversed=True),
        Case(f"{name} ddp m2 twice", 2, layout, "fp64", f"{name} ddp m2", bitwise=True, interrupted=(1, 2)),
    ]  # fmt: skip


def run(place: ProcessInfo, group: Communicator, root: Path) -> None:
    for name, made in TASKS.items():
        for case in cases_of(name):
            if case.world_size == place.world_size and not (name == "no double" and place.world_size > 1):
                config = configuration(
                    layout={"world_size": place.world_size, "strategy": "single", **case.layout},
                    train={"global_batch": 8, "steps": 3, "precision": "fp64", "guard_every": 10**9},
                    optim=ADAMW,
                )
                case_recorder.record_case(made, config, place, group, case, PROOF, root)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record")
    processes.alone(run, path)
    processes.run(run, 2, path)
    return path


def verdicts(root: Path, name: str) -> dict[str, Verdict]:
    every = cases_of(name)
    traces = {
        c.name: Trace(trace_folder(root, c.name))
        for c in every
        if (trace_folder(root, c.name) / "facts.json").is_file()
    }
    found, alone = judgement.judge_cases(every, traces, adaptive=True)
    return {v.case.removeprefix(f"{name} "): v for v in (*alone, *found)}


def why(verdict: Verdict) -> str:
    return " ".join(c.why for c in verdict.compared if c.mark == "ABSTAIN" and c.why != "there is none")


def size(verdict: Verdict, quantity: str) -> float:
    return next(c.worst.size for c in verdict.compared if c.quantity == quantity)


def test_a_plain_model_passes_everything_that_can_be_compared(root: Path) -> None:
    found = verdicts(root, "plain")
    assert {name: v.mark for name, v in found.items()} == {
        "single m2": "ABSTAIN", "single m1": "PASS", "ddp m2": "PASS", "ddp m2 attention": "ABSTAIN",
        "ddp m2 reversed": "PASS", "ddp m2 twice": "PASS",
    }  # fmt: skip
    passed = {c.quantity for c in found["ddp m2"].compared if c.mark == "PASS"}
    assert {"outputs", "update", "optimizer state", "parameters"} <= passed
    assert "none of torch's fused attention kernels" in why(found["ddp m2 attention"])
    assert found["single m2"].notes == []


def test_callbacks_are_named_since_no_proof_calls_them(root: Path) -> None:
    (left,) = [one for one in verdicts(root, "chosen")["single m2"].invariants if "callbacks" in one.quantity]
    assert (left.mark, "does not call Adapting" in left.why) == ("ABSTAIN", True)


def test_ranks_have_their_rows_the_other_way_round(root: Path) -> None:
    plain, turned = (Trace(trace_folder(root, f"plain ddp m2{more}")).facts.steps[0] for more in ("", " reversed"))
    assert turned.by_rank == plain.by_rank[::-1] != plain.by_rank
    assert turned.rows == plain.rows


def test_what_computes_in_lower_precision_is_named_and_its_floor_measured(root: Path) -> None:
    found = verdicts(root, "lower inside")
    assert any("the model: float32" in note for note in found["single m2"].notes), found["single m2"].notes
    assert found["ddp m2"].mark == "PASS"
    allowed = next(c.allowed for c in found["ddp m2"].compared if c.quantity == "raw gradients")
    assert 1e-9 < allowed < 1e-4
    plain = next(c.allowed for c in verdicts(root, "plain")["ddp m2"].compared if c.quantity == "raw gradients")
    assert plain == 1e-12


def test_draws_that_no_key_decides_leave_nothing_to_say(root: Path) -> None:
    found = verdicts(root, "own draws")
    _assert_one_process_fails(found, "The forward pass depends on the call")
    assert "a second forward pass with the same weights, rows and seeds gave another output" in why(found["ddp m2"])


def test_data_that_cannot_be_read_again_leave_nothing_to_say(root: Path) -> None:
    found = verdicts(root, "changing rows")
    _assert_one_process_fails(found, "The samples depend on the call")
    assert "the first rows came out otherwise when they were read again" in why(found["ddp m2"])


def _assert_one_process_fails(found: dict[str, Verdict], name: str) -> None:
    """By itself, with this name; and all others have nothing to be compared with."""
    alone = [v for v in found.values() if not v.reference]
    assert [v.diagnosis.fault for v in alone if v.diagnosis] == [name] * len(alone)
    assert {v.mark for v in found.values() if v.reference} == {"ABSTAIN"}


def test_rows_that_depend_on_each_other_forbid_other_micro_batches_only(root: Path) -> None:
    found = verdicts(root, "capacity")
    assert found["ddp m2"].mark == "PASS"
    assert found["single m1"].mark == "ABSTAIN"
    assert "experts with a capacity" in why(found["single m1"])


def test_without_a_kernel_for_double_nothing_is_said_of_fp64(root: Path) -> None:
    found = verdicts(root, "no double")
    assert {v.mark for v in found.values()} == {"ABSTAIN"}
    assert "no fp64 kernel" in why(found["single m2"])


def test_where_a_kernel_that_was_asked_for_is_not_there_nothing_is_said(root: Path) -> None:
    found = verdicts(root, "no kernel")
    assert {v.mark for v in found.values()} == {"ABSTAIN"}
    assert all("model.kernel=fast cannot be used: it has no fp64" in why(v) for v in found.values())


def test_the_kernels_that_were_chosen_are_told(root: Path) -> None:
    found = verdicts(root, "chosen")
    assert found["ddp m2"].mark == "PASS"
    assert found["single m2"].notes == ["kernels: kernel slow (fast has no fp64)"]


def test_the_table_of_differences_is_not_that_of_equal_bits(root: Path) -> None:
    """Two processes add in another order: without any difference the comparison could be of a run with itself."""
    assert max(size(verdicts(root, name)["ddp m2 reversed"], "optimizer state") for name in ("plain", "capacity")) > 0
