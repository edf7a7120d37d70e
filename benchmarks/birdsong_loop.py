"""Recordings per second of the whole birdsong training loop, and how long it waits for data, by number of processes.

    python -m benchmarks.birdsong_loop [--objectives lejepa …] [--processes 1 2] [--steps 40] [--rounds 2] [words …]

Runs of the command, in turns, every one in a folder of its own: songs made on the spot, `model=tiny`, 32 recordings a
step. Medians are over the steps after the first ten of all rounds; the first waits for the loader to begin and for the
compiler. The data wait is the share of a step in which the slowest process had no batch; its mean is told, too, since
single steps may wait. `words` are settings, e.g. `data=recordings data.path=DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM = 10  # steps before anything is counted


def run(objective: str, processes: int, steps: int, words: list[str]) -> list[dict[str, float]]:
    """The records of the steps of one run."""
    with tempfile.TemporaryDirectory() as folder:
        own = [
            f"task.objective={objective}", f"layout.world_size={processes}", f"train.steps={steps}", "eval.every=null",
            "eval.at_end=false", "checkpoint.every=null", "checkpoint.at_end=false", "observe.trackers=[]",
            "observe.progress=false", f"run.dir={folder}", "run.name=run",
        ]  # fmt: skip
        command = [sys.executable, "-m", "unisono", "train", "birdsong", *own, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "events.jsonl").read_text("utf-8").splitlines()
    return [one for one in map(json.loads, lines) if "recordings_per_second" in one][WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["supervised", "lejepa", "pixio"]
    parser.add_argument("--objectives", nargs="+", default=every, choices=every)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("words", nargs="*", default=[], help="settings of the runs, key=value")
    arguments = parser.parse_args()
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for objective in arguments.objectives:
            for processes in arguments.processes:
                results.setdefault((objective, processes), []).extend(
                    run(objective, processes, arguments.steps, arguments.words)
                )
    print(f"{os.cpu_count()} cores, load of the last 15 minutes {os.getloadavg()[2]:.1f}")
    print("| objective | processes | recordings a second | data wait, median | mean |\n|---|---|---|---|---|")
    for (objective, processes), steps in results.items():
        speed, wait = ([step[name] for step in steps] for name in ("recordings_per_second", "data_wait"))
        print(
            f"| {objective} | {processes} | {statistics.median(speed):.0f} | {statistics.median(wait):.1%} | "
            f"{statistics.mean(wait):.1%} |"
        )


if __name__ == "__main__":
    main()
