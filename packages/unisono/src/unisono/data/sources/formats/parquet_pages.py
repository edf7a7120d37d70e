"""Headers of the pages of a Parquet file, which say what a footer may hide: how far a column can unpack.

A text that a dictionary holds once, or that the delta encoding continues, takes a few bits a row and its whole length
in memory. Arrow believes the headers and not the footer, so they are read here, without the pages themselves.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_VALUES = {0: (5, 2), 3: (8, 4)}  # of the types of pages that hold values: fields of their header and of its encoding
_DICTIONARY_PAGE = 2
_INTEGER, _STRUCTURE = 5, 12  # types of fields
_REPEATING = (2, 7, 8)  # PLAIN_DICTIONARY, DELTA_BYTE_ARRAY, RLE_DICTIONARY
_DELTA = 7
_NEGATIVE = "a page has a negative number of values"
_EMPTY_PAGES = 1000  # of one column, at most
_MAX_HEADER, _MAX_DEPTH = 16 << 20, 8  # bytes, as Arrow has it; structures in each other
_WINDOW = 1024  # bytes that are read for a header at first: of a small column the first pages, too
READ_AHEAD = 8 << 20  # bytes of a column that are asked of a server at once


_Fields = dict[int, tuple[int, Any]]  # types and values, by the numbers of the fields

# Most headers, whole, as all common writers have them: of a dictionary, and of values, with or without statistics whose
# least and greatest value are short. One match is a fifth of the time of taking them apart field by field, which is for
# all others; what matches here means the same there.
_NUMBER = rb"\x15([\x80-\xff]{0,2}[\x00-\x7f])"  # the next field, of at most 21 bits
_COUNT = rb"(?:[\x80-\xff]{0,3}[\x00-\x7f]|[\x80-\xff]{4}[\x00-\x0f])"  # of at most 32 bits
_TEXT = b"(?:%b)" % b"|".join(rb"\x%02x.{%d}" % (size, size) for size in range(65))
_STATISTICS = rb"\x1c(?:(?:(?:\x18%b){2}\x16|\x36)%b(?:\x28%b\x18%b(?:[\x11\x12]{2})?)?)?\x00" % (
    _TEXT,
    _COUNT,
    _TEXT,
    _TEXT,
)
_COMMON = re.compile(
    rb"\x15(?:\x04%b\x4c\x15%b\x15%b[\x11\x12]?|\x00%b\x2c%b\x15%b\x15%b(?:%b)?)\x00\x00"
    % (_NUMBER * 2, _COUNT, _COUNT, _NUMBER * 2, _NUMBER * 2, _COUNT, _COUNT, _STATISTICS),
    re.DOTALL,
)


class ColumnPages(NamedTuple):
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


class _Window:
    """A file of which what follows is read too, as far as it belongs to a column."""

    def __init__(self, source: Any, end: int, ahead: int) -> None:
        self._source, self._end, self._ahead = source, end, ahead
        self._first, self._content = 0, b""

    def read(self, at: int, size: int) -> bytes:
        """At most `size` bytes from `at`; fewer where the file ends."""
        begin = at - self._first
        if begin < 0 or begin + size > len(self._content):
            self._source.seek(at)
            self._content = bytes(self._source.read(max(size, min(self._ahead, self._end - at))))
            self._first, begin = at, 0
        return self._content[begin : begin + size]


def read_pages(source: Any, column: Any, ahead: int = 0) -> ColumnPages:
    """Read the headers of a column's pages, as Arrow understands them.

    Args:
        source: The file, as a `pyarrow.NativeFile`.
        column: Its `pyarrow.parquet.ColumnChunkMetaData`.
        ahead: Bytes of the column that are read at once, where each reading is a request.

    Raises:
        ValueError: If a header cannot be read or is ambiguous, or there are many pages without values.
    """
    offsets = [column.data_page_offset]
    if column.has_dictionary_page and column.dictionary_page_offset:
        offsets.append(column.dictionary_page_offset)
    at, size = min(offsets), source.size()
    window = _Window(source, min(size, at + column.total_compressed_size + _WINDOW), ahead)
    seen = empty = repeated = largest = 0
    late = delta = False
    count = column.num_values
    while seen < count and at < size:
        kind, unpacked, packed, values, encoding, length = _read_page(window, at)
        if packed < 0 or unpacked < 0:
            raise ValueError("a page has a negative size")
        largest = max(largest, packed, unpacked)  # what is not compressed is as long as it is stored
        late |= kind == _DICTIONARY_PAGE and seen > 0
        empty += values == 0
        if empty > _EMPTY_PAGES:
            raise ValueError(f"it has more than {_EMPTY_PAGES} pages without values")
        seen += values
        repeated += values if encoding in _REPEATING else 0
        delta |= encoding == _DELTA
        at += length + packed
    return ColumnPages(seen, repeated, largest, late, delta)


def _read_page(window: _Window, at: int) -> tuple[int, int, int, int, int, int]:
    """The type of a page, its sizes unpacked and packed, its values, their encoding, and the length of its header."""
    if found := _COMMON.match(window.read(at, _WINDOW)):
        if found[1]:
            return _DICTIONARY_PAGE, _decode(found[1]), _decode(found[2]), 0, 0, found.end()
        unpacked, packed, values, encoding = map(_decode, found.group(3, 4, 5, 6))
        if values < 0:
            raise ValueError(_NEGATIVE)
        return 0, unpacked, packed, values, encoding, found.end()
    header, length = _read_header(window, at)
    kind, unpacked, packed = (_field(header, number, _INTEGER, -1) for number in (1, 2, 3))
    return kind, unpacked, packed, *_read_values(header, kind), length


def _decode(number: bytes) -> int:
    """A number of `_NUMBER`."""
    value = number[0] & 127
    if len(number) > 1:
        value |= (number[1] & 127) << 7
        if len(number) > 2:
            value |= number[2] << 14
    return (value >> 1) ^ -(value & 1)


def _read_values(header: _Fields, kind: int) -> tuple[int, int]:
    """How many values a page has, and their encoding; none in pages of other types, which Arrow skips."""
    if kind not in _VALUES:
        return 0, 0
    place, encoding = _VALUES[kind]
    inner = _field(header, place, _STRUCTURE, None)
    if inner is None:
        raise ValueError("a page of values does not say how many it has")
    values = _field(inner, 1, _INTEGER, -1)
    if values < 0:
        raise ValueError(_NEGATIVE)
    return values, _field(inner, encoding, _INTEGER, 0)


def _field(fields: _Fields, number: int, kind: int, missing: Any) -> Any:
    """The value of a field, which readers skip if it is of another type."""
    found, value = fields.get(number, (kind, missing))
    if found != kind:
        raise ValueError(f"field {number} of a page's header is of a type that it never has")
    return value


def _read_header(window: _Window, at: int) -> tuple[_Fields, int]:
    """A page's header, and its length in bytes."""
    size = _WINDOW
    while True:
        content = window.read(at, size)
        try:
            return _structure(content, 0, 0)
        except IndexError:
            if len(content) < size or size >= _MAX_HEADER:
                raise ValueError("a header of a page is cut off") from None
            size *= 8


def _structure(content: bytes, at: int, depth: int) -> tuple[_Fields, int]:
    """A structure in Thrift's compact protocol, and where it ends."""
    if depth > _MAX_DEPTH:
        raise ValueError("a header of a page is nested too deeply")
    fields: _Fields = {}
    number = 0
    while kind := content[at]:
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, at = _integer(content, at, 16)
        if number in fields:
            raise ValueError(f"a header of a page has field {number} twice")
        kind &= 15
        if kind == _INTEGER and (byte := content[at]) < 128:  # most of a header; a group of a few rows feels the calls
            fields[number] = kind, (byte >> 1) ^ -(byte & 1)
            at += 1
            continue
        value, at = _value(content, at, kind, depth)
        fields[number] = kind, value
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true and false
        return kind == 1, at
    if kind in (4, _INTEGER, 6):
        return _integer(content, at, {4: 16, _INTEGER: 32, 6: 64}[kind])
    if kind == _STRUCTURE:
        return _structure(content, at, depth + 1)
    if kind in (3, 7, 8):  # a byte, a double, or bytes
        size = {3: 1, 7: 8}.get(kind)
        if size is None:
            size, at = _varint(content, at)
        if size and at + size > len(content):
            raise IndexError
        return None, at + size
    raise ValueError("a header of a page holds what none has")


def _integer(content: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number, of which other readers would keep the last bits."""
    value, at = _varint(content, at)
    if value >> bits:
        raise ValueError("a number in a header of a page is too long")
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
