"""Documents from files: text, JSONL, Parquet, Arrow and saved Hugging Face data sets, in one fixed order.

Files are sorted by path, so no file system decides the order. Whatever cannot be read is an error that names the file
and the row; empty documents are counted and left out.
"""

from __future__ import annotations

import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from unisono.errors import DataError, nearest

_FORMATS = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip


@dataclass(frozen=True)
class DocumentFile:
    """A file of documents.

    Attributes:
        path: of the file.
        format: `text`, `jsonl`, `parquet` or `arrow`.
        name: as it stands in the order and in the fingerprint, relative to where it was found.
    """

    path: Path
    format: str
    name: str


@dataclass(frozen=True)
class Found:
    """The files of a corpus, in order, and the names of those that were passed over."""

    files: tuple[DocumentFile, ...]
    ignored: tuple[str, ...] = ()


def standard_library() -> Found:
    """The modules of this interpreter's standard library, tests and site-packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped.intersection(path.relative_to(root).parts)]
    if not paths:
        raise DataError(f"{root} holds no Python source; the embedded example needs it. Use data=corpus data.path=DIR")
    return Found(tuple(DocumentFile(path, "text", path.relative_to(root).as_posix()) for path in paths))


def find(paths: Sequence[Path], pattern: str = "*", split: str | None = None) -> Found:
    """The files of a corpus.

    Args:
        paths: files and directories; a directory is searched to any depth.
        pattern: glob that file names must match. With one that is not `*`, files of unknown endings are read as text.
        split: which split of a saved `DatasetDict`.

    Raises:
        DataError: for a path that does not exist, or where no file can be read as documents.
    """
    files: list[DocumentFile] = []
    ignored: list[str] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"data.path: {path} does not exist")
        if (path / "dataset_dict.json").is_file():
            path = path / _split_of(path, split)
        if path.is_file():
            candidates, root = [path], path.parent
        elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            candidates, root = _saved_files(path), path
        else:
            candidates, root = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p, path)], path
        for file in candidates:
            ending = Path(file.name.removesuffix(".gz")).suffix.lower()
            kind = _FORMATS.get(ending) or ({".json": "jsonl"}.get(ending, "text") if pattern != "*" else None)
            if kind is None or not file.match(pattern):
                ignored.append(file.relative_to(root).as_posix())
            else:
                files.append(DocumentFile(file, kind, f"{path.name}/{file.relative_to(root).as_posix()}"))
    if not files:
        wanted = ", ".join(sorted(_FORMATS))
        raise DataError(
            f"data.path: no documents in {', '.join(map(str, paths))} (pattern '{pattern}'); known endings are "
            f"{wanted}, and others are read as text where data.pattern names them"
            + (f"; passed over: {', '.join(ignored[:5])}" if ignored else "")
        )
    return Found(tuple(files), tuple(ignored))


def read(file: DocumentFile, column: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of a file, in order.

    Args:
        file: to read.
        column: of the text, where the format has columns.
        separator: between the documents of a text file; None where the file is one document.

    Raises:
        DataError: naming file and row.
    """
    try:
        match file.format:
            case "text":
                text = _decoded(file.path)
                yield from text.split(separator) if separator else [text]
            case "jsonl":
                yield from _json_lines(file.path, column)
            case "parquet":
                with pq.ParquetFile(file.path) as parquet:
                    _check_column(file.path, parquet.schema_arrow, column)
                    batches = parquet.iter_batches(batch_size=256, columns=[column])
                    yield from _texts(file.path, column, (batch.column(0) for batch in batches))
            case "arrow":
                yield from _arrow(file.path, column)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{file.path} cannot be read as {file.format}: {error}") from error


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _decoded(path: Path) -> str:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")  # a byte order mark is no text; JSON drops it too
    except UnicodeDecodeError as error:
        if path.suffix == ".py":  # a module may declare another encoding
            import tokenize

            with suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as source:
                return source.read()
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}") from error


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number} is a {type(record).__name__}; every line must be a JSON object")
            if column not in record:
                raise DataError(f"{path}, line {number} has no key '{column}', {nearest(column, record)} (data.column)")
            text = record[column]
            if not isinstance(text, str | None):
                raise DataError(
                    f"{path}, line {number}: '{column}' is of type {type(text).__name__}, not text (data.column)"
                )
            _check_encodable(path, number, column, text or "")
            yield text or ""


def _check_encodable(path: Path, number: int, column: str, text: str) -> None:
    """Refuse half a character: JSON may escape what no text can hold, and tokenizers panic at it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, line {number}: '{column}' holds half a character, the unpaired surrogate "
            f"\\u{ord(text[error.start]):04x}, as its character {error.start}; repair the line or take it out"
        ) from error


def _arrow(path: Path, column: str) -> Iterator[str]:
    """Both Arrow formats: a file with a footer, or a stream, as Hugging Face's `datasets` writes."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _check_column(path, reader.schema, column)
        batches: Iterator[Any] = (
            (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        )
        yield from _texts(path, column, (batch.column(column) for batch in batches))


def _texts(path: Path, column: str, arrays: Iterable[Any]) -> Iterator[str]:
    row = 0
    for array in arrays:
        for value in array:
            try:
                yield value.as_py() or ""
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: row {row} (from 0) of column '{column}' is not UTF-8: {error}") from error
            row += 1


def _check_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise DataError(f"{path} has no column '{column}', {nearest(column, schema.names)} (data.column)")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"{path}: column '{column}' is {kind}, not text (data.column)")


def _split_of(path: Path, split: str | None) -> str:
    splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    chosen = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else "")
    if chosen not in splits:
        raise DataError(f"{path} has the splits {', '.join(splits)}; choose one by data.split")
    return str(chosen)


def _saved_files(path: Path) -> list[Path]:
    """The Arrow files of a data set that `datasets` saved, in its own order."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state.get("_indices_files"):
        raise DataError(f"{path} was saved with an indices mapping; save it again after dataset.flatten_indices()")
    missing = [entry["filename"] for entry in state["_data_files"] if not (path / entry["filename"]).is_file()]
    if missing:
        raise DataError(f"{path}: {missing[0]} is missing, which its state.json lists")
    return [path / entry["filename"] for entry in state["_data_files"]]
