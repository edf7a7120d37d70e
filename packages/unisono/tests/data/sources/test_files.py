"""Rows by number: the same ones from every format, in any order of access, from threads and from other processes."""

from __future__ import annotations

import gc
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.unisono.tests.data.sources.written import FORMATS, SCHEMA, opened, plain, rows, table, write
from packages.unisono.tests.real_data import real
from unisono.data.sources import Files, create_cache_folder, discovery, files, find, index, open_source
from unisono.data.sources.formats import lines, npy
from unisono.runtime.errors import ConfigError, DataError
from unisono.task import Source

ROWS = rows(29)


@pytest.fixture(params=FORMATS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return opened(write(request.param, tmp_path / "rows", ROWS))


# every format -----------------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_records(source: Files) -> None:
    assert len(source) == 29
    assert isinstance(source, Source)
    assert [plain(source[row]) for row in range(29)] == ROWS
    assert [plain(record) for record in source] == ROWS, "and iterating ends"
    with pytest.raises(IndexError, match="row 29 of 29"):
        source[29]
    with pytest.raises(IndexError):
        source[-1]
    assert plain(source[np.int64(28)]) == ROWS[28]


def test_blocks_are_the_rows_in_order(source: Files) -> None:
    blocks = [source.read_block(number) for number in range(len(source.blocks))]
    assert [len(block) for block in blocks] == source.blocks.tolist()
    assert source.blocks.dtype == np.int64
    assert [plain(record) for block in blocks for record in block] == ROWS
    with pytest.raises(IndexError, match="block"):
        source.read_block(len(blocks))


def test_lengths_are_those_of_the_lists(source: Files) -> None:
    lengths = source.lengths
    assert lengths is not None
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [len(row["tokens"]) for row in ROWS]


def test_threads_see_what_one_sees(source: Files) -> None:
    order = np.random.default_rng(0).integers(29, size=400)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: plain(source[row]), order))
    assert found == [ROWS[row] for row in order]


def test_a_copy_reads_on_by_itself(source: Files) -> None:
    source[3]
    content = pickle.dumps(source)
    assert len(content) < 20_000
    copy = pickle.loads(content)
    assert [plain(copy[row]) for row in (28, 0, 13)] == [ROWS[28], ROWS[0], ROWS[13]]
    assert (copy.fingerprint, len(copy)) == (source.fingerprint, 29)


def test_no_file_stays_open(source: Files) -> None:
    for row in range(29):
        source[row]
    gc.collect()
    held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in held if "/rows/" in path or "/cache/" in path]
    assert held, "they can be seen"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    count=st.integers(1, 40),
    block=st.integers(1, 9),
    cache_mb=st.sampled_from([0.0, 0.001, 256.0]),
)
def test_any_row_in_any_order_is_the_same_in_all_formats(
    tmp_path: Path, data: Any, count: int, block: int, cache_mb: float
) -> None:
    made = rows(count)
    order = data.draw(st.lists(st.integers(0, count - 1), max_size=30))
    name = data.draw(st.sampled_from(sorted(set(FORMATS) - {"saved data set"})))
    columns = data.draw(st.sampled_from([None, "text", "tokens", ["tokens", "id"]]))
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    if name in ("Parquet, three files",) and count < 3:
        count = 3
        made, order = rows(3), [0]
    source = opened(write(name, folder, made, block), columns, cache_mb=cache_mb)
    for row in order:
        wanted = made[row] if columns is None else made[row].get(columns) if isinstance(columns, str) else None
        if isinstance(columns, list):
            wanted = {column: made[row][column] for column in columns}
        assert plain(source[row]) == wanted
    read = [record for number in range(len(source.blocks)) for record in source.read_block(number)]
    assert [plain(record) for record in read] == [plain(source[row]) for row in range(count)]
    again = pickle.loads(pickle.dumps(source))
    assert [plain(again[row]) for row in order] == [plain(source[row]) for row in order]


def test_a_worker_process_reads_the_same(tmp_path: Path) -> None:
    source = opened(write("JSONL, gzip", tmp_path / "rows", ROWS))
    (tmp_path / "source.pickle").write_bytes(pickle.dumps(source))
    code = (
        "import pickle, sys; source = pickle.load(open(sys.argv[1], 'rb')); "
        "print([source[i]['id'] for i in (5, 0, 28)], 'torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "source.pickle")], capture_output=True, text=True, timeout=60
    )
    assert (told.stdout, told.stderr) == ("[5, 0, 28] False\n", "")


def write_file(path: Path, rows: Any) -> None:
    with pa.ipc.new_file(path, rows.schema) as writer:
        writer.write_table(rows)


# columns ----------------------------------------------------------------------------------------------------------


def test_a_format_of_another_distribution_is_read_by_its_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its reader is found by an entry point, and its files are a source as all others are."""

    class Records(lines.LineReader):
        """Lines of JSON under another suffix."""

    entry = SimpleNamespace(load=lambda: Records)
    for module in (files, discovery):
        monkeypatch.setattr(module, "find_entry_points", {"unisono.formats": {"records": entry}}.__getitem__)
    (tmp_path / "a.records").write_text('{"x": 1}\n{"x": 2}\n')
    assert [*open_source(tmp_path)] == [*open_source(tmp_path / "a.records", format="jsonl")] == [{"x": 1}, {"x": 2}]
    with pytest.raises(ConfigError, match="did you mean 'records'"):
        open_source(tmp_path, format="record")


def test_one_column_as_text_gives_bare_values(tmp_path: Path) -> None:
    folder = write("Arrow file", tmp_path / "rows", ROWS)
    assert opened(folder, "id")[5] == 5
    assert opened(folder, ["id"])[5] == {"id": 5}
    assert list(opened(folder, ["tokens", "id"])[6]) == ["tokens", "id"], "in the order in which they are asked for"


def test_structs_and_labels_are_given_as_they_are(tmp_path: Path) -> None:
    audio = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    made = pa.table(
        {
            "audio": pa.array([{"bytes": b"\x00\xff", "path": "a"}, {"bytes": b"", "path": None}], audio),
            "label": pa.array([3, None]),
        }
    )
    pq.write_table(made, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "b.arrow", made.schema) as writer:
        writer.write_table(made)
    source = open_source(tmp_path, expect={"audio.bytes": "bytes", "audio.path": "text?", "label": "int64?"})
    assert source[0] == source[2] == {"audio": {"bytes": b"\x00\xff", "path": "a"}, "label": 3}
    assert source[3] == {"audio": {"bytes": b"", "path": None}, "label": None}


NESTED = pa.list_(pa.struct([("x", pa.int64())]))
ODD: list[tuple[Any, list[Any]]] = [
    (pa.list_(pa.int32()), [[1, 2], None, [3, 4]]), (pa.large_list(pa.int32()), [[1, 2], None, [3]]),
    (pa.list_(pa.int32(), 2), [[1, 2], None, [3, 4]]), (pa.list_view(pa.int32()), [[1, 2], None, [3, 4]]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", None, "b"]), (pa.string_view(), ["x", None, "y"]),
    (pa.large_binary(), [b"x", None, b"y"]), (pa.bool_(), [True, None, False]),
    (pa.float16(), [np.float16(1), None, np.float16(2)]), (pa.list_(pa.list_(pa.int64())), [[[1], [2, 3]], None, []]),
    (NESTED, [[{"x": 1}], None, []]), (pa.timestamp("us"), [1, None, 3]), (pa.null(), [None, None, None]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), ODD, ids=lambda value: "" if isinstance(value, list) else str(value))
def test_any_type_is_read_and_what_follows_it_too(tmp_path: Path, kind: Any, values: list[Any]) -> None:
    """The nodes of nested types must be counted right, or nulls would be looked for in another column."""
    made = pa.table({"odd": pa.array(values, kind), "label": pa.array([1, 2, 3])})
    write_file(tmp_path / "a.arrow", made)
    source = open_source(tmp_path, expect={"label": "int64"})
    assert [source[row]["label"] for row in range(3)] == [1, 2, 3]
    assert source[1]["odd"] is None
    for row in (0, 2):
        found, wanted = source[row]["odd"], made["odd"][row].as_py()
        assert np.array_equal(found, wanted) if isinstance(found, np.ndarray) else found == wanted
    write_file(tmp_path / "a.arrow", made.set_column(1, "label", pa.array([1, 2, None])))
    with pytest.raises(DataError, match=r"a\.arrow, row 2 \(from 0\): column 'label' is null"):
        open_source(tmp_path, expect={"label": "int64"})


def test_lists_of_numbers_keep_their_width_and_own_their_memory(tmp_path: Path) -> None:
    made = pa.table({"tokens": pa.array([[1, 2], [], [3]], pa.list_(pa.uint16()))})
    pq.write_table(made, tmp_path / "a.parquet")
    source = open_source(tmp_path, "tokens", expect={"tokens": "list<int>"})
    assert [value.tolist() for value in source.read_block(0)] == [[1, 2], [], [3]]
    holes = pa.table({"tokens": pa.array([[1, 2], None, [3, None]], pa.list_(pa.uint16()))})
    write_file(tmp_path / "b.arrow", holes)
    holed = open_source(tmp_path / "b.arrow", "tokens")
    for read in (list(holed), [holed[row] for row in range(3)]):
        assert isinstance(read[0], np.ndarray), "whatever its neighbours hold"
        assert read[1:] == [None, [3, None]]
    assert source[0].dtype == np.uint16
    assert source[0].flags.owndata
    source[0][:] = 9
    assert source[0].tolist() == [1, 2], "what a task does to its record stays there"


# NumPy ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 30),
    shape=st.lists(st.integers(1, 4), max_size=2),
    dtype=st.sampled_from(["<u2", ">i4", "<f4", "<i8", "bool", "<f2"]),
    version=st.sampled_from([(1, 0), (2, 0)]),
)
def test_arrays_are_rows_of_their_first_axis(
    tmp_path: Path, count: int, shape: list[int], dtype: str, version: tuple[int, int]
) -> None:
    array = (np.random.default_rng(0).random((count, *shape)) * 100).astype(dtype)
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version=version)
    source = open_source(tmp_path / "a.npy", npy.ARRAY_COLUMN)
    assert len(source) == count
    for row in (0, count - 1):
        assert np.array_equal(source[row], array[row])
        assert np.asarray(source[row]).dtype == array.dtype or not shape
    assert np.array_equal(np.array(source.read_block(0)), array)


def test_named_fields_are_columns(tmp_path: Path) -> None:
    array = np.zeros(3, dtype=[("label", "<i8"), ("pixels", "<f4", (2, 2)), ("name", "U3")])
    array["label"], array["name"] = [1, 2, 3], ["a", "bc", "def"]
    np.save(tmp_path / "a.npy", array)
    source = open_source(tmp_path, expect={"label": "int64", "name": "text"})
    assert source[2]["label"] == 3
    assert source[2]["name"] == "def"
    assert source[2]["pixels"].shape == (2, 2)
    assert open_source(tmp_path, ["label"])[1] == {"label": 2}


def test_lengths_of_arrays_are_all_alike(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 7), np.uint16))
    lengths = open_source(tmp_path, npy.ARRAY_COLUMN).lengths
    assert lengths is not None
    assert lengths.tolist() == [7] * 5


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([{}, []], dtype=object), "Python objects.*unpickled"),
        (np.array(3), r"has no rows; save it again with numpy\.save"),
        (np.asfortranarray(np.ones((3, 4))), "Fortran order.*ascontiguousarray"),
    ],
)
def test_arrays_that_cannot_be_read_by_rows_are_refused(tmp_path: Path, array: Any, said: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=rf"a\.npy .*{said}"):
        open_source(tmp_path)


# text -------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.sampled_from("ab\n\r-é🎻\x00"), max_size=60),
    separator=st.sampled_from(["\n\n", "-", "--", "é", "🎻-"]),
    chunk=st.integers(1, 7),
    stretch=st.integers(1, 9),
    name=st.sampled_from(["a.txt", "a.text"]),
)
def test_documents_of_a_text_are_what_lies_between_separators(
    tmp_path: Path, text: str, separator: str, chunk: int, stretch: int, name: str
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_CHUNK", chunk)
        patch.setattr(lines, "_BLOCK", stretch)
        source = open_source(tmp_path / name, "text", separator=separator)
        assert list(source) == text.split(separator)
        assert [text for number in range(len(source.blocks)) for text in source.read_block(number)] == list(source)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n  \t\n", "\n\x0c\n"]), min_size=20, max_size=20),
    last=st.sampled_from(["", "\n", "\n\n", " "]),
    stretch=st.integers(1, 40),
    mark=st.sampled_from(["", "\ufeff"]),
    name=st.sampled_from(["a.jsonl", "a.ndjson"]),
)
def test_lines_are_found_whatever_ends_them(
    tmp_path: Path, values: list[int], ends: list[str], last: str, stretch: int, mark: str, name: str
) -> None:
    joined = "".join(f'{{"id": {v}}}' + end for v, end in zip(values, ends, strict=False))
    content = mark + joined.rstrip() + last
    (tmp_path / name).write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BLOCK", stretch)
        source = open_source(tmp_path / name, "id")
        assert list(source) == values
        assert [value for number in range(len(source.blocks)) for value in source.read_block(number)] == values


# memory, caches, read-only data -----------------------------------------------------------------------------------


def test_memory_is_that_of_the_last_blocks(tmp_path: Path) -> None:
    folder = write("Parquet", tmp_path / "rows", rows(400), block=10)
    small = opened(folder, cache_mb=0)
    for row in range(400):
        small[row]
    assert len(small._blocks) == 1
    small.keep_blocks(5)
    for row in range(400):
        small[row]
    assert len(small._blocks) == 5
    sent = pickle.loads(pickle.dumps(small))
    for row in range(400):
        sent[row]
    assert len(sent._blocks) == 5, "worker processes keep as many"
    large = opened(folder)
    for row in range(400):
        large[row]
    assert len(large._blocks) == 40, "the other bound is of bytes"


def test_a_block_is_read_once_for_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(write("Parquet", tmp_path / "rows", ROWS, block=29))
    reads: list[int] = []
    reader = source._reader(0)
    read = reader.block
    monkeypatch.setattr(reader, "block", lambda number: (reads.append(number), read(number))[1])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: source[row], list(range(29)) * 4))
    assert reads == [0]


def test_what_was_found_out_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_SMALL_BYTES", 0)
    folder = write("JSONL", tmp_path / "rows", ROWS)
    assert [plain(record) for record in opened(folder)] == ROWS
    kept = sorted((tmp_path / "cache" / "sources").glob("*.npy"))
    assert len(kept) == 1
    monkeypatch.setattr(lines, "_find_line_starts", lambda *_: pytest.fail("the lines were looked for again"))
    assert [plain(record) for record in opened(folder)] == ROWS
    with (folder / "rows.jsonl").open("a") as more:
        more.write('{"id": 29, "text": "", "tokens": []}\n')
    with pytest.raises(BaseException, match="looked for again"):
        opened(folder)


@pytest.mark.parametrize("name", ["JSONL", "Parquet", "Arrow stream"])
def test_neither_the_data_nor_the_cache_need_be_writable(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_SMALL_BYTES", 0)
    (tmp_path / "occupied").write_text("a file where the cache should be")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "occupied"))
    folder = write(name, tmp_path / "rows", ROWS)
    before = sorted(path.name for path in folder.rglob("*"))
    folder.chmod(0o555)
    source = opened(folder)
    assert [plain(source[row]) for row in range(29)] == ROWS
    assert source.lengths is not None
    assert sorted(path.name for path in folder.rglob("*")) == before
    folder.chmod(0o755)


def test_an_archive_that_cannot_be_unpacked_says_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be unpacked into .*occupied.*UNISONO_CACHE"):
        opened(write("JSONL, gzip", tmp_path / "rows", ROWS))


def test_a_full_disk_is_not_taken_for_an_archive_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "atomic_file", lambda place: nullcontext(Path("/dev/full")))
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be unpacked into .*No space left on device"):
        opened(write("JSONL, gzip", tmp_path / "rows", ROWS))


def test_a_column_of_lengths_is_used_where_there_is_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"length": [5, 6], "a": [[1], [2]], "b": [[1], [2]]}), tmp_path / "a.parquet")
    lengths = open_source(tmp_path).lengths
    assert lengths is not None
    assert lengths.tolist() == [5, 6]
    pq.write_table(pa.table({"a": [[1], [2]], "b": [[1], [2]]}), tmp_path / "a.parquet")
    assert open_source(tmp_path).lengths is None, "two lists: nobody can know which"
    assert open_source(tmp_path, ["a"]).lengths is not None


def test_the_schema_is_that_of_the_files(tmp_path: Path) -> None:
    assert opened(write("Parquet", tmp_path / "a", ROWS)).schema.names == SCHEMA.names
    seen = opened(write("JSONL", tmp_path / "b", ROWS)).schema
    assert seen.field("tokens").type == pa.list_(pa.int64())
    assert table(ROWS).schema.equals(SCHEMA)


def test_real_documents_are_those_that_pyarrow_reads() -> None:
    folder = real("text_corpora") / "books"
    source = open_source(folder, "text", expect={"text": "text"}, cache_mb=1)
    wanted = [text for path in sorted(folder.glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()]
    assert len(source) == len(wanted) > 10
    for row in np.random.default_rng(0).permutation(len(wanted))[:40].tolist():
        assert source[row] == wanted[row]
    assert list(source) == wanted


def test_what_can_be_made_again_is_nobody_s_data_unless_it_is_asked_for(tmp_path: Path) -> None:
    made = tmp_path / "cache" / "made"
    create_cache_folder(made)
    for path in (tmp_path / "a.txt", made / "b.txt", made / "below" / "c.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name, encoding="utf-8")
    assert [Path(file.path).name for file in find([tmp_path]).files] == ["a.txt"]
    assert [Path(file.path).name for file in find([made]).files] == ["b.txt", "c.txt"]
    assert [file.path.rpartition("/")[2] for file in find([f"file://{tmp_path}"]).files] == ["a.txt"]
