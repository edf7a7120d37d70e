"""`unisono compare`: prints a table of runs, writes it as Parquet, and draws pictures of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet
from pydantic import Field

from unisono.config.schema import Settings
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.console import say, terminal_width
from unisono.runtime.display.text_table import format_table
from unisono.runtime.errors import ConfigError, nearest
from unisono.runtime.files import atomic_file
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_writing
from unisono_sweeps import record
from unisono_sweeps.axes import SEED, shorten_keys
from unisono_sweeps.compare.power_law import PowerLaw, fit_power_law
from unisono_sweeps.compare.table import aggregate_seeds, compare_runs, different_keys, find_runs, metric_names
from unisono_sweeps.text_table import format_number

_MOST_SHOWN = 40  # characters of a text in the table


class CompareSettings(Settings):
    """The words of `unisono compare`."""

    metric: str | None = Field(None, description="column to show; null: eval/loss if runs were evaluated, else loss")
    mode: Literal["min", "max"] = Field("min", description="whether the smallest or the largest value is best")
    fit: str | None = Field(None, description="column x of a power-law fit: the metric is a + b·x^−c")
    out: Path | None = Field(None, description="folder for the table and the pictures; null: SWEEP/comparison")


def compare(paths: Sequence[Path], settings: CompareSettings) -> None:
    """Print and write what runs show together.

    Raises:
        UnisonoError: for a path that is no run, a column that does not exist, or a fit that the data do not hold.
    """
    runs, damaged = find_runs(paths)
    for name, why in damaged.items():
        say(f"unisono: WARNING: {name} is left out: {why}", error=True)
    table, keys = compare_runs(runs), different_keys(runs)
    metrics = metric_names(table, keys)
    metric = settings.metric or ("eval/loss" if "eval/loss" in metrics else "loss")
    if metric not in metrics:
        raise ConfigError(f"metric={metric}: the runs have no such column, {nearest(metric, metrics)}")
    out = settings.out or (paths[0] if len(paths) == 1 and len(runs) > 1 else Path()) / "comparison"
    with wrap_native_errors(f"{out} cannot be written to", ConfigError, "choose another place: out=FOLDER"):
        if settings.out:
            out.mkdir(parents=True, exist_ok=True)
        else:
            safe_writing.make_folder(out.parent, out.name)
        with atomic_file(out / "runs.parquet") as temporary:
            parquet.write_table(table, temporary)
    shown = aggregate_seeds(table, keys) if SEED in keys else table
    say(
        "\n".join(
            format_rows(
                shown, [key for key in keys if key in shown.column_names], metric, settings.mode, terminal_width()
            )
        )
    )
    for run in runs:
        if run.state != "finished":
            why = f": {one_line(run.why)}" if run.why else ""
            say(f"{one_line(run.folder.name)}: {run.state} after step {run.steps_done}{why}")
        if gap := record.describe_lost_log(run):
            say(f"unisono: WARNING: {one_line(run.folder.name)}: {gap}", error=True)
    law = _fit(table, settings.fit, metric) if settings.fit else None
    if law is not None:
        say(f"\n{metric} over {settings.fit}: {law.format()}")
    if find_spec("matplotlib") is None:
        say(f"\n{out / 'runs.parquet'}; for pictures: pip install 'unisono-sweeps[plots]'")
        return
    from unisono_sweeps.compare.figures import draw_figures

    fit = (settings.fit, law) if settings.fit and law is not None else None
    with wrap_native_errors("the pictures cannot be drawn"):  # numbers that no axis holds
        drawn = draw_figures(out, runs, table, keys, metric, mode=settings.mode, fit=fit)
    say(f"\n{out / 'runs.parquet'}, {', '.join(path.name for path in drawn)}")


def format_rows(table: pa.Table, keys: Sequence[str], metric: str, mode: str, width: int | None = None) -> list[str]:
    """The lines of a table for a terminal of `width`, the best run first."""
    wanted = dict.fromkeys(["steps", "loss", "best_loss", metric, "seconds", "flops", "memory_gb", "parameters"])
    columns = [name for name in wanted if name in table.column_names]
    rows = table.to_pylist()
    sign = 1.0 if mode == "min" else -1.0
    rows.sort(key=lambda row: float("inf") if row[metric] is None else sign * row[metric])
    aggregated = "runs" in table.column_names
    first = [] if aggregated else ["run", "state"]
    short = {key: key if name in columns else name for key, name in shorten_keys(list(keys)).items()}
    lines = []
    for row in rows:
        cells = [str(row[name]) for name in first] + [_shown(row[key]) for key in keys]
        cells += [str(row["runs"])] if aggregated else []
        for name in columns:
            spread = row.get(f"{name} ±")
            cells.append(format_number(row[name]) + (f" ± {spread:.2g}" if spread else ""))
        lines.append(cells)
    head = [*first, *(short[key] for key in keys), *(["runs"] if aggregated else []), *columns]
    return format_table(head, lines, left=len(first) or 1, width=width)


def _fit(table: pa.Table, column: str, metric: str) -> PowerLaw:
    kinds = pa.types.is_floating, pa.types.is_integer
    numeric = [field.name for field in table.schema if any(of_kind(field.type) for of_kind in kinds)]
    if column not in numeric:
        raise ConfigError(f"fit={column}: the runs have no such column of numbers, {nearest(column, numeric)}")
    points = [(row[column], row[metric]) for row in table.to_pylist() if row[column] and row[metric] is not None]
    with wrap_native_errors(f"fit={column}: no power law can be fitted", ConfigError):
        return fit_power_law([x for x, _ in points], [y for _, y in points])


def _shown(value: Any) -> str:
    text = (
        format_number(value)
        if isinstance(value, float)
        else "–"
        if value is None
        else str(value).removeprefix(f"{Path.cwd()}{os.sep}")
    )
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"
