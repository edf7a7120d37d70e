"""Rows on disk: what was written comes back without a copy, and nothing that was changed is taken for it."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.unisono.tests.data.numbers import Numbers
from unisono.data.prepare import shards
from unisono.data.prepare.manifest import ContentHash
from unisono.data.prepare.preparation import prepare
from unisono.data.prepare.shards import Shards, ShardWriter
from unisono.runtime.errors import DataError

rows_of_numbers = st.lists(st.lists(st.integers(0, 65_535), max_size=30), max_size=25)


def handed_over(rows: list[Any], parts: list[int]) -> list[tuple[Any, Any]]:
    """The rows in parts of these sizes, as a writer takes them."""
    found, begin = [], 0
    for size in [*parts, len(rows)]:
        part = rows[begin : begin + size]
        lengths = np.asarray([len(row) for row in part], dtype=np.int64)
        found.append((np.concatenate([np.zeros(0, dtype="<u2"), *part]).astype("<u2"), lengths))
        begin += size
    return found


def written(path: Path, rows: list[Any], parts: list[int]) -> dict[str, Any]:
    with ShardWriter(path, "tokens", "<u2") as writer:
        for values, lengths in handed_over(rows, parts):
            writer.add(values, lengths)
        return writer.close()


@pytest.fixture
def made(tmp_path: Path) -> Shards:
    found = prepare(Numbers(400), tmp_path / "made", shard_mb=2)
    assert found is not None
    return found


# there and back ---------------------------------------------------------------------------------------------------


def test_every_row_comes_back_in_order(made: Shards):
    wanted = Numbers(400).rows()
    assert len(made) == len(wanted) > 300
    assert any(len(row) == 0 for row in wanted)
    assert all(np.array_equal(made[row], wanted[row]) for row in range(len(made)))
    assert made.lengths.tolist() == [len(row) for row in wanted]
    assert made.lengths.dtype == np.int64


def test_a_row_is_a_view_of_the_file_and_cannot_be_written_to(made: Shards):
    row = made[next(i for i in range(len(made)) if len(made[i]))]
    assert row.dtype == np.dtype("<u2")
    assert not row.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1


def test_a_slice_ends_with_its_row_and_a_row_that_is_not_there_is_an_index_error(made: Shards):
    row = int(np.argmax(made.lengths))
    assert made.slice(row, 3, 10**6).tolist() == made[row][3:].tolist()
    assert made.slice(row, 2, 5).tolist() == made[row][2:5].tolist()
    for past in (-1, 10**6):
        with pytest.raises(IndexError, match=f"row {past} of {len(made)}"):
            made[past]


def test_batches_hold_all_rows_and_blocks_say_how_many(made: Shards):
    parts = list(made.batches())
    assert np.concatenate([lengths for _, lengths in parts]).tolist() == made.lengths.tolist()
    assert np.array_equal(np.concatenate([values for values, _ in parts]), np.concatenate(Numbers(400).rows()))
    assert [len(lengths) for _, lengths in parts if len(lengths)] == made.blocks.tolist()
    assert made.blocks.sum() == len(made)


def test_another_process_opens_the_same_rows(made: Shards):
    again = pickle.loads(pickle.dumps(made))
    assert again.lengths.tolist() == made.lengths.tolist()
    assert np.array_equal(again[7], made[7])


def test_a_shard_is_an_arrow_file_that_others_read(made: Shards):
    with pa.memory_map(str(made.folder / made.manifest["shards"][0]["file"])) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table.schema.field("tokens").type == pa.large_list(pa.uint16())
        assert table["tokens"][1].as_py() == made[1].tolist()


def test_the_manifest_tells_rows_units_and_lengths_of_each_shard(made: Shards):
    entries, lengths = made.manifest["shards"], made.lengths
    assert len(entries) == 5
    assert (made.manifest["rows"], made.manifest["units"]) == (len(lengths), lengths.sum())
    assert made.manifest["left_out"] == 400 - len(lengths) > 0
    begin = 0
    for entry in entries:
        own = lengths[begin : begin + entry["rows"]]
        told = (entry["units"], entry["shortest"], entry["longest"], entry["mean"])
        assert told == (own.sum(), own.min(), own.max(), round(own.mean(), 3))
        begin += entry["rows"]
    assert begin == len(made)


# bytes and content ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(rows=rows_of_numbers, parts=st.lists(st.integers(0, 9), max_size=8), block=st.integers(1, 80))
def test_the_bytes_do_not_depend_on_how_rows_are_handed_over(rows: list[Any], parts: list[int], block: int):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "_BATCH_UNITS", block)
        one, other = Path(folder, "one"), Path(folder, "other")
        assert written(one, rows, []) == written(other, rows, parts)
        assert one.read_bytes() == other.read_bytes()
        batches = pa.ipc.open_file(one.read_bytes()).read_all().to_batches()
        assert [row for batch in batches for row in batch.column(0).to_pylist()] == rows
        for batch in batches[:-1]:  # full, and not by more than its last row
            lengths = [len(row) for row in batch.column(0).to_pylist()]
            assert sum(lengths) >= block > sum(lengths[:-1])


@settings(max_examples=100, deadline=None)
@given(rows=rows_of_numbers, cuts=st.lists(st.integers(0, 25), max_size=4))
def test_the_content_does_not_depend_on_how_rows_are_cut_into_shards(rows: list[Any], cuts: list[int]):
    def content(part: list[Any]) -> ContentHash:
        found = ContentHash()
        for values, lengths in handed_over(part, []):
            found.add(values, lengths)
        return found

    places = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [content(rows[places[i] : places[i + 1]]) for i in range(len(places) - 1)]
    entries = [{"rows": part.rows, "content": part.hex} for part in parts]
    assert (ContentHash.combine(entries).rows, ContentHash.combine(entries).hex) == (len(rows), content(rows).hex)


@pytest.mark.parametrize(
    "other",
    [[[1, 2], [3], []], [[1], [2, 3]], [[3], [1, 2]], [[1, 2], [4]], [[], [1, 2], [3]], [[1, 2]]],
    ids=["an empty row more", "cut elsewhere", "another order", "another number", "an empty row first", "a row less"],
)
def test_other_rows_have_another_content(tmp_path: Path, other: list[list[int]]):
    contents = [written(tmp_path / "x", rows, [])["content"] for rows in ([[1, 2], [3]], other)]
    assert contents[0] != contents[1]


# damage -----------------------------------------------------------------------------------------------------------


def _shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _of_others(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def _other_rows(path: Path) -> None:
    size = path.stat().st_size
    written(path, [[1, 2, 3]], [])
    path.write_bytes(path.read_bytes()[: size - 20] + b"\0" * (size - path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_shorter, r"is damaged \(\d+ bytes instead of \d+\); remove this file and prepare the data again"),
        (_of_others, r"is damaged \(.*\); remove this file and prepare the data again"),
        (_other_rows, r"is damaged \(.*\); remove this file and prepare the data again"),
        (Path.unlink, r"is listed in the manifest but missing; prepare the data again"),
    ],
    ids=["cut off", "zeros", "no footer", "gone"],
)
def test_a_shard_that_cannot_be_read_is_named_with_the_remedy(made: Shards, damage: Callable[[Path], Any], told: str):
    path = made.folder / made.manifest["shards"][3]["file"]
    damage(path)
    with pytest.raises(DataError, match=f"^{path} {told}"):
        Shards(made.folder)


def test_one_changed_bit_is_found_by_reading_every_byte(made: Shards):
    made.verify()
    path = made.folder / made.manifest["shards"][2]["file"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path} is damaged \\(its hash differs"):
        Shards(made.folder).verify()


def test_a_shard_that_changes_while_it_is_open_is_named(made: Shards):
    assert len(made.manifest["shards"]) > 1
    paths = [made.folder / entry["file"] for entry in made.manifest["shards"]]
    content = paths[1].read_bytes()
    os.utime(paths[1], ns=(1, 1))
    made.check_files()  # written again as it was
    paths[1].unlink()
    made.check_files()  # nothing else is read in its place
    for changed, length in ((content + b"x", f": it had {len(content)} bytes and has {len(content) + 1}"),
                            (content[:-1] + b"x", "")):  # fmt: skip
        paths[1].write_bytes(changed)
        made.check_files(0, len(paths))  # another process looks at it
        with pytest.raises(DataError, match=f"{paths[1]} has changed since it was opened{length}; restore it"):
            made.check_files(1, len(paths))


def test_where_a_row_is_names_its_file_and_its_number_there(made: Shards):
    entries = made.manifest["shards"]
    assert made.where(0) == f"{made.folder / entries[0]['file']}, row 0 (from 0)"
    first = entries[0]["rows"]
    assert made.where(first - 1).endswith(f"{entries[0]['file']}, row {first - 1} (from 0)")
    assert made.where(first + 2).endswith(f"{entries[1]['file']}, row 2 (from 0)")


def test_a_shard_of_another_preparation_is_noticed_by_its_rows(tmp_path: Path, made: Shards):
    manifest = made.manifest
    manifest["shards"][1]["rows"] += 1
    (made.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"00001-of-00005\.arrow is damaged \(\d+ rows of \d+ units instead of"):
        Shards(made.folder)


def test_a_folder_that_is_not_finished_or_of_another_version_is_refused(tmp_path: Path, made: Shards):
    with pytest.raises(DataError, match=r"has no prepared data .*create it with `unisono data prepare`"):
        Shards(tmp_path)
    manifest = made.folder / "manifest.json"
    manifest.write_text(json.dumps({**made.manifest, "format": 99}))
    with pytest.raises(DataError, match=r"manifest\.json has format 99, but this version of Unisono reads format 1"):
        Shards(made.folder)
    manifest.write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json cannot be read: .*; remove it and prepare the data again"):
        Shards(made.folder)
    manifest.unlink()
    with pytest.raises(DataError, match=r"is not finished \(no manifest\.json\)"):
        Shards(made.folder)
