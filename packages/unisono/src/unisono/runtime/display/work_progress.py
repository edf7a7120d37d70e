"""Progress of long work before a run trains: a bar on a terminal, lines elsewhere, nothing for quick work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

from unisono.runtime.console import clean, say
from unisono.runtime.display.preparing import suspended
from unisono.runtime.text import format_count

ProgressCallback = Callable[[int, int], None]  # numbers of records and units since the last call
_MAX_SILENCE = 5.0  # seconds without a line


@contextmanager
def show_progress(
    what: object, total: int, unit: str = "units", records: str = "records", patience: float = 0.0
) -> Iterator[ProgressCallback]:
    """Show how far some work is, on stderr: a bar on a terminal; else a line for every tenth, or every five seconds.

    Args:
        what: The work, e.g. `tokenising`, or the folder that is written.
        total: Records there are.
        unit: What is counted besides records; empty for nothing.
        records: What records are, e.g. `documents`.
        patience: Seconds before anything is shown.
    """
    began, shown = monotonic(), 0.0
    counts = [0, 0]
    with ExitStack() as stack:
        bar: Any = None

        def amounts() -> str:
            more = f", {format_count(counts[1])} {unit}" if unit else ""
            return f"{format_count(counts[0])} of {format_count(total)} {records}{more}"

        def progress(more: int, units: int) -> None:
            nonlocal bar, shown
            before = 10 * counts[0] // max(1, total)
            counts[0], counts[1] = counts[0] + more, counts[1] + units
            now = monotonic()
            if now - began < patience:
                return
            if bar is None and sys.stderr.isatty():
                bar = stack.enter_context(_bar(clean(what), total))
            if bar is not None:
                bar(counts[0], amounts())
            elif 10 * counts[0] // max(1, total) > before or now - max(shown, began) > _MAX_SILENCE:
                shown = now
                say(f"{what}: {amounts()}", error=True)

        yield progress


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from unisono.runtime.display.run_console import RunConsole

    console = RunConsole(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
    with suspended(), Progress(*columns, console=console, transient=True) as bar:
        job = bar.add_task(what, total=total, rate="")
        yield lambda done, rate: bar.update(job, completed=done, rate=rate)
