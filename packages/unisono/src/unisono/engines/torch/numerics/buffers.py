"""A model's buffers and modes: which buffers differ by process, and contexts that restore them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.text import join_names

log = logging.getLogger(__name__)


class Buffers:
    """The buffers of a model that may be one of several copies.

    Running statistics of batch normalisation depend on the rows of a process. Such buffers are `local`: guards allow
    them to differ, and evaluation uses those of the first process. A checkpoint saves the first process's as the
    model's, and additionally those of every process, so that the same number of processes resumes bit for bit.
    Synchronised statistics are treated like any other buffer.

    Args:
        model: before it is wrapped.
        process: this one.
        synchronised: names of the layers whose statistics are those of all processes.
    """

    def __init__(self, model: nn.Module, process: ProcessInfo, synchronised: Collection[str] = ()) -> None:
        self._model, self._process = model, process
        norms = {name: module for name, module in model.named_modules() if isinstance(module, _NormBase)}
        layers = [name for name, norm in norms.items() if norm.track_running_stats]
        self._shared_statistics = _buffers_of(model, [name for name in layers if name in synchronised])
        layers = [name for name in layers if name not in synchronised]
        self.local = _buffers_of(model, layers)
        if layers and process.world_size > 1:
            of_rows = [name for name in layers if not isinstance(norms[name], _BatchNorm)]  # instance normalisation
            log.warning(
                "Normalisation keeps running statistics in %s. Each process updates its own from "
                "its own micro-batches, so evaluated and saved statistics differ from a run on one process. %s",
                layers[0] if len(layers) == 1 else f"{len(layers)} layers (first: {layers[0]})",
                f"Set track_running_stats=False in {join_names(of_rows, 3)}."
                if of_rows
                else "With layout.sync_batch_norm=true they agree.",
            )

    @property
    def shared(self) -> dict[str, Tensor]:
        """The buffers that are the same on every process."""
        return {name: buffer for name, buffer in self._model.named_buffers() if name not in self.local}

    @property
    def names_saved_by_rank_0(self) -> set[str]:
        """Names in a checkpoint of the local ones: all from one process, since they belong together."""
        return {f"model/{name}" for name in self.local} if self._process.world_size > 1 else set()

    @property
    def own(self) -> Mapping[str, Tensor]:
        """This process's local buffers, under names with its rank."""
        buffers = dict(self._model.named_buffers())
        if self._process.world_size == 1:
            return {}
        return {f"rank-{self._process.rank}/{name}": buffers[name] for name in sorted(self.local)}

    def copy_from_first(self) -> None:
        """Overwrite the local ones by those of the first process, which a checkpoint has; collective."""
        buffers = dict(self._model.named_buffers())
        for name in sorted(self.local) if self._process.world_size > 1 else ():
            dist.broadcast(buffers[name], 0)

    @contextmanager
    def restore_on_exit(self, chosen: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
        """A context that restores all buffers, or those chosen by name, on exit.

        One that has grown meanwhile is a cache, such as a table of positions, and is left as it is.
        """
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers() if chosen(name)}
        try:
            yield
        finally:
            for name, buffer in self._model.named_buffers():
                if name in before and buffer.shape == before[name].shape:
                    buffer.copy_(before[name])

    def restore_idle_on_exit(self) -> AbstractContextManager[None]:
        """The same for an idle pass, except for synchronised statistics, which include other processes' rows."""
        return self.restore_on_exit(lambda name: name not in self._shared_statistics)


@contextmanager
def restore_modes_on_exit(model: nn.Module) -> Iterator[None]:
    """A context that restores on exit which modules are in training and which in evaluation."""
    before = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _buffers_of(model: nn.Module, layers: Collection[str]) -> set[str]:
    return {f"{layer}.{name}" for layer in layers for name, _ in model.get_submodule(layer).named_buffers()}
