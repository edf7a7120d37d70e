"""Headers of Parquet's pages are read as Arrow reads them, refused if ambiguous, and asked for at once."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unisono.data.sources import open_source
from unisono.data.sources.formats import parquet_pages
from unisono.data.sources.formats.parquet_pages import ColumnPages, read_pages

Field = tuple[int, int, Any]  # number, type, value
NUMBER, BINARY, STRUCTURE = 5, 8, 12
PLAIN, DICTIONARY = 0, 8  # encodings


def encode(fields: list[Field]) -> bytes:
    """A structure in Thrift's compact protocol, with every number of a field in full."""
    found = bytearray()
    for number, kind, value in fields:
        content = encode(value) if kind == STRUCTURE else varint(value << 1) if kind == NUMBER else varint(0)
        found += bytes([kind]) + varint(number << 1) + content
    return bytes([*found, 0])


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def page(kind: int, *fields: Field) -> bytes:
    return encode([(1, NUMBER, kind), (2, NUMBER, 4), (3, NUMBER, 4), *fields]) + bytes(4)


def first(values: int, encoding: int) -> Field:
    return 5, STRUCTURE, [(1, NUMBER, values), (2, NUMBER, encoding)]


def second(values: int, encoding: int) -> Field:
    return 8, STRUCTURE, [(1, NUMBER, values), (4, NUMBER, encoding)]


def read(*pages: bytes) -> ColumnPages:
    content = b"".join(pages)
    column = SimpleNamespace(
        data_page_offset=0, has_dictionary_page=False, num_values=10, total_compressed_size=len(content)
    )
    return read_pages(pa.BufferReader(content), column)


HONEST = page(0, first(10, DICTIONARY))


@pytest.mark.parametrize(
    "pages",
    [
        [HONEST],
        [page(3, second(10, DICTIONARY))],
        [page(1, first(10, PLAIN)), HONEST],  # of an index
        [page(9, second(10, PLAIN)), HONEST],
        [page(2, first(10, PLAIN)), HONEST],  # a dictionary
        [page(3, first(10, PLAIN), second(10, DICTIONARY))],
        [page(0, first(10, DICTIONARY), second(10, PLAIN))],
    ],
)
def test_values_are_counted_where_arrow_counts_them(pages: list[bytes]) -> None:
    """An index page could claim all values, and the header of another version could hide a dictionary."""
    assert read(*pages) == ColumnPages(values=10, repeated=10, largest=4, late_dictionary=False, delta=False)


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (page(0, first(10, DICTIONARY), first(10, PLAIN)), "field 5 twice"),
        (page(0, (5, STRUCTURE, [(1, NUMBER, 1), (1, NUMBER, 10)])), "field 1 twice"),
        (page(0, (5, STRUCTURE, [(1, BINARY, None)])), "field 1 of a page's header is of a type that it never has"),
        (page(0, (5, BINARY, None)), "field 5 of a page's header is of a type"),
        (page(0, (5, STRUCTURE, [(1, NUMBER, (1 << 32) + 1)])), "too long"),
        (page(0, (1 << 16, NUMBER, 1), first(10, PLAIN)), "too long"),
        (bytes.fromhex("1500 1508 1508 2c 1514 1500 15ffffffff7f 1506 00 00"), "too long"),  # as all writers have it
        (page(0, second(10, PLAIN)), "does not say how many"),
        (page(0, (5, STRUCTURE, [(2, NUMBER, PLAIN)])), "a negative number of values"),
    ],
)
def test_a_header_that_readers_could_understand_otherwise_is_refused(forged: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(forged, HONEST)


def test_many_pages_that_are_skipped_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 1000 pages without values"):
        read(*[page(1)] * 1001, HONEST)


def test_the_pages_of_a_remote_column_are_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page had a request of its own."""
    path = tmp_path / "a.parquet"
    numbers = np.random.default_rng(0).integers(0, 1 << 60, 20_000)
    table = pa.table({"a": [f"{number:x}" for number in numbers]})
    pq.write_table(table, path, use_dictionary=False, compression="zstd", data_page_size=4000)
    system: Any = fsspec.filesystem("memory")
    system.pipe("/pages/a.parquet", path.read_bytes())
    source = open_source("memory://pages/a.parquet", "a")
    asked: list[int] = []
    cat = type(system).cat_file

    def count(self: Any, path: str, start: int, end: int, **options: Any) -> Any:
        asked.append(end - start)
        return cat(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(system), "cat_file", count)
    try:
        assert source[19_999] == table["a"][19_999].as_py()
    finally:
        system.store.clear()
    chunk: int = pq.read_metadata(path).row_group(0).column(0).total_compressed_size
    assert len(asked) == 2 and chunk > 40 * 4000, "one for the headers, one by Arrow"


def headers(tmp_path: Path, values: Any, **options: Any) -> list[bytes]:
    """The headers of a column that Arrow writes."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": values}), path, **options)
    column, content = pq.read_metadata(path).row_group(0).column(0), path.read_bytes()
    at, seen, found = column.dictionary_page_offset or column.data_page_offset, 0, list[bytes]()
    while seen < column.num_values:
        _, _, packed, values, _, length = parquet_pages._read_page(
            parquet_pages._Window(pa.BufferReader(content), len(content), 0), at
        )
        found.append(content[at : at + length])
        at, seen = at + length + packed, seen + values
    return found


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize(
    "values", [range(300), np.linspace(0, 1, 70_000), ["x" * 30, "y"], [None, True], [[1, 2], [3]]]
)
def test_headers_that_are_known_as_a_whole_mean_what_their_fields_say(
    tmp_path: Path, values: Any, statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever byte of one is changed: fields out of order, of other types, numbers that are negative or long."""

    def read_page(content: bytes) -> object:
        try:
            return parquet_pages._read_page(parquet_pages._Window(pa.BufferReader(content), len(content), 0), 0)
        except ValueError as error:
            return str(error)

    common, known = parquet_pages._COMMON, 0
    for header in headers(tmp_path, values, write_statistics=statistics, data_page_size=1 << 17):
        known += bool(common.match(header))
        for place in range(len(header)):
            for byte in {0, 1, 0x15, 0x7F, 0x80, 0xFF, header[place] ^ 1, header[place] ^ 16, header[place]}:
                changed = header[:place] + bytes([byte]) + header[place + 1 :]
                with monkeypatch.context() as patch:
                    quick = read_page(changed)
                    patch.setattr(parquet_pages, "_COMMON", re.compile(b"(?!)"))
                    assert quick == read_page(changed), changed.hex(" ")
    assert known, "none is known as a whole"
