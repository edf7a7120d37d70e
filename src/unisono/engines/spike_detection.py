"""Skips an update if its loss or gradient is far from those of the previous steps.

A step is compared with the median of the history plus a multiple of its deviation, both robust: the deviation is 1.4826
times the median absolute deviation, which is the standard deviation of normal numbers (Hampel, "The influence curve
and its role in robust estimation", 1974). So spikes go into the history like any step: some of them do not move the
limit, and a run whose level has changed for good is let through once half of the history has it. OLMo-core has such a
switch with mean and standard deviation, which a spike in the history raises for as long as it stays there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from unisono.config.schema.optimizers import SkipSpikes
from unisono.engines.observers import Observer, StepVerdict
from unisono.engines.protocol import StepResult
from unisono.runtime.errors import SpikeError

_MIN_DEVIATION = 1e-2  # of the median: in a history of equal numbers, a small change is no spike


def spike_limit(history: Sequence[float], sigma: float) -> float:
    """The largest number that is no spike.

    >>> round(limit([1.0, 1.1, 0.9, 1.0, 50.0], sigma=6), 2)
    1.89
    """
    middle = median(history)
    largest = middle + sigma * max(
        1.4826 * median(abs(value - middle) for value in history), _MIN_DEVIATION * abs(middle)
    )
    # An engine that decides on its device compares the same number, even where it has 32 bits only.
    return float(np.float32(largest))


class SpikeDetection(Observer):
    """The history of a run, and its verdict on the next step.

    What it looks at came out of the step's reduction, so all ranks have the same history and give the same verdict.

    Args:
        config: None to let every step through.
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
        """Skip the update if the step is a spike; refuse the step if there are too many in a row."""
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

    def state(self) -> dict[str, list[float]]:
        """The state to save, by name; empty if spike detection is off."""
        if self._config is None:
            return {}
        return {kind: list(history) for kind, history in self._history.items()} | {
            "in_a_row": [float(self._consecutive_spikes)]
        }

    def load(self, saved: Mapping[str, Sequence[float]]) -> None:
        """Load a saved state; without one, begin with an empty history."""
        self._consecutive_spikes = int(saved.get("in_a_row", [0])[0])
        for kind, history in self._history.items():
            history.clear()
            history.extend(saved.get(kind, []))
