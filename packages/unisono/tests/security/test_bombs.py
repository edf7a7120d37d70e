"""What a few kilobytes claim to hold is compared with a budget before any memory is reserved for it.

The budget of a block is a 64th here, and so are the tables, of which a few must be made in memory.
"""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packages.unisono.tests.checkpoint.saved import save
from unisono.checkpoint.core import commit, manifest
from unisono.data.sources import open_source, storage
from unisono.data.sources.files import records
from unisono.data.sources.formats import delimited, lines, parquet, parquet_pages
from unisono.data.sources.storage import File
from unisono.runtime.errors import CheckpointError, DataError

BUDGET = 1 << 24  # bytes
ROWS = 8_000
LONG = "x" * 2500


@pytest.fixture(autouse=True)
def _budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (storage._TABLE_FREE, parquet._AT_ONCE) == (BUDGET << 6, BUDGET << 6)
    monkeypatch.setattr(storage, "_TABLE_FREE", BUDGET)
    monkeypatch.setattr(parquet, "_AT_ONCE", BUDGET)


def texts(kind: str) -> Any:
    """A column in which many rows are one text of 2,500 bytes, stored once."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(ROWS, dtype=np.int32)), pa.array([LONG]))
    if kind == "list":
        return pa.ListArray.from_arrays(pa.array(np.arange(ROWS + 1, dtype=np.int32)), column)
    return column if kind == "plain" else pa.StructArray.from_arrays([column], ["inner"])


def repeated(path: Path, kind: str) -> Path:
    """A table of such a column."""
    pq.write_table(pa.table({"a": texts(kind)}), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.parametrize("kind", ["plain", "struct", "list"])
def test_a_parquet_file_of_a_long_repeated_text_is_refused_unread(tmp_path: Path, kind: str) -> None:
    """8.6 kB became 2.4 GB."""
    source = open_source(repeated(tmp_path / "a.parquet", kind))
    with pytest.raises(DataError, match=r"row group 0 unpacks to 20(\.1)? MB, more than 16\.8 MB"):
        _ = source[0]


@pytest.mark.parametrize("wanted", [["a.b"], None])
def test_such_a_column_is_refused_whatever_it_is_called(tmp_path: Path, wanted: list[str] | None) -> None:
    """Columns with a dot in their name were not counted: 47 kB became 20 GB."""
    columns = {"a.b": texts("list"), "a": pa.array([["x"]] * ROWS)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression="zstd", store_schema=False)
    source = open_source(tmp_path / "a.parquet", wanted)
    with pytest.raises(DataError, match=r"row group 0 unpacks to 20(\.1)? MB, more than 16\.8 MB"):
        _ = source[0]


def test_a_column_whose_name_begins_like_that_of_another_is_neither_counted_nor_read_for_it(tmp_path: Path) -> None:
    """`a.b` was counted for `a`, read with it, and its lengths were taken for those of `a`."""
    columns = {"a.b": texts("list"), "a": pa.array([[1, 2], [3]] * (ROWS // 2), pa.list_(pa.int32()))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression="zstd", store_schema=False)
    source = open_source(tmp_path / "a.parquet", ["a"])
    assert source[1]["a"].tolist() == [3]
    assert source.lengths is not None
    assert source.lengths[:4].tolist() == [2, 1, 2, 1]
    rows = records(source.shards[0].file, source._wanted)
    assert [next(rows)["a"].tolist() for _ in range(2)] == [[1, 2], [3]]


def test_rows_of_such_a_file_are_read_in_order_as_few_at_a_time_need_little(tmp_path: Path) -> None:
    path = repeated(tmp_path / "a.parquet", "plain")
    file = File.from_path(path, "parquet", path.name)
    assert next(iter(records(file, open_source(path)._wanted))) == {"a": LONG}


def dictionary_last(path: Path, column: pa.Array) -> Path:
    """A column whose texts stand plainly in its first pages, and then the dictionary of the others."""
    options = {"store_schema": False, "dictionary_pagesize_limit": 40_000, "row_group_size": 10**7}
    pq.write_table(pa.table({"a": column}), path, compression="zstd", **options)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    content, at, seen = bytearray(path.read_bytes()), chunk.dictionary_page_offset, 0
    first: list[bytes] = []
    then: list[bytes] = []
    with pa.memory_map(str(path)) as source:
        window = parquet_pages._Window(source, len(content), 0)
        while seen < chunk.num_values:
            header, length = parquet_pages._read_header(window, at)
            page = bytes(content[at : at + length + header[3][1]])
            values, encoding = parquet_pages._read_values(header, header[1][1])
            (first if values and encoding == 0 else then).append(page)
            at, seen = at + len(page), seen + values
    assert first and len(then) > 1
    content[chunk.dictionary_page_offset : at] = b"".join(first + then)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("is_list", [False, True])
def test_a_dictionary_that_comes_after_values_is_refused(tmp_path: Path, is_list: bool) -> None:
    """Arrow follows it: 140 kB became 1.3 GB, though the first rows showed nothing."""
    texts = pa.array([LONG] * (50_000 >> 6) + [f"{row:08d}" * 3 for row in range(3000)])
    if is_list:
        texts = pa.ListArray.from_arrays(pa.array([*range(0, len(texts), 100), len(texts)], pa.int32()), texts)
    source = open_source(dictionary_last(tmp_path / "a.parquet", texts))
    with pytest.raises(DataError, match=r"the dictionary of column 'a.*' comes after values, where no writer puts it"):
        _ = source[0]


def test_texts_that_continue_each_other_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """The delta encoding repeats a text without a dictionary; large honest files of it were refused."""
    path, few = tmp_path / "a.parquet", tmp_path / "few.parquet"
    options = {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}, "compression": "zstd"}
    pq.write_table(pa.table({"a": ["short", *[LONG] * ROWS]}), path, **options)
    source = open_source(path)
    with pytest.raises(DataError, match=r"row group 0 unpacks to 20(\.1)? MB, more than 16\.8 MB"):
        _ = source[0]
    honest = [f"{row}" + LONG for row in range(20_000 >> 6)]
    pq.write_table(pa.table({"a": honest}), few, **options)
    assert [row["a"] for row in open_source(few)] == honest


def test_lists_of_a_row_count_by_their_values(tmp_path: Path) -> None:
    """600 bytes became 1.6 GB: one row, whose list repeats one number."""
    count = 140_000_000 >> 6
    lists = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, dtype=np.int64)))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": lists}), path, compression="zstd", write_statistics=False)
    assert path.stat().st_size < 2000
    with pytest.raises(DataError, match=r"row group 0 unpacks to 17\.5 MB, more than 16\.8 MB"):
        _ = open_source(path)[0]


def test_a_footer_that_names_a_small_size_changes_nothing(tmp_path: Path) -> None:
    """Arrow does not look at a row group's total size, so it bounds nothing."""
    path = repeated(tmp_path / "a.parquet", "plain")
    size, content = pq.read_metadata(path).row_group(0).total_byte_size, path.read_bytes()
    number = _number(size)
    at = content.index(b"\x16" + number + b"\x16", len(content) - 2000) + 1
    small = b"\x82" + b"\x80" * (len(number) - 2) + b"\0"  # in as many bytes
    path.write_bytes(content[:at] + small + content[at + len(small) :])
    assert pq.read_metadata(path).row_group(0).total_byte_size == 1
    with pytest.raises(DataError, match=r"row group 0 unpacks to 20(\.1)? MB, more than 16\.8 MB"):
        _ = open_source(path)[0]


def _number(value: int) -> bytes:
    """An integer as Thrift's compact protocol has it."""
    value, found = value << 1, bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("where", ["batch", "dictionary"])
def test_an_arrow_file_whose_buffers_unpack_to_gigabytes_is_refused_unread(
    tmp_path: Path, form: str, where: str
) -> None:
    """33 kB became 1.3 GB."""
    zeros = pa.array(np.zeros((140_000_000 >> 6), dtype=np.int64))
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
    with pytest.raises(DataError, match=r"record batch 0 unpacks to 17\.5 MB"):
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


@pytest.mark.parametrize("indexed", [True, False])
def test_a_line_that_no_memory_should_hold_is_refused(
    tmp_path: Path, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty gigabytes of nothing behind the first row of a file full of holes were read as one line."""
    monkeypatch.setattr(lines, "MAX_ROW", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n')
    good = open_source(path)
    os.truncate(path, 40 << 30)
    with pytest.raises(DataError, match=r"a\.jsonl: line 2 has more than 0 GiB, which no row has"):
        _ = open_source(path) if indexed else list(records(File.from_path(path, "jsonl", path.name), good._wanted))


@pytest.mark.parametrize("value", ["7", "x"])
def test_a_table_takes_eight_bytes_a_value_beside_one_part_of_it(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole columns were converted at once, beside the texts that they came from: 17 times a file of digits."""
    path, rows, seen = tmp_path / "a.csv", 100_000, [0]
    path.write_text("a\n" + f"{value}\n" * rows)
    fill, before = delimited._null_if_empty, pa.total_allocated_bytes()

    def watched(values: Any) -> Any:
        seen.append(pa.total_allocated_bytes() - before)
        return fill(values)

    monkeypatch.setattr(delimited, "_null_if_empty", watched)
    assert len(open_source(path)) == rows
    assert len(seen) > rows // delimited._BLOCK_ROWS
    assert rows < max(seen) < 9 * rows
