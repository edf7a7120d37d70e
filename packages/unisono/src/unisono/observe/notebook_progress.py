"""The bar of a run below a cell of a notebook: one output that is updated in place, as HTML or as text.

It needs nothing but IPython's display, which every notebook has.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from time import monotonic

from unisono.observe.live import PATIENCE, format_number, format_table, table_columns
from unisono.runtime.console import clean
from unisono.runtime.display.notebook import LiveOutput

_EVALUATIONS = 5  # the last of them are shown
_INTERVAL = 0.25  # seconds between two updates
_WIDTH = 100  # characters of the text


class NotebookProgress:
    """What is shown of a run below the cell that trains it; as `unisono.observe.live.LiveDisplay`, on a notebook."""

    def __init__(self, total: int) -> None:
        self._total, self._step, self._values, self._clock = total, 0, list[str](), ""
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._evaluating, self._began = "", 0.0  # in words, and when it began
        self._output: LiveOutput | None = None
        self._shown_at = 0.0

    def start(self) -> None:
        """Begin; nothing is shown before there is something to show."""

    def stop(self) -> None:
        """Show how it ended."""
        self.refresh()

    def show_step(self, step: int, values: Sequence[str], clock: str) -> None:
        """Show a finished step: what it came to, and the time left."""
        self._step, self._values, self._clock = step, list(values), clock if step < self._total else ""
        if monotonic() - self._shown_at > _INTERVAL or step == self._total:
            self.refresh()

    def show_evaluating(self, step: int, done: int, total: int) -> None:
        """Show how far an evaluation is, in rows, once it has taken a while."""
        self._began = self._began if self._evaluating else monotonic()
        self._evaluating = f"evaluating after step {step}: {done}/{total} rows"
        if min(monotonic() - self._began - PATIENCE, monotonic() - self._shown_at - _INTERVAL) > 0:
            self.refresh()

    def show_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to the table of evaluations."""
        self._evaluating = ""
        self._evaluations = [*self._evaluations, (step, dict(values))][-_EVALUATIONS:]
        self.refresh()

    def refresh(self) -> None:
        """Draw now."""
        if not self._step and not self._evaluations:
            return
        self._shown_at = monotonic()
        if self._output is None:
            self._output = LiveOutput(self)
        else:
            self._output.update()

    @property
    def _numbers(self) -> str:
        """Of the last step; or of an evaluation that takes long."""
        if self._evaluating and monotonic() - self._began > PATIENCE:
            return self._evaluating
        return "  ".join(self._values)

    def __repr__(self) -> str:
        ends = f"{self._step}/{self._total}  {self._clock}".rstrip()
        filled = round(20 * self._step / max(1, self._total))
        bar = f"{'━' * filled}{'─' * (20 - filled)}  {ends}  {self._numbers}"
        return clean("\n".join([*format_table(self._evaluations, _WIDTH), bar]))

    def _repr_html_(self) -> str:
        clock = f" · {self._clock}" if self._clock else ""
        bar = (
            f'<progress value="{self._step}" max="{self._total}" style="width:20em"></progress> '
            f"{self._step}/{self._total}{html.escape(clock)}<br>"
        )
        values = html.escape(clean(self._numbers))
        return f"{self._table()}{bar}<code style='white-space:pre-wrap'>{values}</code>"

    def _table(self) -> str:
        if not self._evaluations:
            return ""
        names = table_columns(self._evaluations)
        header = "".join(f"<th>{html.escape(clean(name))}</th>" for name in ("eval after step", *names))
        lines = (
            f"<tr><td>{step}</td>{''.join(f'<td>{format_number(values, name)}</td>' for name in names)}</tr>"
            for step, values in self._evaluations
        )
        return f"<table><tr>{header}</tr>{''.join(lines)}</table>"
