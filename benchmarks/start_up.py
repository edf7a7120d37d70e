"""How long the command takes before it does anything: `unisono --help`, a typo, `unisono list` of no runs.

    python -m benchmarks.start_up [ROUNDS]

Each round runs every command once, in turn, beside a bare Python, so that all of them meet the same other load. The
processor's time says more on a busy machine than the wall clock; both are medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "unisono": ["-m", "unisono"],
    "unisono --help": ["-m", "unisono", "--help"],
    "unisono train --help": ["-m", "unisono", "train", "--help"],
    "unisono trian language": ["-m", "unisono", "trian", "language"],
    "unisono list": ["-m", "unisono", "list"],
}


def measure(words: list[str], folder: str) -> tuple[float, float]:
    """Wall and processor seconds of one command."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    wall, after = time.perf_counter() - began, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, words in COMMANDS.items():
                found[name].append(measure(words, folder))
    print(f"{'':<24}{'wall, s':>10}{'CPU, s':>10}   (medians of {rounds} rounds, load {os.getloadavg()[0]:.1f})")
    for name, times in found.items():
        wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
        print(f"{name:<24}{wall:>10.3f}{cpu:>10.3f}")


if __name__ == "__main__":
    main()
