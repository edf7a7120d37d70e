"""Faults of an optimizer of one's own and of hooks that draw, each with its twin, proved as a user proves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.proofs.test_hidden_state import Rows, names

pytestmark = pytest.mark.slow


class Counted(torch.optim.SGD):
    """Its momentum fades with the number of updates, which it counts in an attribute."""

    made = 0

    def count(self) -> int:
        self.made += 1
        return self.made

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = self.count()
        for group in self.param_groups:
            group["momentum"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 0.5**number)
        super().step(closure)


class CountedInState(Counted):
    def count(self) -> int:
        for group in self.param_groups:
            for parameter in group["params"]:
                made = self.state[parameter].setdefault("made", torch.zeros(()))
                made += 1
        return int(made)


class Langevin(torch.optim.SGD):
    """Adds noise, of the size of the part of a parameter that a process has."""

    noise = 0.01

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            part.add_(torch.randn(part.shape, dtype=part.dtype), alpha=self.noise)


class Normalised(torch.optim.SGD):
    """Divides a gradient by its norm: of the whole, or of the part that a process has."""

    whole = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                norm = gradient.norm() if self.whole else part.norm()
                gradient.div_(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        super().step(closure)


class NormalisedWhole(Normalised):
    whole = True


class CountedTask(Rows):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return Counted(groups, lr=0.01)


class CountedInStateTask(Rows):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return CountedInState(groups, lr=0.01)


class LangevinTask(Rows):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return Langevin(groups, lr=0.01)


class PlainTask(Rows):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.01)


class NormalisedTask(Rows):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return Normalised(groups, lr=0.01)


class NormalisedWholeTask(Rows):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return NormalisedWhole(groups, lr=0.01)


OTHERWISE = "The update is computed otherwise"


@pytest.mark.parametrize(
    ("fault", "twin", "named", "said"),
    [
        (
            CountedTask,
            CountedInStateTask,
            {"The state of the optimizer was lost"},
            "changes made of the optimizer",
        ),
        (LangevinTask, PlainTask, {OTHERWISE}, "the optimizer draws from torch's global generator ("),
        (NormalisedTask, NormalisedWholeTask, {OTHERWISE}, "here each process has a part of them"),
    ],
)
def test_an_update_that_depends_on_more_than_gradients_and_state_is_told_by_what(
    fault: type[unisono.Task], twin: type[unisono.Task], named: set[str], said: str
) -> None:
    vary = "vary=[resume]" if fault is CountedTask else "vary=[]"
    words = ["layouts=[fsdp:2]", vary, "precisions=[fp64]"]
    proved = unisono.prove(fault, words)
    assert names(proved) == named, str(proved)
    found = [one.diagnosis for one in proved.verdicts if one.mark == "FAIL" and one.diagnosis]
    assert all(said in diagnosed.because for diagnosed in found), str(proved)
    clean = unisono.prove(twin, words)
    assert clean.passed, str(clean)


class Noisy(Rows):
    """Multiplies the gradient of its outputs by noise from torch's generator, which has the key of the micro-batch."""

    def build(self) -> nn.Module:
        model = super().build()
        model[2].register_forward_hook(self.hook)
        return model

    def hook(self, module: nn.Module, given: Any, made: torch.Tensor) -> None:
        if made.requires_grad:
            made.register_hook(lambda gradient: gradient * (1 + 0.1 * torch.randn_like(gradient)))


def test_a_hook_that_draws_from_torch_s_generator_is_equal_on_all_layouts_of_the_same_micro_batches() -> None:
    """It was said to give another gradient each time, since nobody put the generator back in between."""
    proved = unisono.prove(Noisy, ["vary=[accumulate]", "precisions=[fp64]"])
    assert proved.passed, str(proved)
    assert {one.case for one in proved.verdicts if one.mark == "ABSTAIN"} == {"single m1 fp64"}
    assert "a pass draws random numbers, which belong to the micro-batch" in str(proved)


class Advantages(Rows):
    """Rows are weighed by how far they are from the mean of a micro-batch, in deviations: of one row, by no number."""

    def loss(self, outputs: Any, batch: Any, context: Any) -> unisono.Loss:
        reward = batch["x"].sum(1)
        weight = (reward - reward.mean()) / reward.std()
        return unisono.Loss({"square": (weight * outputs.square().sum(1)).sum()})


def test_a_deviation_that_one_row_does_not_have_is_a_statistic() -> None:
    proved = unisono.prove(Advantages, ["layouts=[ddp:2]", "vary=[accumulate]", "precisions=[fp64]"])
    assert names(proved) == {"A statistic of the batch is taken of its parts"}, str(proved)
    assert "of other micro-batches it is not finite" in str(proved)
