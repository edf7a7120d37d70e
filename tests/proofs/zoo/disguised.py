"""Faults that look like others, whose names would be wrong: each must get its own name, or a neutral one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.proofs.zoo.faults import FAULTS, TASKS, Fault, fault, nothing, wrapping
from tests.tasks import TransformerTask
from unisono.engines import rules
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.numerics import gradients
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.parallel.parallel import Parallel
from unisono.engines.torch.passes import Passes
from unisono.optim import schedules
from unisono.task import Loss


class Remembering(TransformerTask):
    """Scales its loss by how often it was called, which a process of many is less often."""

    calls = 0

    def loss(self, outputs: Any, batch: Any, context: Any) -> Loss:
        self.calls += 1
        done = super().loss(outputs, batch, context)
        return replace(done, sums={name: value * (1 + 0.01 * self.calls) for name, value in done.sums.items()})


class Drawing(TransformerTask):
    """Draws in its loss from NumPy's global generator, which nobody seeds by row."""

    def loss(self, outputs: Any, batch: Any, context: Any) -> Loss:
        done = super().loss(outputs, batch, context)
        return replace(done, sums={name: value * np.random.uniform(0.9, 1.1) for name, value in done.sums.items()})


TASKS["remembering"], TASKS["drawing"] = Remembering, Drawing
FAULTS["state in the loss"] = Fault(nothing, "The loss depends on the call", task="remembering", twin="transformer")
FAULTS["unseeded draws in the loss"] = Fault(
    nothing, "The loss depends on the call", task="drawing", twin="transformer"
)


@fault("a term on the first rank only", "The loss depends on the process")
def term_of_first_rank() -> Iterator[None]:
    def loss(original: Any, self: TransformerTask, *arguments: Any) -> Any:
        done = original(self, *arguments)
        return replace(done, sums={**done.sums, "length": done.sums["length"] * float(dist.get_rank() == 0)})

    with wrapping(TransformerTask, "loss", loss):
        yield


@fault("one term × N", "The loss depends on the layout")
def one_term_times_n() -> Iterator[None]:
    def loss(original: Any, self: TransformerTask, *arguments: Any) -> Any:
        done = original(self, *arguments)
        return replace(done, sums={**done.sums, "length": done.sums["length"] * dist.get_world_size()})

    with wrapping(TransformerTask, "loss", loss):
        yield


@fault("counts per process, loss logged right", "A mean of means")
def logged_right() -> Iterator[None]:
    own: dict[str, float] = {}

    def counts(original: Any, self: MetricReduction, batches: Any) -> Any:
        own.update(rules.sum_counts(batches))
        return original(self, batches)

    def scales(original: Any, counts: Any, factor: float, where: Any) -> Any:
        return {name: 1 / torch.tensor(own[name]) for name in counts}  # DDP then takes the mean of them

    with wrapping(MetricReduction, "counts", counts), wrapping(rules, "loss_scales", scales):
        yield


@fault("rows of one rank count for more", "The gradients depend on the layout")
def heavier_rank() -> Iterator[None]:
    def forward(original: Any, self: Passes, *arguments: Any) -> Any:
        total, loss = original(self, *arguments)
        return total * (1.0 + 0.5 * dist.get_rank()), loss

    with wrapping(Passes, "forward", forward):
        yield


@fault("noise in the third digit of gradients", "The gradients depend on the layout")
def noisy() -> Iterator[None]:
    def reduced(original: Any, self: Parallel, where: str) -> None:
        original(self, where)
        generator = torch.Generator().manual_seed(1)  # the same on all ranks
        for part in self.gradients():
            part.mul_(1 + 2e-3 * torch.randn(part.shape, generator=generator, dtype=part.dtype))

    with wrapping(Parallel, "check_reduced", reduced):
        yield


@fault("gradients × 1.1", "The gradients depend on the layout")
def scaled_by_another_number() -> Iterator[None]:
    def forward(original: Any, self: Passes, *arguments: Any) -> Any:
        total, loss = original(self, *arguments)
        return total * 1.1, loss

    with wrapping(Passes, "forward", forward):
        yield


@fault("norm without the matrices", "The norm depends on the layout")
def norm_of_vectors() -> Iterator[None]:
    def squares(original: Any, parts: Any, wide: Any) -> Any:
        return original([part for part in parts if part.ndim < 2], wide)

    with wrapping(gradients, "squared_norm", squares):
        yield


@fault("clipped by value as well", "The clipping depends on the layout")
def clipped_by_value() -> Iterator[None]:
    def clip(original: Any, parts: Any, *arguments: Any) -> None:
        original(parts, *arguments)
        for part in parts:
            part.clamp_(-1e-3, 1e-3)

    with wrapping(gradients, "clip_gradients", clip):
        yield


@fault("rate scaled by the number of processes", "The learning rate depends on the world size")
def scaled_rate() -> Iterator[None]:
    def scalars(original: Any, self: Any, step: int) -> Any:
        values = original(self, step)
        return {**values, "lr": values["lr"] * dist.get_world_size()}

    with wrapping(schedules.ScheduledScalars, "__call__", scalars):
        yield


@fault("the logged loss is smoothed", "The reported loss depends on the layout")
def smoothed() -> Iterator[None]:
    def reduce(original: Any, self: MetricReduction, *arguments: Any) -> Any:
        result, *more = original(self, *arguments)
        terms = {name: 0.9 * value for name, value in result.terms.items()}
        return replace(result, loss=0.9 * result.loss, terms=terms), *more

    with wrapping(MetricReduction, "reduce", reduce):
        yield


@fault("a metric over twice its count", "A metric depends on the layout")
def metric_over_another_count() -> Iterator[None]:
    def reduce(original: Any, self: MetricReduction, *arguments: Any) -> Any:
        result, *more = original(self, *arguments)
        return replace(result, metrics={name: value / 2 for name, value in result.metrics.items()}), *more

    with wrapping(MetricReduction, "reduce", reduce):
        yield


@fault("an evaluation that is off everywhere", "The evaluation depends on the layout")
def evaluation_off() -> Iterator[None]:
    def evaluate(original: Any, self: TorchEngine, *arguments: Any) -> Any:
        result = original(self, *arguments)
        return replace(result, loss=1.01 * result.loss, terms={n: 1.01 * v for n, v in result.terms.items()})

    with wrapping(TorchEngine, "evaluate", evaluate):
        yield
