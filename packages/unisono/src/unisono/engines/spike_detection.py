"""Skips an update if its loss or gradient is far from those of the previous steps.

A step is compared with the median of the history plus a multiple of its deviation, which is 1.4826 times the median
absolute deviation, i.e. the standard deviation for normal numbers (Hampel, "The influence curve and its role in robust
estimation", 1974). Both are robust, so spikes are added to the history like any other step: a few of them hardly move
the limit, and after a permanent change of level, steps pass once half of the history is at the new level. OLMo-core
uses mean and standard deviation instead, which a spike raises for as long as it stays in the history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from unisono.config.schema.optimizers import SkipSpikes
from unisono.engines.observers import Observer, StepResult, StepVerdict
from unisono.engines.state import ArrayShard, StateReader
from unisono.runtime.errors import SpikeError

_PREFIX = "spikes/"  # of the names in a checkpoint
_MIN_DEVIATION = 1e-2  # of the median, so that a small change after a history of equal numbers is not a spike


def spike_limit(history: Sequence[float], sigma: float) -> float:
    """The largest number that is not a spike.

    >>> round(spike_limit([1.0, 1.1, 0.9, 1.0, 50.0], sigma=6), 2)
    1.89
    """
    middle = median(history)
    largest = middle + sigma * max(
        1.4826 * median(abs(value - middle) for value in history), _MIN_DEVIATION * abs(middle)
    )
    # Rounded so that an engine that compares in 32 bits on its device uses the same limit.
    return float(np.float32(largest))


class SpikeDetection(Observer):
    """Keeps the history of a run and judges each step.

    It only uses results of the step's reduction, so all ranks have the same history and reach the same verdict.

    Args:
        config: None to accept every step.
    """

    def __init__(self, config: SkipSpikes | None) -> None:
        self._config = config
        self._history: dict[str, deque[float]] = {}
        if config is not None:
            self._history = {kind: deque(maxlen=config.history) for kind in config.of}
        self._consecutive_spikes = 0
        self._step = 0

    def limits(self) -> dict[str, float]:
        """The limits for the next step, by quantity; none until the history is full."""
        full = {kind: history for kind, history in self._history.items() if len(history) == history.maxlen}
        return {kind: spike_limit(history, self._config.sigma) for kind, history in full.items() if self._config}

    def on_step_begin(self, step: int, batches: Sequence[object]) -> None:
        """See `Observer`."""
        self._step = step

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        """Skip the update if the step is a spike; reject the step if there are too many in a row."""
        if self._config is None:
            return None
        values = {kind: getattr(result, kind) for kind in self._history}
        limits = {kind: most for kind, most in self.limits().items() if values[kind] > most}
        reason = " and ".join(f"{kind} {values[kind]:.4g} is over {most:.4g}" for kind, most in limits.items())
        for kind, history in self._history.items():
            history.append(values[kind])
        self._consecutive_spikes = self._consecutive_spikes + 1 if reason else 0
        if self._consecutive_spikes < self._config.in_a_row:
            return StepVerdict(skip=reason)
        return StepVerdict(
            SpikeError(
                f"step {self._step + 1}: {reason}, as in the {self._consecutive_spikes - 1} steps before, whose "
                "updates were skipped: the run has diverged. Resume from an older checkpoint with a smaller optim.lr, "
                "look at the rows (`skipped_rows` in events.jsonl), or raise optim.skip_spikes.sigma or "
                "optim.skip_spikes.in_a_row"
            )
        )

    def shards(self) -> list[ArrayShard]:
        """The history, for one process to save; nothing if spike detection is off."""
        if self._config is None:
            return []
        saved = {kind: np.array(values, np.float64) for kind, values in self._history.items()}
        saved["in_a_row"] = np.array([self._consecutive_spikes], np.float64)
        return [ArrayShard(f"{_PREFIX}{kind}", values.shape, (0,), values) for kind, values in saved.items()]

    def load(self, reader: StateReader) -> None:
        """Load a saved history; without one, start with an empty one."""

        def read(kind: str) -> list[float]:
            name = f"{_PREFIX}{kind}"
            found: list[float] = reader.read(name, (0,), reader.shapes[name]).tolist() if name in reader.shapes else []
            return found

        self._consecutive_spikes = int(sum(read("in_a_row")))
        for kind, history in self._history.items():
            history.clear()
            history.extend(read(kind))
