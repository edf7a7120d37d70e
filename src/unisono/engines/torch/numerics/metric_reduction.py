"""Everything a step reports, added up on the device and over ranks in one reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.data.loading.loader import MicroBatch
from unisono.engines.protocol import StepResult
from unisono.runtime.errors import ConfigError
from unisono.task import Loss

Names = list[list[str]]  # of terms, metrics and work


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
        self._weights: dict[str, float] = {}
        self.names: Names | None = None
        self.without_gradient: list[int] = []
        self.recompiled = 0
        self.void = False
        self.short: str | None = None

    def add_nothing(self, names: Names | None, short: str) -> None:
        """Have zeros under all names, and in `short` what the allocator said of a step that was not finished."""
        assert names is not None
        terms, metrics, work = names
        self.short = short
        zeros = partial(torch.zeros, dtype=self._wide, device=self._device)
        self._terms, self._metrics = {name: zeros(1) for name in terms}, {name: zeros(2) for name in metrics}
        self._work = dict.fromkeys(work, 0.0)

    def add(self, micro: MicroBatch, loss: Loss) -> None:
        """Add what one micro-batch came to.

        Raises:
            ConfigError: if its names or weights are not those of the others.
        """
        names = [sorted(loss.sums), sorted(loss.metrics), list(micro.work)]
        weights = {name: float(loss.weights.get(name, 1.0)) for name in names[0]}
        if self.names not in (None, names) or self._weights not in ({}, weights):
            raise ConfigError(
                f"micro-batch {micro.number}: terms, metrics, work or weights are not those of the micro-batches "
                f"before ({self.names}, {self._weights}; here {names}, {weights}). They may not depend on the rows; a "
                "term that counts nothing has sum and count zero."
            )
        self.names, self._weights = names, weights
        share = 0.0 if micro.idle else 1.0
        for name, term in loss.sums.items():
            self._terms[name] = self._terms.get(name, 0.0) + self._numbers(term, share=share)
        for name, pair in loss.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + self._numbers(*pair, share=share)
        for name, amount in micro.work.items():
            self._work[name] = self._work.get(name, 0.0) + amount

    def reduce(
        self,
        counts: Mapping[str, Tensor],
        world_size: int,
        squares: Tensor | None,
        whole: bool,
        alive: Tensor | None = None,
        recompiled: int = 0,
    ) -> StepResult:
        """The result over all ranks; whether any of them has not finished is left in `void`. Waits for the device.

        Args:
            counts: of the loss's terms, over the whole global batch already.
            world_size: number of ranks.
            squares: this rank's part of the squared norm of the gradient; None where there is no gradient.
            whole: whether that part is the whole gradient's, on every rank, and not to be added up.
            alive: for every parameter, whether this rank's part of its gradient has an element that is not zero; those
                of which no rank has any are left in `without_gradient`.
            recompiled: how often this rank compiled something again; the sum over ranks is left in `recompiled`.
        """
        alive = torch.zeros(0, dtype=self._wide, device=self._device) if alive is None else alive.to(self._wide)
        squares = torch.zeros((), dtype=self._wide, device=self._device) if squares is None else squares
        # Finite on one rank and not on another must still be one decision, so the question is reduced too.
        bad = (~torch.isfinite(squares)).to(self._wide)
        terms, metrics, work = sorted(self._terms), sorted(self._metrics), list(self._work)
        amounts = torch.tensor([self._work[name] for name in work], dtype=self._wide).to(self._device)
        again, none = torch.full_like(bad, recompiled), torch.full_like(bad, self.short is not None)
        parts = [torch.stack([bad, torch.zeros_like(squares) if whole else squares, again, none])]
        parts += [self._terms[name] for name in terms] + [self._metrics[name] for name in metrics] + [amounts, alive]
        vector = torch.cat(parts)
        if world_size > 1:
            dist.all_reduce(vector)
        known = torch.stack([squares, *(counts[name].to(self._device) for name in terms)])
        bad_ranks, summed, all_again, without, *rest = torch.cat([vector, known]).tolist()
        own, *counted = rest[-len(known) :]
        flags = rest[len(rest) - len(known) - len(alive) : len(rest) - len(known)]
        self.without_gradient = [number for number, flag in enumerate(flags) if flag == 0]
        self.recompiled, self.void = round(all_again), bool(without)
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
        # A number is filled in on the device: copying it there would wait for the device.
        return torch.stack(
            [
                value.detach().to(self._device, self._wide)
                if isinstance(value, Tensor)
                else torch.full((), float(value), dtype=self._wide, device=self._device)
                for value in values
            ]
        )


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0


def count(batches: Sequence[MicroBatch], world_size: int, device: torch.device, wide: torch.dtype) -> dict[str, Tensor]:
    """What each term counts in the whole global batch, before anything is computed; scalars on the device.

    Raises:
        ConfigError: for terms that only some micro-batches have, and for counts that are no counts.
    """
    names = sorted(batches[0].counts)
    for micro in batches:
        if sorted(micro.counts) != names or not all(0 <= n < math.inf for n in micro.counts.values()):
            raise ConfigError(
                f"counts() returned {micro.counts} for rows {micro.rows.tolist()[:8]}; every batch must count the "
                f"terms {names}, none below zero"
            )
    counts = torch.tensor([sum(micro.counts[name] for micro in batches) for name in names], dtype=wide).to(device)
    if world_size > 1:
        dist.all_reduce(counts)
    return dict(zip(names, counts.unbind(), strict=True))


def over_ranks(added: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of tensors over all processes; collective."""
    vector = torch.cat([value.reshape(-1) for value in added.values()])
    dist.all_reduce(vector)
    parts = vector.split([value.numel() for value in added.values()])
    return {name: part.reshape(added[name].shape) for name, part in zip(added, parts, strict=True)}
