"""Everything a step reports, added up on the device and over ranks in one reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.data.loader import MicroBatch
from unisono.engines.base import StepResult
from unisono.task import Loss


class Sums:
    """Sums over this process's micro-batches; idle ones add nothing but their names.

    Args:
        device: where they are added up.
        wide: dtype in which they are, float64 where the device has it.
    """

    def __init__(self, device: torch.device, wide: torch.dtype) -> None:
        self._device, self._wide = device, wide
        self._terms: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}  # (sum, count)
        self._work: dict[str, float] = {}
        self._weights: Mapping[str, float] = {}

    def add(self, micro: MicroBatch, loss: Loss) -> None:
        """Add what one micro-batch came to."""
        share = 0.0 if micro.idle else 1.0
        for name, term in loss.sums.items():
            self._terms[name] = self._terms.get(name, 0.0) + self._numbers(term, share=share)
        for name, pair in loss.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + self._numbers(*pair, share=share)
        for name, amount in micro.work.items():
            self._work[name] = self._work.get(name, 0.0) + amount
        self._weights = loss.weights

    def reduce(self, counts: Mapping[str, Tensor], world_size: int, squares: Tensor | None, whole: bool) -> StepResult:
        """The result over all ranks. This is the step's one wait for the device.

        Args:
            counts: of the loss's terms, over the whole global batch already.
            world_size: number of ranks.
            squares: this rank's part of the squared norm of the gradient; None where there is no gradient.
            whole: whether that part is the whole gradient's, on every rank, and not to be added up.
        """
        squares = torch.zeros((), dtype=self._wide, device=self._device) if squares is None else squares
        # Finite on one rank and not on another must still be one decision, so the question is reduced too.
        bad = (~torch.isfinite(squares)).to(self._wide)
        terms, metrics, work = sorted(self._terms), sorted(self._metrics), sorted(self._work)
        amounts = torch.tensor([self._work[name] for name in work], dtype=self._wide).to(self._device)
        parts = [torch.stack([bad, torch.zeros_like(squares) if whole else squares])]
        parts += [self._terms[name] for name in terms] + [self._metrics[name] for name in metrics] + [amounts]
        vector = torch.cat(parts)
        if world_size > 1:
            dist.all_reduce(vector)
        known = torch.stack([squares, *(counts[name].to(self._device) for name in terms)])
        bad_ranks, summed, *rest = torch.cat([vector, known]).tolist()
        own, *counted = rest[-len(known) :]
        values = iter(rest)
        means = {name: _ratio(next(values), count) for name, count in zip(terms, counted, strict=True)}
        return StepResult(
            loss=sum(self._weights.get(name, 1.0) * mean for name, mean in means.items()),
            terms=means,
            metrics={name: _ratio(next(values), next(values)) for name in metrics},
            work={name: next(values) for name in work},
            grad_norm=math.nan if bad_ranks else math.sqrt(own if whole else summed),
        )

    def _numbers(self, *values: Tensor | float, share: float) -> Tensor:
        """Scalars as a vector on the device; zeros where they have no share, whatever they are."""
        if not share:
            return torch.zeros(len(values), dtype=self._wide, device=self._device)
        return torch.stack([torch.as_tensor(value).detach().to(self._device, self._wide) for value in values])


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0


def count(batches: Sequence[MicroBatch], world_size: int, device: torch.device, wide: torch.dtype) -> dict[str, Tensor]:
    """What each term counts in the whole global batch, before anything is computed; scalars on the device."""
    names = sorted(batches[0].counts)
    counts = torch.tensor([sum(micro.counts[name] for micro in batches) for name in names], dtype=wide).to(device)
    if world_size > 1:
        dist.all_reduce(counts)
    return dict(zip(names, counts.unbind(), strict=True))
