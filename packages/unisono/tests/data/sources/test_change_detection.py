"""Which file is named when data are not what they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unisono.data.sources import open_source
from unisono.data.sources.change_detection import find_change
from unisono.data.sources.formats.parquet import ParquetReader
from unisono.runtime.errors import DataError

BEFORE = [{"name": name, "rows": 3, "digest": name, "size": 9, "stamp": "1"} for name in "abc"]


def changed(number: int, **what: Any) -> list[dict[str, Any]]:
    return [file | what if n == number else file for n, file in enumerate(BEFORE)]


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (BEFORE, None),
        (changed(1, rows=2, digest="x"), "b has changed: it had 3 rows and has 2"),
        (changed(2, digest="x"), "c has changed: its content differs"),
        (changed(1, size=8, stamp="2"), "b has changed: it had 9 bytes and has 8"),
        (changed(1, stamp="2"), "b was written again"),
        ([file | {"stamp": "2"} | ({"size": 8} if file["name"] == "c" else {}) for file in BEFORE],
         "c has changed: it had 9 bytes and has 8"),
        (BEFORE[1:], "a is gone"),
        (BEFORE[:-1], "c is gone"),
        ([BEFORE[0], BEFORE[2]], "b is gone"),
        ([{**BEFORE[0], "name": "A"}, *BEFORE], "A was not there"),
        ([*BEFORE, {**BEFORE[0], "name": "d"}], "d was not there"),
        ([BEFORE[0], BEFORE[2], BEFORE[1]], "c is now where b was"),
        ([], "a is gone"),
    ],
)  # fmt: skip
def test_the_file_that_differs_is_named(now: list[dict[str, Any]], told: str | None) -> None:
    assert find_change(BEFORE, now) == told


def test_a_parquet_file_that_is_cut_off_while_it_is_open_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim: its name is in an error, where reading beyond the end of a mapped file is a SIGBUS."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": np.random.default_rng(0).normal(size=20_000)}), path, row_group_size=10_000)
    source = open_source(path)
    check_size = ParquetReader._check_size

    def cut_off(*arguments: Any, **named: Any) -> int:
        os.truncate(path, 8192)
        return check_size(*arguments, **named)

    monkeypatch.setattr(ParquetReader, "_check_size", cut_off)
    with pytest.raises(DataError, match=r"rows\.parquet has changed since .*: it had \d+ bytes and has 8192"):
        source[19_999]
