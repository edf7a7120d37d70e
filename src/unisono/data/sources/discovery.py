"""Which files a source consists of, and in what order: sorted by their paths, so no file system decides it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from unisono.data.sources.duplicates import refuse
from unisono.data.sources.storage import TAG, File, Where, asked, is_remote, told
from unisono.runtime.errors import DataError

ENDINGS = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".npy": "npy", ".csv": "csv", ".tsv": "tsv",
}  # fmt: skip
Place = str | PathLike[str]


@dataclass(frozen=True)
class Found:
    """Files in order, and the names of those that were passed over; none of them is opened.

    Attributes:
        files: in order.
        ignored: names.
    """

    files: tuple[File, ...]
    ignored: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def stamp(self) -> list[list[Any]]:
        """Of each file its name, format, size and time of the last change, as JSON: changes when one is written again."""
        return [[file.name, file.format, file.size, file.stamp] for file in self.files]


@dataclass(frozen=True)
class _Entry:
    """A file, and its path below the place it was found in."""

    path: str
    inner: PurePosixPath
    size: int
    stamp: str


def find(
    paths: Place | Sequence[Place],
    pattern: str = "*",
    split: str | None = None,
    *,
    format: str | None = None,
    formats: Sequence[str] = tuple(dict.fromkeys(ENDINGS.values())),
    where: Where | None = None,
    duplicates: Literal["refuse", "allow"] = "refuse",
    key: str = "data.path",
) -> Found:
    """The files of a source.

    Args:
        paths: files, directories, globs and URLs; a directory is searched to any depth, without hidden files.
        pattern: glob that file names must match. With one that is not `*`, files of unknown endings are read as text.
        split: which split of a saved `DatasetDict`.
        format: of all files, whatever their endings.
        formats: that are wanted; files of others are passed over.
        where: how remote places are reached.
        duplicates: of a file that is found twice, or with the content of another.
        key: the setting that holds the paths, for errors.

    Raises:
        DataError: for a path that does not exist, a file that is there twice, or where nothing can be read.
    """
    given = [paths] if isinstance(paths, str | PathLike) else list(paths)
    files: list[File] = []
    ignored: list[str] = []
    for place in _expanded([_plain(fspath(path)) for path in given], where or Where(), key):
        place = place.of_split(split)
        for entry in place.entries():
            ending = PurePosixPath(entry.inner.name.removesuffix(".gz")).suffix.lower()
            kind = format or ENDINGS.get(ending) or ({".json": "jsonl"}.get(ending, "text") if pattern != "*" else None)
            if kind is None or kind not in formats or not entry.inner.match(pattern):
                ignored.append(str(entry.inner))
            else:
                name = f"{place.name}/{entry.inner}"
                files.append(File(entry.path, kind, name, entry.size, entry.stamp, place.where))
    if not files:
        wanted = ", ".join(sorted(ending for ending, kind in ENDINGS.items() if kind in formats))
        raise DataError(
            f"{key}: no documents in {', '.join(map(str, given))} (pattern '{pattern}'); known endings are "
            f"{wanted}, and others are read as text where data.pattern names them"
            + (f"; passed over: {', '.join(ignored[:5])}" if ignored else "")
        )
    if duplicates == "refuse":
        refuse(files, key)
    return Found(tuple(files), tuple(ignored))


class _Local:
    """A file or directory on this host."""

    def __init__(self, path: Path, where: Where) -> None:
        self.path, self.where = path, where

    @property
    def name(self) -> str:
        return self.path.name

    def of_split(self, split: str | None) -> _Local:
        if not (self.path / "dataset_dict.json").is_file():
            return self
        return _Local(
            self.path / _split_of(self.path, (self.path / "dataset_dict.json").read_bytes(), split), self.where
        )

    def entries(self) -> Iterator[_Entry]:
        path = self.path
        if path.is_file():
            chosen, root = [path], path.parent
        elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            there = {entry.name for entry in path.iterdir() if entry.is_file()}
            chosen, root = [path / n for n in _saved_files(path, (path / "state.json").read_bytes(), there)], path
        else:
            below = {PurePosixPath(p.relative_to(path)): p for p in sorted(path.rglob("*"))}
            chosen, root = [p for p in map(below.__getitem__, _data(below)) if p.is_file() or _broken(p)], path
        for file in chosen:
            status = file.stat()
            yield _Entry(str(file), PurePosixPath(file.relative_to(root)), status.st_size, str(status.st_mtime_ns))


class _Remote:
    """An object or a prefix behind a URL."""

    def __init__(self, url: str, where: Where) -> None:
        self.url, self.where = url.rstrip("/"), where

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def of_split(self, split: str | None) -> _Remote:
        content = self._content("dataset_dict.json")
        return self if content is None else _Remote(f"{self.url}/{_split_of(self.url, content, split)}", self.where)

    def entries(self) -> Iterator[_Entry]:
        def listing(system: Any, path: str) -> tuple[str, dict[str, Any]]:
            system.invalidate_cache()  # what was there when somebody asked before is not what is there
            about = system.info(path)
            root = about["name"]
            if about["type"] == "file":
                return root, {root: about}
            return root, system.find(root, detail=True)

        root, listed = asked(self.url, self.where, listing)
        inner = {path: PurePosixPath(path[len(root) :].lstrip("/") or self.name) for path in listed}
        data = set(_data(inner.values()))
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
            return asked(f"{self.url}/{name}", self.where, lambda system, path: bytes(system.cat_file(path)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DataError:
            if self.url.startswith("http"):  # servers of web pages answer what they like where nothing is
                return None
            raise


def _broken(path: Path) -> bool:
    """Refuse a link that leads nowhere: what it led to would be missing, and nothing would say so."""
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a link to {path.readlink()}, which does not exist; mend it or take it out")
    return False


def _plain(path: str) -> str:
    """A path without `file://`, which is a local one."""
    return path.removeprefix("file://") if path.startswith("file://") else path


def _expanded(paths: Sequence[str], where: Where, key: str) -> Iterator[_Local | _Remote]:
    for path in paths:
        try:
            if is_remote(path):
                yield from _remote(path, where)
            elif Path(path).exists():
                yield _Local(Path(path), where)
            else:
                matches = _matching(path)
                if not matches:
                    raise FileNotFoundError
                yield from (_Local(match, where) for match in matches)
        except FileNotFoundError as error:
            matching = "matches nothing" if any(sign in path for sign in "*?[") else "does not exist"
            raise DataError(f"{key}: {path} {matching}") from error
        except PermissionError as error:
            raise DataError(f"{key}: {path} may not be read: {told(error)}") from error


def _matching(path: str) -> list[Path]:
    """What a glob matches."""
    anchor = Path(path).anchor
    inner = path.removeprefix(anchor)
    matches = sorted(Path(anchor or ".").glob(inner)) if inner else []
    return [match for match in matches if _seen(match.as_posix(), path)]


def _seen(match: str, pattern: str) -> bool:
    """Whether what a glob matches is hidden nowhere that the glob does not say."""
    said = PurePosixPath(pattern).parts
    return not any(part.startswith(".") and part not in said for part in PurePosixPath(match).parts)


def _remote(url: str, where: Where) -> Iterator[_Remote]:
    protocol = url.partition("://")[0]

    def expand(system: Any, path: str) -> list[str]:
        system.invalidate_cache()
        if any(sign in path for sign in "*[") and not system.exists(path):
            return [str(system.unstrip_protocol(match)) for match in system.glob(path) if _seen(match, path)]
        system.info(path)  # raises where there is nothing
        return [url]

    matches = asked(url, where, expand)
    if not matches:
        raise FileNotFoundError
    for match in sorted(matches, key=lambda found: PurePosixPath(found).parts):
        yield _Remote(match if "://" in match else f"{protocol}://{match}", where)


def _stamp(about: dict[str, Any]) -> str:
    """What an object store says of the content of an object, or when it was changed."""
    for name in ("ETag", "etag", "md5Hash", "md5", "generation", "LastModified", "last_modified", "mtime", "created"):
        if about.get(name):
            return f"{name} {about[name]}"
    return ""


def _data(inner: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """Those of the paths in a directory that are not hidden, nor in one of its own that is tagged as made again."""
    paths = [path for path in inner if not _hidden(path)]
    made = {path.parent for path in paths if path.name == TAG}
    return [path for path in paths if path.name != TAG and not made.intersection(list(path.parents)[:-1])]


def _hidden(inner: PurePosixPath | Path) -> bool:
    return any(part.startswith(".") for part in inner.parts)


def _split_of(place: Any, content: bytes, split: str | None) -> str:
    splits = json.loads(content)["splits"]
    chosen = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else "")
    if chosen not in splits:
        raise DataError(f"{place} has the splits {', '.join(splits)}; choose one by data.split")
    return str(chosen)


def _saved_files(place: Any, content: bytes, there: set[str]) -> list[str]:
    """The Arrow files of a data set that `datasets` saved, in its own order."""
    state = json.loads(content)
    if state.get("_indices_files"):
        raise DataError(f"{place} was saved with an indices mapping; save it again after dataset.flatten_indices()")
    names = [str(entry["filename"]) for entry in state["_data_files"]]
    missing = [name for name in names if name not in there]
    if missing:
        raise DataError(f"{place}: {missing[0]} is missing, which its state.json lists")
    return names
