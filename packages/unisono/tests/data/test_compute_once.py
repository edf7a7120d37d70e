"""What takes long is computed by one process, once; others find it, or wait and say for whom."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono import compute_array_once, compute_once
from unisono.data import cache_lock
from unisono.runtime.errors import DataError
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.safe_paths import UnsafePathError


def make(folder: Path) -> None:
    (folder / "it").write_text("made")


def load(folder: Path) -> str:
    return (folder / "it").read_text()


def test_it_is_computed_once_for_an_address_and_anew_for_another(tmp_path: Path) -> None:
    made: list[Any] = []

    def once(address: Any) -> str:
        return compute_once(
            "kind", address, lambda folder: (made.append(address), make(folder))[1], load, cache=tmp_path
        )

    assert [once(["a", 1]), once(["a", 1]), once(["a", 2])] == ["made"] * 3
    assert made == [["a", 1], ["a", 2]]


def test_what_fails_leaves_nothing_that_is_taken_for_finished(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        make(folder)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        compute_once("kind", 1, fail, load, cache=tmp_path)
    assert not [path for path in (tmp_path / "kind").iterdir() if path.is_dir()]
    assert compute_once("kind", 1, make, load, cache=tmp_path) == "made"


@pytest.mark.parametrize("damage", ["gone", "short", "other"])
def test_what_is_damaged_is_computed_again(tmp_path: Path, damage: str) -> None:
    def find() -> Any:
        return compute_array_once(
            "kind", 1, lambda: np.arange(5.0), is_valid=lambda found: found.shape == (5,), cache=tmp_path
        )

    find()
    (path,) = (tmp_path / "kind").glob("*/array.npy")
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        np.save(path, np.arange(3.0))
    assert find().tolist() == [0, 1, 2, 3, 4]
    assert np.load(path).shape == (5,)


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"the cache .*file cannot be used \(.*\); set data\.cache or \$UNISONO_CACHE"):
        compute_once("kind", 1, make, load, cache=tmp_path / "file")


def test_a_link_among_the_files_is_told_as_one_and_not_as_a_fault_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("/etc/hostname")

    def read(folder: Path) -> None:
        safe_paths.read_text(tmp_path, "x.json")

    with pytest.raises(UnsafePathError, match=r"x\.json") as caught:
        compute_once("kind", 1, read, load, cache=tmp_path / "cache")
    assert "UNISONO_CACHE" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named_and_not_the_cache(tmp_path: Path) -> None:
    """The advice was another folder for the cache."""
    with pytest.raises(DataError) as caught:
        compute_once("kind", 1, lambda folder: (tmp_path / "rows.csv").open().close(), load, cache=tmp_path / "cache")
    assert str(caught.value) == f"{tmp_path}/rows.csv cannot be used (No such file or directory)"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO, errno.ESTALE])
def test_a_file_system_without_locks_is_a_sentence_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DataError, match=rf"the cache .* cannot be used \({os.strerror(code)}\); set data.cache"):
        compute_once("kind", 1, make, load, cache=tmp_path)


def _slowly(cache: Path, began: Any, made: Any) -> None:
    def make_slowly(folder: Path) -> None:
        began.set()
        made.put(1)
        time.sleep(0.5)
        make(folder)

    assert compute_once("kind", 1, make_slowly, load, cache=cache) == "made"


def test_of_two_processes_one_computes_and_the_other_waits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    began, made = context.Event(), context.Queue()
    processes = [context.Process(target=_slowly, args=(tmp_path, began, made)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert made.get(timeout=5) == 1
    assert made.empty()


def test_whoever_waits_says_for_whom_and_gives_up_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_lock, "_PATIENCE", 0.05)
    begun, done = threading.Event(), threading.Event()

    def hold(folder: Path) -> None:
        begun.set()
        done.wait(30)
        make(folder)

    thread = threading.Thread(target=compute_once, args=("kind", 1, hold, load), kwargs={"cache": tmp_path})
    thread.start()
    assert begun.wait(30)
    (note,) = (tmp_path / "kind").glob("*.holder.json")
    holder = json.loads(note.read_text())
    try:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(DataError, match=rf"waited 0\.2 s for .* by process {holder['process']} on .*stop it"),
        ):
            compute_once("kind", 1, make, load, cache=tmp_path, wait=0.2)
        assert f"computed by process {holder['process']} on {holder['host']}" in caplog.text
    finally:
        done.set()
        thread.join(30)
    assert compute_once("kind", 1, make, load, cache=tmp_path) == "made"
