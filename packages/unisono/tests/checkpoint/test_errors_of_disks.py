"""Whatever error a call of a save gets, older checkpoints stay, nothing else is left, and the error says what to do."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.checkpoint.saved import flip_bit, is_of, save
from unisono.checkpoint.core import commit
from unisono.runtime.errors import SaveError, UnavailableError

# Of a save, each of which gets the error once: the folder; a file's header and two pieces; the manifest; that file, the
# manifest, their folder and the one above; the commit.
CALLS = {"os.mkdir": 1, "os.write": 3, "Path.write_bytes": 1, "os.fsync": 4, "os.rename": 1}
ERRORS = (errno.EDQUOT, errno.EINTR, errno.EPERM, errno.EXDEV, errno.EROFS, errno.EIO)
MAY_PASS = {errno.EDQUOT, errno.EINTR, errno.EIO}


@contextmanager
def failing(name: str, code: int, on: Callable[..., bool]) -> Iterator[list[tuple[Any, ...]]]:
    """A function that fails with an error where `on` says so; yields the arguments of those calls."""
    owner, name = {"os": os, "Path": Path}[name.partition(".")[0]], name.partition(".")[2]
    real, hits = getattr(owner, name), list[tuple[Any, ...]]()

    def call(*arguments: Any, **more: Any) -> Any:
        if on(*arguments):
            hits.append(arguments)
            paths = [str(one) for one in arguments if isinstance(one, str | Path)]
            raise OSError(code, os.strerror(code), *paths[:1])  # with the file that the real call would name
        return real(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield hits


def nth(which: int) -> Callable[..., bool]:
    """True of one call, by its number."""
    count = [0]

    def is_it(*_: Any) -> bool:
        count[0] += 1
        return count[0] == which + 1

    return is_it


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("name", "which"), [(name, n) for name, count in CALLS.items() for n in range(count)])
def test_an_error_of_any_call_says_where_why_and_what_to_do_and_leaves_nothing(
    tmp_path: Path, name: str, which: int, code: int
) -> None:
    """A failed write named no file, no error said what to do, and a call that was interrupted was not tried again."""
    save(tmp_path, 2)
    with failing(name, code, nth(which)) as hits, pytest.raises(SaveError) as caught:
        save(tmp_path, 4)
    assert hits
    text = str(caught.value)
    assert str(tmp_path) in text
    assert os.strerror(code) in text or (code == errno.EDQUOT and "the disk quota is used up" in text)
    assert text.endswith("Older checkpoints are untouched. See to the space, the quota and the permissions there.")
    assert caught.value.transient == (code in MAY_PASS)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert is_of(tmp_path / "step-00000002", 2)
    assert is_of(save(tmp_path, 4), 4)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM], ids=errno.errorcode.get)
def test_a_damaged_checkpoint_that_cannot_be_put_aside_stays_where_it_is(tmp_path: Path, code: int) -> None:
    """As one in a lower layer of an overlay, of which folders cannot be renamed (EXDEV)."""
    content = flip_bit(save(tmp_path, 4) / "rank-00000.safetensors")
    with failing("os.rename", code, lambda path, *_: "writing" not in str(path)), pytest.raises(SaveError) as caught:
        save(tmp_path, 4)
    assert f"{os.strerror(code)}: {tmp_path}/step-00000004" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert (tmp_path / "step-00000004" / "rank-00000.safetensors").read_bytes() == content


def test_a_reading_that_was_interrupted_says_nothing_of_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    with failing("os.open", errno.EINTR, lambda *_: True), pytest.raises(UnavailableError) as caught:
        commit.open_checkpoint(path)
    assert re.search(rf"^{path}/manifest.json cannot be read now \(.*\)\. It may well be whole", str(caught.value))
    assert is_of(path, 4)
