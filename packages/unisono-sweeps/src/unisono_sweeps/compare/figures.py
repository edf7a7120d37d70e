"""Pictures of several runs, as PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unisono.runtime.code.entry_points import import_extra
from unisono.runtime.files import atomic_file
from unisono.supervise.run_facts import RunFacts
from unisono_sweeps.axes import SEED, shorten_keys
from unisono_sweeps.compare.power_law import PowerLaw
from unisono_sweeps.compare.table import aggregate_seeds, name_setting
from unisono_sweeps.text_table import is_wide

_MOST_NAMED = 12  # curves with a legend
_MOST_AXES = 8  # of parallel coordinates
_APART = 0.04  # of the height of an axis, between its labels
_POINTS = 2000  # of a curve: more than a picture has pixels


def draw_figures(
    folder: Path,
    runs: Sequence[RunFacts],
    table: pa.Table,
    keys: Sequence[str],
    metric: str,
    *,
    mode: str,
    fit: tuple[str, PowerLaw] | None,
) -> list[Path]:
    """Draw all pictures that the runs have data for; returns their files.

    Args:
        folder: for the files; must exist.
        runs: to compare.
        table: of `compare_runs`, in the same order.
        keys: that differ.
        metric: column of the table that is shown against the keys and against FLOPs.
        mode: whether its smallest or its largest value is best, `min` or `max`.
        fit: a column of the table and the power law of the metric over it.
    """
    import_extra("matplotlib", "plots", "drawing pictures", of="unisono-sweeps").use("Agg")  # without a display
    plot = import_extra("matplotlib.pyplot", "plots", "drawing pictures", of="unisono-sweeps")
    drawn = [_draw_curves(plot, folder / "curves.png", runs, table, keys, metric)]
    short = shorten_keys(list(keys))
    for key in keys:
        if key != SEED:
            drawn.append(_draw_metric(plot, folder / f"{_file_name(short[key])}.png", table, keys, key, metric))
    costs = {"pareto.png": "flops" if "flops" in table.column_names else "seconds", "pareto_size.png": "parameters"}
    for file, cost in costs.items():
        if file == "pareto.png" or (cost in table.column_names and len(set(table.column(cost).to_pylist())) > 1):
            drawn.append(_draw_pareto(plot, folder / file, table, cost, metric, mode))
    swept = [key for key in keys if key != SEED][:_MOST_AXES]
    if len(swept) > 1:
        drawn.append(_draw_parallel(plot, folder / "parallel.png", table, swept, metric, mode))
    if fit is not None:
        drawn.append(_draw_fit(plot, folder / "power_law.png", table, *fit, metric))
    return drawn


def _draw_curves(
    plot: Any, path: Path, runs: Sequence[RunFacts], table: pa.Table, keys: Sequence[str], metric: str
) -> Path:
    """A line for each run; those of one setting, which differ in their seed, have one colour."""
    figure, axes = plot.subplots(figsize=(8, 5), layout="constrained")
    evaluated = metric.removeprefix("eval/") if metric.startswith("eval/") else None
    rows = table.to_pylist()
    rows.sort(key=lambda row: [(isinstance(row[key], str), row[key] or 0) for key in keys if key != SEED])
    by_name = dict(zip(table.column("run").to_pylist(), runs, strict=True))
    colours: dict[str, Any] = {}
    for row in rows:
        name, run = name_setting(row, keys) or row["run"], by_name[row["run"]]
        events = run.evaluations if evaluated else run.steps
        field = evaluated or ("loss" if metric in ("loss", "best_loss") else metric)
        points = [(event["step"], event[field]) for event in events if isinstance(event.get(field), int | float)]
        points = points[:: max(1, len(points) // _POINTS)]
        if points:
            steps, values = zip(*points, strict=True)
            mark, label = "." if len(points) == 1 else None, None if name in colours else name
            colour = colours.get(name)
            (line,) = axes.plot(steps, values, linewidth=1.2, label=label, marker=mark, color=colour)
            colours[name] = line.get_color()
    axes.set_xlabel("step")
    axes.set_ylabel(metric if evaluated else field)
    if 1 < len(colours) <= _MOST_NAMED:
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
    if numeric and is_wide(x):
        axes.set_xscale("log")
    if numeric and len(set(x)) <= _MOST_AXES:
        axes.set_xticks(sorted(set(x)), [f"{value:.4g}" for value in sorted(set(x))])
        axes.minorticks_off()
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
        if is_wide([x for x, _ in points]):
            axes.set_xscale("log")
    about = {"flops": "FLOPs of all steps", "seconds": "seconds of all steps", "parameters": "parameters"}
    axes.set_xlabel(about[cost])
    axes.set_ylabel(metric)
    return _save(plot, figure, path)


def pareto_front(points: Sequence[tuple[float, float]], mode: str) -> list[int]:
    """The numbers of the points that no other one beats in cost and value, by rising cost.

    Args:
        points: cost and value of each.
        mode: whether the smallest or the largest value is best, `min` or `max`.

    >>> pareto_front([(1.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 1.0)], "min")
    [0, 1, 3]
    """
    sign = 1.0 if mode == "min" else -1.0
    front: list[int] = []
    best = float("inf")
    for number in sorted(range(len(points)), key=lambda n: (points[n][0], sign * points[n][1])):
        if sign * points[number][1] < best:
            best = sign * points[number][1]
            front.append(number)
    return front


def _draw_parallel(plot: Any, path: Path, table: pa.Table, keys: Sequence[str], metric: str, mode: str) -> Path:
    """A line for each run, across an axis for each swept key and one for the metric; the better, the darker."""
    rows = [row for row in table.to_pylist() if row[metric] is not None]
    columns = [*keys, metric]
    figure, axes = plot.subplots(figsize=(2 + 1.6 * len(columns), 4.5), layout="constrained")
    places = {name: _place([row[name] for row in rows]) for name in columns}
    short = {**shorten_keys(list(keys)), metric: metric}
    colours = plot.get_cmap("viridis")
    for number in sorted(range(len(rows)), key=lambda n: places[metric][0][n], reverse=mode == "min"):
        height = places[metric][0][number]
        shade = colours(height if mode == "min" else 1 - height)
        axes.plot(range(len(columns)), [places[name][0][number] for name in columns], color=shade, linewidth=1.2)
    for place, name in enumerate(columns):
        axes.axvline(place, color="tab:gray", linewidth=0.8)
        labels = places[name][1]
        last = -1.0
        for height, label in labels:
            if height - last < _APART:
                continue
            last = height
            axes.text(place + 0.03, height, label, fontsize="x-small", va="center")
    axes.set_xticks(range(len(columns)), [short[name] for name in columns])
    axes.set_xlim(-0.1, len(columns) - 0.6)
    axes.set_yticks([])
    axes.set_frame_on(False)
    return _save(plot, figure, path)


def _place(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights of values on an axis from 0 to 1, and its labels; logarithmic where numbers differ much.

    >>> _place([1, 3, 2])[0], _place(["b", "a"])[1]
    ([0.0, 1.0, 0.5], [(0.0, 'a'), (1.0, 'b')])
    """
    if all(isinstance(value, int | float) for value in values):
        numbers = [float(value) for value in values]
        scaled = [math.log(number) for number in numbers] if is_wide(numbers) else numbers
        low, spread = min(scaled), (max(scaled) - min(scaled)) or 1.0
        heights = [(number - low) / spread for number in scaled]
        return heights, sorted({(height, f"{value:.3g}") for height, value in zip(heights, numbers, strict=True)})
    names = sorted({str(value) for value in values})
    step = 1 / max(1, len(names) - 1)
    return [names.index(str(value)) * step for value in values], [(n * step, name) for n, name in enumerate(names)]


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
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plot.close(figure)
    return path


def _file_name(key: str) -> str:
    return "by_" + "".join(letter if letter.isalnum() else "_" for letter in key)
