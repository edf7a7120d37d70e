"""Text tables are read strictly, and tables are written in four formats that hold the same."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from unisono import open_source, read_table, write_table
from unisono.runtime.errors import ConfigError, DataError

COLUMNS = {"name": ["a", 'b, "c"'], "score": np.array([0.5, 1e-9]), "pair": torch.tensor([[1, 2], [3, 4]])}


def test_every_format_holds_the_same_table(tmp_path: Path) -> None:
    paths = [write_table(tmp_path / f"t{ending}", COLUMNS) for ending in (".csv", ".tsv", ".jsonl", ".parquet")]
    rows = [{"name": "a", "score": 0.5, "pair": [1, 2]}, {"name": 'b, "c"', "score": 1e-9, "pair": [3, 4]}]
    for path, delimiter in zip(paths, ",\t", strict=False):
        with path.open(newline="") as file:
            found = list(csv.DictReader(file, delimiter=delimiter))
        assert [{**row, "score": float(row["score"]), "pair": json.loads(row["pair"])} for row in found] == rows
    assert [json.loads(line) for line in paths[2].read_text().splitlines()] == rows
    assert pq.read_table(paths[3]).to_pylist() == rows


def test_arrays_of_any_shape_are_nested_lists(tmp_path: Path) -> None:
    rows = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 3), np.float32), np.ones((1, 4), np.float32)]
    paths = [write_table(tmp_path / f"t{ending}", {"a": rows}) for ending in (".csv", ".jsonl", ".parquet")]
    expected = [row.tolist() for row in rows]
    with paths[0].open(newline="") as file:
        assert [json.loads(row["a"]) for row in csv.DictReader(file)] == expected
    assert [json.loads(line)["a"] for line in paths[1].read_text().splitlines()] == expected
    assert pq.read_table(paths[2])["a"].to_pylist() == expected


def test_another_ending_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"t\.xlsx: tables are written as \.csv, \.tsv, \.jsonl, \.parquet"):
        write_table(tmp_path / "t.xlsx", COLUMNS)
    assert not list(tmp_path.iterdir())


def test_columns_of_different_lengths_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_table(tmp_path / "t.csv", {"a": [1, 2], "b": [1]})
    assert not list(tmp_path.iterdir())


def test_a_text_table_is_columns_of_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('id,note\n007,"a, b"\n\n8\n')
    assert read_table(path) == {"id": ["007", "8"], "note": ["a, b", ""]}


# as a source ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_delimited_file_is_a_source_whose_columns_have_types(tmp_path: Path, ending: str) -> None:
    path, mark = tmp_path / f"t.{ending}", "," if ending == "csv" else "\t"
    lines = [["id", "fold", "score", "note"], ["007", "1", "0.5", "x"], ["8", "2", "", ""], ["9", "3", "2", "y"]]
    path.write_text("\n".join(mark.join(line) for line in lines) + "\n")
    source = open_source(path, expect={"id": "text", "score": "float?"})
    assert [source[row] for row in range(3)] == [
        {"id": "007", "fold": 1, "score": 0.5, "note": "x"},
        {"id": "8", "fold": 2, "score": None, "note": None},
        {"id": "9", "fold": 3, "score": 2.0, "note": "y"},
    ]
    assert [open_source(path, "fold")[row] for row in range(3)] == [1, 2, 3]
    before = source.fingerprint
    path.write_text(path.read_text().replace("0.5", "0.6"))
    assert open_source(path).fingerprint != before


def test_thousands_of_rows_are_read_by_number_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("n\n" + "".join(f"{n}\n" for n in range(9001)))
    source = open_source(path, "n")
    assert list(source) == list(range(9001))
    assert source.blocks.tolist() == [4096, 4096, 809]
    assert (source[4095], source[4096], source[9000]) == (4095, 4096, 9000)
    assert list(source.read(4000, 8200)) == list(range(4000, 8200))


@pytest.mark.parametrize(
    ("text", "expect", "told"),
    [
        ("a,b\n1,2\n3\n", {}, r"line 3: 1 values, but the header has 2 columns"),
        ("a,a\n1,2\n", {}, r"columns of the same name: 'a'"),
        ('a\n"1\n', {}, r"cannot be read as csv: unexpected end of data"),
        ("a\nx\n", {"a": "int"}, r"column 'a' is not int: .*'x'"),
        ("a\n1\n", {"b": "int"}, r"has no column 'b', (did you mean|valid here)"),
    ],
)
def test_a_delimited_file_that_would_mislead_is_refused(
    tmp_path: Path, text: str, expect: dict[str, str], told: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=told):
        open_source(path, expect=expect)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("number", [1, 2, 3, 5000])
def test_the_line_of_a_byte_that_is_not_utf8_is_named(tmp_path: Path, number: int, end: str) -> None:
    """Its position was one within a piece of the file that nobody sees."""
    lines = [f"row {line} é".encode() for line in range(6000)]
    lines[number - 1] = b"caf\xe9"
    path = tmp_path / "t.csv"
    path.write_bytes(end.encode().join(lines))
    with pytest.raises(DataError, match=rf"t\.csv, line {number}: byte 0xe9 is not UTF-8 .*save the file as UTF-8"):
        open_source(path)


def test_columns_at_the_end_that_a_spreadsheet_left_empty_are_none(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("id\tage\t\t \ns1\t3\t\t\ns2\t4\n")
    assert read_table(path) == {"id": ["s1", "s2"], "age": ["3", "4"]}
    path.write_text("id\tage\t\ns1\t3\tx\n")
    with pytest.raises(DataError, match=r"line 2: 3 values, but the header has 2 columns.* a column may have no name"):
        read_table(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_spreadsheet_computes_no_cell_and_a_terminal_obeys_none(tmp_path: Path, suffix: str) -> None:
    texts = [
        "=1+1",
        "+cmd|' /C calc'!A0",
        "-2+3",
        "@SUM(A1)",
        "\t=1",
        " =1",
        "\uff1d1",
        "-0.5",
        "+3e-4",
        "a-b",
        "\x1b[2J",
    ]
    path = write_table(tmp_path / f"a{suffix}", {"=name": texts, "n": list(range(-5, 6))})
    with path.open(encoding="utf-8", newline="") as file:
        (head, *rows) = csv.reader(file, delimiter="," if suffix == ".csv" else "\t")
    assert head == ["'=name", "n"]
    shown = [row[0] for row in rows]
    assert shown[:7] == [f"'{text}" for text in texts[:7]]
    assert shown[7:] == ["-0.5", "+3e-4", "a-b", "\\x1b[2J"]
    assert [int(row[1]) for row in rows] == list(range(-5, 6)), "numbers stay"


def test_cells_stay_as_they_are_where_that_is_asked_for(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", {"a": ["=1+1", "\x1b"]}, escape=False)
    assert path.read_text().splitlines() == ["a", "=1+1", "\x1b"]
