"""Which checkpoints to keep: the newest, every n-th step, and the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unisono.config.schema.run import Checkpoint as Settings
from unisono.runtime.errors import ConfigError, nearest


@dataclass(frozen=True)
class FinishedCheckpoint:
    """Step and metrics of a finished checkpoint."""

    step: int
    metric: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep.

    Attributes:
        newest: number of newest checkpoints.
        every: also those whose step is a multiple of it.
        best: name of a metric whose best checkpoint is kept as well.
        largest: whether the largest value is the best one.
    """

    newest: int
    every: int | None = None
    best: str | None = None
    largest: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Retention:
        """The retention for the `checkpoint` group of a configuration."""
        best = settings.keep_best
        name, largest = (best.metric, best.mode == "max") if best else (None, False)
        return cls(settings.keep, settings.keep_every, name, largest)

    def find_removable(self, made: int, known: Iterable[FinishedCheckpoint]) -> list[int]:
        """Steps of the checkpoints to remove, now that the one of step `made` is finished; never that one.

        Later ones are kept: they belong to a history that the run left by resuming from an older checkpoint, and may
        be needed to find out why.

        >>> steps = (10, 20, 25, 30, 35, 40, 50)
        >>> Retention(2, every=10).find_removable(40, [FinishedCheckpoint(step) for step in steps])
        [25]
        """
        before = sorted((c for c in known if c.step <= made), key=lambda c: c.step)
        remain = {c.step for c in before[-self.newest :]} | {made}
        if self.every is not None:
            remain |= {c.step for c in before if c.step % self.every == 0}
        judged = [(value, c.step) for c in before if (value := self._value(c)) is not None]
        if judged:
            remain.add((max if self.largest else min)(judged)[1])
        return [c.step for c in before if c.step not in remain]

    def _value(self, checkpoint: FinishedCheckpoint) -> float | None:
        value = (checkpoint.metric or {}).get(self.best) if self.best else None
        return value if value is not None and math.isfinite(value) else None


def check_metric(settings: Settings, metrics: Iterable[str]) -> None:
    """Reject `keep_best` with a metric that evaluations do not have.

    Raises:
        ConfigError: with the nearest metric.
    """
    best, names = settings.keep_best, list(metrics)
    if best is not None and best.metric not in names:
        raise ConfigError(
            f"checkpoint.keep_best.metric={best.metric}: this task's evaluations have no such metric; "
            f"{nearest(best.metric, names)}"
        )
