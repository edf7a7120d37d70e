"""The live display on a terminal: a bar with the newest step, and a table of the last evaluations, which stay.

No line is wider than the terminal: values are folded between each other, and the table has the columns that fit.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

_EVALUATIONS = 5  # the last of them are shown
_REFRESHES = 8  # a second
_BAR = 40  # characters at most
PATIENCE = 2.0  # seconds that an evaluation takes without a bar


class LiveDisplay:
    """What stands below the permanent lines of a run."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._step, self._values, self._clock = 0, list[str](), ""
        self._evaluating: tuple[int, int, int, float] | None = None  # step, rows done, of how many, and since when
        self._evaluations: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=_EVALUATIONS)
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=_REFRESHES,
            redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty(),
        )  # fmt: skip

    def start(self) -> None:
        """Begin to draw."""
        self._live.start()

    def stop(self) -> None:
        """Draw a last time, and leave that on the screen."""
        self._live.stop()

    def show_step(self, step: int, values: Sequence[str], clock: str) -> None:
        """Show a finished step: what it came to, and the time left."""
        self._step, self._values, self._clock = step, list(values), clock if step < self._total else ""

    def show_evaluating(self, step: int, done: int, total: int) -> None:
        """Show how far an evaluation is, in rows, once it has taken a while."""
        began = monotonic() if self._evaluating is None else self._evaluating[3]
        self._evaluating = step, done, total, began

    def show_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to the table of evaluations."""
        self._evaluating = None
        self._evaluations.append((step, dict(values)))

    def refresh(self) -> None:
        """Draw now."""
        self._live.refresh()

    def _render(self) -> RenderableType:
        width = self._console.width - 1  # some terminals wrap a line that fills them
        parts: list[RenderableType] = [Text(line) for line in format_table(list(self._evaluations), width)]
        if self._step:
            ends = f"{self._step}/{self._total}  {self._clock}".rstrip()
            parts.append(_draw_bar(self._console, self._step, self._total, ends, width))
        if (now := self._evaluating) is not None and monotonic() - now[3] > PATIENCE:
            step, done, total, _ = now
            ends = f"evaluating after step {step}: {done}/{total} rows"
            parts.append(_draw_bar(self._console, done, total, ends, width))
        if self._step:
            parts.append(Text(fold_values(self._values, width)))
        return Group(*parts)


def _draw_bar(console: Console, done: int, total: int, ends: str, width: int) -> Text:
    """A bar and what follows it, in one line of at most so many characters."""
    line = Text()
    for segment in console.render(ProgressBar(total, done, width=max(1, min(_BAR, width - len(ends) - 2)))):
        line.append(segment.text, segment.style)
    return line.append(f"  {ends}")


def format_table(evaluations: Sequence[tuple[int, Mapping[str, float]]], width: int) -> list[str]:
    """The lines of a table of evaluations with the columns that fit, the first values first.

    >>> for line in format_table([(50, {"loss": 0.5}), (100, {"loss": 0.25})], 60):
    ...     print(line)
    eval after step    loss
                 50  0.5000
                100  0.2500
    """
    if not evaluations:
        return []
    first = "eval after step"
    columns, room, left_out = list[str](), width - len(first), 0
    for name in table_columns(evaluations):
        needed = 2 + max(len(name), *(len(format_number(values, name)) for _, values in evaluations))
        if needed > room:
            left_out += 1
            continue
        columns.append(name)
        room -= needed
    more = f"  +{left_out}"
    widths = {
        name: max(len(name), *(len(format_number(values, name)) for _, values in evaluations)) for name in columns
    }
    header = first + "".join(f"  {name:>{widths[name]}}" for name in columns)
    header += more if left_out and len(more) <= room else ""
    return [
        header,
        *(
            f"{step:>{len(first)}}" + "".join(f"  {format_number(values, n):>{widths[n]}}" for n in columns)
            for step, values in evaluations
        ),
    ]


def table_columns(evaluations: Sequence[tuple[int, Mapping[str, float]]]) -> list[str]:
    """The names of what the newest evaluation has, in its order."""
    return list(evaluations[-1][1])


def format_number(values: Mapping[str, float], name: str) -> str:
    """A value of an evaluation, or a dash where it has none of that name."""
    return f"{values[name]:.4f}" if name in values else "–"


def fold_values(values: Sequence[str], width: int) -> str:
    """Values beside each other, in as many lines as they need.

    >>> print(fold_values(["loss 0.5", "accuracy 0.25", "lr 0.1"], 24))
    loss 0.5  accuracy 0.25
    lr 0.1
    """
    lines = [""]
    for value in values:
        joined = f"{lines[-1]}  {value}" if lines[-1] else value
        if len(joined) > width and lines[-1]:
            lines.append(value)
        else:
            lines[-1] = joined
    return "\n".join(lines)
