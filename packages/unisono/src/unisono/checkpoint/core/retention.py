"""Which checkpoints to keep: the newest, every n-th step, and the best few by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.config.schema.run import Checkpoint as Settings


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep.

    Attributes:
        newest: number of newest checkpoints.
        every: also those whose step is a multiple of it.
        best: name of a metric whose best checkpoints are kept as well.
        largest: whether the largest value is the best one.
        best_count: how many of the best.
    """

    newest: int
    every: int | None = None
    best: str | None = None
    largest: bool = False
    best_count: int = 1

    @classmethod
    def from_settings(cls, settings: Settings) -> Retention:
        """The retention for the `checkpoint` group of a configuration."""
        best = settings.keep_best
        chosen = (best.metric, best.mode == "max", best.count) if best else ()
        return cls(settings.keep, settings.keep_every, *chosen)

    def find_removable(self, made: int, metrics: Mapping[int, Mapping[str, float] | None]) -> list[int]:
        """Steps of the checkpoints to remove, now that the one of step `made` is finished; never that one.

        Later ones are kept: they belong to a history that the run left by resuming from an older checkpoint, and may
        be needed to find out why.

        Args:
            made: a step.
            metrics: of each finished checkpoint, by its step.

        >>> Retention(2, every=10).find_removable(40, dict.fromkeys((10, 20, 25, 30, 35, 40, 50)))
        [25]
        """
        before = sorted(step for step in metrics if step <= made)
        remain = {*before[-self.newest :], made}
        if self.every is not None:
            remain |= {step for step in before if step % self.every == 0}
        values = [((metrics[step] or {}).get(self.best or ""), step) for step in before]
        judged = [(value, step) for value, step in values if value is not None and math.isfinite(value)]
        remain |= {step for _, step in sorted(judged, reverse=self.largest)[: self.best_count]}
        return [step for step in before if step not in remain]
