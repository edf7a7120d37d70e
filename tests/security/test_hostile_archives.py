"""Archives of recordings from anybody: headers that lie end in a sentence, and at once."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from unisono.runtime.errors import DataError
from unisono_audio.sources.archives import Archives


def with_size(size: str) -> bytes:
    """An archive whose second member says its size in an extended header."""
    record = f" size={size}\n"
    length = len(record) + 2
    body = f"{length}{record}".encode()
    assert len(body) == length
    extended, member, first = tarfile.TarInfo("x"), tarfile.TarInfo("a.wav"), tarfile.TarInfo("first.txt")
    extended.type, extended.size = b"x", len(body)
    headers = [part.tobuf(tarfile.USTAR_FORMAT) for part in (first, extended, member)]
    return headers[0] + headers[1] + body + bytes(-len(body) % 512) + headers[2] + bytes(1024)


@pytest.mark.parametrize("size", ["-1536", "-512", "-1", "-99999999999999999999", "9" * 40])
def test_a_size_that_no_member_has_is_refused(tmp_path: Path, size: str) -> None:
    """With -1536, Python 3.11 reads the same member for ever, and keeps each."""
    path = tmp_path / "a.tar"
    path.write_bytes(with_size(size))
    with pytest.raises(DataError, match=r"a\.tar"):
        Archives([str(path)], None, "data.path")
