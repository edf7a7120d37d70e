"""Documents from files: text, JSONL, Parquet, Arrow and saved Hugging Face data sets, in one fixed order.

`unisono.data.sources` finds and reads them, on this host or behind a URL. Here is what makes rows documents: one
column, of text, where a null is an empty document.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.data import sources
from unisono.data.sources import File, Found, Wanted
from unisono.runtime.errors import DataError

_FORMATS = ("text", "jsonl", "parquet", "arrow")


def standard_library() -> Found:
    """The modules of this interpreter's standard library, tests and site-packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped.intersection(path.relative_to(root).parts)]
    if not paths:
        raise DataError(f"{root} holds no Python source; the embedded example needs it. Use data=corpus data.path=DIR")
    return Found(tuple(File.of(path, "text", path.relative_to(root).as_posix()) for path in paths))


def find(paths: Sequence[str | Path], pattern: str = "*", split: str | None = None) -> Found:
    """The files of a corpus.

    Args:
        paths: files, directories, globs and URLs; a directory is searched to any depth.
        pattern: glob that file names must match. With one that is not `*`, files of unknown endings are read as text.
        split: which split of a saved `DatasetDict`.

    Raises:
        DataError: for a path that does not exist, a file that is there twice, or where there are no documents.
    """
    return sources.find(paths, pattern, split, formats=_FORMATS)


def read(file: File, column: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of a file, in order.

    Args:
        file: to read.
        column: of the text, where the format has columns.
        separator: between the documents of a text file; None where the file is one document.

    Raises:
        DataError: naming file and row.
    """
    wanted = Wanted.of([column], {column: "text?"}, separator, hint="data.column")
    for record in sources.records(file, wanted):
        yield record[column] or ""
