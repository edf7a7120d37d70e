"""Reads JSON Lines and text files, whose rows are separated by newlines or another separator.

An index of row positions is computed once, so that any row can be read by its position. Compressed files do not support
random access, so they are decompressed into the cache once; sequential reading does not need that.
"""

from __future__ import annotations

import hashlib
import re
import tokenize
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.sources import index
from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.storage import MAX_ROW, File, wrap_read_errors
from unisono.runtime.errors import DataError, nearest
from unisono.runtime.remote import is_remote
from unisono.runtime.untrusted import safe_paths

TEXT = "text"  # the column of text files
_BLOCK = 1 << 20  # bytes of file per block: a block has the rows that begin in it
_CHUNK = 1 << 24
_SAMPLE = 64  # lines from which columns are inferred
_BOM = b"\xef\xbb\xbf"  # dropped, as by the JSON parser

Record = dict[str, Any]
_Positions = NDArray[np.int64]  # in bytes, (rows,)


class _LineBlock:
    """Consecutive rows of a file between these positions; `parse` reads one, given its bytes and its position."""

    def __init__(
        self, content: Any, starts: _Positions, ends: _Positions, parse: Callable[[bytes, int], Record], weight: int
    ) -> None:
        self.weight = weight
        self._content, self._starts, self._ends, self._parse_record = content, starts, ends, parse

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Record:
        return self._parse_record(self.content(row), int(self._starts[row]))

    def content(self, row: int) -> bytes:
        """The bytes of a row."""
        begin = int(self._starts[0])
        return bytes(self._content[int(self._starts[row]) - begin : int(self._ends[row]) - begin])

    def __iter__(self) -> Iterator[Record]:
        return (self[row] for row in range(len(self)))


class DocumentReader:
    """Reads a text file as one document."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted = file, wanted
        self.schema = pa.schema([(_text_column(wanted), pa.string())])
        self.rows = np.ones(1, dtype=np.int64)
        self.digest, self.weight = "", 0

    def block(self, number: int) -> _LineBlock:
        """The document."""
        with wrap_read_errors(self._file), self._file.open_plain() as stream:
            ((_, content),) = _read_parts(self._file, stream, b"")
        return _LineBlock(content, np.zeros(1, np.int64), np.array([len(content)]), self._parse_record, len(content))

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Not available."""
        raise KeyError(column)

    def _parse_record(self, content: bytes, first: int) -> Record:
        return {_text_column(self._wanted): _decode(self._file, content, first)}


class LineReader:
    """Reads the rows of a file, using an index of their positions."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted = file, wanted
        self._text = file.format == "text"
        self._mark = (wanted.separator or "").encode() if self._text else b"\n"
        self._plain = index.unpack_file(file) if file.is_compressed else file
        with wrap_read_errors(file):
            self._starts = index.cached_array(self._plain, f"{file.format} {self._mark!r}", self._find)
            self._content = None if is_remote(self._plain.path) else self._plain.content()
        stretches = np.arange(0, self._plain.size + 1, _BLOCK)
        firsts = np.unique(np.searchsorted(self._starts, stretches))
        self._firsts = firsts[firsts < len(self._starts)]
        self.rows: NDArray[np.int64] = np.diff([*self._firsts, len(self._starts)])
        self.weight = self._starts.nbytes * self._starts.flags.owndata  # 0 if memory-mapped
        self.digest = hashlib.blake2b(self._starts.data, digest_size=16).hexdigest()
        self.schema = pa.schema([(_text_column(wanted), pa.string())]) if self._text else self._infer_schema()

    def block(self, number: int) -> _LineBlock:
        """The rows of a block."""
        return self._rows(int(self._firsts[number]), int(self._firsts[number] + self.rows[number]))

    def lengths(self, column: str) -> NDArray[np.int64]:
        """The values of an integer column, or the lengths of a column's lists, (rows,); reads the whole file."""
        found = (record[column] for record in read_records(self._file, self._wanted))
        each = (0 if value is None else value if isinstance(value, int) else len(value) for value in found)
        return np.fromiter(each, np.int64, len(self._starts))

    def _find(self) -> NDArray[np.int64]:
        with self._plain.stream() as content:
            return (
                _find_part_starts(self._file, content, self._mark)
                if self._text
                else _find_line_starts(self._file, content)
            )

    def _rows(self, first: int, last: int) -> _LineBlock:
        starts = self._starts[first:last]
        ends = np.append(self._starts[first + 1 : last + 1], self._plain.size)[: len(starts)]
        if self._text:
            ends = np.where(np.arange(first, last) == len(self._starts) - 1, ends, ends - len(self._mark))
        begin, end = int(starts[0]), int(ends[-1])
        if self._content is not None:
            return _LineBlock(self._content.slice(begin, end - begin), starts, ends, self._parse_record, 0)
        with wrap_read_errors(self._file):
            content = self._plain.range(begin, end)
        return _LineBlock(content, starts, ends, self._parse_record, len(content))

    def _parse_record(self, content: bytes, first: int) -> Record:
        if self._text:
            return {_text_column(self._wanted): _decode(self._file, content, first)}
        return _parse_line(content.partition(b"\n")[0], self._wanted, lambda: self._line(first))

    def _line(self, first: int) -> str:
        """A row's location for errors, with the line number as shown by an editor."""
        if is_remote(self._plain.path):
            return f"{self._file.path}, row {int(np.searchsorted(self._starts, first))} (from 0)"
        lines = 1
        with self._plain.stream() as content:
            while first > 0:
                chunk = content.read(min(_CHUNK, first))
                lines, first = lines + chunk.count(b"\n"), first - len(chunk)
        return f"{self._file.path}, line {lines}"

    def _infer_schema(self) -> Any:
        """The schema of the first lines, at least one of which must be valid: a bad line may be skipped when read."""
        good: list[Record] = []
        fault: DataError | None = None
        if not len(self.rows):
            return pa.schema([])
        head = self._rows(0, min(_SAMPLE, int(self.rows[0])))
        for row in range(len(head)):
            try:
                _ = head[row]
                good.append(safe_paths.decode_json(head.content(row).partition(b"\n")[0]))
            except DataError as error:
                fault = fault or error
        if fault is not None and not good:
            raise fault
        names = dict.fromkeys(name for made in good for name in made)
        return pa.schema([(name, _infer_type([made.get(name) for made in good])) for name in names])


def read_records(file: File, wanted: ColumnRequest) -> Iterator[Record]:
    """Iterate over the rows without an index; the file may be compressed.

    Raises:
        DataError: naming file and line.
    """
    with wrap_read_errors(file), file.open_plain() as content:
        if file.format == "text":
            for first, part in _read_parts(file, content, (wanted.separator or "").encode()):
                yield {_text_column(wanted): _decode(file, part, first)}
            return
        for number, line in enumerate(_read_lines(file, content), start=1):
            if line.strip():
                yield _parse_line(line, wanted, lambda number=number: f"{file.path}, line {number}")  # type: ignore[misc]


def _parse_line(line: bytes, wanted: ColumnRequest, where: Callable[[], str]) -> Record:
    """Parse a line of JSON into the requested columns."""
    try:
        made = safe_paths.decode_json(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where()} is not JSON: {error}") from error
    if not isinstance(made, dict):
        raise DataError(f"{where()} is a {type(made).__name__}; every line must be a JSON object")
    if wanted.columns is not None:
        for column in wanted.columns:
            if column not in made:
                raise DataError(f"{where()} has no key '{column}', {nearest(column, made)}{wanted.hint}")
        made = {column: made[column] for column in wanted.columns}
    for name, kind in wanted.types:
        holder, _, last = name.rpartition(".")
        inside: Any = made
        for step in holder.split(".") if holder and name not in made else ():
            inside = inside.get(step) if isinstance(inside, dict) else None
        last = last if inside is not made else name
        if not isinstance(inside, dict) or last not in inside:
            raise DataError(f"{where()} has no key '{name}', {nearest(name, made)}{wanted.hint}")
        value = inside[last]
        if value is None and not kind.nulls:
            wanted.check_nulls(where, made)
        fits, inside[last] = kind.read(value)
        if not fits:
            raise DataError(f"{where()}: '{name}' is of type {type(value).__name__}, not {kind}{wanted.hint}")
    if b"\\ud" in line or b"\\uD" in line:
        for column, value in made.items():
            _check_encodable(where, column, value)
    return made


def _check_encodable(where: Callable[[], str], column: str, value: Any) -> None:
    """Reject unpaired surrogates, which JSON can escape but UTF-8 cannot encode, and which make tokenizers panic."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_encodable(where, column, part)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where()}: '{column}' contains the unpaired surrogate "
                f"\\u{ord(value[error.start]):04x} as its character {error.start}; repair or remove the line"
            ) from error


def _decode(file: File, content: bytes, first: int) -> str:
    """Decode the content of a file from byte `first` on."""
    try:
        return (content.removeprefix(_BOM) if first == 0 else content).decode("utf-8")
    except UnicodeDecodeError as error:
        if file.path.endswith(".py") and not is_remote(file.path):  # a module may declare another encoding
            with suppress(SyntaxError, UnicodeDecodeError), safe_paths.open_found(file.path, file.folder) as head:
                return content.decode(tokenize.detect_encoding(head.readline)[0]).replace("\r\n", "\n")
        shift = len(_BOM) if first == 0 and content.startswith(_BOM) else 0
        at = error.start + shift
        raise DataError(f"{file.path} is not UTF-8 text: byte {first + at} is 0x{content[at]:02x}") from error


def _text_column(wanted: ColumnRequest) -> str:
    """The name of a text file's only column: as requested, or `text`."""
    return wanted.columns[0] if wanted.columns and len(wanted.columns) == 1 else TEXT


def _read_lines(file: File, content: Any) -> Iterator[bytes]:
    """The lines of an open file; one that no memory should hold, as of a file full of holes, is an error."""
    for number, line in enumerate(iter(partial(content.readline, MAX_ROW + 1), b""), start=1):
        _check_row(file, len(line), f"line {number}")
        yield line


def _check_row(file: File, size: int, what: str) -> None:
    if size > MAX_ROW:
        raise DataError(
            f"{file.path}: {what} has more than {MAX_ROW >> 30} GiB, which no row has; check that the file was "
            "written completely, with a line for each row or a separator between documents"
        )


def _read_parts(file: File, content: Any, mark: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts between separators, with their positions; the whole if there are none."""
    at, left = 0, bytearray()
    while chunk := content.read(_CHUNK):
        begin, search = 0, max(0, len(left) - len(mark) + 1)  # a separator may span two chunks
        left += chunk
        while mark and (end := left.find(mark, search)) >= 0:
            yield at + begin, bytes(left[begin:end])
            begin = search = end + len(mark)
        at, left = at + begin, left[begin:] if begin else left
        _check_row(file, len(left), f"the document at byte {at}")
    yield at, bytes(left)


def _find_line_starts(file: File, content: Any) -> NDArray[np.int64]:
    """The positions of all lines that are not blank."""
    starts, at = array("q"), 0
    for line in _read_lines(file, content):
        if line.strip():
            starts.append(at)
        at += len(line)
    return np.array(starts, dtype=np.int64)


def _find_part_starts(file: File, content: Any, mark: bytes) -> NDArray[np.int64]:
    """The positions of the parts between separators: the first at 0, and the others after each separator."""
    starts, at, left = array("q", [0]), 0, b""
    pattern = re.compile(re.escape(mark))
    while chunk := content.read(_CHUNK):
        left += chunk
        done = 0
        for match in pattern.finditer(left):
            done = match.end()
            starts.append(at + done)
        keep = max(done, len(left) - len(mark) + 1)  # a separator may span two chunks
        at, left = at + keep, left[keep:]
        _check_row(file, at - starts[-1], f"document {len(starts)}")
    return np.array(starts, dtype=np.int64)


def _infer_type(values: list[Any]) -> Any:
    """The Arrow type of values; null if they have no common type."""
    with suppress(pa.ArrowException, OverflowError):
        return pa.infer_type(values)
    return pa.null()
