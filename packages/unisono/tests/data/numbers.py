"""Something to prepare: rows of numbers that follow from the record, some records without a row, some rows empty.

As a program it prepares a folder, slowly, so that it can be killed:
`python -m packages.unisono.tests.data.numbers FOLDER KIND`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.prepare import preparation
from unisono.data.prepare.preparation import Made
from unisono.runtime.rng import generator


@dataclass(frozen=True)
class Numbers:
    """A preparation that is its own maker."""

    records: int
    size: float = 1e7  # bytes that the source has, as far as the plan is concerned
    dtype: str = "<u2"
    part: int = 7  # records at a time
    pause: float = 0.0  # seconds per part
    column: str = "tokens"
    inputs: Mapping[str, Any] = field(default_factory=lambda: {"tokenizer": "a", "source": "b"})
    fails_at: int | None = None
    longest: int = 300
    blocks: Any = None

    @property
    def known_inputs(self) -> Mapping[str, Any]:
        return {"records": self.records, "source": self.inputs["source"]}

    def bounds(self, shard_mb: float) -> Sequence[int]:
        return preparation.even_bounds(self.records, self.size, shard_mb, self.blocks)

    def begin(self, folder: Path) -> Numbers:
        (folder / "travels.txt").write_text("with the shards")
        return self

    def row(self, record: int) -> Any:
        """None where a record makes no row."""
        rng = generator("numbers", record)
        if rng.integers(10) == 0:
            return None
        length = 0 if rng.integers(10) == 0 else int(rng.integers(1, self.longest))
        return rng.integers(0, 1 << 16, length).astype(self.dtype)

    def rows(self, first: int = 0, last: int | None = None) -> list[Any]:
        made = (self.row(record) for record in range(first, self.records if last is None else last))
        return [row for row in made if row is not None]

    def make(self, first: int, last: int) -> Iterator[Made]:
        for begin in range(first, last, self.part):
            end = min(last, begin + self.part)
            if self.fails_at is not None and begin <= self.fails_at < end:
                raise RuntimeError(f"record {self.fails_at}")
            time.sleep(self.pause)
            rows = self.rows(begin, end)
            values = np.concatenate([np.zeros(0, dtype=self.dtype), *rows])
            lengths = np.asarray([len(row) for row in rows], dtype=np.int64)
            yield Made(values, lengths, end - begin, end - begin - len(rows))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but locks."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


if __name__ == "__main__":
    slow = Numbers(300, pause=0.04)
    preparation.prepare(slow, Path(sys.argv[1]), workers=2, kind=sys.argv[2], shard_mb=1)  # type: ignore[arg-type]
