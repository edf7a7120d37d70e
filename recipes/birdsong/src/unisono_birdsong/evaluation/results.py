"""Results of probes in one Parquet file; rows of the same checkpoint, task, seed and probe are replaced.

The file is written anew under a lock and appears by one rename, so jobs may add to it at the same time, and whoever
reads it (`duckdb -c "select * from 'probes.parquet'"`) sees all of an addition or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from unisono import ConfigError, DataError, RunError
from unisono.recipe_tools import atomic_file, safe_paths

KEY = ("checkpoint", "task", "seed", "probe")
_DEADLINE = 60.0  # seconds to wait for whoever adds rows now


@dataclass(frozen=True)
class Result:
    """What a probe reached.

    Attributes:
        checkpoint: digest of the encoder's settings and weights.
        task: the data, and which of their rows are held out.
        seed: of the probe.
        probe: its kind.
        run: folder of the run.
        step: updates that made the weights.
        weights: `model`, or `ema` for their moving average.
        train_rows: that the probe was fitted to.
        test_rows: that it was measured on.
        test_groups: recordings or recordists of these.
        classes: number of classes.
        objective: of the probe.
        decay: L2 that was chosen; None of centroids.
        cmap: class-mean average precision, with the ends of its 95 % interval.
        auroc: mean over classes, likewise.
        top1: share of rows whose best class is right, likewise.
        time: UTC, ISO 8601.
    """

    checkpoint: str
    task: str
    seed: int
    probe: str
    run: str
    step: int
    weights: str
    train_rows: int
    test_rows: int
    test_groups: int
    classes: int
    objective: str
    decay: float | None
    cmap: float
    cmap_low: float
    cmap_high: float
    auroc: float
    auroc_low: float
    auroc_high: float
    top1: float
    top1_low: float
    top1_high: float
    time: str


_TYPES = {"int": "int64", "str": "string", "float": "float64", "float | None": "float64"}


def check(path: Path) -> None:
    """Refuse a file that results cannot be added to (ending, columns) before anything is computed."""
    if path.suffix != ".parquet":
        raise ConfigError(f"out={path}: results are kept as Parquet; choose a name that ends in .parquet")
    if path.exists():
        _read(path)


def append(path: Path, results: Sequence[Result]) -> int:
    """Add results to a file, which is made where it is missing; those of a key that is there already replace it.

    Returns:
        How many rows the file has now.

    Raises:
        DataError: for a file that is not one of results.
        RunError: where another process holds its lock for a minute.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=_DEADLINE)
    try:
        with lock:
            rows = {tuple(row[name] for name in KEY): row for row in (_read(path) if path.exists() else [])}
            for result in results:
                key = tuple(getattr(result, name) for name in KEY)
                rows.pop(key, None)  # what is new comes last
                rows[key] = asdict(result)
            with atomic_file(path) as temporary:
                pq.write_table(pa.Table.from_pylist(list(rows.values()), schema=_schema()), temporary)
            return len(rows)
    except Timeout as error:
        raise RunError(
            f"{lock.lock_file} has been held for {_DEADLINE:g} s by another process that adds results to {path}; try "
            "again, or add to another file by out="
        ) from error


def _read(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with safe_paths.open_regular(path) as file:
            table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}; add to another file by out=") from error
    if table.schema.names != _schema().names:
        odd = sorted(set(table.schema.names) ^ set(_schema().names))
        raise DataError(
            f"{path} is not a file of probe results (it differs in {', '.join(odd[:4]) or 'the order of columns'}); "
            "add to another file by out="
        )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([(field.name, pa.type_for_alias(_TYPES[str(field.type)])) for field in fields(Result)])
