"""The console output of rank 0: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unisono.runtime.console import clean, discard_output
from unisono.runtime.text import format_count as format_count


@dataclass(frozen=True)
class Speed:
    """How fast a step was.

    Attributes:
        unit: Of `rate`, e.g. `tokens`.
        rate: Units per second over all processes.
        mfu: Model FLOP utilisation between 0 and 1; None if the device's peak rate is unknown.
        wait: Share of the time spent waiting for data, between 0 and 1.
        seconds: Per step.
        flops: Of the step over all processes; None if the task does not count them.
        memory: Peak bytes of rank 0 so far, on its accelerator if it has one.
    """

    unit: str
    rate: float
    mfu: float | None
    wait: float
    seconds: float
    flops: float | None = None
    memory: int | None = None


class RunConsole(Console):
    """A console whose reader may go away; rich itself would end the process without a word."""

    def on_broken_pipe(self) -> None:
        """Discard what is printed from now on."""
        self.quiet = True
        discard_output(sys.stdout)


class Progress:
    """The console of a run.

    Args:
        total: Steps in the run.
        every: Steps between lines if there is no terminal.
        shown: False for no output, as on ranks other than 0.
    """

    def __init__(self, total: int, every: int, shown: bool) -> None:
        self._total, self._every, self._shown = total, every, shown
        self._console = RunConsole(highlight=False, emoji=False, soft_wrap=True)
        self._live: Live | None = None
        self._smooth: float | None = None

    def __enter__(self) -> Progress:
        if self._shown and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Print a permanent line."""
        if self._shown:
            self._console.print(clean(line), markup=False)

    def step(self, step: int, loss: float, speed: Speed, unsaved_since: int | None = None) -> None:
        """Show a finished step; `step` counts from 1.

        `unsaved_since` is the step of the last checkpoint if saves have failed since then.
        """
        if not self._shown:
            return
        self._smooth = speed.seconds if self._smooth is None else 0.9 * self._smooth + 0.1 * speed.seconds
        mfu = "–" if speed.mfu is None else f"{100 * speed.mfu:.1f} %"
        left = _format_duration((self._total - step) * self._smooth)
        memory = "" if speed.memory is None else f"  memory {speed.memory / 1e9:.2f} GB"
        line = (
            f"step {step:>{len(str(self._total))}}/{self._total}  loss {loss:.4f}  {format_count(speed.rate)} "
            f"{speed.unit}/s  mfu {mfu}  data wait {100 * speed.wait:.1f} %{memory}  eta {left}"
        )
        if unsaved_since is not None:
            line += f"  unsaved since step {unsaved_since}"
        if self._live is not None and step < self._total:
            self._live.update(Text(line))
        elif self._live is not None:  # the line of the last step is permanent
            self._live.update(Text(""))
            self.say(line)
        elif step % self._every == 0 or step in (1, self._total):
            self.say(line)


class Stopwatch:
    """Measures the seconds of whole steps, and the part of them spent waiting for data."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context whose duration counts as waiting for data."""
        began = perf_counter()
        yield
        self._waited += perf_counter() - began

    def lap(self) -> tuple[float, float]:
        """Return the seconds since the last lap, and the share of them spent waiting for data."""
        now = perf_counter()
        seconds, share = now - self._last, self._waited / max(now - self._last, 1e-9)
        self._last, self._waited = now, 0.0
        return seconds, min(1.0, share)


def _format_duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
