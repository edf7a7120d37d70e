"""What a few kilobytes claim to hold is compared with a budget before any memory is reserved for it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packages.unisono.tests.checkpoint.saved import save
from unisono.checkpoint.core import commit, manifest
from unisono.data.sources import open_source
from unisono.data.sources.files import records
from unisono.data.sources.storage import File
from unisono.runtime.errors import CheckpointError, DataError

ROWS = 500_000
LONG = "x" * 2500


def repeated(path: Path, kind: str) -> Path:
    """A table in which half a million rows are one text of 2,500 bytes, stored once."""
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(ROWS, dtype=np.int32)), pa.array([LONG]))
    column = texts if kind == "plain" else pa.StructArray.from_arrays([texts], ["inner"])
    if kind == "list":
        column = pa.ListArray.from_arrays(pa.array(np.arange(ROWS + 1, dtype=np.int32)), texts)
    pq.write_table(pa.table({"a": column}), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.parametrize("kind", ["plain", "struct", "list"])
def test_a_parquet_file_of_a_long_repeated_text_is_refused_unread(tmp_path: Path, kind: str) -> None:
    """8.6 kB became 2.4 GB."""
    source = open_source(repeated(tmp_path / "a.parquet", kind))
    with pytest.raises(DataError, match=r"row group 0 unpacks to 1\.[23] GB, more than 1 GiB"):
        _ = source[0]


def test_rows_of_such_a_file_are_read_in_order_as_few_at_a_time_need_little(tmp_path: Path) -> None:
    path = repeated(tmp_path / "a.parquet", "plain")
    file = File.from_path(path, "parquet", path.name)
    assert next(iter(records(file, open_source(path)._wanted))) == {"a": LONG}


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("where", ["batch", "dictionary"])
def test_an_arrow_file_whose_buffers_unpack_to_gigabytes_is_refused_unread(
    tmp_path: Path, form: str, where: str
) -> None:
    """33 kB became 1.3 GB."""
    zeros = pa.array(np.zeros(140_000_000, dtype=np.int64))
    column = zeros if where == "batch" else pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), zeros)
    table = pa.table({"a": column})
    path = tmp_path / "a.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    new = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    assert path.stat().st_size < 100_000
    source = open_source(path)
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match=r"record batch 0 unpacks to 1\.1 GB"):
        _ = source[0]
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_manifest_of_empty_pieces_is_refused(tmp_path: Path) -> None:
    """400,000 of them were planned, opened and read."""
    path = save(tmp_path / "checkpoints", 4)
    checkpoint = commit.open_checkpoint(path)
    name, array = next((n, a) for n, a in checkpoint.arrays.items() if a["shape"])
    empty = {**array["pieces"][0], "shape": [0] * len(array["shape"]), "bytes": 0}
    array["pieces"] = [*array["pieces"], *[empty] * 1000]
    content = {
        key: getattr(checkpoint, key)
        for key in ("step", "state", "arrays", "files", "parent", "holds", "metric", "about")
    }
    (path / manifest.NAME).write_bytes(manifest.encode({"format": manifest.FORMAT, **content}))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=name):
        commit.open_checkpoint(path)
    tracemalloc.stop()
