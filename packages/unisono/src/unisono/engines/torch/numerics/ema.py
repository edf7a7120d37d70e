"""A moving average of the weights, sharded like them: each process averages its own shards, nothing is gathered.

Only trained parameters that are not excluded are averaged. For other parameters and for buffers (running statistics,
counters), evaluation and export use the model's current values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from unisono.config.schema.run import Ema
from unisono.engines.state import StateReader
from unisono.engines.torch.state import sharded_tensors
from unisono.optim import ema
from unisono.optim.sharded import local

log = logging.getLogger(__name__)
NAME_PREFIX = "ema/"  # what the names of its arrays in a checkpoint begin with


class MovingAverage:
    """The average of a model's trainable parameters, in their dtype (the master's) and on their device.

    Without a decay there is none: it has no tensors, and every method does nothing. The model is laid out, and its
    parameters may not be replaced afterwards.
    """

    def __init__(self, config: Ema, model: nn.Module) -> None:
        self._config = config
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._weights = {name: trained[name] for name in ema.averaged_names(config, list(trained))}
        self.tensors: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names in a checkpoint."""
        return {f"{NAME_PREFIX}{name}": value for name, value in self.tensors.items()}

    def update(self, updates: int) -> None:
        """Add the weights after an update; `updates` counts them from 1."""
        decay = ema.decay(self._config, updates) if self.tensors else None
        if decay is not None:
            get_ema_multi_avg_fn(decay)(*self._local_pairs(), None)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """A context in which the model uses the average as its weights; they are restored bit for bit afterwards.

        Values are exchanged in place, tensor by tensor, since FSDP gathers from the memory that it knows.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def load(self, reader: StateReader) -> None:
        """Load a saved average; without one, start from the model's weights."""
        if not self.tensors:
            return
        if any(name.startswith(NAME_PREFIX) for name in reader.shapes):
            sharded_tensors.load(self.named_tensors, reader, kinds=(NAME_PREFIX,))
            return
        log.warning("the checkpoint has no moving average of the weights; it starts from the current weights")
        for average, weight in zip(*self._local_pairs(), strict=True):
            average.copy_(weight)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(*self._local_pairs(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _local_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """This process's parts of the average and of the weights."""
        return [local(value) for value in self.tensors.values()], [
            local(weight.detach()) for weight in self._weights.values()
        ]
