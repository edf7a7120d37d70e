"""A name in somebody's file leads to a regular file of its folder, or nowhere; and nobody waits for a pipe."""

from __future__ import annotations

import os
import socket
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.runtime.errors import DataError, UnisonoError
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.runtime.untrusted.safe_paths import UnsafePathError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "given"
    (made / "inner").mkdir(parents=True)
    (made / "a").write_text("mine")
    (made / "inner" / "b").write_text("deeper")
    (tmp_path / "secret").write_text("private")
    return made


def read(folder: Path, name: object) -> str:
    with safe_paths.open_inside(folder, name) as file:
        return file.read().decode()


def test_a_file_of_the_folder_is_read_at_any_depth(folder: Path) -> None:
    assert (read(folder, "a"), read(folder, "inner/b"), read(folder, "./inner//b")) == ("mine", "deeper", "deeper")
    (folder.parent / "link").symlink_to(folder)  # the folder itself is the caller's word
    assert read(folder.parent / "link", "inner/b") == "deeper"


@pytest.mark.parametrize(
    "name",
    [
        "../secret", "inner/../../secret", "/etc/passwd", "", ".", "/", "a\0b", "inner\\b", 3, None, "x" * 2000,
        "d/" * 40 + "x", "\ud800",
    ],
)  # fmt: skip
def test_a_name_that_is_none_or_leads_elsewhere_is_refused(folder: Path, name: object) -> None:
    with pytest.raises(UnsafePathError) as caught:
        read(folder, name)
    assert isinstance(caught.value, UnisonoError) and isinstance(caught.value, OSError)
    str(caught.value).encode()  # fit to be printed


@pytest.mark.parametrize(
    ("target", "name"), [("../secret", "x"), ("a", "x"), ("..", "x/secret"), ("nowhere", "x")],
    ids=["to a file", "within", "to a folder", "to nowhere"],
)  # fmt: skip
def test_a_link_is_refused_and_not_followed(folder: Path, target: str, name: str) -> None:
    (folder / "x").symlink_to(target)
    with pytest.raises(UnsafePathError, match="is a link"):
        read(folder, name)
    assert not safe_paths.is_inside(folder, name)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), Path.mkdir],
    ids=["pipe", "socket", "folder"],
)  # fmt: skip
@pytest.mark.parametrize("reads", [lambda p: safe_paths.open_inside(p.parent, p.name), safe_paths.open_regular])
def test_what_is_no_regular_file_is_refused_at_once(
    folder: Path, make: Callable[[Path], None], reads: Callable[[Path], Any]
) -> None:
    make(folder / "x")
    with pytest.raises(OSError):
        reads(folder / "x")
    with pytest.raises(UnsafePathError, match="is a device"):
        safe_paths.open_regular("/dev/null")


def test_a_file_that_is_missing_is_so_by_its_whole_name(folder: Path) -> None:
    for name in ("nothing", "inner/nothing", "nowhere/nothing"):
        with pytest.raises(FileNotFoundError) as caught:
            read(folder, name)
        assert str(folder) in str(caught.value.filename)


def test_the_user_s_own_word_may_be_a_link(folder: Path) -> None:
    (folder / "x").symlink_to("a")
    with safe_paths.open_regular(folder / "x") as file:
        assert file.read() == b"mine"


def test_what_was_opened_stays_the_same_file_whatever_becomes_of_its_name(folder: Path) -> None:
    with safe_paths.open_inside(folder, "a") as file:
        (folder / "a").unlink()
        (folder / "a").symlink_to(folder.parent / "secret")
        assert Path(safe_paths.path_of(file)).read_text() == "mine"


def test_a_file_that_is_too_large_is_refused_unread(folder: Path) -> None:
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)  # of holes
    with pytest.raises(UnsafePathError, match="has 1099511627776 bytes; at most 67108864"):
        safe_paths.read_bytes(folder, "large")
    assert safe_paths.read_bytes(folder, "a", 4) == b"mine"
    with pytest.raises(UnsafePathError, match="at most 3"):
        safe_paths.read_bytes(folder, "a", 3)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "1" * 5000, b"\xff", ""])
def test_what_is_no_json_is_a_value_error(folder: Path, text: str | bytes) -> None:
    (folder / "x").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError):
        safe_paths.read_json(folder, "x", Any)


def test_a_record_of_another_shape_is_a_value_error_that_names_the_place(folder: Path) -> None:
    (folder / "x").write_text('{"rows": [1, "two"]}')
    with pytest.raises(ValueError, match=r"'rows\.1' should be a valid integer"):
        safe_paths.read_json(folder, "x", dict[str, list[int]])


def test_a_large_limit_reserves_no_memory_for_a_small_file(folder: Path) -> None:
    """A limit of 8 GB reserved 8 GB for every file of events."""
    tracemalloc.start()
    try:
        assert safe_paths.read_bytes(folder, "a", 8 << 30) == b"mine"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_copy_follows_no_link_and_replaces_nothing(folder: Path) -> None:
    safe_paths.copy_inside(folder, "a", folder / "copy")
    assert (folder / "copy").read_text() == "mine"
    with pytest.raises(FileExistsError):
        safe_paths.copy_inside(folder, "a", folder / "copy")
    (folder / "x").symlink_to(folder.parent / "secret")
    with pytest.raises(UnsafePathError):
        safe_paths.copy_inside(folder, "x", folder / "y")
    (folder / "z").symlink_to(folder.parent / "made by it")
    with pytest.raises(FileExistsError):
        safe_paths.copy_inside(folder, "a", folder / "z")
    assert not (folder.parent / "made by it").exists()


def test_nothing_is_written_through_a_link(folder: Path) -> None:
    assert safe_writing.destination(folder, "new/deep/file") == folder / "new" / "deep" / "file"
    assert (folder / "new" / "deep").is_dir()
    (folder / "out").symlink_to(folder.parent)
    (folder / "x").symlink_to(folder.parent / "secret")
    for name in ("out/secret", "x", "../secret", "/secret", "inner"):
        with pytest.raises(UnsafePathError):
            safe_writing.destination(folder, name)


def test_a_snapshot_of_the_hugging_face_cache_may_link_to_its_own_blobs_alone(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    (snapshot / "deep").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("x")
    (snapshot / "a").symlink_to("../../blobs/123")
    (snapshot / "deep" / "a").symlink_to("../../../blobs/123")
    assert read(snapshot, "a") == read(snapshot, "deep/a") == "x"
    (tmp_path / "secret").write_text("x")
    (blobs / "456").symlink_to(tmp_path / "secret")
    for number, target in enumerate(
        [tmp_path / "secret", "../../../secret", "../../blobs/456", "../../blobs/../../secret", "../../blobs/.."]
    ):
        (snapshot / f"b{number}").symlink_to(target)
        with pytest.raises(UnsafePathError):
            read(snapshot, f"b{number}")


def test_nothing_stays_open_after_a_refusal(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "x").symlink_to("a")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("pipe", "x", "inner/nothing", "../secret", "inner"):
        with pytest.raises(OSError):
            read(folder, name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_copy_is_no_more_open_to_others_than_the_umask_says(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        safe_paths.copy_inside(folder, "a", folder / "copy")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "copy").stat().st_mode) == 0o600


def test_a_second_name_is_that_of_the_file_and_of_no_link(folder: Path) -> None:
    """`link_inside` and `copy_folder` are what a run's files are copied by; neither reaches out of the folder."""
    (folder / "secret").symlink_to("/etc/hostname")
    (folder / "own").write_text("own")
    safe_writing.link_inside(folder, "own", folder / "again")
    assert (folder / "again").stat().st_ino == (folder / "own").stat().st_ino
    for act in (
        lambda: safe_writing.link_inside(folder, "secret", folder / "copy"),
        lambda: safe_writing.copy_folder(folder, folder.parent / "all"),
    ):
        with pytest.raises(UnsafePathError, match="is a link to /etc/hostname"):
            act()
    assert not (folder / "copy").exists()
    assert not (folder.parent / "all" / "secret").exists()


def test_links_of_a_data_folder_are_followed_inside_of_it_alone(folder: Path) -> None:
    (folder / "own").write_text("own")
    (folder / "near").symlink_to("own")
    (folder / "far").symlink_to("/etc/hostname")
    with safe_paths.open_inside(folder, "near", follow=True) as file:
        assert file.read() == b"own"
    with pytest.raises(UnsafePathError, match="is a link"):
        safe_paths.open_inside(folder, "far", follow=True)
    safe_paths.check_link(folder, "near")
    with pytest.raises(DataError, match=r"far is a link to /etc/hostname, outside of the folder.*copy it into"):
        safe_paths.check_link(folder, "far")


def test_an_array_whose_header_lies_is_not_allocated(folder: Path) -> None:
    np.save(folder / "a.npy", np.arange(4.0))
    assert safe_paths.load_array(folder, "a.npy").tolist() == [0, 1, 2, 3]
    content = (folder / "a.npy").read_bytes()
    (folder / "a.npy").write_bytes(content.replace(b"(4,), }" + b" " * 12, b"(4" + b"9" * 12 + b",), }"))
    with pytest.raises((ValueError, OSError)):
        safe_paths.load_array(folder, "a.npy")


def test_a_new_file_is_created_in_the_folder_and_through_no_link(folder: Path) -> None:
    """What `unisono stop` and `save` do: as root, a link made them create any file."""
    safe_writing.create_inside(folder, "stop")
    assert (folder / "stop").read_bytes() == b""
    with pytest.raises(FileExistsError):
        safe_writing.create_inside(folder, "stop")
    (folder / "save").symlink_to(folder.parent / "anything")
    with pytest.raises(UnsafePathError, match="save is a link; remove it"):
        safe_writing.create_inside(folder, "save")
    assert not (folder.parent / "anything").exists()
