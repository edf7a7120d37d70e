"""What is in a cache is believed, so nobody else may have written into it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from unisono.data.compute_once import compute_array_once
from unisono.data.sources import index
from unisono.data.sources.storage import File
from unisono.runtime.errors import DataError
from unisono.runtime.files import cache_dir, cache_entry, make_private

ROWS = np.arange(4.0)


def compute(cache: Path) -> np.ndarray:
    return compute_array_once("rows", ["a"], lambda: ROWS, cache=cache)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("level", [0, 1, 2, 3], ids=["cache", "kind", "entry", "file"])
def test_a_cache_that_others_can_write_is_refused_at_every_level(cache: Path, level: int) -> None:
    """Row 5 came back as row 6, which another user had put there."""
    assert compute(cache).tolist() == ROWS.tolist()
    (entry,) = (path for path in (cache / "rows").iterdir() if path.is_dir())
    (cache, cache / "rows", entry, entry / "array.npy")[level].chmod(0o777)
    with pytest.raises(DataError, match=r"can be written by other users \(mode 777\).*mkdir -m 700.*UNISONO_CACHE"):
        compute(cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_an_entry_of_another_user_is_refused(cache: Path) -> None:
    compute(cache)
    (entry,) = (path for path in (cache / "rows").iterdir() if path.is_dir())
    os.chown(entry, 65534, -1)
    with pytest.raises(DataError, match=r"belongs to another user \(nobody\)"):
        compute(cache)
    os.chown(cache, 65534, -1)
    with pytest.raises(DataError, match="belongs to another user"):
        cache_dir()


def test_a_cache_that_is_made_with_any_umask_is_one_s_own(cache: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert compute(cache).tolist() == compute(cache).tolist()
        (tmp_path / "a.txt").write_text("line\n" * (1 << 18))
        file = File.from_path(tmp_path / "a.txt", "text", "a.txt")
        for _ in range(2):
            assert index.cached_array(file, "lines", lambda: ROWS).tolist() == ROWS.tolist()
    finally:
        os.umask(before)


def test_an_index_that_others_can_write_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * (1 << 18))
    file = File.from_path(tmp_path / "a.txt", "text", "a.txt")
    index.cached_array(file, "lines", lambda: ROWS)
    (place,) = (cache / "sources").glob("*.npy")
    place.chmod(0o666)
    with pytest.raises(DataError, match="can be written by other users"):
        index.cached_array(file, "lines", lambda: ROWS)


@pytest.mark.parametrize("level", range(5), ids=["cache", "kind", "folder", "entry", "file"])
def test_the_entry_of_a_recipe_is_refused_where_others_can_write_at_any_level(cache: Path, level: int) -> None:
    """Token shards and speech codes were believed, whoever had written them."""
    entry = cache_entry("recipe", "folder", "entry")
    assert entry == cache / "recipe" / "folder" / "entry"
    assert entry.parent.is_dir() and not entry.exists()
    (entry / "inner").mkdir(parents=True)
    (entry / "inner" / "rows.npy").touch()
    make_private(entry)
    assert cache_entry("recipe", "folder", "entry") == entry
    (cache, cache / "recipe", entry.parent, entry, entry / "inner" / "rows.npy")[level].chmod(0o777)
    with pytest.raises(DataError, match=r"can be written by other users \(mode 777\)"):
        cache_entry("recipe", "folder", "entry")


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"the cache .*file cannot be used.*set data\.cache or \$UNISONO_CACHE"):
        cache_entry("recipe", "entry", cache=tmp_path / "file")
