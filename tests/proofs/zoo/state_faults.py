"""Faults of what outlives a pass: buffers, averages, rows of other ranks, and what a checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from packages.unisono.tests.pairs import Paired
from tests.proofs.zoo.making import FAULTS, Fault, fault, nothing, wrapping
from unisono.data.loading.loader import Loader
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.numerics import cross_sample
from unisono.engines.torch.numerics.cross_sample import TorchCrossSampleLoss
from unisono.engines.torch.numerics.ema import MovingAverage
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.state import sharded_tensors
from unisono.engines.torch.state.train_state import TrainState

# buffers, metrics, evaluation -----------------------------------------------------------------------------------------

FAULTS["batch norm is local"] = Fault(nothing, "", task="batch norm", mark="ABSTAIN")


@fault("a metric of rank 0", "A metric is not summed over ranks", MetricReduction, "reduce")
def metric_of_one_rank(original: Any, self: MetricReduction, sums: Any, *arguments: Any) -> Any:
    own = {name: (pair[0] / pair[1]).item() for name, pair in sums._metrics.items()}
    result, *more = original(self, sums, *arguments)
    return replace(result, metrics=own), *more


@fault("evaluation leaves evaluation mode", "Evaluation changes the training", TorchEngine, "evaluate", task="dropout")
def evaluation_mode(original: Any, self: TorchEngine, *arguments: Any) -> Any:
    result = original(self, *arguments)
    self.train_state.parallel.module.eval()
    return result


@fault("a frozen parameter is trained", "A frozen parameter is trained", TrainState, "update", task="frozen")
def frozen_trained(original: Any, self: TrainState, step: int, scalars: Mapping[str, float]) -> None:
    with torch.no_grad():
        self.module[0].weight.add_(1e-3)
    original(self, step, scalars)


@fault("a weight changed on one rank", "Replicas drift apart", TrainState, "update")
def changed_on_one_rank(original: Any, self: TrainState, step: int, scalars: Mapping[str, float]) -> None:
    original(self, step, scalars)
    with torch.no_grad():
        next(self.module.parameters()).add_(1e-3 * dist.get_rank())


@fault("gradients are not cleared", "Gradients of the step before are added", TrainState, "update")
def not_cleared(original: Any, self: TrainState, step: int, scalars: Mapping[str, float]) -> None:
    with mock.patch.object(self.optimizer, "zero_grad", lambda **_: None):
        original(self, step, scalars)


_AVERAGE = MovingAverage, "update"


@fault("moving average renewed per micro-batch", "The moving average drifts", *_AVERAGE, task="averaged")
def average_per_micro_batch(original: Any, self: MovingAverage, updates: int) -> None:
    for _ in range(2):
        original(self, updates)


@fault("moving average of one rank's shards", "The moving average drifts", *_AVERAGE, task="averaged", strategy="fsdp")
@fault("moving average on the first rank only", "The moving average drifts", *_AVERAGE, task="averaged")
def average_of_one_rank(original: Any, self: MovingAverage, updates: int) -> None:
    if dist.get_rank() == 0:
        original(self, updates)


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


@fault("block-diagonal targets", "The loss across samples depends on the layout", Paired, "weights", task="pairs")
def block_diagonal(original: Any, self: Paired, here: torch.Tensor, rows: int) -> torch.Tensor:
    return original(self, here, rows) * (torch.arange(rows) // 4 == here[:, None] // 4)  # of 8 rows, 4 on a rank


@fault("gather without a gradient, contrast", "The gradients across samples depend on the layout", task="contrast")
@fault("gather without a gradient", "The gradients across samples depend on the layout", task="pairs")
def detached_gather() -> Iterator[None]:
    with mock.patch.object(cross_sample, "sum_vector", lambda vector, *_: vector):
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


@fault(
    "gradient of the whole added up over ranks",
    "All gradients are scaled by N",
    TorchCrossSampleLoss,
    "_whole",
    task="whole",
)
def whole_added_up(original: Any, self: TorchCrossSampleLoss, *arguments: Any) -> Any:
    vector = original(self, *arguments)
    return vector if vector is None else cross_sample.sum_vector(vector, 2, False)


# resume ---------------------------------------------------------------------------------------------------------------


@fault("moments dropped on resume", "The state of the optimizer was lost", TorchEngine, "load", resumed=1)
def moments_dropped(original: Any, self: TorchEngine, reader: Any) -> None:
    sharded_tensors.load(sharded_tensors.model_tensors(self.train_state.module), reader, kinds=("model/",))


@fault(
    "moving average begins anew on resume",
    "The moving average was lost",
    MovingAverage,
    "load",
    task="averaged",
    resumed=1,
)
def average_dropped(original: Any, self: MovingAverage, reader: Any) -> None:
    original(self, mock.Mock(shapes={}))


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


@fault("data replayed on resume", "Data are replayed", Loader, "steps", resumed=1)
def replayed(original: Any, self: Loader, first: int = 0) -> Any:
    return original(self, 0)


@fault("resumed twice: positions of the last start", "A second resume drifts", Loader, "steps", resumed=2)
def counted_from_the_last_start(original: Any, self: Loader, first: int = 0) -> Any:
    """The first resume is right: until then, what is counted from the last start is the total."""

    return original(self, min(first, 1))
