"""Which file is named when data are not what they were."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.data.sources.change_detection import find_change

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
