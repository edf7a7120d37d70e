"""What a stranger's file says is read exactly, or refused in a sentence: no crash, no other value, no memory for it."""

from __future__ import annotations

import io
import json
import math
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from unisono import DataError
from unisono.data.sources import open_source
from unisono.runtime.untrusted import archives, safe_paths, shapes


def rows_of(path: Path, content: bytes | str, **options: Any) -> list[dict[str, Any]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(open_source(path, **options))


# JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "a": 2}', "key 'a' twice"),
        ('{"a": {"x": 1, "x": 2}}', "key 'x' twice"),
        ('{"a": [1e400]}', "1e400 is too large"),
        ('{"a": [true, -1.5E+0400]}', r"-1\.5E\+0400 is too large"),
        ('{"a": "1e-5", "b": ' + "9" * 300 + "e9}", "9e9 is too large|999… is too large"),
    ],
)
def test_json_that_readers_understand_differently_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        safe_paths.parse_json(text, shapes.Object)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1 is not JSON.*{told}"):
        rows_of(tmp_path / "a.jsonl", text)


def test_what_json_says_plainly_is_kept(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "a.jsonl", '{"a": NaN, "b": -Infinity, "c": 9007199254740993, "d": -0.0, "e": 1e308}')
    assert math.isnan(row["a"]) and row["b"] == -math.inf and row["c"] == 2**53 + 1 and row["e"] == 1e308
    assert math.copysign(1, row["d"]) == -1


@pytest.mark.parametrize("text", ['{"a": true, "b": [1.5e-05, 2.0], "c": "some text"}', '{"a": false, "b": 1E-7}'])
def test_json_without_large_exponents_is_not_parsed_number_by_number(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Every `true`, and every small number, made rows of floats half as slow again."""
    monkeypatch.setattr(safe_paths, "_FINITE_DECODER", None)
    assert safe_paths.decode_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("kind", "value"), [("list<float32>", [1.0, 1e39]), ("list<float16>", [70000]), ("float32", 1e39), ("float16", 7e4),
     ("float64", 10**400), ("list<float64>", [10**400])],
)  # fmt: skip
def test_a_number_that_a_narrow_type_cannot_hold_is_refused(tmp_path: Path, kind: str, value: Any) -> None:
    lines = [json.dumps({"a": one}) for one in [[1.0] if kind.startswith("list") else 1.0] * 80 + [value]]
    with pytest.raises(DataError, match=rf"line 81: 'a' is of type .* not {kind}"):
        rows_of(tmp_path / "a.jsonl", "\n".join(lines), expect={"a": kind})


def test_infinity_that_is_written_as_such_is_one(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "a.jsonl", '{"a": [Infinity, 1.5]}', expect={"a": "list<float16>"})
    assert row["a"].tolist() == [math.inf, 1.5] and row["a"].dtype == np.float16


# CSV --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "read"),
    [
        (["12345678901234567890", "12345678901234567891"], None),  # two ids that one float would be
        (["9007199254740993", "1.5"], None),
        (["-9007199254740993", "9007199254740992", "1.5"], None),
        (["0.5", "1000000000000000", "-9007199254740992", "+100000000000000000000"], [0.5, 1e15, -(2.0**53), 1e20]),
        (["0x10", "16"], None),
        (["1e400", "2"], None),
        (["9223372036854775807", "-1"], [2**63 - 1, -1]),
        (["123456789012345", "1.5"], [123456789012345.0, 1.5]),
        (["inf", "-Infinity"], [math.inf, -math.inf]),
    ],
)
def test_a_column_is_numbers_only_where_none_changes(tmp_path: Path, values: list[str], read: Any) -> None:
    rows = rows_of(tmp_path / "a.csv", "\n".join(["id", *values]))
    assert [row["id"] for row in rows] == (values if read is None else read)


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [("0x10", "int64", "'0x10' is hexadecimal"), ("1e39", "float32", "'1e39' is too large for float"),
     ("1", "bytes", "cannot be bytes: csv has texts and numbers alone")],
)  # fmt: skip
def test_a_value_that_is_not_of_the_expected_type_is_refused(tmp_path: Path, value: str, kind: str, told: str) -> None:
    with pytest.raises(DataError, match=rf"a\.csv: column 'a' .*{told}"):
        rows_of(tmp_path / "a.csv", f"a\n{value}\n", expect={"a": kind})


@pytest.mark.parametrize("end", [",\n,\n", ",,,\n\n,\n", "\n,"])
def test_empty_rows_and_columns_at_the_end_as_of_spreadsheets_are_left_out(tmp_path: Path, end: str) -> None:
    """The rows of nulls would be trained on; two columns without a name were refused as of the same."""
    rows = rows_of(tmp_path / "a.csv", "a,b,,\n1,x,,\n,\n2,y\n" + end)
    assert [(row["a"], row["b"]) for row in rows] == [(1, "x"), (None, None), (2, "y")] and len(rows[0]) == 2
    with pytest.raises(DataError, match=r"line 2: 3 values, but the header has 2 columns.* may have no name"):
        rows_of(tmp_path / "b.csv", "a,b,,\n1,x,3\n")
    with pytest.raises(DataError, match="columns of the same name"):
        rows_of(tmp_path / "c.csv", ",,\n1,x,3\n")


def test_a_row_of_empty_values_is_a_row_and_a_blank_line_is_none(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a.csv", "a,b\n1,2\n,\n\n3,4\n")
    assert rows == [{"a": 1, "b": 2}, {"a": None, "b": None}, {"a": 3, "b": 4}]


# Arrow ------------------------------------------------------------------------------------------------------------


def write_arrow(path: Path, table: Any) -> Path:
    with pa.ipc.new_stream(path, table.schema) as made:
        made.write_batch(table)
    return path


def test_unsigned_numbers_beyond_a_dictionary_do_not_end_the_process(tmp_path: Path) -> None:
    """Arrow aborts (SIGABRT) at an index of 2^63 and more; where this fails, pytest ends."""
    beyond = pa.DictionaryArray.from_arrays(pa.array([0, 2**63 + 5], pa.uint64()), pa.array(["x"]), safe=False)
    source = open_source(write_arrow(tmp_path / "a.arrow", pa.record_batch({"x": beyond})))
    assert source[0] == {"x": "x"}
    with pytest.raises(DataError, match=r"'x' is damaged at row 1 .* in a dictionary"):
        source[1]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**50], pa.timestamp("s")),
        pa.array([1], pa.timestamp("s", tz="Not/AZone")),
        pa.array([2**31 - 1], pa.int32()).view(pa.date32()),
        pa.array([[2**50]], pa.list_(pa.timestamp("s"))),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], fields=[pa.field("x", pa.int64())] * 2),
    ],
    ids=["year", "zone", "day", "list of years", "field twice"],
)
def test_what_python_cannot_express_is_a_sentence(tmp_path: Path, column: Any) -> None:
    source = open_source(write_arrow(tmp_path / "a.arrow", pa.record_batch({"x": column})))
    for read in (lambda: source[0], lambda: list(source)):
        with pytest.raises(DataError, match=r"a\.arrow: column 'x' is damaged at row 0"):
            read()


def test_a_dictionary_of_lists_is_read(tmp_path: Path) -> None:
    lists = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1]), pa.array([[1, 2], [3]]))
    source = open_source(write_arrow(tmp_path / "a.arrow", pa.record_batch({"x": lists})))
    expected = [[3], [1, 2], None, [3]]
    assert [None if row["x"] is None else row["x"].tolist() for row in source] == expected
    assert [None if source[at]["x"] is None else source[at]["x"].tolist() for at in range(4)] == expected


@pytest.mark.parametrize("kind", ["dictionary", "runs", "views", "view of texts", "dictionary in a list"])
def test_rows_that_share_one_long_value_are_read_a_few_at_a_time(tmp_path: Path, kind: str) -> None:
    """256 rows at a time took 512 MB of a file of 2 MB."""
    rows, long = 256, "x" * (2 << 20)
    column = {
        "dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array([long])),
        "runs": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([rows]), pa.array([long])),
        "views": lambda: pa.ListViewArray.from_arrays(
            pa.array([0] * rows, pa.int32()), pa.array([1 << 18] * rows, pa.int32()), pa.array(np.zeros(1 << 18))
        ),
        "view of texts": lambda: pa.Array.from_buffers(
            pa.string_view(),
            rows,
            [None, pa.py_buffer(struct.pack("<i4sii", len(long), b"xxxx", 0, 0) * rows), pa.py_buffer(long.encode())],
        ),
        "dictionary in a list": lambda: pa.ListArray.from_arrays(
            pa.array(range(rows + 1), pa.int32()),
            pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array([long])),
        ),
    }[kind]()
    source = open_source(write_arrow(tmp_path / "a.arrow", pa.record_batch({"x": column})))
    tracemalloc.start()
    try:
        _ = next(iter(source))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


# NumPy ------------------------------------------------------------------------------------------------------------


def npy(header: str, content: bytes = b"", version: int = 1) -> bytes:
    described = header.encode()
    size = struct.pack("<H" if version == 1 else "<I", len(described))
    return b"\x93NUMPY" + bytes([version, 0]) + size + described + content


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (npy("{'descr': '<U2', 'fortran_order': False, 'shape': (1,)}", b"\xff" * 8), "0xffffffff, which does not"),
        (npy("{'descr': '<U2', 'fortran_order': False, 'shape': (1,)}", b"\0\xd8\0\0" * 2), "0xd800, which does not"),
        (npy("{'descr': '|S0', 'fortran_order': False, 'shape': (5,)}"), "its shape is"),
        (npy(f"{{'descr': '<i1', 'fortran_order': False, 'shape': ({'1,' * 70})}}", b"\1"), "its shape is"),
        (npy("{'descr': '<i4', 'fortran_order': False, 'shape': (1,)}", b"\1\0\0\0", 9), "its version is 9.0"),
    ],
    ids=["no character", "surrogate", "no width", "70 axes", "version 9"],
)
def test_an_array_that_numpy_trips_over_is_a_sentence(tmp_path: Path, content: bytes, told: str) -> None:
    with pytest.raises(DataError, match=rf"a\.npy cannot be read as npy: .*{told}"):
        rows_of(tmp_path / "a.npy", content)


def test_names_of_fields_are_what_they_are_and_arrays_of_a_type_are_rows(tmp_path: Path) -> None:
    named = npy("{'descr': [('é', '<i4')], 'fortran_order': False, 'shape': (1,)}", b"\1\0\0\0", 3)
    assert rows_of(tmp_path / "a.npy", named) == [{"é": 1}]
    pairs = npy("{'descr': ('<i4', (2,)), 'fortran_order': False, 'shape': (1,)}", b"\1\0\0\0\2\0\0\0")
    assert rows_of(tmp_path / "b.npy", pairs)[0]["array"].tolist() == [1, 2]


# archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [("a.npy", "a.npy"), ("a.npy", "a")], ids=["twice", "with and without ending"])
def test_an_archive_with_two_files_of_one_name_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for number, name in enumerate(names):
            content = io.BytesIO()
            np.save(content, np.full(3, number))
            archive.writestr(name, content.getvalue())
    with safe_paths.open_regular(tmp_path / "a.npz") as file, pytest.raises(ValueError, match="it has two"):
        archives.load_arrays(file)
