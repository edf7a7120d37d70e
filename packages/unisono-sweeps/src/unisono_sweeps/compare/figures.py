"""Pictures of several runs, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unisono.supervise.run_facts import RunFacts
from unisono_sweeps.axes import SEED, shorten_keys
from unisono_sweeps.compare.power_law import PowerLaw
from unisono_sweeps.compare.table import aggregate_seeds
from unisono_sweeps.extras import import_plots
from unisono_sweeps.pareto import pareto_front

_MOST_NAMED = 12  # curves with a legend
_POINTS = 2000  # of a curve: more than a picture has pixels
_WIDE = 30.0  # ratio of the largest to the smallest number from which on an axis is logarithmic


def draw_figures(
    folder: Path,
    runs: Sequence[RunFacts],
    table: pa.Table,
    keys: Sequence[str],
    metric: str,
    *,
    mode: str = "min",
    fit: tuple[str, PowerLaw] | None = None,
) -> list[Path]:
    """Draw all pictures that the runs have data for; returns their files.

    Args:
        folder: for the files.
        runs: to compare.
        table: of `compare_runs`, in the same order.
        keys: that differ.
        metric: column of the table that is shown against the keys and against FLOPs.
        mode: whether its smallest or its largest value is best, `min` or `max`.
        fit: a column of the table and the power law of the metric over it.
    """
    import_plots("matplotlib", "drawing pictures").use("Agg")  # without a display
    plot = import_plots("matplotlib.pyplot", "drawing pictures")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_draw_curves(plot, folder / "curves.png", runs, table, metric)]
    short = shorten_keys(list(keys))
    for key in keys:
        if key != SEED:
            drawn.append(_draw_metric(plot, folder / f"{_file_name(short[key])}.png", table, keys, key, metric))
    cost = "flops" if "flops" in table.column_names else "seconds"
    drawn.append(_draw_pareto(plot, folder / "pareto.png", table, cost, metric, mode))
    if fit is not None:
        drawn.append(_draw_fit(plot, folder / "power_law.png", table, *fit, metric))
    return drawn


def _draw_curves(plot: Any, path: Path, runs: Sequence[RunFacts], table: pa.Table, metric: str) -> Path:
    figure, axes = plot.subplots(figsize=(8, 5), layout="constrained")
    evaluated = metric.removeprefix("eval/") if metric.startswith("eval/") else None
    names = table.column("run").to_pylist()
    for run, name in zip(runs, names, strict=True):
        events = run.evaluations if evaluated else run.steps
        field = evaluated or ("loss" if metric in ("loss", "best_loss") else metric)
        points = [(event["step"], event[field]) for event in events if isinstance(event.get(field), int | float)]
        points = points[:: max(1, len(points) // _POINTS)]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, linewidth=1.2, label=name, marker="." if len(points) == 1 else None)
    axes.set_xlabel("step")
    axes.set_ylabel(metric if evaluated else field)
    if 1 < len(runs) <= _MOST_NAMED:
        axes.legend(fontsize="small")
    return _save(plot, figure, path)


def _draw_metric(plot: Any, path: Path, table: pa.Table, keys: Sequence[str], key: str, metric: str) -> Path:
    """A point for each setting, with the interval over seeds where there are several."""
    rows = [row for row in aggregate_seeds(table, keys).to_pylist() if row[metric] is not None]
    figure, axes = plot.subplots(figsize=(6, 4), layout="constrained")
    numeric = all(isinstance(row[key], int | float) for row in rows)
    labels = sorted({str(row[key]) for row in rows})
    x = [row[key] if numeric else labels.index(str(row[key])) for row in rows]
    errors = [row[f"{metric} ±"] or 0.0 for row in rows]
    axes.errorbar(x, [row[metric] for row in rows], yerr=errors, fmt="o", capsize=3)
    if numeric and _is_wide(x):
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    axes.set_xlabel(key)
    axes.set_ylabel(metric)
    return _save(plot, figure, path)


def _draw_pareto(plot: Any, path: Path, table: pa.Table, cost: str, metric: str, mode: str) -> Path:
    """All runs by what they took and what they reached; the line joins those that no other run beats in both."""
    rows = [row for row in table.to_pylist() if row[cost] and row[metric] is not None]
    figure, axes = plot.subplots(figsize=(6, 4), layout="constrained")
    points = [(float(row[cost]), float(row[metric])) for row in rows]
    if points:
        axes.plot(*zip(*points, strict=True), "o", color="tab:gray")
        front = [points[number] for number in pareto_front(points, mode)]
        axes.plot(*zip(*front, strict=True), "o-", color="tab:blue", label="no run is cheaper and better")
        axes.legend(fontsize="small")
        if _is_wide([x for x, _ in points]):
            axes.set_xscale("log")
    axes.set_xlabel({"flops": "FLOPs of all steps", "seconds": "seconds of all steps"}[cost])
    axes.set_ylabel(metric)
    return _save(plot, figure, path)


def _draw_fit(plot: Any, path: Path, table: pa.Table, column: str, law: PowerLaw, metric: str) -> Path:
    points = [(row[column], row[metric]) for row in table.to_pylist() if row[metric] is not None and row[column]]
    x, y = (np.asarray(one, dtype=np.float64) for one in zip(*points, strict=True))
    figure, axes = plot.subplots(figsize=(6, 4), layout="constrained")
    line = np.geomspace(x.min() / 1.2, x.max() * 1.2, 200)
    axes.plot(x, y, "o")
    axes.plot(line, law(line), "-", label=f"{law.a:.3g} + {law.b:.3g} · x^−{law.c:.3g}")
    axes.axhline(law.a, linestyle=":", color="tab:gray", label="a")
    axes.set_xscale("log")
    axes.set_xlabel(column)
    axes.set_ylabel(metric)
    axes.legend(fontsize="small")
    return _save(plot, figure, path)


def _save(plot: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plot.close(figure)
    return path


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > _WIDE * min(values)


def _file_name(key: str) -> str:
    return "by_" + "".join(letter if letter.isalnum() else "_" for letter in key)
