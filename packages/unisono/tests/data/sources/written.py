"""The same rows, written in every format, and what reads them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unisono.data.sources import Files, open_source

Rows = list[dict[str, Any]]
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("tokens", pa.list_(pa.int64()))])
TYPES = {"id": "int64", "text": "text?", "tokens": "list<int64>"}


def rows(count: int) -> Rows:
    """Rows that are all different, with a null now and then."""
    return [
        {"id": i, "text": None if i % 7 == 3 else f"document {i} é\n🎻" * (i % 4), "tokens": list(range(i, i + i % 5))}
        for i in range(count)
    ]


def table(made: Rows) -> Any:
    """Of the rows, as Arrow has it."""
    return pa.Table.from_pylist(made, SCHEMA)


def _parquet(made: Rows, folder: Path, block: int) -> None:
    pq.write_table(table(made), folder / "rows.parquet", row_group_size=block)


def _file(made: Rows, folder: Path, block: int, **options: Any) -> None:
    with pa.ipc.new_file(folder / "rows.arrow", SCHEMA, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table(made), max_chunksize=block)


def _stream(made: Rows, folder: Path, block: int, **options: Any) -> None:
    with pa.ipc.new_stream(folder / "rows.arrow", SCHEMA, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table(made), max_chunksize=block)


def _dictionaries(made: Rows, folder: Path, block: int) -> None:
    whole = table(made)
    parts = [whole.slice(i, block) for i in range(0, len(whole), block)]
    coded = [part.set_column(1, "text", part["text"].combine_chunks().dictionary_encode()) for part in parts]
    with pa.ipc.new_stream(folder / "rows.arrow", coded[0].schema) as writer:  # each batch replaces the dictionary
        for part in coded:
            writer.write_table(part)


def _jsonl(made: Rows, folder: Path, block: int) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def _jsonl_gz(made: Rows, folder: Path, block: int) -> None:
    _jsonl(made, folder, block)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress((folder / "rows.jsonl").read_bytes()))
    (folder / "rows.jsonl").unlink()


def _shards(made: Rows, folder: Path, block: int) -> None:
    for number in range(3):
        part = folder / f"{number}"
        part.mkdir()
        _parquet(made[number * len(made) // 3 : (number + 1) * len(made) // 3], part, block)


def _saved(made: Rows, folder: Path, block: int) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset(table(made)).save_to_disk(folder, num_shards=min(2, len(made)))


FORMATS: dict[str, Callable[[Rows, Path, int], None]] = {
    "Parquet": _parquet,
    "Arrow file": _file,
    "Arrow stream": _stream,
    "Arrow file, zstd": lambda made, folder, block: _file(made, folder, block, compression="zstd"),
    "Arrow stream, lz4": lambda made, folder, block: _stream(made, folder, block, compression="lz4"),
    "Arrow file, old": lambda made, folder, block: _file(made, folder, block, use_legacy_format=True),
    "Arrow stream, dictionaries": _dictionaries,
    "JSONL": _jsonl,
    "JSONL, gzip": _jsonl_gz,
    "Parquet, three files": _shards,
    "saved data set": _saved,
}


def write(name: str, folder: Path, made: Rows, block: int = 4) -> Path:
    """The rows in one of the formats, in a new folder."""
    folder.mkdir(parents=True)
    FORMATS[name](made, folder, block)
    return folder


def opened(folder: Path | str, columns: Any = None, **options: Any) -> Files:
    """The rows as a source, with the types that JSON needs."""
    names = TYPES if columns is None else [columns] if isinstance(columns, str) else columns
    return open_source(folder, columns, expect={name: TYPES[name] for name in names}, **options)


def plain(record: Any) -> Any:
    """A record with lists in place of arrays; an array must be one of int64 with memory of its own."""
    if isinstance(record, dict):
        return {name: plain(value) for name, value in record.items()}
    if isinstance(record, np.ndarray):
        assert record.dtype == np.int64
        assert record.flags.owndata
        return record.tolist()
    return record
