"""The documents of a corpus by number: text, JSONL, Parquet, Arrow and saved data sets, in one fixed order.

`unisono.sources` finds and reads the files, local or behind a URL. A document is one text column of a row; a null is an
empty document.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unisono import DataError, sources
from unisono_language.settings import CorpusFiles

_FORMATS = ("text", "jsonl", "parquet", "arrow")
_CACHE_MB = 64.0  # of blocks that were read last
_NOT_DOCUMENTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class Texts:
    """Documents as text. The files are read on first use.

    Attributes:
        found: their files.
        column: of the text, where a format has columns.
        separator: between the documents of a text file; None where a file is one document.
    """

    found: sources.Found
    column: str = "text"
    separator: str | None = None

    @classmethod
    def from_files(cls, files: CorpusFiles | None) -> Texts:
        """The documents that the settings name; None for the source of Python's standard library."""
        if files is None:
            return cls(standard_library())
        paths = files.path if isinstance(files.path, list) else [files.path]
        return cls(find_texts(paths, files.pattern, files.split), files.column, files.separator)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, first: int, last: int) -> Iterator[str]:
        """The documents `first..last-1`, in order, read block by block."""
        return (text or "" for text in self.rows.read(first, last))

    def iterate(self) -> Iterator[str]:
        """Every document; unlike `read_documents`, without an index of where they begin."""
        for file in self.found.files:
            yield from read_documents(file, self.column, self.separator)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the files' content and the reading options, independent of their location."""
        return digest([self.rows.fingerprint, self.column, self.separator])

    @cached_property
    def stamp(self) -> str:
        """Changes whenever a file is rewritten; opens no file."""
        return digest([self.found.stamp, self.column, self.separator])

    @cached_property
    def rows(self) -> sources.Files:
        """The rows of the files; each is a document or null."""
        return sources.Files(self.found, _schema(self.column, self.separator), bare=True, cache_mb=_CACHE_MB)


def standard_library() -> sources.Found:
    """The modules of this interpreter's standard library, tests and site-packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_DOCUMENTS]  # site-packages can be huge
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if not paths:
        raise DataError(f"{root} holds no Python source, which data=embedded needs. Use data=corpus data.path=DIR")
    named = (sources.File.from_path(path, "text", path.relative_to(root).as_posix()) for path in sorted(paths))
    return sources.Found(tuple(named))


def find_texts(paths: Sequence[str | Path], pattern: str = "*", split: str | None = None) -> sources.Found:
    """The files of a corpus: files, directories (searched to any depth), globs and URLs.

    With a `pattern` of names that is not `*`, files of unknown endings are read as text; `split` is that of a saved
    `DatasetDict`.

    Raises:
        DataError: for a path that does not exist, a file that is there twice, or where there are no documents.
    """
    return sources.find(paths, pattern, split, formats=_FORMATS)


def read_documents(file: sources.File, column: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of a file, in order; errors name file and row."""
    for record in sources.records(file, _schema(column, separator)):
        yield record[column] or ""


def digest(value: object) -> str:
    """A hash of JSON, in hex."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _schema(column: str, separator: str | None) -> sources.ColumnRequest:
    return sources.ColumnRequest.parse([column], {column: "text?"}, separator, hint="data.column")
