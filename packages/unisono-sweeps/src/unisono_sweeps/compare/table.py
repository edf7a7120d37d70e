"""One row for each run: what distinguishes it from the others, what it reached, and what it took.

The configurations of runs are read as data; no task is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeGuard

import pyarrow as pa

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.manifest import read_manifest
from unisono.config import CONFIG_FILE, fingerprint
from unisono.runtime.errors import RunError, UnisonoError
from unisono.runtime.text import one_line
from unisono.supervise import run_status
from unisono.supervise.run_facts import RunFacts, read_run_facts
from unisono_sweeps.axes import SEED, shorten_keys
from unisono_sweeps.text_table import format_cell

_UNTOLD = (
    "run.name",
    "run.dir",
    "run.resume",
    "run.stop_after",
    "observe.progress",
    "observe.log_every",
)  # differences that say nothing of a run
_ABOUT_TIME = ("step", "eval", "rows", "seconds")
# Student's t for 95 % by degrees of freedom, from 1; beyond, the normal distribution's 1.96 is 2 % away at most.
_STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def find_runs(paths: Sequence[Path]) -> tuple[list[RunFacts], dict[str, str]]:
    """The runs that paths name: a run's own folder, or a folder of runs, as a sweep is.

    Returns:
        The runs; and of those within a folder that cannot be read, names and what is wrong.

    Raises:
        UnisonoError: if a path is neither, or no run can be read.
    """
    runs: dict[Path, RunFacts] = {}
    damaged: dict[str, str] = {}
    for path in paths:
        if not (inside := run_status.find_runs(path)):
            raise RunError(f"{path} is neither a run (no {path}/{CONFIG_FILE}) nor a folder of runs")
        for folder in inside:
            try:
                runs[folder] = read_run_facts(folder)
            except UnisonoError as error:
                if folder == path:
                    raise
                damaged[one_line(folder.name)] = str(error)
    if not runs:
        raise RunError("no run can be read: " + "; ".join(damaged.values()))
    return list(runs.values()), damaged


def different_keys(runs: Sequence[RunFacts]) -> list[str]:
    """The keys of the configuration that are not the same in all runs."""
    flat = [fingerprint.flatten(dict(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [key for key in keys if key not in _UNTOLD and len({_as_text(values.get(key)) for values in flat}) > 1]


def compare_runs(runs: Sequence[RunFacts]) -> pa.Table:
    """A row for each run.

    Returns:
        Columns: `run`, `state`, each key that differs, `steps`, `loss` (of the last step), `best_loss` (the smallest of
        an evaluation, else of a step), `eval/NAME` (of the last evaluation) with its `min` and `max`, `seconds` (of all
        steps), `flops` (of all steps, where the task counts them), `memory_gb` (the most that a step needed), and
        `parameters` (values of the model in the newest checkpoint).
    """
    keys = different_keys(runs)
    flat = [fingerprint.flatten(dict(run.config)) for run in runs]
    columns: dict[str, list[Any]] = {
        "run": [one_line(run.folder.name) for run in runs],
        "state": [r.state for r in runs],
    }
    if len(set(columns["run"])) < len(runs):
        columns["run"] = [str(run.folder) for run in runs]
    columns |= {key: _column([values.get(key) for values in flat]) for key in keys}
    measured = [measure(run) for run in runs]
    names = dict.fromkeys(name for values in measured for name in values)
    columns |= {name: [values.get(name) for values in measured] for name in names}
    return pa.table(columns)


def measure(run: RunFacts) -> dict[str, float | int | None]:
    """What a run reached and took, by column."""
    found: dict[str, float | int | None] = {"steps": run.steps_done, "loss": run.loss}
    series: dict[str, list[float]] = {}
    last: dict[str, float | None] = {}
    for event in run.evaluations:
        for name, value in event.items():
            if name not in _ABOUT_TIME and (is_number(value) or value is None or isinstance(value, float)):
                last[f"eval/{name}"] = float(value) if is_number(value) else None
                series.setdefault(f"eval/{name}", []).extend([float(value)] if is_number(value) else [])
    losses = series.get("eval/loss")
    if losses is None:  # and not where no evaluation has a finite loss
        losses = [float(step["loss"]) for step in run.steps if is_number(step["loss"])]
    found["best_loss"] = min(losses, default=None)
    for name, values in series.items():
        found |= {name: last[name], f"{name} min": min(values, default=None), f"{name} max": max(values, default=None)}
    found["seconds"] = _total(run.steps, "seconds")
    if any("flops" in step for step in run.steps):
        found["flops"] = _total(run.steps, "flops")
    memory = [float(step["memory_gb"]) for step in run.steps if is_number(step.get("memory_gb"))]
    if memory:
        found["memory_gb"] = max(memory)
    if (parameters := count_parameters(run.folder)) is not None:
        found["parameters"] = parameters
    return found


def count_parameters(folder: Path) -> int | None:
    """The values of a run's model, by its newest checkpoint; None if there is none that can be read."""
    found: list[Path] = []
    with suppress(UnisonoError):
        found = commit.find_checkpoints(folder / placement.NAME)
    for path in reversed(found):
        with suppress(OSError, UnisonoError):
            arrays = read_manifest(path).arrays
            return sum(int(math.prod(one["shape"])) for name, one in arrays.items() if name.startswith("model/"))
    return None


def name_setting(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """What a run has in common with those that differ from it only in their seed; empty if no runs do."""
    short, settings = shorten_keys(keys), [key for key in keys if key != SEED]
    return ", ".join(f"{short[key]} {format_cell(row[key])}" for key in settings) if SEED in keys else ""


def metric_names(table: pa.Table, keys: Sequence[str]) -> list[str]:
    """The columns of a comparison that were measured."""
    return [name for name in table.column_names if name not in ("run", "state", *keys)]


def aggregate_seeds(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """One row for the runs that differ only in their seed: means, with 95 % intervals of them.

    Returns:
        Columns: the keys but the seed, `runs` (their number), each metric's mean, and its `±` (half the width of the
        interval by Student's t; null for a single run).
    """
    settings = [key for key in keys if key != SEED]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(json.dumps([row[key] for key in settings]), []).append(row)
    metrics = metric_names(table, keys)
    rows = []
    for members in groups.values():
        summary: dict[str, Any] = {**{key: members[0][key] for key in settings}, "runs": len(members)}
        for name in metrics:
            values = [float(member[name]) for member in members if member[name] is not None]
            summary[name] = fmean(values) if values else None
            summary[f"{name} ±"] = half_width(values)
        rows.append(summary)
    names = [*settings, "runs", *(column for name in metrics for column in (name, f"{name} ±"))]
    return pa.table({name: [row[name] for row in rows] for name in names})


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of a mean; None for fewer than two values.

    >>> half_width([1.0]), round(half_width([1.0, 2.0, 3.0]), 2)
    (None, 2.48)
    """
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    quantile = _STUDENT_T[freedom - 1] if freedom <= len(_STUDENT_T) else 1.96
    return quantile * stdev(values) / math.sqrt(len(values))


def _column(values: Sequence[Any]) -> list[Any]:
    """Values of one type: numbers where all are, else texts."""
    if all(value is None or is_number(value) for value in values):
        whole = all(value is None or isinstance(value, int) for value in values)
        return [None if value is None else value if whole else float(value) for value in values]
    return [value if isinstance(value, str) or value is None else _as_text(value) for value in values]


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a finite number; what a log has in place of another one is not a measurement."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _total(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(step[name] for step in steps if is_number(step.get(name))))
