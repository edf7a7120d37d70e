"""The console output of rank 0: live on a terminal (`live`) or a notebook (`notebook_progress`), else plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from unisono.observe.live import PATIENCE, LiveDisplay
from unisono.observe.notebook_progress import NotebookProgress
from unisono.runtime.console import clean
from unisono.runtime.display import notebook
from unisono.runtime.display.run_console import RunConsole
from unisono.runtime.display.work_progress import show_progress
from unisono.runtime.text import fold
from unisono.runtime.text import format_count as format_count

FOLLOWED_VARIABLE = (
    "UNISONO_FOLLOWED"  # set for processes whose steps somebody else shows: the notebook that started them
)


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


class Progress:
    """The console of a run.

    Args:
        total: Steps in the run.
        every: Steps between lines if there is no terminal.
        shown: False for no output, as on ranks other than 0.
        plain: Lines on a terminal, too.
    """

    def __init__(self, total: int, every: int, shown: bool, plain: bool = False) -> None:
        self._total, self._every, self._shown = total, every, shown
        self._console = RunConsole(highlight=False, emoji=False, soft_wrap=True, force_jupyter=False)
        self._live: LiveDisplay | NotebookProgress | None = None
        if shown and not plain and notebook.in_notebook():
            self._live = NotebookProgress(total)
        elif shown and not plain and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = LiveDisplay(self._console, total)
        self._is_followed = FOLLOWED_VARIABLE in os.environ and self._live is None
        self._smooth: float | None = None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a permanent line, on a live terminal folded between words."""
        if self._shown:
            text = clean(line)
            folded = fold(text, self._console.width) if isinstance(self._live, LiveDisplay) else text
            self._console.print(folded, markup=False)

    def step(
        self,
        step: int,
        loss: float,
        speed: Speed,
        unsaved_since: int | None = None,
        values: Mapping[str, float] | None = None,
    ) -> None:
        """Show a finished step.

        Args:
            step: From 1.
            loss: Of the step.
            speed: Of the step.
            unsaved_since: The step of the last checkpoint if saves have failed since then.
            values: What else a live display shows: terms of the loss, metrics, the learning rate.
        """
        if not self._shown or self._is_followed:
            return
        self._smooth = speed.seconds if self._smooth is None else 0.9 * self._smooth + 0.1 * speed.seconds
        left = format_time_left((self._total - step) * self._smooth)
        rate = f"{format_count(speed.rate)} {speed.unit}/s"
        facts = [] if speed.mfu is None else [f"mfu {100 * speed.mfu:.1f} %"]
        facts.append(f"data wait {100 * speed.wait:.1f} %")
        facts += [] if speed.memory is None else [f"memory {speed.memory / 1e9:.2f} GB"]
        unsaved = [] if unsaved_since is None else [f"unsaved since step {unsaved_since}"]
        if self._live is not None:
            numbers = [f"{name} {value:.4g}" for name, value in (values or {}).items()]
            self._live.show_step(step, [f"loss {loss:.4f}", *numbers, rate, *facts, *unsaved], left)
        elif step % self._every == 0 or step in (1, self._total):
            place = f"step {step:>{len(str(self._total))}}/{self._total}"
            self.say("  ".join([place, f"loss {loss:.4f}", rate, *facts, left, *unsaved]))

    def evaluating(self, step: int, done: int, total: int) -> None:
        """Show, live, how far an evaluation after `step` steps is, in rows."""
        if self._live is not None:
            self._live.show_evaluating(step, done, total)

    def evaluation(self, step: int, values: Mapping[str, float], rows: int, seconds: float) -> None:
        """Show a finished evaluation after `step` steps, of so many rows."""
        if self._is_followed:
            return
        if self._live is not None:
            self._live.show_evaluation(step, values)
            return
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.say(f"eval after step {step}: {numbers}  ({rows} held-out row{'s' * (rows != 1)}, {seconds:.1f} s)")


@contextmanager
def show_evaluation(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how far an evaluation without a run is; elsewhere, nothing.

    Args:
        total: Rows with one set of weights.
        shown: False on ranks other than 0.

    Returns:
        What is given the rows that are done, and those in all.
    """
    if not (shown and sys.stderr.isatty()) or notebook.is_below_cell():
        yield lambda done, total: None
        return
    with show_progress("evaluating", total, unit="", records="rows", patience=PATIENCE) as more:
        before = 0

        def report(done: int, total: int) -> None:
            nonlocal before
            more(done - before, 0)
            before = done

        yield report


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


def format_time_left(seconds: float) -> str:
    """What a run still takes.

    >>> format_time_left(75), format_time_left(3700)
    ('eta 1:15', 'eta 1:01:40')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"eta {hours}:{minute:02d}:{second:02d}" if hours else f"eta {minute}:{second:02d}"
