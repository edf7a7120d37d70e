"""The documents of a corpus by number: what is tokenised, in one fixed order that no file system decides."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError
from unisono.recipes.language import documents
from unisono.recipes.language.documents import Found
from unisono.recipes.language.settings import Files

_LOCK = threading.Lock()


@dataclass(frozen=True)
class Texts:
    """Documents as text; `texts[number]` is one of them.

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
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        file = int(np.searchsorted(self._ends, number, side="right"))
        return self._content(file)[number - (int(self._ends[file - 1]) if file else 0)]

    def read(self, first: int, last: int) -> Iterator[str]:
        """The documents `first..last-1`, in order."""
        begin = 0
        for file, end in zip(self.found.files, self._ends.tolist(), strict=True):
            if begin < last and end > first:
                for place, text in enumerate(documents.read(file, self.column, self.separator), begin):
                    if place >= last:
                        return
                    if place >= first:
                        yield text
            begin = end

    def all(self) -> Iterator[str]:
        """Every document; unlike `read`, without a pass that counts them first."""
        for file in self.found.files:
            yield from documents.read(file, self.column, self.separator)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.path.stat().st_size for file in self.found.files)

    @cached_property
    def fingerprint(self) -> str:
        """What the files are and how they are read, wherever they lie."""
        files = [[file.name, file.format, file.path.stat().st_size] for file in self.found.files]
        return digest([files, self.column, self.separator])

    @cached_property
    def stamp(self) -> str:
        """As the fingerprint, but another one whenever a file was written again."""
        return digest([self.fingerprint, *(file.path.stat().st_mtime_ns for file in self.found.files)])

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        counts = [sum(1 for _ in documents.read(f, self.column, self.separator)) for f in self.found.files]
        return np.cumsum(counts, dtype=np.int64)

    def _content(self, file: int) -> list[str]:
        """All documents of a file; those of the last one are kept."""
        with _LOCK:
            number, content = self.__dict__.get("_last", (-1, []))
            if number != file:
                content = list(documents.read(self.found.files[file], self.column, self.separator))
                self.__dict__["_last"] = (file, content)
            return list(content)


def check_filled(texts: Texts) -> None:
    """Refuse a corpus without a single document.

    Raises:
        DataError: saying how many files it has.
    """
    if not len(texts):
        raise DataError(f"the corpus has {len(texts.found.files)} files and no text in them")


def digest(value: object) -> str:
    """A hash of JSON, in hex."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
