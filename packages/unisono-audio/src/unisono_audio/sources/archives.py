"""Reads WebDataset archives: tar files in which members with the same name up to the first dot form a row.

An archive is indexed once; after that a recording is a byte range, and only what is decoded is fetched.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import DataError
from unisono.runtime.remote import is_remote, remote_options, stream_remote
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono_audio.recordings import ByteRange, data_of
from unisono_audio.sources.metadata import AUDIO_SUFFIXES, RecordingTable, file_status

_LABELS = "json", "cls", "txt", "text"  # endings of members that become columns


def expand_paths(paths: Sequence[str]) -> list[str]:
    """Paths with globs and folders of archives expanded; others are unchanged."""
    found: list[str] = []
    for path in paths:
        if is_remote(path):
            found.append(path)
        elif Path(path).is_dir():
            found.extend(_found_below(Path(path), Path(path).glob("*.tar")) or [path])
        elif any(sign in path for sign in "*?[") and path.endswith(".tar"):
            anchor, named = Path(path).anchor, safe_paths.named_folder(path)
            found.extend(_found_below(named, Path(anchor or ".").glob(path.removeprefix(anchor))) or [path])
        else:
            found.append(path)
    return found


def _found_below(folder: Path, paths: Iterable[Path]) -> list[str]:
    """What a folder or a glob holds, sorted; a link that leads out of the folder that the user named is refused."""
    found = sorted(paths)
    for path in found:
        safe_paths.check_way(folder, path)
    return list(map(str, found))


class Archives(RecordingTable):
    """Rows of archives, in the order of the paths and of the members.

    Args:
        paths: of the archives, or their URLs.
        storage: options of the file system of URLs.
        key: the setting, for errors.
    """

    def __init__(self, paths: Sequence[str], storage: Mapping[str, Any] | None, key: str) -> None:
        self._where, self._key = remote_options(storage), key
        with ThreadPoolExecutor(8) as pool:
            indices = list(pool.map(self._index, paths))
        self._rows = [row for index in indices for row in index]
        if not self._rows:
            raise DataError(
                f"{key}: no recording found in {', '.join(paths[:3])}; known file types are {', '.join(AUDIO_SUFFIXES)}"
            )
        words = {int: "int64", float: "float64"}
        self.columns: dict[str, str] = {key: words.get(type(v), "text") for key, v in self._labels(0).items()}
        self._status = [(path, file_status(path)) for path in paths]
        said = json.dumps([[[name, size] for name, (_, size) in sorted(row.items())] for _, _, row in self._rows])
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()
        self.changed = "the archives have different members"
        self.files, self.places = [{"name": Path(path).name} for path in paths], paths

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, row: int) -> dict[str, Any]:
        """Columns, `audio` and `name`."""
        path, name, members = self._rows[row]
        (audio,) = (part for ending, part in members.items() if _is_audio(ending))
        labels = dict.fromkeys(self.columns) | self._labels(row)
        return {**labels, "audio": self._part(path, audio), "name": f"{path}, {name}"}

    def read_columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """These columns of every row; `audio` is None, since recordings are not separate files."""
        return ({**self.record(row), "audio": None} for row in range(len(self)))

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if an archive has changed since it was opened."""
        for path, status in self._status[share::shares]:
            if (now := file_status(path)) != status:
                what = "has changed since it was opened" if now else "is no longer there"
                raise DataError(f"{path} {what}; restore it, or start a new run")

    def _labels(self, row: int) -> dict[str, Any]:
        """The columns of a row, from its members that are not recordings."""
        path, name, members = self._rows[row]
        found: dict[str, Any] = {"key": name}
        for ending, part in members.items():
            if ending in _LABELS:
                found |= _parse_member(ending, bytes(data_of(self._part(path, part))), f"{path}, {name}.{ending}")
        return found

    def _part(self, path: str, part: tuple[int, int]) -> ByteRange:
        return ByteRange(path, part[0], part[0] + part[1], self._where)

    def _index(self, path: str) -> list[tuple[str, str, dict[str, tuple[int, int]]]]:
        """The rows of an archive: its path, the row's name, and the offset and size of each member."""
        rows: dict[str, dict[str, tuple[int, int]]] = {}
        files, links = set[str](), dict[str, str]()  # names, and those of symbolic links by what they lead to
        try:
            with (
                wrap_native_errors(f"{path} cannot be read as a tar archive"),  # a header that lies is any error
                stream_remote(path, self._where) if is_remote(path) else safe_paths.open_regular(path) as file,
                tarfile.open(fileobj=file, mode="r:") as archive,
            ):
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # it would hold all of them
                    if member.size < 0:  # Python 3.11's reader would go back, and read the same member for ever
                        raise DataError(f"{path}: {one_line(member.name)} has {member.size} bytes; copy it again")
                    folder, _, base = member.name.rpartition("/")
                    name, _, ending = base.partition(".")
                    ending = ending.lower()
                    lacks_bytes = member.islnk() or member.issym() or member.issparse()
                    if lacks_bytes and name and (_is_audio(ending) or ending in _LABELS):
                        what = "has holes" if member.issparse() else "is a link"
                        raise DataError(
                            f"{path}: {one_line(member.name)} {what}, so the archive does not hold its bytes; write it "
                            "again with `tar --dereference --hard-dereference`, and without --sparse"
                        )
                    if member.issym():
                        links[posixpath.normpath(posixpath.join(folder, member.linkname))] = member.name
                    if lacks_bytes or not member.isfile():
                        continue
                    files.add(posixpath.normpath(member.name))
                    if name and ending:
                        parts = rows.setdefault(f"{folder}/{name}" if folder else name, {})
                        if ending in parts or (_is_audio(ending) and any(map(_is_audio, parts))):
                            raise DataError(
                                f"{path} has {'two recordings' if _is_audio(ending) else 'two files'} for one row, the "
                                f"second in {one_line(member.name)}; write it again with one, or under another name"
                            )
                        parts[ending] = member.offset_data, member.size
                        if member.offset_data + member.size > file.seek(0, 2):
                            raise DataError(f"{path} is cut off in {member.name}; copy it again")
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise DataError(f"{self._key}: {path} does not exist") from error.__cause__
            raise
        for target in links.keys() - files:  # a README may be a link to another file, but not a folder of recordings
            raise DataError(
                f"{path}: {one_line(links[target])} is a link to {one_line(target)}, which is no file of the archive "
                "and may be a folder of recordings; write it again with `tar --dereference`, or leave the link out"
            )
        return [(path, name, members) for name, members in rows.items() if any(map(_is_audio, members))]


def _is_audio(ending: str) -> bool:
    return f".{ending.rpartition('.')[2]}" in AUDIO_SUFFIXES


def _parse_member(ending: str, content: bytes, where: str) -> dict[str, Any]:
    try:
        if ending == "json":
            found = safe_paths.parse_json(content, Any)
            return found if isinstance(found, dict) else {"json": found}
        text = content.decode()
        return {"cls": int(text)} if ending == "cls" else {"txt": text}
    except ValueError as error:
        raise DataError(f"{where} cannot be read: {error}") from error
