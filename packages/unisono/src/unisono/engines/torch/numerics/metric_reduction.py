"""The two reductions of a step on the device: the counts before it, and everything it reports after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.observers import StepResult
from unisono.engines.rules import MetricSums
from unisono.task import expand_counts


class MetricReduction:
    """Sums over ranks, added up on the device in `dtype`: float64 where the device has it."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Each term's count in the whole global batch, as scalars on the device; collective."""
        own = rules.sum_counts(batches)
        counts = torch.tensor([*own.values()], dtype=self.dtype).to(self._device)
        if self._world_size > 1:
            dist.all_reduce(counts)
        return dict(zip(own, counts.unbind(), strict=True))

    def sums(self) -> MetricSums:
        """New, empty sums."""
        return MetricSums(self._vector)

    def reduce(
        self,
        sums: MetricSums,
        counts: Mapping[str, Tensor],
        squares: Tensor | None = None,
        votes: Sequence[float] = (),
        flags: Tensor | None = None,
    ) -> tuple[StepResult, list[float], list[float]]:
        """The result over all ranks, and the sums of votes and flags; collective. Waits for the device.

        Args:
            sums: of this rank.
            counts: of the loss's terms, over the whole global batch already.
            squares: this rank's part of the squared norm of the gradient, if there is one.
            votes: of this rank's observers.
            flags: more of this rank's numbers, on the device.
        """
        squares = torch.zeros((), device=self._device) if squares is None else squares
        ends = [self._vector(squares, *votes), *([] if flags is None else [flags.to(self.dtype)])]
        vector = torch.cat([*sums.vectors(), *ends])
        if self._world_size > 1:
            dist.all_reduce(vector)
        known = torch.stack([count.to(self._device) for count in expand_counts(counts, sums.terms).values()])
        numbers = self.read(torch.cat([vector, known]))
        first, last = len(vector) - sum(map(len, ends)), len(vector)
        result = sums.result(numbers[:first], numbers[last:], numbers[first])
        middle = first + 1 + len(votes)
        return result, numbers[first + 1 : middle], numbers[middle:last]

    def read(self, vector: Tensor) -> list[float]:
        """The numbers of a vector on the device; waits for it."""
        numbers: list[float] = vector.tolist()
        return numbers

    def _vector(self, *values: Tensor | float) -> Tensor:
        """Scalars as a vector on the device."""
        # A number is filled in on the device: copying it there would wait for the device.
        return torch.stack(
            [
                value.detach().to(self._device, self.dtype)
                if isinstance(value, Tensor)
                else torch.full((), float(value), dtype=self.dtype, device=self._device)
                for value in values
            ]
        )


def sum_over_ranks(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of tensors over all processes; collective."""
    vector = torch.cat([value.reshape(-1) for value in values.values()])
    dist.all_reduce(vector)
    parts = vector.split([value.numel() for value in values.values()])
    return {name: part.reshape(values[name].shape) for name, part in zip(values, parts, strict=True)}
