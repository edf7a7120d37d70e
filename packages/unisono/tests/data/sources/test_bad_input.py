"""What can be wrong with files: each refused with the file, the place in it, and what to do."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packages.unisono.tests.data.sources.written import FORMATS, opened, plain, rows, write
from unisono.data.sources import open_source
from unisono.runtime.errors import ConfigError, DataError

ROWS = rows(12)


def put(path: Path, columns: dict[str, Any], schema: Any = None) -> Path:
    """A file of these columns, by its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pa.table(columns, schema=schema)
    if path.suffix == ".parquet":
        pq.write_table(made, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, made.schema) as writer:
            writer.write_table(made)
    elif path.suffix == ".feather":
        with pa.ipc.new_file(path, made.schema) as writer:
            writer.write_table(made)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in made.to_pylist()))
    return path


def refused(said: str, *parts: str, kind: type[Exception] = DataError, **options: Any) -> str:
    """Opening or reading must fail with a message that holds all parts."""
    with pytest.raises(kind) as caught:
        source = open_source(said, **options)
        for row in range(len(source)):
            source[row]
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    return str(caught.value)


ENDINGS = ["parquet", "arrow", "feather", "jsonl"]


# nothing there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_empty_source_is_refused(tmp_path: Path, ending: str) -> None:
    put(tmp_path / "in" / f"a.{ending}", {"text": pa.array([], pa.string())})
    refused(f"{tmp_path}/in", "data.path", "contain no rows", f"in/a.{ending}", "written completely")


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_empty_file_among_others_is_passed_over_and_told(tmp_path: Path, ending: str) -> None:
    put(tmp_path / "in" / f"a.{ending}", {"text": pa.array([], pa.string())})
    put(tmp_path / "in" / f"b.{ending}", {"text": ["one"]})
    source = open_source(tmp_path / "in", "text")
    assert list(source) == ["one"]
    assert source.ignored == (f"in/a.{ending}",)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather", "npy"])
def test_a_file_of_no_bytes_is_refused_where_the_format_has_a_frame(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.{ending}").write_bytes(b"")
    refused(str(tmp_path), f"a.{ending} cannot be read as")


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"Parquet, three files"}))
def test_one_row_is_a_source(tmp_path: Path, name: str) -> None:
    source = opened(write(name, tmp_path / "rows", ROWS[:1]))
    assert [plain(record) for record in source] == ROWS[:1]
    assert source.blocks.tolist() == [1]


def test_a_directory_without_readable_files_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    refused(f"{tmp_path}/in", "data.path", "no documents in", ".arrow, .csv, .feather, .jsonl")
    (tmp_path / "in" / "a.xyz").write_text("a,b")
    (tmp_path / "in" / ".hidden.jsonl").write_text("{}")
    said = refused(f"{tmp_path}/in", "ignored: a.xyz")
    assert "hidden" not in said


def test_a_path_that_does_not_exist_and_a_glob_that_matches_nothing(tmp_path: Path) -> None:
    refused(f"{tmp_path}/nowhere", "data.path", "nowhere does not exist")
    refused(f"{tmp_path}/*.parquet", "data.path", "*.parquet matches nothing")


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.parquet", {"text": ["x"]})
    (tmp_path / "in" / "b.parquet").symlink_to(tmp_path / "gone.parquet")
    refused(f"{tmp_path}/in", "b.parquet is a link to", "gone.parquet, which does not exist")


def test_a_refused_permission_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is made here."""
    put(tmp_path / "a.parquet", {"text": ["x"]})

    def deny(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(pa, "memory_map", deny)
    refused(str(tmp_path), "a.parquet cannot be read as parquet", "Permission denied")


# columns and types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_missing_column_suggests_the_nearest(tmp_path: Path, ending: str) -> None:
    put(tmp_path / f"a.{ending}", {"text": ["x"], "other": [1]})
    refused(str(tmp_path), f"a.{ending}", "'txt'", "did you mean 'text'?", columns="txt")
    refused(str(tmp_path), f"a.{ending}", "'labels'", "valid here: other, text", expect={"labels": "int64"})


@pytest.mark.parametrize("ending", ENDINGS)
def test_labels_that_are_text_are_refused_by_the_name_of_their_column(tmp_path: Path, ending: str) -> None:
    put(tmp_path / f"a.{ending}", {"ebird_code": ["amecro", "norcar"]})
    said = refused(str(tmp_path), f"a.{ending}", "'ebird_code'", "not int64 or null", expect={"ebird_code": "int64?"})
    assert "str" in said


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("label", [3, None])
def test_labels_that_are_int64_or_null_are_taken(tmp_path: Path, ending: str, label: int | None) -> None:
    put(tmp_path / f"a.{ending}", {"ebird_code": pa.array([7, label], pa.int64())})
    assert list(open_source(tmp_path, "ebird_code", expect={"ebird_code": "int64?"})) == [7, label]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_null_is_refused_with_its_row_where_none_is_allowed(tmp_path: Path, ending: str) -> None:
    put(tmp_path / f"a.{ending}", {"a": [1, 2, 3], "label": [1, None, 3]})
    where = "line 2" if ending == "jsonl" else "row 1 (from 0)"
    refused(str(tmp_path), f"a.{ending}", where, "'label' is null", "allow nulls", expect={"label": "int64"})


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_null_in_a_struct_is_found_too(tmp_path: Path, ending: str) -> None:
    put(tmp_path / f"a.{ending}", {"audio": [{"bytes": "x"}, {"bytes": None}]})
    refused(str(tmp_path), f"a.{ending}", "'audio.bytes' is null", expect={"audio.bytes": "text"})
    refused(str(tmp_path), f"a.{ending}", "'audio.byte'", "did you mean", expect={"audio.byte": "text"})


def test_types_say_what_they_know() -> None:
    refused(".", "'integer' is not a column type", "did you mean 'int'", kind=ConfigError, expect={"a": "integer"})
    refused(".", "expect names the column 'b'", kind=ConfigError, columns=["a"], expect={"b": "int"})
    refused(".", "format='parket'", "did you mean 'parquet'?", kind=ConfigError, format="parket")


@pytest.mark.parametrize(
    ("kind", "value", "taken"),
    [
        ("int8", 127, True), ("int8", 128, False), ("uint8", -1, False), ("int", True, False), ("bool", True, True),
        ("float", 1, True), ("float", "1", False), ("text", 1, False), ("list", [1], True), ("list<int>", [1.5], False),
        ("list<float>", [1.5, 2], True), ("list<int8>", [200], False), ("struct", {"x": 1}, True),
        ("number", 2**70, True), ("int", 2**70, False), ("bytes", "x", False), ("list<list<int>>", [[1]], True),
        ("list<int>", [1, True], False), ("list<int>", [], True),
        ("list<text>", ["a", None], False), ("list<int>", [1, None], False),
        ("list<int?>", [1, None], True), ("list<uint64>", [2**64 - 1, 0], True), ("list<uint64>", [2**64], False),
        ("list<int64>", [2**63], False), ("list<bool>", [True], True), ("list<list<int>>", [[1.5]], False),
        ("list<struct>", [{"x": 1}], True), ("list<list<int?>>", [[1, None]], True),
    ],
)  # fmt: skip
def test_json_is_held_to_its_types_line_by_line(tmp_path: Path, kind: str, value: Any, taken: bool) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": value}))
    if taken:
        found = open_source(tmp_path, "x", expect={"x": kind})[0]
        assert np.array_equal(found, value) if isinstance(found, np.ndarray) else found == value
    else:
        refused(str(tmp_path), "a.jsonl, line 1", "'x' is of type", kind, expect={"x": kind})


def test_files_with_different_columns_are_refused_with_both_names(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.parquet", {"text": ["x"], "score": [1.0]})
    put(tmp_path / "in" / "b.arrow", {"text": ["y"]})
    refused(f"{tmp_path}/in", "b.arrow has no column 'score'", "a.parquet has", "select columns that all files have")
    assert list(open_source(tmp_path / "in", "text")) == ["x", "y"]


def test_files_with_different_types_are_refused_with_both(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.parquet", {"tokens": pa.array([[1]], pa.list_(pa.int32()))})
    put(tmp_path / "in" / "b.parquet", {"tokens": pa.array([[1]], pa.list_(pa.int64()))})
    refused(f"{tmp_path}/in", "column 'tokens' is", "int32", "a.parquet", "int64", "b.parquet", "same types")


def test_kinds_of_text_are_one_type(tmp_path: Path) -> None:
    for number, kind in enumerate(
        [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
    ):
        put(tmp_path / "in" / f"{number}.arrow", {"text": pa.array([f"{number}"], kind)})
    assert list(open_source(tmp_path / "in", "text")) == ["0", "1", "2", "3"]


# damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Parquet", "Arrow file", "Arrow stream", "Arrow stream, lz4", "JSONL, gzip"])
@pytest.mark.parametrize("part", [0.0, 0.05, 0.3, 0.5, 0.9, 0.99, "one byte"])
def test_a_file_that_is_cut_off_is_refused_before_the_start(tmp_path: Path, name: str, part: Any) -> None:
    folder = write(name, tmp_path / "rows", ROWS)
    path = next(folder.iterdir())
    content = path.read_bytes()
    assert len(opened(folder)) == 12
    path.write_bytes(content[: -1 if part == "one byte" else int(part * len(content))])
    if name == "JSONL, gzip" and part == 0.0:
        refused(str(folder), "contain no rows", path.name)  # nothing unpacks to nothing
    else:
        refused(str(folder), f"{path.name} cannot be")


def test_an_arrow_stream_cut_between_batches_is_refused(tmp_path: Path) -> None:
    """pyarrow, and `datasets` with it, would take what is left for the whole."""
    folder = write("Arrow stream", tmp_path / "rows", ROWS)
    path = folder / "rows.arrow"
    reader: Any = opened(folder)._reader(0)
    path.write_bytes(path.read_bytes()[: reader._batches[1].last])
    with pa.memory_map(str(path)) as source:
        assert len(pa.ipc.open_stream(source).read_all()) == 8, "it is a stream that others read"
    refused(str(folder), "rows.arrow cannot be read as arrow", "truncated", "write or copy it again")


@pytest.mark.parametrize("name", ["Arrow file", "Arrow stream", "Arrow stream, lz4", "Parquet"])
def test_a_block_that_is_overwritten_is_an_error_and_no_crash(tmp_path: Path, name: str) -> None:
    folder = write(name, tmp_path / "rows", ROWS, block=12)
    path = next(folder.iterdir())
    content = bytearray(path.read_bytes())
    if name == "Parquet":
        content[4:400] = b"\xff" * 396
    else:
        reader: Any = opened(folder)._reader(0)
        end = int(reader._batches[0].last)
        content[end - 600 : end] = b"\xff" * 600
    path.write_bytes(content)
    refused(str(folder), path.name, "cannot be read as")


@pytest.mark.parametrize("name", ["Parquet", "Arrow file", "Arrow stream", "JSONL, gzip"])
def test_garbage_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(name, tmp_path / "rows", ROWS)
    path = next(folder.iterdir())
    for content in (b"\xff" * 100, b"\x00" * 100, os.urandom(300), b"ARROW1\0\0" + b"\x01" * 300 + b"ARROW1"):
        path.write_bytes(content)
        refused(str(folder), path.name)


def test_an_array_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    content = (tmp_path / "a.npy").read_bytes()
    for size in (3, 60, 500):
        (tmp_path / "a.npy").write_bytes(content[:size])
        refused(str(tmp_path), "a.npy cannot be read as npy")


# other data than before -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path, name: str) -> None:
    here = opened(write(name, tmp_path / "here", ROWS))
    there = opened(write(name, tmp_path / "elsewhere" / "there", ROWS))
    if "gzip" not in name and "saved" not in name:  # those write the time, or random names
        assert here.fingerprint == there.fingerprint
    changed = [*ROWS[:-1], {**ROWS[-1], "id": 1000}]
    other = opened(write(name, tmp_path / "other", changed))
    assert other.fingerprint != here.fingerprint
    fewer = opened(write(name, tmp_path / "fewer", ROWS[:-1]))
    assert len({here.fingerprint, other.fingerprint, fewer.fingerprint}) == 3


def test_a_shard_that_changed_since_the_checkpoint_is_named(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path / "in" / f"{name}.parquet", {"text": [name]})
    manifest = json.loads(json.dumps(open_source(tmp_path / "in").manifest))
    open_source(tmp_path / "in").check_same(manifest)
    put(tmp_path / "in" / "b.parquet", {"text": ["B"]})
    with pytest.raises(DataError, match=r"in/b\.parquet has changed: its content differs\. Restore"):
        open_source(tmp_path / "in").check_same(manifest)
    (tmp_path / "in" / "b.parquet").unlink()
    with pytest.raises(DataError, match=r"in/b\.parquet is gone"):
        open_source(tmp_path / "in").check_same(manifest)
    put(tmp_path / "in" / "b.parquet", {"text": ["b"]})
    open_source(tmp_path / "in").check_same(manifest)
    put(tmp_path / "in" / "d.parquet", {"text": ["d"]})
    with pytest.raises(DataError, match=r"in/d\.parquet was not there"):
        open_source(tmp_path / "in").check_same(manifest)
    for name in "cd":
        (tmp_path / "in" / f"{name}.parquet").unlink()
    with pytest.raises(DataError, match=r"in/c\.parquet is gone"):
        open_source(tmp_path / "in").check_same(manifest)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_changes_under_a_running_source_is_named(tmp_path: Path, ending: str) -> None:
    path = put(tmp_path / f"a.{ending}", {"id": [1, 2, 3]})
    source = open_source(tmp_path, "id")
    put(path, {"id": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]})
    source._reset_caches()  # as in a worker that opens it only now
    with pytest.raises(DataError, match=rf"a\.{ending} has changed since it was opened"):
        source[0]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_has_changed_is_found_without_reading_it(tmp_path: Path, ending: str) -> None:
    paths = [put(tmp_path / f"{name}.{ending}", {"id": [number, 2, 3]}) for number, name in enumerate("abc")]
    source = open_source(tmp_path, "id")
    source.check_files()
    content = paths[1].read_bytes()
    put(paths[1], {"id": [5, 6, 7, 8]})
    source.check_files(0, 2)  # those of another process: the first and the third
    size = paths[1].stat().st_size
    lengths = f": it had {len(content)} bytes and has {size}" if size != len(content) else ""
    with pytest.raises(DataError, match=rf"b\.{ending} has changed since it was opened{lengths}; restore it"):
        source.check_files(1, 2)
    paths[1].unlink()
    source.check_files()  # nothing else is read in its place
    paths[1].write_bytes(content)
    source.check_files()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("checked", [True, False])
def test_a_file_that_was_written_again_as_it_was_is_read_on(
    tmp_path: Path, ending: str, checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(tmp_path / f"a.{ending}", {"id": [1, 2, 3]})
    source = open_source(tmp_path, "id", cache_mb=0)
    before = source.fingerprint
    os.utime(path, ns=(1, 1))
    if checked:
        source.check_files()
    copy = pickle.loads(pickle.dumps(source))
    for one in (source, copy):
        one._reset_caches()  # as in a worker that opens it only now
        assert list(one) == [1, 2, 3]
        assert one[1] == 2
    assert f"a.{ending} was written again with the same size, ends and index" in caplog.text
    assert source.fingerprint == before
    other = bytearray(path.read_bytes())
    other[-1] ^= 1
    path.write_bytes(other)
    with pytest.raises(DataError, match=rf"a\.{ending}"):
        source.check_files()


def test_the_same_file_twice_is_refused_unless_allowed(tmp_path: Path) -> None:
    path = put(tmp_path / "in" / "a.jsonl", {"text": ["x"]})
    with pytest.raises(DataError, match=r"a\.jsonl is listed twice.*duplicates='allow'"):
        open_source([tmp_path / "in", path])
    with pytest.raises(DataError, match=r"a\.jsonl is listed twice"):
        open_source([path, f"file://{path}", tmp_path / "in" / ".." / "in"])
    assert list(open_source([tmp_path / "in", path], "text", duplicates="allow")) == ["x", "x"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_copy_under_another_name_is_refused_with_both_names(tmp_path: Path, ending: str) -> None:
    first = put(tmp_path / "in" / f"a.{ending}", {"text": ["x", "y"]})
    (tmp_path / "in" / f"b.{ending}").write_bytes(first.read_bytes())
    refused(f"{tmp_path}/in", f"b.{ending} has the same content as", f"a.{ending}", "duplicates='allow'")
    assert len(open_source(tmp_path / "in", duplicates="allow")) == 4


def test_files_that_differ_in_their_middle_alone_are_no_copies(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        array = np.zeros(1_000_000, np.uint8)
        array[500_000] = value
        np.save(tmp_path / f"{name}.npy", array)
    assert len(open_source(tmp_path)) == 2_000_000
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes())
    refused(str(tmp_path), "b.npy has the same content as", "a.npy")


def test_text_files_may_be_alike(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("")
    assert list(open_source(tmp_path, "text")) == ["", ""]


# odd text ---------------------------------------------------------------------------------------------------------

ODD = ["a\x00b", "x" * 1_000_000, "line\r\nline", "\u2028\u2029\x85", "\ufeff inside", "🎻", ""]


@pytest.mark.parametrize("ending", ENDINGS)
def test_odd_text_comes_through(tmp_path: Path, ending: str) -> None:
    put(tmp_path / f"a.{ending}", {"text": ODD})
    source = open_source(tmp_path, "text")
    assert list(source) == ODD
    assert source.read_block(0) == ODD[: len(source.read_block(0))]


def test_odd_text_comes_through_text_files(tmp_path: Path) -> None:
    for number, text in enumerate(ODD):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    wanted = [text.removeprefix("\ufeff") for text in ODD for _ in range(2)]  # at its beginning it marks the byte order
    assert list(open_source(tmp_path, "text")) == wanted


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"text": "broken', ["line 4 is not JSON"]),
        (b"\x00\x00", ["line 4 is not JSON"]),
        (b'{"text": "caf\xe9"}', ["line 4", "utf-8", "0xe9"]),
        (b'{"text": "ab\\ud800c"}', ["line 4", "unpaired surrogate \\ud800", "character 2", "repair"]),
        (b'{"text": ["\\uDC00"]}', ["line 4", "unpaired surrogate"]),
        (b"[1]", ["line 4 is a list", "JSON object"]),
        (b'{"other": 1}', ["line 4 has no key 'text'"]),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_bad_line_is_refused_when_it_is_read(tmp_path: Path, line: bytes, parts: list[str], ending: str) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\n' + line + b'\n{"text": "c"}'
    (tmp_path / f"a.{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    source = open_source(tmp_path, "text")
    assert [source[0], source[1], source[3]] == ["a", "b", "c"], "one bad line does not spoil the others"
    with pytest.raises(DataError) as caught:
        source[2]
    for part in (f"a.{ending}", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("separator", [None, "--"])
def test_text_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path, separator: str | None) -> None:
    (tmp_path / "a.txt").write_bytes("abc--café".encode("latin-1"))
    refused(str(tmp_path), "a.txt is not UTF-8 text: byte 8 is 0xe9", separator=separator)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather"])
def test_a_row_that_is_not_utf8_is_named_and_others_are_read(tmp_path: Path, ending: str) -> None:
    offsets = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 1, 2, 4)))
    bad = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"ab\xff\xfe")])
    put(tmp_path / f"a.{ending}", {"text": bad})
    source = open_source(tmp_path, "text")
    assert source[1] == "b"
    for read in (lambda: source[2], lambda: source.read_block(0)):
        with pytest.raises(DataError, match=rf"a\.{ending}: row 2 \(from 0\) of column 'text' is not UTF-8.*0xff"):
            read()
