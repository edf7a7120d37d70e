"""State of rows that lives from step to step, by global micro-batch: kept, saved, and dealt out again on any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from unisono.config.batch_split import Split
from unisono.data.loading.loader import MicroBatch
from unisono.engines.state import Reader, Shard
from unisono.engines.torch import saved_tensors

Rows = Mapping[str, Tensor]


class Carry:
    """What a task carries along, for the micro-batches of one process.

    Args:
        split: of the global batch.
        rank: of this process.
        device: where it is kept.
    """

    def __init__(self, split: Split, rank: int, device: torch.device) -> None:
        self._split, self._rank, self._device = split, rank, device
        self._kept: dict[int, dict[str, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def of(self, micro: MicroBatch) -> Rows | None:
        """What the rows of a micro-batch carry, if a step has kept anything for them."""
        kept = self._kept.get(micro.number)
        return {name: rows[: micro.size] for name, rows in kept.items()} if kept else None

    def keep(self, made: Iterable[tuple[MicroBatch, Rows]]) -> None:
        """Keep what a finished step has made; rows that a short batch lacks keep what they have."""
        for micro, carry in made:
            kept = self._kept.setdefault(micro.number, {})
            for name, rows in carry.items():
                rows = rows.detach()
                beyond = kept[name][len(rows) :] if name in kept else rows[:0]
                kept[name] = torch.cat([rows, beyond]) if len(beyond) else rows

    def shards(self) -> Iterator[Shard]:
        """The pieces that this process has to save."""
        for number, carry in self._kept.items():
            first = number * self._split.micro_batch
            for name, rows in carry.items():
                shape = (self._split.global_batch, *rows.shape[1:])
                yield Shard(f"carry/{name}", shape, (first,) + (0,) * (rows.dim() - 1), rows.cpu())

    def load(self, reader: Reader) -> None:
        """Take over what was saved for the micro-batches of this process."""
        for full, shape in reader.shapes.items():
            if not full.startswith("carry/"):
                continue
            for number in self._split.micro_batches(self._rank):
                size = (self._split.micro_batch, *shape[1:])
                offset = (number * size[0],) + (0,) * (len(shape) - 1)
                if reader.covers(full, offset, size):  # else no step has reached these rows yet
                    rows = saved_tensors.read(reader, full, offset, size).to(self._device)
                    self._kept.setdefault(number, {})[full.removeprefix("carry/")] = rows
