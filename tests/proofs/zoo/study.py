"""Five faults of one study of recursive models on many devices, which its authors met one after the other.

Runs on one device were right, losses fell on many, and the accuracies could not be repeated. Each is made here as it
was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.proofs.zoo.making import fault, wrapping
from tests.tasks import TransformerTask
from unisono.data.loading.loader import Loader
from unisono.engines import rules
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.parallel.parallel import Parallel


def average(module: nn.Module) -> None:
    """The mean over ranks in place of every parameter, which was meant as a broadcast."""
    with torch.no_grad():
        for parameter in module.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


@fault("initial weights averaged over seeds", "Initialisation depends on the layout")
def averaged_weights() -> Iterator[None]:
    """Their spread shrinks by the root of the number of ranks."""

    def build(original: Any, self: Any) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        model: nn.Module = original(self)
        average(model)
        return model

    with wrapping(TransformerTask, "build", build):
        yield


@fault("gradients averaged, loss divided by the global batch", "All gradients are scaled by N")
def divided_twice() -> Iterator[None]:
    def scales(original: Any, counts: Any, factor: float, where: Any) -> Any:
        return original(counts, 1.0, where)

    with wrapping(rules, "loss_scales", scales):
        yield


@fault("buffers drawn on each rank", "Initialisation depends on the rank")
def buffers_by_rank() -> Iterator[None]:
    def wrapped(original: Any, self: Parallel) -> None:
        original(self)
        with torch.no_grad():
            for buffer in self.module.buffers():
                buffer.mul_(1 + 0.1 * dist.get_rank())

    with wrapping(Parallel, "wrap", wrapped):
        yield


@fault("checkpoint averaged with random weights", "The state was not carried on", resumed=1)
def mixed_checkpoint() -> Iterator[None]:
    """Rank 0 alone loads it, and the mean over ranks is taken for a broadcast."""

    def load(original: Any, self: TorchEngine, reader: Any) -> None:
        original(self, reader)
        module = self.train_state.parallel.module
        if dist.get_rank():
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(std=0.02)
        average(module)

    with wrapping(TorchEngine, "load", load):
        yield


@fault("one device of two computes", "Rows are dropped")
def one_device() -> Iterator[None]:
    """The rows were dealt out to all devices of a host, and one process drives the first."""

    def steps(original: Any, self: Loader, first: int = 0) -> Any:
        for batches in original(self, first):
            yield [replace(micro, idle=True) for micro in batches] if dist.get_rank() else batches

    with wrapping(Loader, "steps", steps):
        yield
