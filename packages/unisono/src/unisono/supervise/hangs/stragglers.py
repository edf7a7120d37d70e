"""Reports ranks that are slower than the others by themselves; it never stops them.

A run is as fast as its slowest rank, and every rank's step takes the same time. So what counts is the time a rank
spends on its own data and compute, without waiting for others. On a GPU, compute happens while the process waits for
the device, which is invisible here.

A slow link costs no rank's own time: all ranks wait for it alike. So if no rank is slow by itself, and even the rank
that waits least waits much longer than before, communication is holding up all of them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from unisono.runtime.heartbeat import HeartbeatRecord

PHASES = ("data", "compute")
WINDOW = 20  # steps to average over
_WINDOWS, _MIN_WINDOWS = 64, 3  # windows that define the usual wait: at most, and at least
_COMMUNICATION = (-1, "communication")
_MIN_EXCESS = 0.025  # seconds per step; less would go unnoticed


class Stragglers:
    """Checks every window of steps; a rank is reported if it is slow in two consecutive windows.

    Args:
        factor: How many times slower than the median of the others.
    """

    def __init__(self, factor: float = 2.0) -> None:
        self._factor = factor
        self._window_start: dict[int, HeartbeatRecord] = {}
        self._slow: set[tuple[int, str]] = set()
        self._reported: set[tuple[int, str]] = set()
        # In recent windows, the wait per step of the rank that waits least.
        self._waits: deque[float] = deque(maxlen=_WINDOWS)

    def update(self, records: Mapping[int, HeartbeatRecord]) -> list[str]:
        """Return a sentence for each rank of this node that has become a straggler, or for slow communication."""
        steps_done = min((record.steps_done for record in records.values()), default=-1)
        if steps_done < 0 or len(records) < 2:
            return []
        start = self._window_start
        begun = min((record.steps_done for record in start.values()), default=0)
        if start.keys() != records.keys() or begun > steps_done:
            self._window_start = dict(records)
            return []
        if steps_done < begun + WINDOW:
            return []
        self._window_start = dict(records)
        lines, slow = [], set()
        window = f"steps {steps_done - WINDOW + 1} to {steps_done}"
        for phase in PHASES:
            means = _mean_seconds(phase, start, records)
            for rank, mean in means.items():
                others = [other_mean for other, other_mean in means.items() if other != rank]
                usual = statistics.median(others) if others else mean
                if mean < self._factor * usual or mean - usual < _MIN_EXCESS:
                    continue
                slow.add((rank, phase))
                if (rank, phase) in self._slow and (rank, phase) not in self._reported:
                    self._reported.add((rank, phase))
                    lines.append(
                        f"rank {rank} holds up the others: {phase} takes {mean:.3g} s per step there and {usual:.3g} s "
                        f"on the others ({mean / max(usual, 1e-9):.1f} times as long), {window}"
                    )
        wait = min(_mean_seconds("wait", start, records).values(), default=0.0)
        before = statistics.median(self._waits) if len(self._waits) >= _MIN_WINDOWS else math.inf
        if not slow and wait >= self._factor * before and wait - before >= _MIN_EXCESS:
            slow.add(_COMMUNICATION)
            if _COMMUNICATION in self._slow and _COMMUNICATION not in self._reported:
                self._reported.add(_COMMUNICATION)
                lines.append(
                    f"communication holds up all ranks: each waits at least {wait:.3g} s per step, up from "
                    f"{before:.3g} s, and no rank is slow by itself, {window}"
                )
        else:  # slow windows do not count as usual
            self._waits.append(wait)
        self._slow = slow
        self._reported &= slow
        return lines


def _mean_seconds(
    phase: str, start: Mapping[int, HeartbeatRecord], records: Mapping[int, HeartbeatRecord]
) -> dict[int, float]:
    """Return the seconds per step that each rank spent in a phase."""
    return {
        rank: (record.totals[phase] - start[rank].totals[phase]) / 1e9 / (record.steps_done - start[rank].steps_done)
        for rank, record in records.items()
        if record.steps_done > start[rank].steps_done
    }
