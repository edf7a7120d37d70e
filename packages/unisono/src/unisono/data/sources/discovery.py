"""Finds the files of a source, sorted by path, so that the order does not depend on the file system."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from typing_extensions import TypedDict

from unisono.data.sources.storage import TAG, File, wrap_read_errors
from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.errors import DataError, UnisonoError
from unisono.runtime.remote import RemoteOptions, ask_remote, error_text, is_remote
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

FORMAT_BY_SUFFIX = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".npy": "npy", ".csv": "csv", ".tsv": "tsv",
}  # fmt: skip
FORMATS_GROUP = "unisono.formats"  # entry points of readers of other formats, each named as its suffix
Place = str | PathLike[str]
_END_BYTES = 1 << 16  # bytes at either end of a file
_CHUNK = 1 << 20
_LOCAL = re.compile(r"^(file|local)://")  # of fsspec, which would follow any link
_HASH_THREADS = 16  # files hashed at a time


@dataclass(frozen=True)
class Found:
    """The files of a source, not opened yet.

    Attributes:
        files: in order.
        ignored: names of files that were skipped.
    """

    files: tuple[File, ...]
    ignored: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(file.size for file in self.files)

    @property
    def stamp(self) -> list[list[Any]]:
        """Name, format, size and modification time of each file, as JSON; changes if a file is rewritten."""
        return [[file.name, file.format, file.size, file.stamp] for file in self.files]


@dataclass(frozen=True)
class _Entry:
    """A file, and its path relative to where it was found."""

    path: str
    inner: PurePosixPath
    size: int
    stamp: str


def format_by_suffix() -> dict[str, str]:
    """The formats of all readers by the suffix of their files, those of plug-ins too."""
    return FORMAT_BY_SUFFIX | {f".{name}": name for name in find_entry_points(FORMATS_GROUP)}


def find(
    paths: Place | Sequence[Place],
    pattern: str = "*",
    split: str | None = None,
    *,
    format: str | None = None,
    formats: Sequence[str] | None = None,
    where: RemoteOptions | None = None,
    duplicates: Literal["refuse", "allow"] = "refuse",
    key: str = "data.path",
) -> Found:
    """Find the files of a source.

    Args:
        paths: files, directories, globs and URLs; directories are searched recursively, without hidden files.
        pattern: glob that file names must match. If it is not `*`, files with unknown suffixes are read as text.
        split: which split of a saved `DatasetDict`.
        format: of all files, whatever their suffixes.
        formats: to include, all by default; files of other formats are skipped.
        where: options for remote paths.
        duplicates: whether to reject files found twice, or with identical content.
        key: the setting that contains the paths, for errors.

    Raises:
        DataError: if a path does not exist, a file is a duplicate, or no file is found.
    """
    given = [paths] if isinstance(paths, str | PathLike) else list(paths)
    suffixes = format_by_suffix()
    wanted = {*suffixes.values()} if formats is None else {*formats}
    files: list[File] = []
    ignored: list[str] = []
    for place in _expand_places(
        [_LOCAL.sub("", fspath(path), count=1) for path in given], where or RemoteOptions(), key
    ):
        place = place.choose_split(split)
        for entry in place.entries():
            ending = PurePosixPath(entry.inner.name.removesuffix(".gz")).suffix.lower()
            kind = format or suffixes.get(ending)
            if kind is None and pattern != "*":
                kind = {".json": "jsonl"}.get(ending, "text")
            if kind is None or kind not in wanted or not entry.inner.match(pattern):
                ignored.append(str(entry.inner))
            else:
                name = f"{place.name}/{entry.inner}"
                files.append(File(entry.path, kind, name, entry.size, entry.stamp, place.where, place.folder))
    if not files:
        known = ", ".join(sorted(ending for ending, kind in suffixes.items() if kind in wanted))
        raise DataError(
            f"{key}: no documents in {', '.join(map(str, given))} (pattern '{pattern}'); known suffixes are "
            f"{known}; other files are read as text if data.pattern names them"
            + (f"; ignored: {', '.join(ignored[:5])}" if ignored else "")
        )
    if duplicates == "refuse":
        refuse_duplicates(files, key)
    return Found(tuple(files), tuple(ignored))


class _LocalPlace:
    """A file or directory on this host, which the user named, or which was found below the folder that he named."""

    def __init__(self, path: Path, where: RemoteOptions, below: Path | None = None) -> None:
        self.path, self.where = path, where
        self._below = path if below is None and path.is_dir() else below

    @property
    def folder(self) -> str | None:
        """The folder out of which no link is followed; None for a file that the user named."""
        return None if self._below is None else str(self._below)

    @property
    def name(self) -> str:
        return self.path.name

    def choose_split(self, split: str | None) -> _LocalPlace:
        if not (self.path / "dataset_dict.json").is_file():
            return self
        content = safe_paths.read_bytes(self.path, "dataset_dict.json")
        return _LocalPlace(self.path / _choose_split(self.path, content, split), self.where, self._below)

    def entries(self) -> Iterator[_Entry]:
        path = self.path
        root = path.parent if path.is_file() else path
        if path.is_file():
            chosen = [path]
        elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            there = {entry.name for entry in path.iterdir() if entry.is_file()}
            chosen = [path / n for n in _saved_files(path, safe_paths.read_bytes(path, "state.json"), there)]
        else:
            below = {PurePosixPath(p.relative_to(path)): p for p in sorted(path.rglob("*"))}
            chosen = [below[inner] for inner in _data_paths(below)]
        if self._below is not None:
            for found in (path, *chosen):  # a link that were passed over would be rows silently missing
                safe_paths.check_link(self._below, found.relative_to(self._below))
        for file in chosen:
            if file.is_dir():  # a pipe is refused where it is opened: passed over, it would be rows silently missing
                continue
            status = file.stat()
            yield _Entry(str(file), PurePosixPath(file.relative_to(root)), status.st_size, str(status.st_mtime_ns))


class _RemotePlace:
    """An object or a prefix behind a URL."""

    def __init__(self, url: str, where: RemoteOptions) -> None:
        self.url, self.where = url.rstrip("/"), where
        self.folder = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def choose_split(self, split: str | None) -> _RemotePlace:
        if (content := self._content("dataset_dict.json")) is None:
            return self
        return _RemotePlace(f"{self.url}/{_choose_split(self.url, content, split)}", self.where)

    def entries(self) -> Iterator[_Entry]:
        def listing(system: Any, path: str) -> tuple[str, dict[str, Any]]:
            system.invalidate_cache()  # an earlier listing may be outdated
            about = system.info(path)
            root = about["name"]
            if about["type"] == "file":
                return root, {root: about}
            return root, system.find(root, detail=True)

        root, listed = ask_remote(self.url, self.where, listing)
        inner = {path: PurePosixPath(path[len(root) :].lstrip("/") or self.name) for path in listed}
        data = set(_data_paths(inner.values()))
        chosen = sorted((p for p in listed if p == root or inner[p] in data), key=lambda path: inner[path].parts)
        state = self._content("state.json") if any(str(inner[p]) == "state.json" for p in chosen) else None
        if state is not None and any(str(inner[p]) == "dataset_info.json" for p in chosen):
            by_name = {str(inner[path]): path for path in chosen}
            chosen = [by_name[name] for name in _saved_files(self.url, state, set(by_name))]
        for path in chosen:
            url = self.url if path == root else f"{self.url}/{inner[path]}"
            yield _Entry(url, inner[path], int(listed[path]["size"] or 0), _stamp(listed[path]))

    def _content(self, name: str) -> bytes | None:
        try:
            return ask_remote(f"{self.url}/{name}", self.where, lambda system, path: bytes(system.cat_file(path)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DataError:
            if self.url.startswith("http"):  # web servers may respond with any error if the file does not exist
                return None
            raise


def _expand_places(paths: Sequence[str], where: RemoteOptions, key: str) -> Iterator[_LocalPlace | _RemotePlace]:
    for path in paths:
        try:
            if is_remote(path):
                yield from _expand_remote(path, where)
            elif Path(path).exists():
                yield _LocalPlace(Path(path), where)
            else:
                matches = _glob_paths(path)
                if not matches:
                    raise FileNotFoundError
                yield from (_matched_place(match, safe_paths.named_folder(path), where) for match in matches)
        except FileNotFoundError as error:
            matching = "matches nothing" if any(sign in path for sign in safe_paths.WILDCARDS) else "does not exist"
            raise DataError(f"{key}: {path} {matching}") from error
        except PermissionError as error:
            raise DataError(f"{key}: {path} may not be read: {error_text(error)}") from error
        except OSError as error:  # e.g. a name that is too long
            if isinstance(error, UnisonoError):
                raise
            raise DataError(f"{key}: {one_line(path)} cannot be looked for: {error.strerror}") from error


def _glob_paths(path: str) -> list[Path]:
    """The paths that a glob matches, sorted."""
    anchor = Path(path).anchor
    inner = path.removeprefix(anchor)
    matches = sorted(Path(anchor or ".").glob(inner)) if inner else []
    return [match for match in matches if _is_visible(match.as_posix(), path)]


def _matched_place(match: Path, named: Path, where: RemoteOptions) -> _LocalPlace:
    """What a glob has matched, which is not what the user named, so a link on the way is one of a folder of data."""
    safe_paths.check_way(named, match)
    return _LocalPlace(match, where, match if match.is_dir() else named)


def _is_visible(match: str, pattern: str) -> bool:
    """Whether a match is not hidden, or hidden only in parts that the glob names explicitly."""
    said = PurePosixPath(pattern).parts
    return not any(part.startswith(".") and part not in said for part in PurePosixPath(match).parts)


def _expand_remote(url: str, where: RemoteOptions) -> Iterator[_RemotePlace]:
    protocol = url.partition("://")[0]

    def expand(system: Any, path: str) -> list[str]:
        system.invalidate_cache()
        if any(sign in path for sign in "*[") and not system.exists(path):
            return [str(system.unstrip_protocol(match)) for match in system.glob(path) if _is_visible(match, path)]
        system.info(path)  # raises if it does not exist
        return [url]

    matches = ask_remote(url, where, expand)
    if not matches:
        raise FileNotFoundError
    for match in sorted(matches, key=lambda found: PurePosixPath(found).parts):
        yield _RemotePlace(match if "://" in match else f"{protocol}://{match}", where)


def _stamp(about: dict[str, Any]) -> str:
    """A content hash, version or modification time of an object, depending on the store."""
    for name in ("ETag", "etag", "md5Hash", "md5", "generation", "LastModified", "last_modified", "mtime", "created"):
        if about.get(name):
            return f"{name} {about[name]}"
    return ""


def _data_paths(inner: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """The paths that are neither hidden nor in a subdirectory tagged as a cache."""
    paths = [path for path in inner if not any(part.startswith(".") for part in path.parts)]
    made = {path.parent for path in paths if path.name == TAG}
    return [path for path in paths if path.name != TAG and not made.intersection(list(path.parents)[:-1])]


def _choose_split(place: Any, content: bytes, split: str | None) -> str:
    splits = _describe(place, "dataset_dict.json", content, _Splits)["splits"]
    chosen = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else "")
    if chosen not in splits:
        raise DataError(f"{place} has the splits {one_line(', '.join(splits))}; choose one by data.split")
    safe_paths.components(str(place), chosen)  # rejects names that lead out of the directory
    return str(chosen)


class _Splits(TypedDict):
    """`dataset_dict.json`."""

    splits: list[str]


class _SavedFile(TypedDict):
    filename: str


class _SavedSet(TypedDict):
    """The parts of `state.json` that are read."""

    _data_files: list[_SavedFile]


def _describe(place: Any, name: str, content: bytes, shape: Any) -> dict[str, Any]:
    """Read a JSON file in which `datasets` describes a directory."""
    try:
        return dict(safe_paths.parse_json(content, shape))
    except ValueError as error:
        raise DataError(
            f"{place}/{name} does not describe a dataset: {one_line(error)}; save it again with `datasets`"
        ) from error


def _saved_files(place: Any, content: bytes, there: set[str]) -> list[str]:
    """The Arrow files of a saved dataset, in its own order."""
    state = _describe(place, "state.json", content, _SavedSet)
    if state.get("_indices_files"):
        raise DataError(f"{place} was saved with an indices mapping; save it again after dataset.flatten_indices()")
    names = [entry["filename"] for entry in state["_data_files"]]
    missing = [name for name in names if name not in there]
    if missing:
        raise DataError(f"{place}: {missing[0]} is listed in state.json but missing")
    return names


def refuse_duplicates(files: Iterable[File], key: str) -> None:
    """Raise if a file is listed twice, or has the same content as another.

    Text files are exempt, since identical documents are plausible. Only files of equal size are compared, and only
    those with equal ends are read completely.

    Raises:
        DataError: naming both.
    """
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise DataError(
                f"{key}: {file.path} is listed twice, so its rows would count twice; list it once, or allow duplicates "
                "(open_source(duplicates='allow'))"
            )
        seen.add(file.path)
    framed = sorted((f for f in files if f.format != "text" and f.size), key=lambda f: (f.format, f.size))
    groups = [list(group) for _, group in groupby(framed, key=lambda f: (f.format, f.size))]
    suspect = [file for group in groups if len(group) > 1 for file in group]
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="unisono-source") as pool:
        digests = dict(zip(suspect, pool.map(digest_ends, suspect), strict=True))
    alike: dict[bytes, list[File]] = {}
    for file in suspect:
        others = alike.setdefault(digests[file], [])
        for other in others:
            if _is_equal(other, file):
                raise DataError(
                    f"{key}: {file.path} has the same content as {other.path}, so its rows would count twice; remove "
                    "one, or allow duplicates (open_source(duplicates='allow'))"
                )
        others.append(file)


def digest_ends(file: File) -> bytes:
    """A digest of a file's size and both its ends; of the whole content, if it is small."""
    digest = hashlib.blake2b(f"{file.format} {file.size} ".encode(), digest_size=16)
    with wrap_read_errors(file):
        digest.update(file.range(0, min(_END_BYTES, file.size)))
        if file.size > _END_BYTES:
            digest.update(file.range(max(_END_BYTES, file.size - _END_BYTES), file.size))
    return digest.digest()


def _is_equal(one: File, other: File) -> bool:
    """Whether two files of equal size have the same content; stops reading at the first difference."""
    with wrap_read_errors(one), one.stream() as first, other.stream() as second:
        while chunk := first.read(_CHUNK):
            if chunk != second.read(len(chunk)):
                return False
    return True
