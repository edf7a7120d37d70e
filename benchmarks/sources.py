"""Rows per second out of files, by row number, in windows of blocks, and from begin to end: ours beside `datasets`.

    python -m benchmarks.sources [--rows 20000] [--rounds 5] [--write]

A row is a number, a text of about a kilobyte and a list of some three hundred token ids. Every contender reads all
columns, in turn with the others; `datasets` once as it comes, with lists of Python, and once in its NumPy format, which
makes arrays as ours does. Our cache is smaller than the data (`cache_mb=8`), so that random access is what it says.
`datasets` reads Arrow itself and copies Parquet and JSON into Arrow first, which is its time to open; its
`streaming=True` does not, and has no access by number. Files lie in the cache of the operating system.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page

BLOCK, WINDOW, RANDOM = 500, 8, 1500  # rows of a block, blocks of a window, rows that are read by number
FORMATS = ("Arrow stream", "Arrow file", "Parquet", "JSONL", "JSONL, gzip", "NumPy")
Opened = tuple[Callable[[int], Any] | None, Callable[[], Iterable[Any]]]  # a row by number, all rows


def write(folder: Path, count: int) -> None:
    """The same rows in every format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.6, count), 1, 2000).astype(int)
    tokens = [rng.integers(50_000, size=length, dtype=np.uint16) for length in lengths]
    words = ["".join(rng.choice(list("abcdefgh"), size=6)) for _ in range(200)]
    texts = [" ".join(rng.choice(words, size=150)) for _ in range(count)]
    table = pa.table({"id": range(count), "text": texts, "tokens": pa.array(tokens, pa.list_(pa.uint16()))})
    for name in FORMATS:
        (folder / name).mkdir()
    with pa.ipc.new_stream(folder / "Arrow stream" / "rows.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=BLOCK)
    with pa.ipc.new_file(folder / "Arrow file" / "rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=BLOCK)
    pq.write_table(table, folder / "Parquet" / "rows.parquet", row_group_size=BLOCK, compression="zstd")
    with (folder / "JSONL" / "rows.jsonl").open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
    packed = gzip.compress((folder / "JSONL" / "rows.jsonl").read_bytes(), compresslevel=3)
    (folder / "JSONL, gzip" / "rows.jsonl.gz").write_bytes(packed)
    np.save(folder / "NumPy" / "rows.npy", rng.integers(50_000, size=(count, 512), dtype=np.uint16))


def ours(folder: Path, name: str) -> Any:
    from unisono import open_source

    types = {"tokens": "list<uint16>"} if name != "NumPy" else None
    return open_source(folder / name, expect=types, cache_mb=8)


def ours_opened(folder: Path, name: str) -> Opened:
    source = ours(folder, name)
    return source.__getitem__, lambda: source


def datasets_opened(folder: Path, name: str, layout: str | None) -> Opened:
    from datasets import Dataset, load_dataset

    files = str(next((folder / name).iterdir()))
    if name == "Arrow stream":
        data: Any = Dataset.from_file(files)
    else:
        kind = {"Arrow file": "arrow", "Parquet": "parquet"}.get(name, "json")
        data = load_dataset(kind, data_files=files, split="train", cache_dir=str(folder / "datasets"))
    data = data.with_format(layout)
    return data.__getitem__, lambda: data


def streamed(folder: Path, name: str) -> Opened:
    from datasets import load_dataset

    files = str(next((folder / name).iterdir()))
    kind = {"Arrow stream": "arrow", "Arrow file": "arrow", "Parquet": "parquet"}.get(name, "json")
    data: Any = load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=str(folder / "datasets"))
    return None, lambda: data


def mapped(folder: Path, name: str) -> Opened:
    array = np.load(folder / name / "rows.npy", mmap_mode="r")
    return lambda row: np.array(array[row]), lambda: (np.array(row) for row in array)


def contenders(name: str) -> dict[str, Callable[[Path, str], Opened]]:
    """Who reads this format."""
    if name == "NumPy":
        return {"Unisono": ours_opened, "numpy.load(mmap_mode='r')": mapped}
    return {
        "Unisono": ours_opened,
        "datasets": lambda folder, name: datasets_opened(folder, name, None),
        "datasets, NumPy format": lambda folder, name: datasets_opened(folder, name, "numpy"),
        "datasets, streaming": streamed,
    }


def windows(source: Any, seed: int) -> Iterator[int]:
    """Rows in an order of blocks: the blocks permuted, and the rows of a few of them among each other."""
    rng = np.random.default_rng(seed)
    firsts = np.cumsum(source.blocks) - source.blocks
    for blocks in np.array_split(rng.permutation(len(source.blocks)), -(-len(source.blocks) // WINDOW)):
        rows = np.concatenate([np.arange(firsts[block], firsts[block] + source.blocks[block]) for block in blocks])
        yield from rng.permutation(rows).tolist()


def measure(folder: Path, name: str, contender: str, count: int, number: int) -> dict[str, float]:
    """Seconds to the first row, and rows per second."""
    for cache in ("datasets", "cache"):
        shutil.rmtree(folder / cache, ignore_errors=True)
    began = time.perf_counter()
    row, rows = contenders(name)[contender](folder, name)
    _ = row(0) if row else next(iter(rows()))
    seen = {"open": time.perf_counter() - began}
    if row:
        order = np.random.default_rng(number).permutation(count)[:RANDOM].tolist()
        began = time.perf_counter()
        for position in order:
            row(position)
        seen["random"] = len(order) / (time.perf_counter() - began)
    if contender == "Unisono":
        source = ours(folder, name)
        source.keep_blocks(WINDOW)
        began = time.perf_counter()
        read = sum(1 for position in windows(source, number) if source[position] is not None)
        seen["windows"] = read / (time.perf_counter() - began)
        assert read == count
    began = time.perf_counter()
    read = sum(1 for _ in rows())
    seen["sequential"] = read / (time.perf_counter() - began)
    assert read == count, f"{contender} gave {read} rows of {name}"
    return seen


def table(results: dict[tuple[str, str], list[dict[str, float]]]) -> list[str]:
    """The lines of the page."""
    head = ("format", "", "open, ms", "by number, rows/s", f"windows of {WINDOW} blocks, rows/s", "in order, rows/s")
    lines = ["".join(f"| {title} " for title in head) + "|", "|---" * len(head) + "|"]
    for (name, contender), runs in results.items():
        cells = [name, contender, f"{1e3 * statistics.median(run['open'] for run in runs):,.0f}"]
        for access in ("random", "windows", "sequential"):
            rates = [run[access] for run in runs if access in run]
            cells.append(f"{statistics.median(rates):,.0f}" if rates else "–")
        lines.append("".join(f"| {cell} " for cell in cells) + "|")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    arguments = parser.parse_args()
    from importlib.metadata import version

    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["UNISONO_CACHE"] = str(folder / "cache")
        write(folder, arguments.rows)
        pairs = [(form, contender) for form in FORMATS for contender in contenders(form)]
        for number in range(arguments.rounds):
            for form, contender in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
                seen = measure(folder, form, contender, arguments.rows, number)
                results.setdefault((form, contender), []).append(seen)
            print(f"round {number + 1} of {arguments.rounds}", flush=True)
        size = sum(path.stat().st_size for path in (folder / "Arrow file").iterdir()) / 1e6
    about = (
        f"{arguments.rows:,} rows, {size:.0f} MB as an Arrow file; medians of {arguments.rounds} rounds; datasets "
        f"{version('datasets')}, pyarrow {pa.__version__}; {platform.machine()}, {os.cpu_count()} cores; "
        f"{time.strftime('%Y-%m-%d')}."
    )
    text = "\n".join([*table({pair: results[pair] for pair in pairs}), "", about])
    print(f"\n{text}")
    if arguments.write:
        page.put("sources", text)


if __name__ == "__main__":
    main()
