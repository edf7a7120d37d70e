"""Faults as they are made: each a small change of a correct task, engine or data path, with what a proof must call it.

A fault is a context manager that is entered on every rank of the run in question, and never by the run on one process
that it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from packages.unisono.tests.tasks import TransformerTask
from tests.proofs.zoo.making import fault, wrapping
from unisono.data.loading import batch_builder
from unisono.data.loading.loader import Loader
from unisono.data.order.order import Order
from unisono.data.order.plan import SampleIndices, StreamPlan
from unisono.engines import rules
from unisono.engines.torch.numerics import gradients
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.parallel.parallel import Parallel
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.step import TrainStep
from unisono.optim import optimizers, schedules
from unisono.optim.sharded import local
from unisono.task import SampleContext

# sums and means -------------------------------------------------------------------------------------------------------


@fault("mean of means over ranks", "A mean of means")
def mean_of_means() -> Iterator[None]:
    def local(original: Any, self: MetricReduction, batches: Any) -> Any:
        return original(MetricReduction(1, torch.device("cpu")), batches)

    def scales(original: Any, counts: Any, factor: float, where: Any) -> Any:
        return {name: 1 / number for name, number in counts.items()}  # DDP then takes the mean of them

    with wrapping(MetricReduction, "counts", local), wrapping(rules, "loss_scales", scales):
        yield


@fault("mean over micro-batches", "A mean of means")
def mean_over_micro_batches() -> Iterator[None]:
    true = TransformerTask.counts

    def counts(original: Any, self: TransformerTask, batch: Any) -> Any:
        return {name: float(count > 0) for name, count in original(self, batch).items()}

    def loss(original: Any, self: TransformerTask, outputs: Any, batch: Any, context: Any) -> Any:
        done, own = original(self, outputs, batch, context), true(self, {n: v.numpy() for n, v in batch.items()})
        return replace(done, sums={name: total / max(1.0, own[name]) for name, total in done.sums.items()})

    with wrapping(TransformerTask, "counts", counts), wrapping(TransformerTask, "loss", loss):
        yield


@fault("gradient × N", "All gradients are scaled by N")
def gradient_times_n() -> Iterator[None]:
    with wrapping(wrap, "gradient_factor", lambda original, *a: 2 * original(*a)):
        yield


@fault("gradient ÷ N, then clip", "All gradients are scaled by N")
def gradient_by_n() -> Iterator[None]:
    with wrapping(wrap, "gradient_factor", lambda original, *a: original(*a) / 2):
        yield


@fault("bf16 all-reduce", "Gradients are reduced in a lower precision")
def bf16_reduction() -> Iterator[None]:
    def reduced(bucket: Any) -> Any:
        rounded = bucket.buffer().bfloat16().to(bucket.buffer().dtype) / dist.get_world_size()
        work = dist.all_reduce(rounded, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def wrapped(original: Any, self: Parallel) -> None:
        original(self)
        self.wrapped.register_comm_hook(None, lambda _, bucket: reduced(bucket))

    with wrapping(Parallel, "wrap", wrapped):
        yield


# synchronisation ------------------------------------------------------------------------------------------------------


@fault("synchronise with the first micro-batch", "Gradients are not synchronised")
def first_micro_batch() -> Iterator[None]:
    seen: list[Any] = []

    def synchronise(original: Any, self: Parallel, last: bool) -> Any:
        seen.append(last)
        return original(self, True if len(seen) == 1 else not last)  # the first is the warm-up

    with wrapping(Parallel, "synchronise", synchronise):
        yield


@fault("forward round the wrapper", "Gradients are not synchronised", Passes, "_run")
def round_the_wrapper(original: Any, self: Passes, *arguments: Any) -> Any:
    with mock.patch.object(self._parallel, "wrapped", self._parallel.module):
        return original(self, *arguments)


@contextmanager
def weighing_micro_batches(last_one: float, others: float) -> Iterator[None]:
    """Weigh the loss of the last micro-batch of a step, and those of the others; outside of steps each counts once."""
    last: list[Any] = []

    def accumulate(original: Any, self: TrainStep, batches: Any, step: int) -> Any:
        last[:] = batches[-1:]
        return original(self, batches, step)

    def forward(original: Any, self: Passes, micro: Any, *rest: Any) -> Any:
        total, loss = original(self, micro, *rest)
        return total * (1.0 if not last else last_one if micro is last[0] else others), loss

    with wrapping(TrainStep, "_accumulate", accumulate), wrapping(Passes, "forward", forward):
        yield


@fault("accumulation overwrites", "Gradients are those of a part of the batch")
def overwritten() -> Iterator[None]:
    with weighing_micro_batches(last_one=1.0, others=0.0):
        yield


@fault("parameter ignored by DDP", "Some parameters are not synchronised", Parallel, "wrap")
def ignored_parameter(original: Any, self: Parallel) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        self.module, ["model.blocks.0.attention.query.weight"]
    )
    original(self)


@fault(
    "optimizer built before sharding",
    "The optimizer was built before wrapping",
    optimizers,
    "build_optimizer",
    strategy="fsdp",
)
def stale_optimizer(original: Any, config: Any, model: nn.Module, *_: Any) -> Any:
    copied = nn.ModuleDict({n.replace(".", "_"): nn.Module() for n, _ in model.named_parameters()})
    for (_, parameter), module in zip(model.named_parameters(), copied.values(), strict=True):
        module.weight = nn.Parameter(local(parameter.detach()).clone())
    return original(config, copied)


# clipping -------------------------------------------------------------------------------------------------------------


@fault("clip before synchronisation", "Clipped before synchronisation", TrainStep, "_accumulate")
def clip_first(original: Any, self: TrainStep, batches: Any, step: int) -> Any:
    with mock.patch.object(self._parallel, "wrapped", self._parallel.module):
        sums = original(self, batches, step)
    parts = self._parallel.gradients()
    norm = float(gradients.squared_norm(parts, torch.float64).sqrt())
    gradients.clip_gradients(parts, norm, 0.05)
    for part in parts:
        dist.all_reduce(part, dist.ReduceOp.AVG if part.is_cuda else dist.ReduceOp.SUM)
        part /= 2
    return sums


@fault("clip by the norm of the local shards", "Clipped by a local norm", gradients, "clip_gradients", strategy="fsdp")
def local_norm(original: Any, parts: Any, norm: float, largest: Any) -> None:
    original(parts, float(gradients.squared_norm(parts, torch.float64).sqrt()), largest)


@fault(
    "norm of one rank's shards",
    "The norm is that of a part of the gradient",
    MetricReduction,
    "reduce",
    strategy="fsdp",
)
def norm_of_shards(original: Any, self: MetricReduction, sums: Any, counts: Any, *squares: Any) -> Any:
    result, *more = original(self, sums, counts, *squares)
    return replace(result, grad_norm=float(squares[0].sqrt())) if squares else result, *more


# the learning rate ----------------------------------------------------------------------------------------------------


@fault("schedule stepped × N", "The schedule is stepped once per process")
def schedule_times_n() -> Iterator[None]:
    with wrapping(schedules.ScheduledScalars, "__call__", lambda original, self, step: original(self, 2 * step)):
        yield


@fault(
    "learning rate differs on one rank",
    "The learning rate differs between ranks",
    schedules.ScheduledScalars,
    "__call__",
)
def other_rate(original: Any, self: Any, step: int) -> Any:
    values = original(self, step)
    return {**values, "lr": values["lr"] * (1.1 if dist.get_rank() else 1.0)}


# data -----------------------------------------------------------------------------------------------------------------


@fault("the same data on all ranks", "Every rank reads the same rows", Loader, "__init__")
def same_data(
    original: Any, self: Loader, task: Any, source: Any, plan: Any, split: Any, rank: int, **more: Any
) -> None:
    original(self, task, source, plan, split, 0 if more.get("purpose", "train") == "train" else rank, **more)


@fault("padded with duplicates", "Rows are repeated to fill the batch")
def padded() -> Iterator[None]:
    def repeated(original: Any, self: StreamPlan, step: int, rows: range) -> SampleIndices:
        length = true(self, step)
        whole = original(self, step, range(length))
        again = np.arange(rows.start, rows.stop) % length
        return SampleIndices(np.arange(rows.start, rows.stop), whole.rows[again], whole.epochs[again])

    true = StreamPlan.rows
    full = mock.patch.object(StreamPlan, "rows", lambda self, step: self.global_batch)
    with full, wrapping(StreamPlan, "samples", repeated):
        yield


@fault("last batch dropped", "Rows are dropped", StreamPlan, "__init__")
def dropped(
    original: Any, self: StreamPlan, stream: Any, global_batch: int, length: int, *more: Any, **others: Any
) -> None:
    length = length // global_batch * global_batch if stream.shuffle else length
    original(self, stream, global_batch, length, *more, **others)


@fault("set_epoch is missing", "Every epoch has the same order", Order, "__call__", task="few rows")
def same_epoch(original: Any, self: Order, positions: Any) -> Any:
    return original(self, np.asarray(positions) % self.size)


@fault("order depends on the world size", "The order of samples depends on the world size", Order, "__call__")
def other_order(original: Any, self: Order, positions: Any) -> Any:
    return original(replace(self, seed=self.seed + dist.get_world_size()), positions)


@fault("worker generators identical", "Augmentation depends on rank or worker", batch_builder._ContextPool, "get")
def worker_generators(original: Any, self: Any, seed: int) -> Any:
    return original(self, 0)


@fault("held-out rows are augmented", "Held-out rows are augmented", TransformerTask, "sample")
def augmented_held_out(original: Any, self: Any, record: Any, context: SampleContext) -> Any:
    return original(self, record, replace(context, training=True))


@fault(
    "held-out rows are made as for the training",
    "The evaluation depends on the layout",
    batch_builder._ContextPool,
    "__init__",
)
def held_out_as_training(original: Any, self: Any, training: bool) -> None:
    original(self, training=True)


# randomness and initial weights ---------------------------------------------------------------------------------------


@fault("dropout keyed by rank", "Randomness depends on the rank", RandomState, "seed", task="dropout")
def dropout_by_rank(original: Any, self: RandomState, *address: Any) -> int:
    return original(self, *address, dist.get_rank() + 1)


@fault("initialisation keyed by rank", "Initialisation depends on the rank", TransformerTask, "build")
def init_by_rank(original: Any, self: Any) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return original(self)


@fault(
    "initial weights 1e-3 off on one rank", "Initialisation depends on the layout", Parallel, "wrap", strategy="fsdp"
)
def init_off(original: Any, self: Parallel) -> None:
    with torch.no_grad():
        for parameter in self.module.parameters():
            parameter.mul_(1.001 if dist.get_rank() else 1.0)
    original(self)


@fault("tied head untied", "Tied weights were untied", Parallel, "wrap", strategy="fsdp")
def untied(original: Any, self: Parallel) -> None:
    self.module.model.head.weight = nn.Parameter(self.module.model.head.weight.detach().clone())
    original(self)
