"""What `unisono.train` returns: how the run ended, its curves as a table and as a picture, and the trained model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.observe import events
from unisono.runtime.code.entry_points import import_extra
from unisono.runtime.display import notebook
from unisono.supervise.step_sync import AS_REQUESTED, STOP_AFTER
from unisono.task import Task

if TYPE_CHECKING:
    from unisono.training.loop import Result

_UNPLOTTED = ("step", "seconds", "data_wait", "flops", "memory_gb", "masked", "unsaved_since", "epoch")


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        folder: Of the run.
        step: Updates made.
        loss: Of the last update; None if this start made none.
        evaluation: Loss and metrics on the held-out rows, if they were evaluated.
        stopped: Why the run ended before its last step; empty if it did not.
        task: Of the run, from which `model` is built.
    """

    folder: Path
    step: int
    loss: float | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""
    task: str | type[Task] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, result: Result, task: str | type[Task]) -> RunResult:
        """Of what the loop of a run returned."""
        return cls(result.folder, result.step, result.loss, result.evaluation, result.stopped, task)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was stopped from outside, by `unisono stop` or `run.stop_after`, and not by a callback."""
        return self.stopped == AS_REQUESTED or self.stopped.startswith(STOP_AFTER)

    @property
    def history(self) -> Any:
        """The curves: a row for each step, with `eval/…` where it was evaluated, over all starts of the run.

        A DataFrame, indexed by step, if pandas is installed; else a list of dictionaries.
        """
        rows = read_history(self.folder)
        if find_spec("pandas") is None:
            return rows
        import pandas

        table = pandas.DataFrame(rows)
        return table.set_index("step") if rows else table

    @cached_property
    def model(self) -> Any:
        """The trained model: a torch module on the CPU, for inference, or a JAX pytree, from the newest checkpoint.

        Raises:
            RunError: If the run has no checkpoint.
        """
        from unisono.launch.trained.run import load_model

        return load_model(self.folder, task=self.task)

    def plot(self) -> Any:
        """Draw the curves: the loss, and each metric of the evaluations, over steps.

        Returns:
            A figure of matplotlib. A notebook shows it at the end of a cell; elsewhere, `figure.savefig("curves.png")`.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        return draw_curves(read_history(self.folder), self.folder.name)


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return a dictionary for each step of a run, with the values of its evaluation as `eval/…`, in order of steps."""
    rows: dict[int, dict[str, Any]] = {}
    lines = events.read_events(folder / "events.jsonl")
    for event in events.step_events(lines):
        rows.setdefault(event["step"], {}).update(event)
    for event in lines:
        if event.get("eval"):
            values = events.last_evaluation([event])
            rows.setdefault(event["step"], {"step": event["step"]}).update(
                {f"eval/{name}": value for name, value in values.items()}
            )
    return [rows[step] for step in sorted(rows)]


def draw_curves(rows: list[dict[str, Any]], title: str) -> Any:
    """Draw a panel for each quantity that was evaluated, beside its value in training; of the loss in any case."""
    plot = import_extra("matplotlib.pyplot" if notebook.in_notebook() else "matplotlib.figure", "plots", "plot()")
    numbers = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    names = ["loss", *dict.fromkeys(n.removeprefix("eval/") for row in rows for n in row if n.startswith("eval/"))]
    names = [name for name in dict.fromkeys(names) if name not in _UNPLOTTED and {name, f"eval/{name}"} & numbers]
    columns = min(3, max(1, len(names)))
    lines = max(1, math.ceil(len(names) / columns))
    size = {"figsize": (4.5 * columns, 3.2 * lines), "layout": "constrained"}
    figure = plot.figure(**size) if notebook.in_notebook() else plot.Figure(**size)
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(lines, columns, number, xlabel="step", title=name)
        for key, label, style in ((name, "training", "-"), (f"eval/{name}", "held out", "o-")):
            points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
            if points:
                steps, values = zip(*points, strict=True)
                axes.plot(steps, values, style if len(points) > 1 else "o", label=label, linewidth=1.2, markersize=4)
        axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    if notebook.in_notebook():
        plot.close(figure)  # the notebook shows what is returned, and would show an open figure once more
    return figure
