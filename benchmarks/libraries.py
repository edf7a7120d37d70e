"""What a library would do in place of code of ours: what reading Arrow and searching for a micro-batch would cost.

    python -m benchmarks.libraries

Counts, not times, so other work on the machine changes nothing. `docs/decisions.md` says what was chosen, and why.
"""

from __future__ import annotations

import io
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unisono.config.batch_split import divisors
from unisono.data.sources import storage
from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.formats import arrow
from unisono.launch.autobatch import memory_fit

BATCHES, ROWS, LENGTH = 64, 32, 4096  # record batches, rows of each, bytes of a row


class Counted(io.FileIO):
    """A file that counts the bytes that are asked of it, as an object store would bill them."""

    bytes_read = 0

    def readinto(self, buffer: Any) -> int:
        got = super().readinto(buffer)
        Counted.bytes_read += got or 0
        return got or 0

    def read(self, size: int = -1) -> bytes:
        got = super().read(size)
        Counted.bytes_read += len(got or b"")
        return got or b""


def write(path: Path, framed: bool) -> None:
    """Record batches of tokens, as a file with a footer or as a stream."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("tokens", pa.list_(pa.int32())), ("id", pa.int64())])
    with (pa.ipc.new_file if framed else pa.ipc.new_stream)(str(path), schema) as sink:
        for _ in range(BATCHES):
            tokens = [rng.integers(0, 50_000, LENGTH // 4, dtype=np.int32) for _ in range(ROWS)]
            sink.write_batch(pa.record_batch([pa.array(tokens, pa.list_(pa.int32())), pa.array(range(ROWS))], schema))


def rows_by_pyarrow(file: Any, framed: bool) -> list[int]:
    """Rows of each record batch, by pyarrow's own readers, of the smallest column."""
    options = pa.ipc.IpcReadOptions(included_fields=[1])
    if not framed:
        with pa.ipc.open_stream(file, options=options) as reader:
            return [batch.num_rows for batch in reader]
    with pa.ipc.open_file(file, options=options) as reader:
        return [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]


def reading() -> None:
    """Bytes that are read of a remote file to know where its rows are."""
    print("| Arrow | size | pyarrow's reader | ours |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for framed in (False, True):
            path = Path(name) / ("file.arrow" if framed else "stream.arrow")
            write(path, framed)
            Counted.bytes_read = 0
            theirs = rows_by_pyarrow(pa.PythonFile(Counted(path)), framed)
            by_pyarrow, Counted.bytes_read = Counted.bytes_read, 0
            file = storage.File.from_path(path, "arrow", path.name)
            with Counted(path) as source:
                heads = list(arrow._messages(file, source, Nothing()))
            ours = [head.rows for head in heads if head.kind == 3]
            assert ours == theirs == [ROWS] * BATCHES
            assert arrow.ArrowReader(file, ColumnRequest()).rows.tolist() == ours
            size = path.stat().st_size
            print(
                f"| {path.stem} | {size / 1e6:.1f} MB | {by_pyarrow / 1e6:.2f} MB | {Counted.bytes_read / 1e6:.3f} MB |"
            )


class Nothing:
    """A digest that nobody asks for."""

    def update(self, content: bytes) -> None: ...


def searching() -> None:
    """Sizes that a search measures, the processes that die of it, and the rows it computes, over many models."""
    ours, bisection = np.zeros(4), np.zeros(4)
    rng, trials = np.random.default_rng(0), 1000
    for _ in range(trials):
        sizes = divisors(int(rng.choice([64, 96, 256, 1024])))
        base, per_row = rng.uniform(0.5, 20), 10 ** rng.uniform(-2, 0.5)
        limit = base + per_row * math.exp(rng.uniform(0, math.log(2 * sizes[-1])))
        true = [size for size in sizes if base + per_row * size <= memory_fit.usable_bytes(limit)]
        largest = true[-1] if true else 0
        peaks: dict[int, float] = {}
        failed = math.inf
        while (size := memory_fit.next_size(sizes, peaks, memory_fit.usable_bytes(limit), failed)) is not None:
            ours += [1, 0, size, 0]
            if base + per_row * size > limit:
                failed, ours[1] = size, ours[1] + 1
            else:
                peaks[size] = base + per_row * size
        ours[3] += (memory_fit.largest_fitting(peaks, memory_fit.usable_bytes(limit)) or 0) == largest
        low, high = -1, len(sizes)  # of sizes: fits, does not fit
        while high - low > 1:
            size = sizes[middle := (low + high) // 2]
            bisection += [1, base + per_row * size > limit, size, 0]
            low, high = (middle, high) if base + per_row * size <= memory_fit.usable_bytes(limit) else (low, middle)
        bisection[3] += (sizes[low] if low >= 0 else 0) == largest
    print("\n| search | sizes measured | of them out of memory | rows computed | right |\n|---|---|---|---|---|")
    for name, (count, dead, rows, right) in (("a line through few sizes (ours)", ours), ("bisection", bisection)):
        print(f"| {name} | {count / trials:.2f} | {dead / trials:.2f} | {rows / trials:.0f} | {right / trials:.1%} |")


if __name__ == "__main__":
    reading()
    searching()
