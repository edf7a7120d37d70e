"""What a report says: of a run, and of many."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from unisono.checkpoint.core import commit, placement
from unisono.config import CONFIG_FILE
from unisono.config.resolved_run import RESOLVED_FILE
from unisono.runtime.errors import UnavailableError
from unisono.runtime.text import format_value
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object
from unisono.supervise.run_facts import RunFacts, read_run_facts
from unisono_sweeps import record
from unisono_sweeps.axes import SEED, shorten_keys
from unisono_sweeps.compare.table import (
    aggregate_seeds,
    compare_runs,
    different_keys,
    find_runs,
    metric_names,
    name_setting,
)
from unisono_sweeps.report.page import Chart, Curve, Page
from unisono_sweeps.report.series import collect_series
from unisono_sweeps.text_table import format_cell, format_number, format_seconds, is_wide

_POINTS = 2000  # of a curve of a run
_POINTS_OF_MANY = 40_000  # of all curves of a chart of a sweep
_MOST_NAMES = 40  # curves of a run
_MEDIA_BYTES = 2_000_000  # of all pictures and sounds together
_MEDIA = {".png": ("image/png", b"\x89PNG"), ".wav": ("audio/wav", b"RIFF")}
_NO_MEDIA = (placement.NAME, "tensorboard", "wandb", "comparison", "uploading")
_FIRST = ("loss", "grad_norm", "lr")


def describe(folder: Path) -> Page:
    """The report of a run, or of a folder of runs.

    Raises:
        UnisonoError: if it is neither.
    """
    if (folder / CONFIG_FILE).is_file():
        return describe_run(read_run_facts(folder))
    return describe_many(folder, *find_runs([folder]))


def describe_run(run: RunFacts) -> Page:
    """The report of a run."""
    page = Page(run.folder.resolve().name)
    page.paragraph(_state(run), "state")
    known = _read(run.folder, "fingerprint.json")
    resolved = _read(run.folder, RESOLVED_FILE)
    if command := resolved.get("command"):
        page.code(shlex.join(map(str, command)))
    seconds = sum(step["seconds"] for step in run.steps if isinstance(step.get("seconds"), int | float))
    flops = [step["flops"] for step in run.steps if isinstance(step.get("flops"), int | float)]
    facts = {
        "recipe": run.config["recipe"],
        "time of all steps": format_seconds(seconds),
        **({"FLOPs of all steps": f"{sum(flops):.3e}"} if flops else {}),
        "global batch": run.config["train"]["global_batch"],
        "precision": run.config["train"]["precision"],
        "layout": _layout(run.config["layout"]),
        "checkpoints": _checkpoints(run.folder),
    }
    page.facts(facts)
    if run.evaluations:
        page.heading("Evaluations")
        _evaluations(page, run)
    page.heading("Steps")
    curves = collect_series(run.steps, _POINTS)
    names = [*(name for name in _FIRST if name in curves), *(name for name in curves if name not in _FIRST)]
    constant = {name: curves[name][1][0] for name in names if len(run.steps) > 1 and len(set(curves[name][1])) == 1}
    charts = [Chart(n, [Curve(n, *curves[n])]) for n in names if n not in constant][:_MOST_NAMES]
    page.charts(charts) if charts else page.paragraph("No step is recorded.")
    if constant:
        page.paragraph("The same in all steps: " + ", ".join(f"{n} {format_number(v)}" for n, v in constant.items()))
    if charts and len(run.steps) > _POINTS:
        page.paragraph(
            f"Of {len(run.steps)} steps, each chart shows the smallest and largest value of short stretches."
        )
    if notes := list(_notes(run)):
        page.heading("Faults and restarts")
        page.table(["after step", "what happened"], notes, texts=2)
    _profile(page, run.folder)
    _samples(page, run)
    _certificate(page, run.folder)
    if data := known.get("data"):
        page.heading("Data")
        page.facts({name: format_value(value) for name, value in data.items()} if isinstance(data, dict) else {})
        if mixture := run.config["data"].get("mixture"):
            page.facts({"mixture": format_value(mixture)})
    page.heading("Environment")
    versions = known.get("versions")
    page.facts({"host": known.get("host", "unknown"), **(versions if isinstance(versions, dict) else {})})
    page.heading("Configuration")
    page.details("config.yaml", yaml.safe_dump(dict(run.config), sort_keys=False))
    return page


def describe_many(folder: Path, runs: Sequence[RunFacts], damaged: Mapping[str, str] = MappingProxyType({})) -> Page:
    """The report of a sweep, or of any folder of runs; of those that cannot be read, by name, it says why."""
    page = Page(folder.resolve().name)
    finished = sum(run.state == "finished" for run in runs)
    listed = record.read_sweep(folder)
    place = {name: number for number, name in enumerate(listed["runs"])}  # as the command has them
    runs = sorted(runs, key=lambda run: place.get(run.folder.name, len(place)))
    missing = sorted(set(listed["runs"]) - {run.folder.name for run in runs} - damaged.keys())
    total = len(runs) + len(missing) + len(damaged)
    page.paragraph(f"{finished} of {total} runs finished", "state")
    if listed["command"]:
        page.code(shlex.join(listed["command"]))
    table, keys = compare_runs(runs), different_keys(runs)
    metrics, short = metric_names(table, keys), shorten_keys(keys)
    metric = "eval/loss" if "eval/loss" in metrics else "loss"
    if SEED in keys:
        page.heading("Means over seeds, with 95 % intervals")
        means = aggregate_seeds(table, keys).to_pylist()
        settings = [key for key in keys if key != SEED]
        means.sort(key=lambda row: float("inf") if row[metric] is None else row[metric])
        rows = [
            [format_cell(row[key]) for key in settings] + [str(row["runs"])] + [_mean(row, m) for m in metrics]
            for row in means
        ]
        page.table([*(short[key] for key in settings), "runs", *metrics], rows, texts=len(settings))
    page.heading("Runs")
    rows = [[format_cell(row[name]) for name in ("run", "state", *keys, *metrics)] for row in table.to_pylist()]
    page.table(["run", "state", *(short[key] for key in keys), *metrics], rows, texts=2)
    if missing:
        page.paragraph(f"Not started: {', '.join(missing)}")
    for name, why in damaged.items():
        page.paragraph(f"{name} cannot be read: {why}")
    page.heading("Curves")
    each = max(50, min(_POINTS, _POINTS_OF_MANY // max(1, len(runs))))
    steps = {run.folder.name: collect_series(run.steps, each) for run in runs}
    evaluations = {run.folder.name: collect_series(run.evaluations, each) for run in runs}
    groups = {run.folder.name: name_setting(row, keys) for run, row in zip(runs, table.to_pylist(), strict=True)}
    charts = []
    for title, curves, name in (("loss", steps, "loss"), ("eval/loss", evaluations, "loss")):
        drawn = [Curve(run, *found[name], group=groups[run]) for run, found in curves.items() if name in found]
        if drawn:
            charts.append(Chart(title, drawn))
    for key in keys:
        if key != SEED and (points := _points(table.to_pylist(), key, metric)):
            charts.append(Chart(f"{metric} by {short[key]}", [points], key, points=True, logx=is_wide(points.x)))
    for cost in ("flops" if "flops" in metrics else "seconds", *(["parameters"] if "parameters" in metrics else [])):
        if points := _points(table.to_pylist(), cost, metric):
            charts.append(Chart(f"{metric} by {cost}", [points], cost, points=True, logx=is_wide(points.x)))
    page.charts(charts)
    if problems := [[run.folder.name, run.state, run.why] for run in runs if run.state != "finished"]:
        page.heading("Runs that are not finished")
        page.table(["run", "state", "why"], problems, texts=3)
    return page


def _state(run: RunFacts) -> str:
    total = f" of {run.total}" if run.total else ""
    loss = "" if run.loss is None else f", loss {run.loss:.4g}"
    why = f": {run.why}" if run.why else ""
    return f"{run.state} after step {run.steps_done}{total}{loss}{why}"


def _checkpoints(folder: Path) -> str:
    try:
        return ", ".join(path.name for path in commit.find_checkpoints(folder / placement.NAME)) or "none"
    except UnavailableError as error:
        return str(error)


def _layout(layout: Mapping[str, Any]) -> str:
    return f"{layout['world_size']} × {layout['device']}, {layout['strategy']}, engine {layout['engine']}"


def _evaluations(page: Page, run: RunFacts) -> None:
    curves = collect_series(run.evaluations, _POINTS)
    shown = [name for name in curves if name != "seconds"]
    if len(run.evaluations) > 1:
        page.charts([Chart(f"eval/{name}", [Curve(name, *curves[name])]) for name in shown[:_MOST_NAMES]])
    last = run.evaluations[-1]
    page.table(
        ["after step", *shown], [[str(last["step"]), *(format_number(last.get(name)) for name in shown)]], texts=0
    )


def _notes(run: RunFacts) -> Iterator[list[str]]:
    for event in run.events:
        values = {name: value for name, value in event.items() if name not in ("step", "seconds")}
        if "sample" in values:
            continue
        if isinstance(changed := values.get("changed"), dict):
            yield [str(event["step"]), f"resumed with {_describe_changes(changed)}"]
        elif "loss" not in values:
            yield [str(event["step"]), format_value(values)]
        elif "skipped" in values:
            yield [str(event["step"]), f"update skipped: {values['skipped']}"]
    if run.why:
        yield [str(run.steps_done), run.why]


def _describe_changes(changed: Mapping[str, Any]) -> str:
    """What is different since a run was resumed.

    >>> _describe_changes({"config": {"layout.world_size": [1, 2]}, "machine": {"threads": [None, 1]}})
    'layout.world_size 1 → 2, threads none → 1'
    """
    parts = []
    for values in changed.values():
        for key, pair in values.items() if isinstance(values, dict) else ():
            two = pair if isinstance(pair, list) and len(pair) == 2 else ["unknown", pair]
            parts.append(f"{key} " + " → ".join("none" if one is None else format_value(one) for one in two))
    return ", ".join(parts) or "the same settings"


def _profile(page: Page, folder: Path) -> None:
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        table = _read(folder / "profile", "table.json")
        ranks = table["ranks"]
        parts = list(ranks[0])
        rows = [[part, *(f"{float(rank[part]):.2f}" for rank in ranks)] for part in parts]
        page.heading("Where the time of a step goes")
        page.table([str(table["unit"]), *(f"rank {number}" for number in range(len(ranks)))], rows)


def _certificate(page: Page, folder: Path) -> None:
    certificate = _read(folder, "certificate.json")
    if not certificate:
        return
    page.heading("Certificate of unisono prove")
    page.facts({"verdict": certificate.get("verdict", "unknown"), "time": certificate.get("time", "unknown")})
    cases = certificate.get("cases")
    if isinstance(cases, list):
        rows = [[str(case.get("case")), _verdict(case)] for case in cases if isinstance(case, dict)]
        page.table(["case", "verdict"], rows, texts=2)


def _verdict(case: Mapping[str, Any]) -> str:
    """The mark of a case; those of one process are what the others are compared with."""
    mark, reference = str(case.get("mark")), case.get("reference")
    if mark == "ABSTAIN" and reference == "" and case.get("compared") == []:
        return "the others are compared with it"
    return f"{mark}, compared with {reference}" if reference else mark


def _samples(page: Page, run: RunFacts) -> None:
    """The newest text and table of each name, and pictures and sounds."""
    newest = {event["sample"]: event for event in run.events if isinstance(event.get("sample"), str)}
    media = list(_media(run.folder))
    if not (media or any("file" not in event for event in newest.values())):
        return
    page.heading("Samples")
    for name, event in newest.items():
        label = f"{name}, after step {event['step']}"
        if isinstance(text := event.get("text"), str):
            page.paragraph(label)
            page.code(text)
        elif isinstance(columns := event.get("columns"), list) and isinstance(rows := event.get("rows"), list):
            page.paragraph(label)
            whole = [row for row in rows if isinstance(row, list) and len(row) == len(columns)]
            page.table(
                [str(one) for one in columns], [[format_cell(cell) for cell in row] for row in whole], len(columns)
            )
    if media:
        page.media(media)


def _media(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """The newest pictures and sounds of a run, as long as they are small together."""
    left = _MEDIA_BYTES
    found = [path for path in folder.rglob("*") if path.suffix in _MEDIA and path.is_file() and not path.is_symlink()]
    inside = [path for path in found if path.relative_to(folder).parts[0] not in _NO_MEDIA]
    for path in sorted(inside, key=lambda path: path.stat().st_mtime, reverse=True):
        kind, begins = _MEDIA[path.suffix]
        with suppress(OSError, ValueError):
            content = safe_paths.read_bytes(folder, str(path.relative_to(folder)), left)
            if content.startswith(begins):
                left -= len(content)
                yield str(path.relative_to(folder)), kind, content


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> Curve | None:
    """The runs as points; None where x is not a number."""
    kept = [row for row in rows if isinstance(row[x], int | float) and row[y] is not None]
    if len(kept) < 2:
        return None
    return Curve(y, [row[x] for row in kept], [row[y] for row in kept], [str(row["run"]) for row in kept])


def _mean(row: Mapping[str, Any], name: str) -> str:
    spread = row[f"{name} ±"]
    return format_number(row[name]) + (f" ± {spread:.2g}" if spread else "")


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a run, which may be missing or damaged."""
    with suppress(OSError, ValueError):
        return dict(safe_paths.read_json(folder, name, Object))
    return {}
