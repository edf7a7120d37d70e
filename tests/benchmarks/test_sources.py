"""The comparison of readers: the page shows all of them, and all read the same rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import page, sources


def test_the_page_has_every_reader_of_every_format() -> None:
    held = page.read_part("sources")
    for name in sources.FORMATS:
        for contender in sources.contenders(name):
            assert held.count(f"| {name} | {contender} |") == 1, (name, contender)


def test_windows_hold_every_row_once_and_only_a_few_blocks_at_a_time() -> None:
    blocks = np.array([3, 5, 1, 4] * 10)
    rows = list(sources.windows(SimpleNamespace(blocks=blocks), seed=0))
    assert sorted(rows) == list(range(130))
    of = np.repeat(np.arange(40), blocks)[rows]
    assert len(set(of[:8].tolist())) > 1, "they are mixed"
    assert max(len(set(of[i : i + 5].tolist())) for i in range(126)) <= 5


@pytest.mark.parametrize("name", ["Arrow stream", "Parquet", "JSONL"])
def test_readers_give_the_same_rows(tmp_path: Path, name: str) -> None:
    sources.write(tmp_path, 20)
    mine, theirs = sources.ours_opened(tmp_path, name)[0], sources.datasets_opened(tmp_path, name, None)[0]
    assert mine is not None and theirs is not None
    for row in (0, 19):
        assert {**mine(row), "tokens": mine(row)["tokens"].tolist()} == theirs(row)
        assert mine(row)["tokens"].dtype == np.uint16
