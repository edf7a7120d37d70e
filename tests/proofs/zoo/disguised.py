"""Faults that look like others, whose names would be wrong: each must get its own name, or a neutral one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from packages.unisono.tests.tasks import Transformer, TransformerTask
from tests.proofs.zoo import faults, state_faults  # noqa: F401 - theirs come first in the table
from tests.proofs.zoo.making import FAULTS, TASKS, Fault, fault, nothing, wrapping
from unisono.data.loading import batch_builder
from unisono.engines import rules
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.numerics import gradients
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.parallel.parallel import Parallel
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state.train_state import TrainState
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


@fault("a term on the first rank only", "The loss depends on the process", TransformerTask, "loss")
def term_of_first_rank(original: Any, self: TransformerTask, *arguments: Any) -> Any:
    done = original(self, *arguments)
    return replace(done, sums={**done.sums, "length": done.sums["length"] * float(dist.get_rank() == 0)})


@fault("one term × N", "The loss is scaled by N", TransformerTask, "loss")
def one_term_times_n(original: Any, self: TransformerTask, *arguments: Any) -> Any:
    done = original(self, *arguments)
    return replace(done, sums={**done.sums, "length": done.sums["length"] * dist.get_world_size()})


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


@fault("rows of one rank count for more", "The gradients depend on the layout", Passes, "forward")
def heavier_rank(original: Any, self: Passes, *arguments: Any) -> Any:
    total, loss = original(self, *arguments)
    return total * (1.0 + 0.5 * dist.get_rank()), loss


@fault("noise in the third digit of gradients", "The gradients depend on the layout", Parallel, "check_reduced")
def noisy(original: Any, self: Parallel, where: str) -> None:
    original(self, where)
    generator = torch.Generator().manual_seed(1)  # the same on all ranks
    for part in self.gradients():
        part.mul_(1 + 2e-3 * torch.randn(part.shape, generator=generator, dtype=part.dtype))


@fault("gradients × 1.1", "The gradients depend on the layout", Passes, "forward")
def scaled_by_another_number(original: Any, self: Passes, *arguments: Any) -> Any:
    total, loss = original(self, *arguments)
    return total * 1.1, loss


@fault("norm without the matrices", "The norm depends on the layout", gradients, "squared_norm")
def norm_of_vectors(original: Any, parts: Any, wide: Any) -> Any:
    return original([part for part in parts if part.ndim < 2], wide)


@fault("clipped by value as well", "The clipping depends on the layout", gradients, "clip_gradients")
def clipped_by_value(original: Any, parts: Any, *arguments: Any) -> None:
    original(parts, *arguments)
    for part in parts:
        part.clamp_(-1e-3, 1e-3)


@fault(
    "rate scaled by the number of processes",
    "The learning rate depends on the world size",
    schedules.ScheduledScalars,
    "__call__",
)
def scaled_rate(original: Any, self: Any, step: int) -> Any:
    values = original(self, step)
    return {**values, "lr": values["lr"] * dist.get_world_size()}


@fault("the logged loss is smoothed", "The reported loss depends on the layout", MetricReduction, "reduce")
def smoothed(original: Any, self: MetricReduction, *arguments: Any) -> Any:
    result, *more = original(self, *arguments)
    terms = {name: 0.9 * value for name, value in result.terms.items()}
    return replace(result, loss=0.9 * result.loss, terms=terms), *more


@fault("a metric over twice its count", "A metric depends on the layout", MetricReduction, "reduce")
def metric_over_another_count(original: Any, self: MetricReduction, *arguments: Any) -> Any:
    result, *more = original(self, *arguments)
    return replace(result, metrics={name: value / 2 for name, value in result.metrics.items()}), *more


@fault("an evaluation that is off everywhere", "The evaluation depends on the layout", TorchEngine, "evaluate")
def evaluation_off(original: Any, self: TorchEngine, *arguments: Any) -> Any:
    result = original(self, *arguments)
    return replace(result, loss=1.01 * result.loss, terms={n: 1.01 * v for n, v in result.terms.items()})


# in the task itself, and seen only with other micro-batches, or by a new task


class Averaging(TransformerTask):
    """Takes a moving average of its own loss away, which it keeps in an attribute."""

    average = 0.0

    def loss(self, outputs: Any, batch: Any, context: Any) -> Loss:
        done = super().loss(outputs, batch, context)
        self.average = 0.9 * self.average + 0.1 * float(done.sums["next"].detach())
        return replace(done, sums={**done.sums, "next": done.sums["next"] - 0.1 * self.average})


class Trimmed(TransformerTask):
    """Pads to the longest row of a micro-batch; a mean over positions then takes padding for words."""

    def collate(self, samples: Any) -> dict[str, Any]:
        batch = super().collate(samples)
        return {**batch, "tokens": batch["tokens"][:, : int(batch["lengths"].max())]}


class Centred(TransformerTask):
    """Takes the mean of the micro-batch away from the lengths."""

    def collate(self, samples: Any) -> dict[str, Any]:
        batch = super().collate(samples)
        return {**batch, "lengths": batch["lengths"] - batch["lengths"].mean()}


class MixedUp(TransformerTask):
    """Mixes the lengths of neighbours."""

    def collate(self, samples: Any) -> dict[str, Any]:
        batch = super().collate(samples)
        return {**batch, "lengths": 0.7 * batch["lengths"] + 0.3 * np.roll(batch["lengths"], 1)}


class Ramped(TransformerTask):
    """Raises the weight of a term with every update, by an attribute that is in no checkpoint."""

    weight, seen = 1.0, -1

    def loss(self, outputs: Any, batch: Any, context: Any) -> Loss:
        if context.training and context.step > self.seen:
            self.weight, self.seen = self.weight + 0.1, context.step
        done = super().loss(outputs, batch, context)
        return replace(done, sums={**done.sums, "length": done.sums["length"] * self.weight})


class Masked(TransformerTask):
    """Keeps the mask of its first micro-batch for all others, which have the same shape."""

    def build(self) -> nn.Module:
        return _Masked(self.config.dropout)


class _Masked(Transformer):
    mask: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.shape[:2] != tokens.shape:
            self.mask = (tokens > 0).unsqueeze(-1)
        return super().forward(tokens) * self.mask


class MaskedAnew(TransformerTask):
    """Keeps the mask as well, and makes it anew in every pass."""

    def build(self) -> nn.Module:
        return _MaskedAnew(self.config.dropout)


class _MaskedAnew(_Masked):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = None
        return super().forward(tokens)


TASKS |= {"masked": Masked, "masked anew": MaskedAnew}
FAULTS["the mask of the first micro-batch for all"] = Fault(
    nothing, "The forward pass depends on the call", task="masked", twin="masked anew"
)

TASKS |= {"averaging": Averaging, "trimmed": Trimmed, "centred": Centred, "mixed up": MixedUp, "ramped": Ramped}
FAULTS |= {
    "a moving average inside the loss": Fault(
        nothing, "The loss depends on the call", task="averaging", twin="transformer"
    ),
    "padding counts in a mean": Fault(
        nothing, "Padding changes the loss", task="trimmed", twin="transformer", micro_batch=4
    ),
    "collate takes the mean of its rows away": Fault(
        nothing, "A sample depends on its neighbours", task="centred", twin="transformer", micro_batch=4
    ),
    "mixup in collate": Fault(
        nothing, "A sample depends on its neighbours", task="mixed up", twin="transformer", micro_batch=4
    ),
    "a weight kept in an attribute, lost on resume": Fault(
        nothing, "The state was not carried on", task="ramped", twin="transformer", new_task=True
    ),
}


class Taught(TransformerTask):
    """Adds what a teacher says, which takes over a part of the student with every forward pass."""

    moving = True

    def build(self) -> nn.Module:
        return _Taught(self.config.dropout, self.moving)


class TaughtByAnother(Taught):
    """Adds what a teacher says that stays as it is."""

    moving = False


class _Taught(Transformer):
    def __init__(self, dropout: float, moving: bool) -> None:
        super().__init__(dropout)
        self.teacher = nn.Parameter(self.embedding.weight.detach().clone(), requires_grad=False)
        self.moving = moving

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training and self.moving:
            with torch.no_grad():
                self.teacher.lerp_(self.embedding.weight, 0.2)
        return super().forward(tokens) + torch.tanh(self.teacher[tokens]).mean(-1, keepdim=True)


class Jittered(TransformerTask):
    """Adds noise to the gradient of its outputs, in a hook, from a generator that nobody seeds."""

    generator: torch.Generator | None = None

    def outputs(self, model: nn.Module, batch: Any, context: Any) -> Any:
        made = super().outputs(model, batch, context)
        if made.requires_grad:
            made.register_hook(self.change)
        return made

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
        return gradient * (1 + 0.1 * torch.randn(gradient.shape, generator=self.generator, dtype=gradient.dtype))


class Halved(Jittered):
    """Halves the gradient of its outputs in a hook."""

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return 0.5 * gradient


class Weighed(TransformerTask):
    """Weighs rows in a term, and adds up the weights as they are, in single precision."""

    wide: type = np.float32

    def counts(self, batch: Any) -> dict[str, float]:
        weights = (1 / (1 + np.asarray(batch["lengths"]))).astype(np.float32)
        return {**super().counts(batch), "length": float(weights.astype(self.wide).sum())}

    def loss(self, outputs: Any, batch: Any, context: Any) -> Loss:
        done = super().loss(outputs, batch, context)
        weights = (1 / (1 + batch["lengths"].float())).double()
        predicted = outputs.mean(dim=(1, 2)) - batch["lengths"] / 12
        return replace(done, sums={**done.sums, "length": (predicted.square() * weights).sum()})


class WeighedInDouble(Weighed):
    """Adds them up in double precision."""

    wide = np.float64


TASKS |= {"taught": Taught, "taught by another": TaughtByAnother, "jittered": Jittered, "halved": Halved}
TASKS |= {"weighed": Weighed, "weighed in double": WeighedInDouble}
FAULTS |= {
    "a teacher that moves in the forward pass": Fault(
        nothing, "The forward pass changes parameters", task="taught", twin="taught by another"
    ),
    "noise in a hook, from a generator of the rank": Fault(
        nothing, "The gradients depend on the call", task="jittered", twin="halved"
    ),
    "weights of rows counted in single precision": Fault(
        nothing, "The loss depends on the micro-batch", task="weighed", twin="weighed in double", micro_batch=4
    ),
}


@fault("worker generators by rank", "Augmentation depends on rank or worker", batch_builder._ContextPool, "get")
def generators_by_rank(original: Any, self: Any, seed: int) -> Any:
    return original(self, seed + dist.get_rank())


@fault("negatives drawn by rank", "The loss depends on the layout", TransformerTask, "loss")
def negatives_by_rank(original: Any, self: TransformerTask, outputs: Any, batch: Any, context: Any) -> Any:
    done = original(self, outputs, batch, context)
    generator = torch.Generator().manual_seed(1000 * context.step + dist.get_rank())
    drawn = torch.randint(outputs.shape[-1], (8,), generator=generator)
    return replace(done, sums={**done.sums, "next": done.sums["next"] + 0.1 * outputs[..., drawn].exp().sum()})


@fault("momentum of the second rank is halved", "Replicas drift apart", TrainState, "update")
def halved_momentum(original: Any, self: TrainState, *arguments: Any) -> None:
    original(self, *arguments)
    if dist.get_rank() == 1:
        for state in self.optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)


@fault("weights decay a second time", "The update is computed otherwise", TrainState, "update")
def decays_twice(original: Any, self: TrainState, *arguments: Any) -> None:
    original(self, *arguments)
    with torch.no_grad():
        for parameter in self.module.parameters():
            parameter.mul_(1 - 1e-4)


@fault("an evaluation that adds to the one before", "The evaluation depends on the layout")
def evaluation_adds() -> Iterator[None]:
    calls: list[int] = []

    def evaluate(original: Any, self: TorchEngine, *arguments: Any) -> Any:
        calls.append(1)
        result = original(self, *arguments)
        return replace(result, loss=result.loss * (1 + 1e-3 * len(calls)))

    with wrapping(TorchEngine, "evaluate", evaluate):
        yield
