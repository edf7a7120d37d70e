"""What a task shows after an evaluation (`Illustrated.on_evaluation`), as a callback of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.callback import Callback, RunInfo
from unisono.protocols import Illustrated


class TaskSamples(Callback):
    """Asks the task of rank 0, alone, and publishes what it returns."""

    def __init__(self, task: Illustrated) -> None:
        super().__init__()
        self._task = task

    def on_start(self, run: RunInfo) -> None:
        """Remember where to show it."""
        self._run = run

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Show it."""
        if not self._run.is_first:
            return
        shown: Mapping[str, Any] | None = self._task.on_evaluation(step, values)
        for name, value in (shown or {}).items():
            self._run.publish(step, name, value)
