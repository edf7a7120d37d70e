"""Packing beside other libraries: documents a second, padding, and how many documents are cut.

    python -m benchmarks.packing [--peers DIR] [--texts DIR] [--documents 1000000] [--rounds 5] [--write]

Lengths are lognormal, with a median of 403 and a mean of 738 tokens, and, with `--texts`, those of the documents in a
folder of text and Parquet files, tokenised with a BPE of 4,096 tokens that is trained on them. Time is that of the
process on its CPUs, in turn with the others, so that other work on the machine hardly counts; what is only needed to
present lengths in a library's own form is not timed. The peers are no dependencies of this project. They go into a
folder of their own, without what else they would bring along:

    pip install --target DIR cached-path
    pip install --target DIR --no-deps trl ai2-olmo-core dataclass-extensions bettermap

TRL packs the tokens along with their lengths, so it is given tokens of one byte each, and at most `--tokens` documents:
its figure contains copying them. OLMo-core's packer and ours decide alone. Both peers pack best-fit-decreasing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import page
from unisono.config.schema.data import Packing
from unisono.data.order import packing

HERE = Path(__file__).parent
CAPACITIES = (2048, 8192)
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """What came of packing: bins, documents that were cut, and seconds of CPU."""

    bins: int
    cut: int
    seconds: float


@dataclass(frozen=True)
class Contender:
    """A way to pack.

    Attributes:
        pack: lengths and capacity to what came of it.
        peer: whether it is another library's best fit.
        most: documents that it is given.
    """

    pack: Callable[[Lengths, int], Packed]
    peer: bool = False
    most: int = sys.maxsize


def ours(method: str, chunk: int | None = None) -> Contender:
    settings = Packing()

    def decide(lengths: Lengths, capacity: int) -> packing.Pieces:
        if method == "online":
            return packing.pack_online(lengths, capacity, settings.open_bins)
        return (
            packing.pack_offline(lengths, capacity)
            if method == "offline"
            else packing.pack_concatenated(lengths, capacity)
        )

    def pack(lengths: Lengths, capacity: int) -> Packed:
        began = time.process_time()
        size = chunk or max(1, len(lengths))
        packs = [decide(lengths[first : first + size], capacity) for first in range(0, len(lengths), size)]
        seconds = time.process_time() - began
        cut = sum(int((np.bincount(pieces.item) > 1).sum()) for pieces in packs)
        return Packed(sum(pieces.bins for pieces in packs), cut, seconds)

    return Contender(pack)


def olmo_core() -> Contender:
    packer_of = importlib.import_module("olmo_core.data.utils").InstancePacker

    def pack(lengths: Lengths, capacity: int) -> Packed:
        pieces = -(-lengths // capacity)
        sizes = np.full(int(pieces.sum()), capacity)
        sizes[np.cumsum(pieces) - 1] = (lengths - 1) % capacity + 1
        ends = np.cumsum(sizes)
        documents = np.stack([ends - sizes, ends], axis=1).astype(np.uint64)
        packer = packer_of(capacity)
        began = time.process_time()
        instances = packer.pack_documents(documents)[0]
        seconds = time.process_time() - began
        return Packed(len(instances), int((pieces > 1).sum()), seconds)

    return Contender(pack, peer=True)


def trl(most: int) -> Contender:
    import pyarrow as pa

    pack_bfd = importlib.import_module("trl.data_utils")._pack_bfd

    def pack(lengths: Lengths, capacity: int) -> Packed:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = pa.array(np.zeros(int(offsets[-1]), dtype=np.int8))
        table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)})
        began = time.process_time()
        packed = pack_bfd(table, capacity, "split")
        seconds = time.process_time() - began
        return Packed(len(packed), int((lengths > capacity).sum()), seconds)

    return Contender(pack, peer=True, most=most)


def contenders(tokens: int) -> tuple[dict[str, Contender], list[str]]:
    """By name, and what is missing and why."""
    chunk = Packing().chunk
    packers = {
        "Unisono, offline": ours("offline"),
        "Unisono, online": ours("online"),
        f"Unisono, offline, chunks of {chunk:,}": ours("offline", chunk),
        f"Unisono, online, chunks of {chunk:,}": ours("online", chunk),
        "Unisono, end to end": ours("concatenate"),
    }
    missing = []
    for name, make in {"OLMo-core, InstancePacker": olmo_core, "TRL, _pack_bfd": lambda: trl(tokens)}.items():
        try:
            packers[name] = make()
        except (ImportError, AttributeError) as error:
            missing.append(f"{name} not run: {error}")
    return packers, missing


def lognormal(documents: int) -> Lengths:
    drawn = np.random.default_rng(0).lognormal(np.log(403), np.sqrt(2 * np.log(738 / 403)), documents)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


def of_texts(folder: Path) -> Lengths:
    from unisono_language.data.library import open_library
    from unisono_language.settings import Corpus

    library = open_library(Corpus(kind="corpus", path=folder, separator="\n\n"), CAPACITIES[0], None)
    lengths = np.concatenate([store.lengths for store in library.corpora.values()])
    return lengths[lengths > 0]


def measure(lengths: Lengths, capacity: int, ways: dict[str, Contender], rounds: int) -> list[str]:
    """Rows of the table."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, Packed] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            last[name] = way.pack(lengths[: way.most], capacity)
            seconds[name].append(last[name].seconds)
    rates = {n: len(lengths[: w.most]) / statistics.median(seconds[n]) for n, w in ways.items()}
    fastest = max((rates[name] for name, way in ways.items() if way.peer), default=None)
    rows = []
    for name, way in ways.items():
        sample = lengths[: way.most]
        units, packed = int(sample.sum()), last[name]
        bound = -(-units // capacity)
        times = "" if fastest is None else f"{rates[name] / fastest:.2f}"
        rows.append(
            f"| {capacity:,} | {name} | {len(sample):,} | {rates[name] / 1000:,.0f} k | {times} "
            f"| {100 * (1 - units / (packed.bins * capacity)):.4f} % | {packed.bins - bound:+,} of {bound:,} "
            f"| {100 * packed.cut / len(sample):.1f} % |"
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the other libraries")
    parser.add_argument("--texts", type=Path, help="folder of documents")
    parser.add_argument("--documents", type=int, default=1_000_000, help="with lognormal lengths")
    parser.add_argument("--tokens", type=int, default=100_000, help="documents for libraries that copy tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.peers:
        sys.path.append(str(arguments.peers))
    ways, missing = contenders(arguments.tokens)
    sets: dict[str, Any] = {"lognormal lengths": lognormal(arguments.documents)}
    if arguments.texts:
        sets["texts"] = of_texts(arguments.texts)
    head = "| tokens a row | way | documents | documents a second | times the peers | padding | rows over the bound "
    text = []
    for name, lengths in sets.items():
        about = f"{len(lengths):,} documents, median {np.median(lengths):,.0f}, mean {lengths.mean():,.0f} tokens"
        text += [f"{name.capitalize()}: {about}.", "", f"{head}| documents cut |", "|---" * 8 + "|"]
        print(f"{name}: {about}", flush=True)
        for capacity in CAPACITIES:
            text += measure(lengths, capacity, ways, arguments.rounds)
        text.append("")
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "trl", "ai2-olmo-core") if version(name))
    notes = [f"{arguments.rounds} rounds", *missing, versions, f"{platform.machine()}, {os.cpu_count()} cores"]
    text.append("; ".join([*notes, time.strftime("%Y-%m-%d")]) + ".")
    if arguments.write:
        page.put("packing", "\n".join(text))


def version(name: str) -> str:
    try:
        return importlib.import_module("importlib.metadata").version(name)
    except ImportError:
        return ""


if __name__ == "__main__":
    main()
