"""State of rows kept from step to step, by global micro-batch: saved and redistributed on any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.protocol import EngineJob
from unisono.engines.state import ArrayShard, StateReader
from unisono.engines.torch.state import saved_tensors
from unisono.task import Batch, Context

Rows = Mapping[str, Tensor]


class RecurrentState:
    """The carry of a task, for the micro-batches of one process; empty where the task has none."""

    def __init__(self, job: EngineJob, device: torch.device) -> None:
        self._features, self._split, self._device = job.features, job.split, device
        self._rank = job.process.rank if job.rows_of_rank is None else job.rows_of_rank
        self._carry_by_number: dict[int, dict[str, Tensor]] = {}
        self._new: list[tuple[MicroBatch, Rows]] = []

    def __bool__(self) -> bool:
        return bool(self._carry_by_number or self._new)

    def attach_to(self, context: Context, micro: MicroBatch, batch: Batch) -> Context:
        """The context of a micro-batch, with the state of its rows after the previous step, or their initial state.

        Rows of idle micro-batches (which repeat other rows) and of evaluations always start from the initial state.
        """
        kept = self._carry_by_number.get(micro.number) if context.training and not micro.idle else None
        rows = (
            {name: rows[: micro.size] for name, rows in kept.items()} if kept else self._features.initial_carry(batch)
        )
        return context if rows is None else replace(context, carry=rows)

    def begin(self) -> None:
        """Begin a step; discards what an unfinished step left."""
        self._new = []

    def add(self, micro: MicroBatch, rows: Rows | None) -> None:
        """Keep a micro-batch's state for the next step."""
        if rows is not None and not micro.idle:
            self._new.append((micro, rows))

    def commit(self) -> None:
        """Store the state of the step's micro-batches; rows missing in a short batch keep theirs."""
        for micro, carry in self._new:
            kept = self._carry_by_number.setdefault(micro.number, {})
            for name, rows in carry.items():
                rows = rows.detach()
                beyond = kept[name][len(rows) :] if name in kept else rows[:0]
                kept[name] = torch.cat([rows, beyond]) if len(beyond) else rows
        self._new = []

    def shards(self) -> Iterator[ArrayShard]:
        """The pieces that this process saves."""
        for number, carry in self._carry_by_number.items():
            first = number * self._split.micro_batch
            for name, rows in carry.items():
                shape = (self._split.global_batch, *rows.shape[1:])
                yield ArrayShard(f"carry/{name}", shape, (first,) + (0,) * (rows.dim() - 1), rows.cpu())

    def load(self, reader: StateReader) -> None:
        """Load the saved state of this process's micro-batches."""
        for full, shape in reader.shapes.items():
            if not full.startswith("carry/"):
                continue
            for number in self._split.micro_batches(self._rank):
                size = (self._split.micro_batch, *shape[1:])
                offset = (number * size[0],) + (0,) * (len(shape) - 1)
                if reader.covers(full, offset, size):  # else no step has reached these rows yet
                    rows = saved_tensors.read_tensor(reader, full, offset, size).to(self._device)
                    self._carry_by_number.setdefault(number, {})[full.removeprefix("carry/")] = rows
