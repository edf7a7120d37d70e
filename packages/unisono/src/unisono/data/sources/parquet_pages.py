"""Headers of the pages of a Parquet file, which say what a footer may hide: how far a column can unpack.

A text that a dictionary holds once, or that the delta encoding continues, takes a few bits a row and its whole length
in memory. Arrow believes the headers and not the footer, so they are read here, without the pages themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DICTIONARY_PAGE = 2
_REPEATING = (2, 7, 8)  # PLAIN_DICTIONARY, DELTA_BYTE_ARRAY, RLE_DICTIONARY
_DELTA = 7
_EMPTY_PAGES = 1000  # of one column, at most
_MAX_HEADER, _MAX_DEPTH = 16 << 20, 8  # bytes, as Arrow has it; structures in each other
_WINDOW = 256  # bytes that are read for a header at first


@dataclass(frozen=True)
class ColumnPages:
    """What the pages of a column of a row group can become.

    Attributes:
        values: All of them, nulls included.
        repeated: Those in pages that may repeat a text which is stored once.
        largest: Bytes of the largest page, unpacked; no text is longer.
        late_dictionary: Whether a dictionary comes after a page of values, where no writer puts it.
        delta: Whether a page continues its texts from each other.
    """

    values: int
    repeated: int
    largest: int
    late_dictionary: bool
    delta: bool


def read_pages(source: Any, column: Any) -> ColumnPages:
    """Read the headers of a column's pages.

    Args:
        source: The file, as a `pyarrow.NativeFile`.
        column: Its `pyarrow.parquet.ColumnChunkMetaData`.

    Raises:
        ValueError: If a header cannot be read, or there are many pages without values.
    """
    offsets = [column.data_page_offset]
    if column.has_dictionary_page and column.dictionary_page_offset:
        offsets.append(column.dictionary_page_offset)
    at, end = min(offsets), source.size()
    seen = empty = repeated = largest = 0
    late = delta = False
    while seen < column.num_values and at < end:
        header, length = _read_header(source, at)
        packed, unpacked = header.get(3, -1), header.get(2, -1)
        if packed < 0 or unpacked < 0:
            raise ValueError("a page has a negative size")
        largest = max(largest, unpacked)
        if header.get(1) == _DICTIONARY_PAGE:
            late |= seen > 0
        else:
            inner = header.get(5) or header.get(8) or {}
            values, encoding = inner.get(1, 0), inner.get(2 if 5 in header else 4)
            empty += values <= 0
            if empty > _EMPTY_PAGES:
                raise ValueError(f"it has more than {_EMPTY_PAGES} pages without values")
            seen += max(0, values)
            repeated += values if encoding in _REPEATING else 0
            delta |= encoding == _DELTA
        at += length + packed
    return ColumnPages(seen, repeated, largest, late, delta)


def _read_header(source: Any, at: int) -> tuple[dict[int, Any], int]:
    """A page's header by numbers of its fields, and its length in bytes."""
    size = _WINDOW
    while True:
        source.seek(at)
        content = bytes(source.read(size))
        try:
            header, length = _structure(content, 0, 0)
            return header, length
        except IndexError:
            if len(content) < size or size >= _MAX_HEADER:
                raise ValueError("a header of a page is cut off") from None
            size *= 8


def _structure(content: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """A structure in Thrift's compact protocol, and where it ends."""
    if depth > _MAX_DEPTH:
        raise ValueError("a header of a page is nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while kind := content[at]:
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, at = _integer(content, at)
        fields[number], at = _value(content, at, kind & 15, depth)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true and false
        return kind == 1, at
    if kind in (4, 5, 6):
        return _integer(content, at)
    if kind == 12:
        return _structure(content, at, depth + 1)
    if kind in (3, 7, 8):  # a byte, a double, or bytes
        size = {3: 1, 7: 8}.get(kind)
        if size is None:
            size, at = _varint(content, at)
        if size and at + size > len(content):
            raise IndexError
        return None, at + size
    raise ValueError("a header of a page holds what none has")


def _integer(content: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(content, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number in a header of a page is too long")
