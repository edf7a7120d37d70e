"""Archives and lists of recordings from anybody: what lies or is ambiguous ends in a sentence, and at once."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.runtime.errors import DataError
from unisono_audio.sources import metadata
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


def add(archive: tarfile.TarFile, name: str, content: bytes = b"RIFF", kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, len(content), "first.wav"
    archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (lambda archive: add(archive, "b.wav", b"", tarfile.LNKTYPE), r"b\.wav is a link"),
        (lambda archive: add(archive, "b.wav", b"", tarfile.SYMTYPE), r"b\.wav is a link"),
        (lambda archive: add(archive, "first.wav", b"RIFX"), r"two recordings for one row, the second in first\.wav"),
        (lambda archive: add(archive, "first.WAV", b"RIFX"), r"two recordings for one row, the second in first\.WAV"),
        (lambda archive: add(archive, "first.flac", b"fLaC"), r"two recordings for one row, the second in first\.flac"),
        (lambda archive: [add(archive, "first.json", b"{}") for _ in range(2)], "two files for one row"),
    ],
    ids=["hard link", "link", "twice", "another case", "another format", "labels twice"],
)
def test_a_recording_that_would_be_missing_without_a_word_is_refused(
    tmp_path: Path, second: Callable[[tarfile.TarFile], None], told: str
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "first.wav")
    assert len(Archives([str(path)], None, "data.path")) == 1
    with tarfile.open(path, "a") as archive:
        second(archive)
    with pytest.raises(DataError, match=rf"a\.tar.* {told}"):
        Archives([str(path)], None, "data.path")


@pytest.mark.parametrize(
    ("map", "told"), [("0,4", r"a\.wav has holes"), ("x,4", "cannot be read as a tar archive"), ("", "cannot be read")]
)
def test_a_member_with_holes_is_refused(tmp_path: Path, map: str, told: str) -> None:
    """The archive holds less than the file: what follows the first hole was decoded in its place."""
    records = b"".join(
        f"{len(text) + 4} {text}\n".encode()
        for text in (f"GNU.sparse.map={map}", "GNU.sparse.size=4096", "GNU.sparse.numblocks=1")
    )
    extended, member = tarfile.TarInfo("x"), tarfile.TarInfo("a.wav")
    extended.type, extended.size, member.size = b"x", len(records), 4
    content = extended.tobuf() + records + bytes(-len(records) % 512) + member.tobuf() + b"RIFF" + bytes(508 + 1024)
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=told):
        Archives([str(tmp_path / "a.tar")], None, "data.path")


# lists of recordings ----------------------------------------------------------------------------------------------


def test_a_list_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("file,label,label\na.wav,1,2\n")
    with pytest.raises(DataError, match=r"a\.csv has two columns 'label'"):
        metadata._read_delimited(tmp_path / "a.csv", ",")
    (tmp_path / "b.csv").write_text("file,label\na.wav,1_000\nb.wav,7\n")
    assert [row["label"] for row in metadata._read_delimited(tmp_path / "b.csv", ",")] == ["1_000", "7"]


def test_lines_of_a_list_end_where_json_says(tmp_path: Path) -> None:
    """U+2028 may stand in a text; bytes that are no text were a traceback."""
    (tmp_path / "a.jsonl").write_text('\ufeff{"file": "a", "text": "x\u2028y"}\n\n{"file": "b"}\n', encoding="utf-8")
    assert metadata._read_json_lines(tmp_path / "a.jsonl")[0]["text"] == "x\u2028y"
    (tmp_path / "a.jsonl").write_bytes(b'{"file": "a"}\n{"file": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 cannot be read as JSON"):
        metadata._read_json_lines(tmp_path / "a.jsonl")
