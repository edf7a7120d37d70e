"""A model's buffers: those that every process has of its own, and passes that leave all of them as they were."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.place import Place

log = logging.getLogger(__name__)


class Buffers:
    """The buffers of a model that may be one of several copies.

    Running statistics of batch normalisation are those of the rows that a process computed. Such buffers are `local`:
    guards let them differ, evaluation takes those of the first process, and a checkpoint has the first process's as the
    model's and everyone's beside them, so that as many processes can go on bit for bit.

    Args:
        model: whose buffers they are, before it is wrapped.
        place: of this process.
    """

    def __init__(self, model: nn.Module, place: Place) -> None:
        self._model, self._place = model, place
        layers = [name for name, module in model.named_modules() if _has_running_statistics(module)]
        self.local = {f"{name}.{buffer}" for name in layers for buffer, _ in model.get_submodule(name).named_buffers()}
        if layers and place.world_size > 1:
            log.warning(
                "%d batch normalisation layers keep running statistics (first: %s). Each process updates its own from "
                "its own micro-batches; those that are evaluated and saved are not those of a run on one process.",
                len(layers),
                layers[0],
            )

    @property
    def shared(self) -> dict[str, Tensor]:
        """Those that are the same on every process."""
        return {name: buffer for name, buffer in self._model.named_buffers() if name not in self.local}

    @property
    def saved_by_first(self) -> set[str]:
        """Names in a checkpoint of the local ones: all from one process, since they belong together."""
        return {f"model/{name}" for name in self.local} if self._place.world_size > 1 else set()

    @property
    def own(self) -> Mapping[str, Tensor]:
        """The local ones as this process has them, under names of its rank."""
        buffers = dict(self._model.named_buffers())
        if self._place.world_size == 1:
            return {}
        return {f"rank-{self._place.rank}/{name}": buffers[name] for name in sorted(self.local)}

    def take_from_first(self) -> None:
        """Overwrite the local ones by those of the first process, which a checkpoint has; collective."""
        buffers = dict(self._model.named_buffers())
        for name in sorted(self.local) if self._place.world_size > 1 else ():
            dist.broadcast(buffers[name], 0)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put all of them back to what they were, after a pass that does not count."""
        kept = [buffer.clone() for buffer in self._model.buffers()]
        try:
            yield
        finally:
            for buffer, value in zip(self._model.buffers(), kept, strict=True):
                buffer.copy_(value)


def _has_running_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats
