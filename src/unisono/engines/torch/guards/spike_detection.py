"""Whether an update is left out because its loss or its gradient is far from those of the steps before.

A step is held against the median of the history plus a multiple of its deviation, both robust: the deviation is 1.4826
times the median absolute deviation, which is the standard deviation of normal numbers (Hampel, "The influence curve
and its role in robust estimation", 1974). So spikes go into the history like any step: some of them do not move the
limit, and a run whose level has changed for good is let through once half of the history has it. OLMo-core has such a
switch with mean and standard deviation, which a spike in the history raises for as long as it stays there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from unisono.config.schema.optimizers import SkipSpikes
from unisono.engines.protocol import StepResult
from unisono.engines.state import Reader, Shard
from unisono.runtime.communicator import Group
from unisono.runtime.errors import SpikeError

_LEAST = 1e-2  # of the median: a history of equal numbers makes no spike of the next digit


def limit(history: Sequence[float], sigma: float) -> float:
    """The largest number that is no spike.

    >>> round(limit([1.0, 1.1, 0.9, 1.0, 50.0], sigma=6), 2)
    1.89
    """
    middle = median(history)
    return middle + sigma * max(1.4826 * median(abs(value - middle) for value in history), _LEAST * abs(middle))


class Spikes:
    """The history of a run, and its judgement of the next step.

    Args:
        config: None to judge nothing.
        group: all processes; they agree on every judgement.
    """

    def __init__(self, config: SkipSpikes | None, group: Group) -> None:
        self._config, self._group = config, group
        kinds = config.of if config else []
        self._seen: dict[str, deque[float]] = {kind: deque(maxlen=config.history) for kind in kinds if config}
        self._in_a_row = 0

    def limits(self) -> dict[str, float]:
        """What the next step is held against, by what is looked at; nothing before there is a whole history."""
        full = {kind: seen for kind, seen in self._seen.items() if len(seen) == seen.maxlen}
        return {kind: limit(seen, self._config.sigma) for kind, seen in full.items() if self._config}

    def judged(self, result: StepResult, step: int, made: bool | None = None) -> StepResult:
        """The result of a step, and in it why its update is to be left out, if it is; collective.

        Args:
            result: of the step, finite.
            step: updates made or left out before this one.
            made: whether the update was made, where that is decided by the limits already.

        Raises:
            SpikeError: on every rank, if too many in a row were to be left out.
        """
        if self._config is None:
            return result
        limits = self.limits()
        values = {kind: getattr(result, kind) for kind in self._seen}
        over = {kind: most for kind, most in limits.items() if values[kind] > most}
        if made is not None:  # the last digit of a number may not be the one that was held against its limit
            over = {} if made else over or limits
        reasons = [f"{kind} {values[kind]:.4g} is over {most:.4g}" for kind, most in over.items()]
        for kind, seen in self._seen.items():
            seen.append(values[kind])
        # The numbers are the same on every rank, or should be; a rank that left its update out alone would be lost.
        told = self._group.gather(" and ".join(reasons), "whether the update is left out")
        why = next(filter(None, told), "")
        self._in_a_row = self._in_a_row + 1 if why else 0
        if self._in_a_row >= self._config.in_a_row:
            raise SpikeError(
                f"step {step + 1}: {why}, as in the {self._in_a_row - 1} steps before, whose updates were left out. "
                "The run has left its course. Go on from an older checkpoint with a smaller optim.lr, look at the rows "
                "(`skipped_rows` in events.jsonl), or raise optim.skip_spikes.sigma or optim.skip_spikes.in_a_row"
            )
        return replace(result, skipped=why)

    def shards(self, first: bool) -> Iterator[Shard]:
        """The pieces to save, all of them by the first process: everyone has the same."""
        if self._config is None or not first:
            return
        arrays = {kind: list(seen) for kind, seen in self._seen.items()} | {"in_a_row": [float(self._in_a_row)]}
        for name, values in arrays.items():
            yield Shard(f"spikes/{name}", (len(values),), (0,), np.array(values, dtype=np.float64))

    def load(self, reader: Reader) -> None:
        """Take over what was saved; a run that did not look at spikes before begins with an empty history."""
        saved = {
            name.removeprefix("spikes/"): reader.read(name, (0,), shape).tolist()
            for name, shape in reader.shapes.items()
            if name.startswith("spikes/")
        }
        (self._in_a_row,) = map(int, saved.get("in_a_row", [0]))
        for kind, seen in self._seen.items():
            seen.clear()
            seen.extend(saved.get(kind, []))
