"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.runtime import files


def test_a_file_is_as_it_was_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_whole(path, "old")
    with files.atomic_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_a_file_is_as_it_was_and_nothing_is_left_over(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_whole(path, "old")

    def write() -> None:
        with files.atomic_file(path) as temporary:
            temporary.write_text("half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_that_write_at_a_time_do_not_write_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with files.atomic_file(path) as one, files.atomic_file(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one", "the last rename"


@pytest.mark.parametrize("lasting", [False, True])
def test_what_is_to_last_is_flushed_with_the_name_that_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(files, "fsync_path", lambda path: synced.append((path.name, (tmp_path / "a.json").exists())))
    files.write_whole(tmp_path / "a.json", "x", lasting=lasting)
    assert synced[0][0].endswith(files.TEMPORARY_SUFFIX)
    assert not synced[0][1], "the content before the name"
    assert synced[1:] == ([(tmp_path.name, True)] if lasting else [])


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path))
    assert files.cache_dir() == tmp_path
    monkeypatch.delenv("UNISONO_CACHE")
    assert files.cache_dir() == Path.home() / ".cache" / "unisono"


def test_what_a_file_was_before_is_kept_once_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    (tmp_path / "config.old.yaml").write_text("of somebody else")
    for text in ("a", "a", "b", "a", "c"):
        files.write_with_backup(path, text)
    kept = {name.name: name.read_text() for name in tmp_path.glob("config.0*")}
    assert kept == {"config.0001.yaml": "a", "config.0002.yaml": "b", "config.0003.yaml": "a"}
    path.write_text("a")  # two processes replace it at a time, and the other one has kept it first
    files.write_with_backup(path, "c")
    assert (path.read_text(), len(list(tmp_path.glob("config.0*")))) == ("c", 3)
