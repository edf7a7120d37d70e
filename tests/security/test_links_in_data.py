"""Links in folders of data, wherever the folder's files are found: they stay in the folder, or are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from unisono import open_source
from unisono.runtime.errors import DataError
from unisono.runtime.untrusted import safe_paths
from unisono_audio.sources.archives import expand_paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `theirs`, beside a private file and a private dataset."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a.txt").write_text("hello")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.txt").write_text("secret")
    table = pa.table({"text": ["secret"]})
    with pa.OSFile("private/rows.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return Path("theirs")


@pytest.mark.parametrize(
    "place",
    [
        "theirs",
        "theirs/*.txt",
        "theirs/**/*.txt",
        "thei*",
        "{here}/theirs/*.txt",
        "file://{here}/theirs",
        "local://{here}/theirs/*.txt",
        "local://{here}/theirs",
    ],
)
def test_a_link_that_a_glob_matches_is_not_one_that_the_user_named(folder: Path, place: str) -> None:
    (folder / "b.txt").symlink_to("../private/key.txt")
    with pytest.raises(DataError, match="outside of the folder"):
        open_source(place.format(here=Path.cwd()))
    assert list(open_source("theirs/b.txt", "text")) == ["secret"]


def test_a_folder_that_a_glob_passes_through_is_no_link_out(folder: Path) -> None:
    (folder / "more").symlink_to("../private")
    with pytest.raises(DataError, match="outside of the folder"):
        open_source("theirs/*/*.txt")


def test_a_link_that_stays_in_the_folder_is_followed(folder: Path) -> None:
    (folder / "b.txt").symlink_to("a.txt")
    for place in ("theirs", "theirs/*.txt"):
        assert list(open_source(place, "text")) == ["hello", "hello"]


def test_the_files_and_splits_of_a_saved_dataset_are_in_it(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    (folder / "train").mkdir()
    (folder / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "rows.arrow"}]}))
    (folder / "train" / "dataset_info.json").write_text("{}")
    (folder / "train" / "rows.arrow").symlink_to("../../private/rows.arrow")
    (folder / "test").symlink_to("../private")
    for split in ("train", "test"):
        with pytest.raises(DataError, match="outside of the folder"):
            open_source(folder, split=split)


def test_a_link_put_in_place_of_a_file_that_was_found_is_not_followed(folder: Path) -> None:
    """The same size and time of modification, which the check for changes believes."""
    private, found = Path("private/key.txt"), folder / "a.txt"
    found.write_text("public")
    os.utime(found, ns=(private.stat().st_atime_ns, private.stat().st_mtime_ns))
    source = open_source(folder, "text")
    found.unlink()
    found.symlink_to("../private/key.txt")
    source._reset_caches()
    with pytest.raises(safe_paths.UnsafePathError, match="is a link"):
        _ = source[0]


def test_blobs_of_a_snapshot_are_found_from_its_subfolders(tmp_path: Path) -> None:
    blobs, data = tmp_path / "blobs", tmp_path / "snapshots" / "abc" / "data"
    blobs.mkdir()
    data.mkdir(parents=True)
    (blobs / "1234").write_text("row")
    (data / "a.txt").symlink_to("../../../blobs/1234")
    for place in (tmp_path / "snapshots" / "abc", data, f"{data}/*.txt"):
        assert list(open_source(place, "text")) == ["row"]
    (data / "b.txt").symlink_to("../../../../blobs/1234")
    with pytest.raises(DataError, match="is a link"):
        open_source(data)
    with pytest.raises(safe_paths.UnsafePathError):
        safe_paths.open_inside(data, "b.txt")


def test_archives_of_recordings_are_found_in_their_folder(folder: Path) -> None:
    (folder / "a.tar").symlink_to("../private/key.txt")
    for place in ("theirs", "theirs/*.tar"):
        with pytest.raises(DataError, match="outside of the folder"):
            expand_paths([place])
