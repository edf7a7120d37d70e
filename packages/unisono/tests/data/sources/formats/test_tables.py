"""Arrow files with offsets outside their values are refused with the row; Arrow itself would read past the buffer."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from unisono.data.sources import open_source
from unisono.runtime.errors import DataError

TEXT = ["a" * 77, "b" * 5, "c" * 3]
NUMBERS = [[1] * 77, [2] * 5, [3] * 3]

COLUMNS = {
    "text": pa.array(TEXT),
    "large text": pa.array(TEXT, pa.large_string()),
    "bytes": pa.array([text.encode() for text in TEXT], pa.binary()),
    "numbers": pa.array(NUMBERS, pa.list_(pa.int16())),
    "many numbers": pa.array(NUMBERS, pa.large_list(pa.float32())),
    "lists of text": pa.array([["a"] * 77, ["b"] * 5, ["c"] * 3]),
    "pairs": pa.array([[("a", 1)] * 77, [("b", 2)] * 5, [("c", 2)] * 3], pa.map_(pa.string(), pa.int8())),
    "a recording": pa.array([{"path": text} for text in TEXT]),
    "text in lists": pa.array([[text] for text in TEXT]),
    "a dictionary": pa.array(TEXT).dictionary_encode(),
}


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("ending", ["arrow", "feather"])
def test_offsets_out_of_the_values_are_refused(tmp_path: Path, name: str, ending: str):
    table = pa.table({"x": COLUMNS[name]})
    path = tmp_path / f"rows.{ending}"
    make = pa.ipc.new_stream if ending == "arrow" else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table)
    source = open_source(path, "x")
    expected = table.column("x").to_pylist()
    assert [plain(source[row]) for row in range(3)] == expected

    wide = "<qqq" if name in ("large text", "many numbers") else "<iii"
    content = path.read_bytes()
    before = struct.pack(wide, 0, 77, 82)
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, struct.pack(wide, 0, 77, 1 << 30)))
    damaged = open_source(path, "x")
    # Row 0 lies before the damage, and is read where nothing else has to be looked at for it.
    if name != "a dictionary":
        assert plain(damaged[0]) == expected[0]
    with pytest.raises(DataError, match=rf"rows\.{ending}.*column 'x' is damaged at row 1 \(from 0\).*copy the file"):
        damaged[1]
    with pytest.raises(DataError, match="damaged"):
        damaged.read_block(0)


@pytest.mark.parametrize("number", [-1, -(1 << 30), 3, 1 << 30])
def test_numbers_out_of_a_dictionary_are_refused(tmp_path: Path, number: int) -> None:
    table = pa.table({"x": pa.array(TEXT).dictionary_encode()})
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    content = path.read_bytes()
    before = struct.pack("<iii", 0, 1, 2)
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, struct.pack("<iii", 0, number, 2)))
    damaged = open_source(path, "x")
    assert [damaged[row] for row in (0, 2)] == [TEXT[0], TEXT[2]]
    with pytest.raises(DataError, match=r"rows\.arrow.*column 'x' is damaged at row 1 \(from 0\).*copy the file"):
        damaged[1]
