"""Parquet as nested values: its footer and the headers of its pages, in Thrift's compact protocol.

https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

from tests.security.forms import number, text
from tests.security.mutations import Form

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCTURE = 1, 2, 3, 7, 8, 9, 10, 12
_MAGIC = b"PAR1"


class _Reader:
    """Reads values from `at` on."""

    def __init__(self, content: bytes, at: int) -> None:
        self.content, self.at = content, at

    def _bytes(self, size: int) -> bytes:
        self.at += size
        return self.content[self.at - size : self.at]

    def _varint(self) -> int:
        found = shift = 0
        while True:
            byte = self._bytes(1)[0]
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    def _integer(self) -> int:
        found = self._varint()
        return found >> 1 ^ -(found & 1)

    def value(self, kind: int) -> Any:
        """A value of a type; of a list its type and its values, of a structure its fields by their numbers."""
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BYTE:
            return self._bytes(1)[0]
        if kind == _DOUBLE:
            return struct.unpack("<d", self._bytes(8))[0]
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            first = self._bytes(1)[0]
            size = first >> 4 if first >> 4 != 15 else self._varint()
            return [first & 15, [self._element(first & 15) for _ in range(size)]]
        return self.structure() if kind == _STRUCTURE else self._integer()

    def _element(self, kind: int) -> Any:
        return self._bytes(1)[0] == _TRUE if kind in (_TRUE, _FALSE) else self.value(kind)

    def structure(self) -> dict[str, list[Any]]:
        """Types and values by the numbers of the fields."""
        found: dict[str, list[Any]] = {}
        field = 0
        while first := self._bytes(1)[0]:
            field = field + (first >> 4) if first >> 4 else self._integer()
            found[str(field)] = [first & 15, self.value(first & 15)]
        return found


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _integer(value: Any) -> bytes:
    value = number(value, 64)
    return _varint((value << 1 ^ -(value >> 63)) % (1 << 64))


def _written(kind: int, value: Any) -> bytes:
    if kind == _BYTE:
        return bytes([number(value, 8)])
    if kind == _DOUBLE:
        with suppress(TypeError, ValueError, OverflowError):
            return struct.pack("<d", float(value))
        return bytes(8)
    if kind == _BINARY:
        return _varint(len(text(value))) + text(value)
    if kind in (_LIST, _SET):
        inner, values = value if isinstance(value, list) and len(value) == 2 else (0, [])
        inner, values = number(inner, 4), values if isinstance(values, list) else []
        head = bytes([len(values) << 4 | inner]) if len(values) < 15 else bytes([240 | inner]) + _varint(len(values))
        return head + b"".join(_element(inner, each) for each in values)
    return _structure(value) if kind == _STRUCTURE else _integer(value)


def _element(kind: int, value: Any) -> bytes:
    return bytes([_TRUE if value else _FALSE]) if kind in (_TRUE, _FALSE) else _written(kind, value)


def _structure(value: Any) -> bytes:
    written, before = bytearray(), 0
    for name, entry in value.items() if isinstance(value, dict) else ():
        if not (name.isdecimal() and isinstance(entry, list) and len(entry) == 2):
            continue
        field, kind = number(int(name), 15), number(entry[0], 4)
        if kind in (_TRUE, _FALSE):
            kind = _TRUE if entry[1] else _FALSE
        step = field - before
        written += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _integer(field)
        written += b"" if kind in (_TRUE, _FALSE) else _written(kind, entry[1])
        before = field
    return bytes(written) + b"\0"


def _parse(content: bytes) -> Any:
    size = int.from_bytes(content[-8:-4], "little")
    end = len(content) - 8 - size
    footer = _Reader(content, end).structure()
    reader, pages = _Reader(content, len(_MAGIC)), []
    while reader.at < end:
        header = reader.structure()
        packed = header["3"][1]
        pages.append([header, content[reader.at : reader.at + packed]])
        reader.at += packed
    return {"pages": pages, "footer": footer}


def _seal(value: Any) -> bytes:
    pages = value.get("pages")
    body = b"".join(
        _structure(page[0]) + text(page[1]) if isinstance(page, list) and len(page) == 2 else text(page)
        for page in (pages if isinstance(pages, list) else ())
    )
    footer = _structure(value.get("footer"))
    return _MAGIC + body + footer + len(footer).to_bytes(4, "little") + _MAGIC


PARQUET = Form(_parse, _seal)
