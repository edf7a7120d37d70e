"""A model's buffers: those that every process has of its own, and passes that leave all of them as they were."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.runtime.communicator import Place

log = logging.getLogger(__name__)

Mark = list[tuple[Tensor, int]]  # every buffer, and how often it was written


class Buffers:
    """The buffers of a model that may be one of several copies.

    Running statistics of batch normalisation are those of the rows that a process computed. Such buffers are `local`:
    guards let them differ, evaluation takes those of the first process, and a checkpoint has the first process's as the
    model's and everyone's beside them, so that as many processes can go on bit for bit. Statistics that processes make
    together are like any other buffer.

    Args:
        model: whose buffers they are, before it is wrapped.
        place: of this process.
        synchronised: names of the layers whose statistics are those of all processes.
    """

    def __init__(self, model: nn.Module, place: Place, synchronised: Collection[str] = ()) -> None:
        self._model, self._place = model, place
        self._undone: Counter[str] = Counter()  # writes that are no change: what was written was put back
        together = [name for name in synchronised if _has_running_statistics(model.get_submodule(name))]
        self._together = {f"{name}.{buffer}" for name in together for buffer, _ in _of(model, name)}
        layers = [name for name, module in model.named_modules() if _has_running_statistics(module)]
        layers = [name for name in layers if name not in synchronised]
        self.local = {f"{name}.{buffer}" for name in layers for buffer, _ in _of(model, name)}
        if layers and place.world_size > 1:
            log.warning(
                "%d batch normalisation layers keep running statistics (first: %s). Each process updates its own from "
                "its own micro-batches; those that are evaluated and saved are not those of a run on one process. With "
                "layout.sync_batch_norm=true they are.",
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

    def mark(self) -> Mark:
        """What `untouched` compares with; no copy."""
        return [(buffer, self._writes(name, buffer)) for name, buffer in self._model.named_buffers()]

    def untouched(self, mark: Mark) -> bool:
        """Whether every buffer is what it was when this mark was made, or has been put back to it."""
        now = self.mark()
        return len(now) == len(mark) and all(
            mine is theirs and writes == before for (mine, writes), (theirs, before) in zip(now, mark, strict=True)
        )

    def _writes(self, name: str, buffer: Tensor) -> int:
        return buffer._version - self._undone[name]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put all of them back to what they were, after a pass that does not count."""
        with self._put_back(lambda name: True):
            yield

    @contextmanager
    def restored_but_shared(self) -> Iterator[None]:
        """The same, after a pass whose own rows do not count, but for statistics of the rows of other processes."""
        with self._put_back(lambda name: name not in self._together):
            yield

    @contextmanager
    def _put_back(self, chosen: Callable[[str], bool]) -> Iterator[None]:
        kept = {name: buffer.clone() for name, buffer in self._model.named_buffers() if chosen(name)}
        before = {name: (buffer, self._writes(name, buffer)) for name, buffer in self._model.named_buffers()}
        try:
            yield
        finally:
            for name, buffer in self._model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])
                    same, writes = before[name]
                    if buffer is same:
                        self._undone[name] = buffer._version - writes


def _of(model: nn.Module, name: str) -> list[tuple[str, Tensor]]:
    return list(model.get_submodule(name).named_buffers())


def _has_running_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats
