"""Faults as they are made: each a small change of a correct task, engine or data path, with what a proof must call it.

A fault is a context manager that is entered on every rank of the run in question, and never by the run on one process
that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.pairs import Paired
from tests.tasks import LinearTask, TransformerTask
from unisono.data.loading import batch_builder
from unisono.data.loading.loader import Loader
from unisono.data.order.order import Order
from unisono.data.order.plan import SampleIndices, StreamPlan
from unisono.engines import rules
from unisono.engines.torch import sharded_tensors
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.numerics import cross_sample, gradients
from unisono.engines.torch.numerics.cross_sample import TorchCrossSampleLoss
from unisono.engines.torch.numerics.ema import MovingAverage
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.parallel.parallel import Parallel
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.step import TrainStep
from unisono.engines.torch.train_state import TrainState
from unisono.optim import optimizers, schedules
from unisono.task import SampleContext, Task

# the tasks that they are made in --------------------------------------------------------------------------------------


class Normed(LinearTask):
    """A batch norm, whose running statistics are those of one process."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Frozen(LinearTask):
    """Its first layer is not trained."""

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model


TASKS: dict[str, Callable[[], Task]] = {
    "transformer": TransformerTask,
    "dropout": lambda: TransformerTask(TransformerTask.Config(dropout=0.25)),
    "few rows": lambda: TransformerTask(TransformerTask.Config(rows=9)),
    "batch norm": Normed,
    "frozen": Frozen,
    "averaged": TransformerTask,
    "pairs": Paired,
    "contrast": lambda: Paired(Paired.Config(loss="contrast")),
    "whole": lambda: Paired(Paired.Config(loss="whole")),
}
SETTINGS: dict[str, dict[str, Any]] = {"averaged": {"ema": {"decay": 0.9}}}  # of the configuration, by task


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        made: the context in which a run has it.
        named: what the diagnosis must call it.
        task: of `TASKS`.
        strategy: of the run.
        resumed: how often the run is interrupted and goes on.
        mark: FAIL, or ABSTAIN where no more can be said.
        twin: the task of the clean run, where the fault is in the task itself.
        micro_batch: rows of its micro-batches; those of the run on one process have two.
        new_task: whether it goes on from the checkpoint of its twin, by a task that has run nothing.
    """

    made: Callable[[], AbstractContextManager[Any]]
    named: str
    task: str = "transformer"
    strategy: str = "ddp"
    resumed: int = 0
    mark: str = "FAIL"
    twin: str = ""
    micro_batch: int = 2
    new_task: bool = False

    @property
    def clean(self) -> Fault:
        """The same run without the fault."""
        return replace(self, made=nothing, named="", mark="PASS", task=self.twin or self.task)


FAULTS: dict[str, Fault] = {}


def collector(faults: dict[str, Any], kind: type[Fault]) -> Callable[..., Any]:
    """A decorator that puts a generator into a zoo as a fault of this kind."""

    def fault(name: str, named: str, **more: Any) -> Callable[[Callable[[], Iterator[Any]]], Any]:
        def add(made: Callable[[], Iterator[Any]]) -> Any:
            faults[name] = kind(contextmanager(made), named, **more)
            return made

        return add

    return fault


fault = collector(FAULTS, Fault)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def wrapping(owner: Any, name: str, around: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace a function by one that is given it as its first argument."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *arguments, **named: around(original, *arguments, **named))


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


@fault("forward round the wrapper", "Gradients are not synchronised")
def round_the_wrapper() -> Iterator[None]:
    def run(original: Any, self: Passes, *arguments: Any) -> Any:
        with mock.patch.object(self._parallel, "wrapped", self._parallel.module):
            return original(self, *arguments)

    with wrapping(Passes, "_run", run):
        yield


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


@fault("parameter ignored by DDP", "Some parameters are not synchronised")
def ignored_parameter() -> Iterator[None]:
    def wrapped(original: Any, self: Parallel) -> None:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self.module, ["model.blocks.0.attention.query.weight"]
        )
        original(self)

    with wrapping(Parallel, "wrap", wrapped):
        yield


@fault("optimizer built before sharding", "The optimizer was built before wrapping", strategy="fsdp")
def stale_optimizer() -> Iterator[None]:
    def build(original: Any, config: Any, model: nn.Module, blocks: Any) -> Any:
        copied = nn.ModuleDict({n.replace(".", "_"): nn.Module() for n, _ in model.named_parameters()})
        for (_, parameter), module in zip(model.named_parameters(), copied.values(), strict=True):
            module.weight = nn.Parameter(gradients.local(parameter.detach()).clone())
        return original(config, copied)

    with wrapping(optimizers, "build_optimizer", build):
        yield


# clipping -------------------------------------------------------------------------------------------------------------


@fault("clip before synchronisation", "Clipped before synchronisation")
def clip_first() -> Iterator[None]:
    def accumulate(original: Any, self: TrainStep, batches: Any, step: int) -> Any:
        with mock.patch.object(self._parallel, "wrapped", self._parallel.module):
            sums = original(self, batches, step)
        parts = self._parallel.gradients()
        norm = float(gradients.squared_norm(parts, torch.float64).sqrt())
        gradients.clip_gradients(parts, norm, 0.05)
        for part in parts:
            dist.all_reduce(part, dist.ReduceOp.AVG if part.is_cuda else dist.ReduceOp.SUM)
            part /= 2
        return sums

    with wrapping(TrainStep, "_accumulate", accumulate):
        yield


@fault("clip by the norm of the local shards", "Clipped by a local norm", strategy="fsdp")
def local_norm() -> Iterator[None]:
    def clip(original: Any, parts: Any, norm: float, largest: Any) -> None:
        original(parts, float(gradients.squared_norm(parts, torch.float64).sqrt()), largest)

    with wrapping(gradients, "clip_gradients", clip):
        yield


@fault("norm of one rank's shards", "The norm is that of a part of the gradient", strategy="fsdp")
def norm_of_shards() -> Iterator[None]:
    def reduce(original: Any, self: MetricReduction, sums: Any, counts: Any, *squares: Any) -> Any:
        result, *more = original(self, sums, counts, *squares)
        return replace(result, grad_norm=float(squares[0].sqrt())) if squares else result, *more

    with wrapping(MetricReduction, "reduce", reduce):
        yield


# the learning rate ----------------------------------------------------------------------------------------------------


@fault("schedule stepped × N", "The schedule is stepped once per process")
def schedule_times_n() -> Iterator[None]:
    with wrapping(schedules.ScheduledScalars, "__call__", lambda original, self, step: original(self, 2 * step)):
        yield


@fault("learning rate differs on one rank", "The learning rate differs between ranks")
def other_rate() -> Iterator[None]:
    def scalars(original: Any, self: Any, step: int) -> Any:
        values = original(self, step)
        return {**values, "lr": values["lr"] * (1.1 if dist.get_rank() else 1.0)}

    with wrapping(schedules.ScheduledScalars, "__call__", scalars):
        yield


# data -----------------------------------------------------------------------------------------------------------------


@fault("the same data on all ranks", "Every rank reads the same rows")
def same_data() -> Iterator[None]:
    def init(
        original: Any, self: Loader, task: Any, source: Any, plan: Any, split: Any, rank: int, **more: Any
    ) -> None:
        original(self, task, source, plan, split, 0 if more.get("purpose", "train") == "train" else rank, **more)

    with wrapping(Loader, "__init__", init):
        yield


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


@fault("last batch dropped", "Rows are dropped")
def dropped() -> Iterator[None]:
    def init(
        original: Any, self: StreamPlan, stream: Any, global_batch: int, length: int, *more: Any, **others: Any
    ) -> None:
        length = length // global_batch * global_batch if stream.shuffle else length
        original(self, stream, global_batch, length, *more, **others)

    with wrapping(StreamPlan, "__init__", init):
        yield


@fault("set_epoch is missing", "Every epoch has the same order", task="few rows")
def same_epoch() -> Iterator[None]:
    def call(original: Any, self: Order, positions: Any) -> Any:
        return original(self, np.asarray(positions) % self.size)

    with wrapping(Order, "__call__", call):
        yield


@fault("order depends on the world size", "The order of samples depends on the world size")
def other_order() -> Iterator[None]:
    def call(original: Any, self: Order, positions: Any) -> Any:
        return original(replace(self, seed=self.seed + dist.get_world_size()), positions)

    with wrapping(Order, "__call__", call):
        yield


@fault("worker generators identical", "Augmentation depends on rank or worker")
def worker_generators() -> Iterator[None]:
    def get(original: Any, self: Any, seed: int) -> Any:
        return original(self, 0)

    with wrapping(batch_builder._ContextPool, "get", get):
        yield


@fault("held-out rows are augmented", "Held-out rows are augmented")
def augmented_held_out() -> Iterator[None]:
    def sample(original: Any, self: Any, record: Any, context: SampleContext) -> Any:
        return original(self, record, replace(context, training=True))

    with wrapping(TransformerTask, "sample", sample):
        yield


@fault("held-out rows are made as for the training", "The evaluation depends on the layout")
def held_out_as_training() -> Iterator[None]:
    def init(original: Any, self: Any, training: bool) -> None:
        original(self, training=True)

    with wrapping(batch_builder._ContextPool, "__init__", init):
        yield


# randomness and initial weights ---------------------------------------------------------------------------------------


@fault("dropout keyed by rank", "Randomness depends on the rank", task="dropout")
def dropout_by_rank() -> Iterator[None]:
    def seed(original: Any, self: RandomState, *address: Any) -> int:
        return original(self, *address, dist.get_rank() + 1)

    with wrapping(RandomState, "seed", seed):
        yield


@fault("initialisation keyed by rank", "Initialisation depends on the rank")
def init_by_rank() -> Iterator[None]:
    def build(original: Any, self: Any) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return original(self)

    with wrapping(TransformerTask, "build", build):
        yield


@fault("initial weights 1e-3 off on one rank", "Initialisation depends on the layout", strategy="fsdp")
def init_off() -> Iterator[None]:
    def wrapped(original: Any, self: Parallel) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1.001 if dist.get_rank() else 1.0)
        original(self)

    with wrapping(Parallel, "wrap", wrapped):
        yield


@fault("tied head untied", "Tied weights were untied", strategy="fsdp")
def untied() -> Iterator[None]:
    def wrapped(original: Any, self: Parallel) -> None:
        self.module.model.head.weight = nn.Parameter(self.module.model.head.weight.detach().clone())
        original(self)

    with wrapping(Parallel, "wrap", wrapped):
        yield


# buffers, metrics, evaluation -----------------------------------------------------------------------------------------

FAULTS["batch norm is local"] = Fault(nothing, "", task="batch norm", mark="ABSTAIN")


@fault("a metric of rank 0", "A metric is not summed over ranks")
def metric_of_one_rank() -> Iterator[None]:
    def reduce(original: Any, self: MetricReduction, sums: Any, *arguments: Any) -> Any:
        own = {name: (pair[0] / pair[1]).item() for name, pair in sums._metrics.items()}
        result, *more = original(self, sums, *arguments)
        return replace(result, metrics=own), *more

    with wrapping(MetricReduction, "reduce", reduce):
        yield


@fault("evaluation leaves evaluation mode", "Evaluation changes the training", task="dropout")
def evaluation_mode() -> Iterator[None]:
    def evaluate(original: Any, self: TorchEngine, *arguments: Any) -> Any:
        result = original(self, *arguments)
        self.train_state.parallel.module.eval()
        return result

    with wrapping(TorchEngine, "evaluate", evaluate):
        yield


@fault("a frozen parameter is trained", "A frozen parameter is trained", task="frozen")
def frozen_trained() -> Iterator[None]:
    def update(original: Any, self: TrainState, step: int, scalars: Mapping[str, float]) -> None:
        with torch.no_grad():
            self.module[0].weight.add_(1e-3)
        original(self, step, scalars)

    with wrapping(TrainState, "update", update):
        yield


@fault("a weight changed on one rank", "Replicas drift apart")
def changed_on_one_rank() -> Iterator[None]:
    def update(original: Any, self: TrainState, step: int, scalars: Mapping[str, float]) -> None:
        original(self, step, scalars)
        with torch.no_grad():
            next(self.module.parameters()).add_(1e-3 * dist.get_rank())

    with wrapping(TrainState, "update", update):
        yield


@fault("gradients are not cleared", "Gradients of the step before are added")
def not_cleared() -> Iterator[None]:
    def update(original: Any, self: TrainState, step: int, scalars: Mapping[str, float]) -> None:
        with mock.patch.object(self.optimizer, "zero_grad", lambda **_: None):
            original(self, step, scalars)

    with wrapping(TrainState, "update", update):
        yield


@fault("moving average renewed per micro-batch", "The moving average drifts", task="averaged")
def average_per_micro_batch() -> Iterator[None]:
    def update(original: Any, self: MovingAverage, updates: int) -> None:
        for _ in range(2):
            original(self, updates)

    with wrapping(MovingAverage, "update", update):
        yield


@fault("moving average on the first rank only", "The moving average drifts", task="averaged")
def average_of_one_rank() -> Iterator[None]:
    def update(original: Any, self: MovingAverage, updates: int) -> None:
        if dist.get_rank() == 0:
            original(self, updates)

    with wrapping(MovingAverage, "update", update):
        yield


@fault("moving average of one rank's shards", "The moving average drifts", task="averaged", strategy="fsdp")
def average_of_shards() -> Iterator[None]:
    with contextmanager(average_of_one_rank)():
        yield


# losses across samples ------------------------------------------------------------------------------------------------


@fault("local pairs only", "The loss across samples depends on the layout", task="pairs")
def local_pairs() -> Iterator[None]:
    def of_this_rank(original: Any, self: TorchCrossSampleLoss, *arguments: Any) -> Any:
        return replace(original(self, *arguments), first=0)

    with (
        mock.patch.object(cross_sample, "gather_rows", lambda own, rows: list(own)),
        mock.patch.object(cross_sample, "sum_vector", lambda vector, *_: vector),
        wrapping(TorchCrossSampleLoss, "_gather", of_this_rank),
    ):
        yield


@fault("block-diagonal targets", "The loss across samples depends on the layout", task="pairs")
def block_diagonal() -> Iterator[None]:
    def weights(original: Any, self: Paired, here: torch.Tensor, rows: int) -> torch.Tensor:
        return original(self, here, rows) * (torch.arange(rows) // 4 == here[:, None] // 4)  # of 8 rows, 4 on a rank

    with wrapping(Paired, "weights", weights):
        yield


@fault("gather without a gradient", "The gradients across samples depend on the layout", task="pairs")
def detached_gather() -> Iterator[None]:
    with mock.patch.object(cross_sample, "sum_vector", lambda vector, *_: vector):
        yield


@fault("gather without a gradient, contrast", "The gradients across samples depend on the layout", task="contrast")
def detached_contrast() -> Iterator[None]:
    with contextmanager(detached_gather)():
        yield


@fault("gradient of the gather × N", "All gradients are scaled by N", task="pairs")
def gather_times_n() -> Iterator[None]:
    with wrapping(cross_sample, "sum_vector", lambda original, *arguments: original(*arguments) * 2):
        yield


@fault("the whole of one rank's rows", "The loss across samples depends on the layout", task="whole")
def whole_of_a_rank() -> Iterator[None]:
    def counted_everywhere(original: Any, self: TorchCrossSampleLoss, *arguments: Any) -> Any:
        return replace(original(self, *arguments), first=0)

    with (
        mock.patch.object(cross_sample, "gather_rows", lambda own, rows: list(own)),
        wrapping(TorchCrossSampleLoss, "_gather", counted_everywhere),
    ):
        yield


@fault("gradient of the whole added up over ranks", "All gradients are scaled by N", task="whole")
def whole_added_up() -> Iterator[None]:
    def whole(original: Any, self: TorchCrossSampleLoss, *arguments: Any) -> Any:
        vector = original(self, *arguments)
        return vector if vector is None else cross_sample.sum_vector(vector, 2, False)

    with wrapping(TorchCrossSampleLoss, "_whole", whole):
        yield


# resume ---------------------------------------------------------------------------------------------------------------


@fault("moments dropped on resume", "The state of the optimizer was lost", resumed=1)
def moments_dropped() -> Iterator[None]:
    def load(original: Any, self: TorchEngine, reader: Any) -> None:
        sharded_tensors.load(sharded_tensors.model_tensors(self.train_state.module), reader, kinds=("model/",))

    with wrapping(TorchEngine, "load", load):
        yield


@fault("moving average begins anew on resume", "The moving average was lost", task="averaged", resumed=1)
def average_dropped() -> Iterator[None]:
    def load(original: Any, self: MovingAverage, reader: Any) -> None:
        original(self, mock.Mock(shapes={}))

    with wrapping(MovingAverage, "load", load):
        yield


@fault("random state lost on resume", "The state was not carried on", task="dropout", resumed=1)
def generator_lost() -> Iterator[None]:
    def seed(original: Any, self: RandomState, *address: Any) -> int:
        calls = self.__dict__.setdefault("calls", [])
        calls.append(address)
        known = address if address[0] != "dropout" or not self.__dict__.get("again") else ("dropout", 0, address[2])
        return original(self, *known)

    def load(original: Any, self: TorchEngine, reader: Any) -> None:
        original(self, reader)
        self._parts.random_state.again = True

    with wrapping(RandomState, "seed", seed), wrapping(TorchEngine, "load", load):
        yield


@fault("data replayed on resume", "Data are replayed", resumed=1)
def replayed() -> Iterator[None]:
    def steps(original: Any, self: Loader, first: int = 0) -> Any:
        return original(self, 0)

    with wrapping(Loader, "steps", steps):
        yield


@fault("resumed twice: positions of the last start", "A second resume drifts", resumed=2)
def counted_from_the_last_start() -> Iterator[None]:
    """The first resume is right: until then, what is counted from the last start is the total."""

    def steps(original: Any, self: Loader, first: int = 0) -> Any:
        return original(self, min(first, 1))

    with wrapping(Loader, "steps", steps):
        yield
