"""What it takes to know the samples of a batch, however far into a run it lies: milliseconds and memory.

    python -m benchmarks.seek [--rounds 50] [--write]

Each round asks every order for a batch of 256 positions from each distance on, in turn, a million positions after the
last one: what an order keeps of a neighbouring block cannot help it. An order of blocks deals them once for as many
epochs as there are lanes; that is in the first request, which stands apart. For comparison, what torch's samplers do:
`torch.randperm` makes the whole epoch to know one sample of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks import page
from unisono.config.schema import data as settings
from unisono.data.order.blocks import BlockOrder
from unisono.data.order.lanes import SINGLE_LANE, Lanes
from unisono.data.order.mixture import Joined, MixtureOrder
from unisono.data.order.order import Order

BATCH = 256
FROM = (0, 10**6, 10**9, 10**12)
LARGE = 10**13  # rows


def orders() -> dict[str, Callable[[Any], Any]]:
    sources = Joined({"web": range(LARGE), "code": range(10**9), "books": range(10**6)})
    mixture = settings.Mixture(weights={"web": 0.7, "code": 0.25, "books": 0.05})
    streams = [Order(len(source), number) for number, source in enumerate(sources.sources.values())]
    lanes, block = Lanes(64, BATCH // 64), np.full(100_000, 1000)
    return {
        "one source of 10¹³ rows": Order(LARGE, 0),
        "mixture of three sources, blocks of 1000": MixtureOrder.from_config(
            mixture, sources, streams, 0, BATCH, SINGLE_LANE
        ),
        "100,000 blocks of 1000 rows, 64 lanes, window 8": BlockOrder(block, 0, 8, lanes),
    }


def milliseconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began)


def memory(act: Callable[[], Any]) -> float:
    """Peak of what is allocated meanwhile, in kB."""
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e3


def measure(rounds: int) -> list[str]:
    """The lines of the page."""
    positions = np.arange(BATCH)
    orders_by_distance = {begin: orders() for begin in FROM}  # each distance with orders of its own
    names = list(orders_by_distance[0])
    first = {
        (name, begin): milliseconds(partial(orders_by_distance[begin][name], begin + positions))
        for name in names
        for begin in FROM
    }
    seen: dict[tuple[str, int], list[float]] = {where: [] for where in first}
    for number in range(1, rounds + 1):
        for name in names:
            for begin in FROM:
                here = begin + 4096 * number * BATCH + positions
                seen[name, begin].append(milliseconds(partial(orders_by_distance[begin][name], here)))
    head = ["", *(f"from {begin:,}" for begin in FROM), "the first of an epoch", "memory, kB"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in names:
        cells = [f"{statistics.median(seen[name, begin]):.2f}" for begin in FROM]
        cells += [f"{statistics.median(first[name, begin] for begin in FROM):.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {memory(partial(orders()[name], FROM[-1] + positions)):.0f} |")
    import torch

    rows = 10**7
    epoch = [milliseconds(lambda: torch.randperm(rows)) for _ in range(5)]
    lines.append(f"| torch.randperm of {rows:,} rows | {' | '.join(['—'] * len(FROM))} "
                 f"| {statistics.median(epoch):.0f} | {8 * rows / 1e3:.0f} |")  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    arguments = parser.parse_args()
    about = (
        f"Milliseconds for the rows of {BATCH} positions, median of {arguments.rounds} rounds; numpy {np.__version__}; "
        f"{platform.machine()}, {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}."
    )
    text = "\n".join([*measure(arguments.rounds), "", about])
    print(text)
    if arguments.write:
        page.put("seek", text)


if __name__ == "__main__":
    main()
