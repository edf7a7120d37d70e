"""The documents of a corpus by number: what is tokenised, in one fixed order that no file system decides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data import sources
from unisono.data.sources import Found, Wanted
from unisono.recipes.language import documents
from unisono.recipes.language.settings import Files

_CACHE_MB = 64.0  # of blocks that were read last


@dataclass(frozen=True)
class Texts:
    """Documents as text; `texts[number]` is one of them. What the files hold is looked at when it is first asked for.

    Attributes:
        found: their files.
        column: of the text, where a format has columns.
        separator: between the documents of a text file; None where a file is one document.
    """

    found: Found
    column: str = "text"
    separator: str | None = None

    @classmethod
    def of(cls, files: Files | None) -> Texts:
        """The documents that the settings name; None for the source of Python's standard library.

        Raises:
            DataError: for a path that does not exist, or where nothing can be read.
        """
        if files is None:
            return cls(documents.standard_library())
        paths = files.path if isinstance(files.path, list) else [files.path]
        return cls(documents.find(paths, files.pattern, files.split), files.column, files.separator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> str:
        return self._rows[number] or ""

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Documents that are read together, (blocks,)."""
        return self._rows.blocks

    def read(self, first: int, last: int) -> Iterator[str]:
        """The documents `first..last-1`, in order, read block by block."""
        ends = np.cumsum(self.blocks)
        block = int(np.searchsorted(ends, first, side="right"))
        while block < len(ends) and int(ends[block] - self.blocks[block]) < last:
            begin = int(ends[block] - self.blocks[block])
            for text in self._rows.read_block(block)[max(0, first - begin) : last - begin]:
                yield text or ""
            block += 1

    def all(self) -> Iterator[str]:
        """Every document; unlike `read`, without an index of where they begin."""
        for file in self.found.files:
            yield from documents.read(file, self.column, self.separator)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.found.files)

    @property
    def ignored(self) -> list[str]:
        """Names of files that were passed over."""
        return list(self._rows.ignored)

    @cached_property
    def fingerprint(self) -> str:
        """What the files hold and how they are read, wherever they lie."""
        return digest([self._rows.fingerprint, self.column, self.separator])

    @property
    def manifest(self) -> dict[str, Any]:
        """The files, with rows and digests of each; see `unisono.data.sources`."""
        return self._rows.manifest

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Refuse files that have changed since they were opened; see `unisono.data.sources`."""
        self._rows.check_files(share, shares)

    @cached_property
    def stamp(self) -> str:
        """Changes whenever a file is written again; nothing is opened for it."""
        files = [[file.name, file.format, file.size, file.stamp] for file in self.found.files]
        return digest([files, self.column, self.separator])

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The files as they are seen without opening one: name, size, time of the last change."""
        return [{"name": file.name, "size": file.size, "stamp": file.stamp} for file in self.found.files]

    @cached_property
    def _rows(self) -> sources.Files:
        wanted = Wanted.of([self.column], {self.column: "text?"}, self.separator, hint="data.column")
        return sources.Files(self.found, wanted, bare=True, cache_mb=_CACHE_MB)


def digest(value: object) -> str:
    """A hash of JSON, in hex."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
