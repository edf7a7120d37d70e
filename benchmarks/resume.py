"""How long the first batch takes after a resume, at 10 %, 50 % and 90 % of an epoch, ours beside others.

    PYTHONPATH=PEERS:src python -m benchmarks.resume [--rounds 3] [--write]

See `benchmarks.loaders` for what is loaded and what to install. A first process reads up to the place and keeps the
loader's state; a second one makes the loader anew, gives it the state and takes a batch. The time begins when the
libraries are imported, with the making of the loader, so opening the data and starting workers are part of it. "At 0 %"
is the same without a state. Ours needs no first process: its state is the number of the step.
"""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import loaders, page

PERCENTS = (0, 10, 50, 90)
STEPS = loaders.ROWS // loaders.BATCH


def _whole(make: Callable[[Path, str], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Loaders whose own object has the state."""

    def keep(folder: Path, batches: int) -> Any:
        loader = make(folder, "light")
        for _ in zip(range(batches), loader, strict=False):
            pass
        return loader.state_dict()

    def go_on(folder: Path, state: Any) -> Any:
        loader = make(folder, "light")
        if state is not None:
            loader.load_state_dict(state)
        return next(iter(loader))

    return keep, go_on


def _streaming() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hugging Face streaming by itself, without workers: the only way in which its state is documented to be kept."""

    def keep(folder: Path, batches: int) -> Any:
        data = loaders._streamed(folder, "light")
        for _ in zip(range(batches * loaders.BATCH), data, strict=False):
            pass
        return data.state_dict()

    def go_on(folder: Path, state: Any) -> Any:
        data = loaders._streamed(folder, "light")
        if state is not None:
            data.load_state_dict(state)
        return loaders.stack([row for _, row in zip(range(loaders.BATCH), data, strict=False)])

    return keep, go_on


def _grain(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Iterators of grain."""

    def keep(folder: Path, batches: int) -> Any:
        iterator = iter(loaders.grain(kind, folder, "light"))
        for _ in range(batches):
            next(iterator)
        return iterator.get_state()

    def go_on(folder: Path, state: Any) -> Any:
        iterator = iter(loaders.grain(kind, folder, "light"))
        if state is not None:
            iterator.set_state(state)
        return next(iterator)

    return keep, go_on


def _ours(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda folder, batches: batches, lambda folder, state: next(
        loaders.unisono(kind, folder, "light", skip=state or 0)
    )


CONTENDERS: dict[str, tuple[str, Callable[[], tuple[Callable[..., Any], Callable[..., Any]]]]] = {
    "Unisono, threads": ("unisono", partial(_ours, "threads")),
    "Unisono, processes": ("unisono", partial(_ours, "processes")),
    "datasets, streaming": ("datasets", _streaming),
    "datasets, streaming + StatefulDataLoader": ("torchdata", partial(_whole, loaders.stateful_streaming)),
    "torchdata StatefulDataLoader, map-style": ("torchdata", partial(_whole, loaders.stateful)),
    "grain, threads": ("grain", partial(_grain, "threads")),
    "grain, processes": ("grain", partial(_grain, "processes")),
}


def one(name: str, folder: Path, percent: int, state: Path) -> float | None:
    """Keep the state, or go on from it if there is one; in this process."""
    keep, go_on = CONTENDERS[name][1]()
    if percent and not state.exists():
        state.write_bytes(pickle.dumps(keep(folder, STEPS * percent // 100)))
        return None
    known = pickle.loads(state.read_bytes()) if percent else None
    for package in ("torch", "datasets", "torchdata.stateful_dataloader", "grain", "unisono.data.loading.loader"):
        if package.split(".")[0] == CONTENDERS[name][0] or (package == "torch" and "Unisono" not in name):
            __import__(package)
    import pyarrow.parquet  # noqa: F401 - everybody reads with it

    began = time.perf_counter()
    batch = go_on(folder, known)
    seconds = time.perf_counter() - began
    assert np.asarray(batch["inputs"]).shape == (loaders.BATCH, loaders.LENGTH)
    return seconds


def table(results: dict[str, dict[int, list[float]]], failed: dict[tuple[str, int], str]) -> list[str]:
    """The lines of the page."""
    lines = [
        "| seconds to the first batch | " + " | ".join(f"at {percent} %" for percent in PERCENTS) + " |",
        "|---" * 5 + "|",
    ]
    for name, places in results.items():
        cells = [
            f"fails: {failed[name, percent]}"
            if (name, percent) in failed
            else f"{statistics.median(places[percent]):.3f}"
            for percent in PERCENTS
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, folder, percent, state = arguments.one
        print("RESULT", one(name, Path(folder), int(percent), Path(state)), flush=True)
        os._exit(0)
    names = [name for name, (package, _) in CONTENDERS.items() if loaders.installed(package)]
    results: dict[str, dict[int, list[float]]] = {name: {percent: [] for percent in PERCENTS} for name in names}
    failed: dict[tuple[str, int], str] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        loaders.generate(folder)
        for number in range(-1, arguments.rounds):  # before the first round, states are kept
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for percent in PERCENTS if number >= 0 else PERCENTS[1:]:
                    state = folder / f"{names.index(name)}-{percent}.pickle"
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.resume",
                        "--one",
                        name,
                        directory,
                        str(percent),
                        str(state),
                    ]
                    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
                    done = subprocess.run(command, capture_output=True, text=True, env=variables)
                    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                    if not lines:  # a loader that cannot go on from its own state is a finding
                        print(
                            f"{name}, {percent}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}", flush=True
                        )
                        failed[name, percent] = (done.stderr.strip().splitlines() or [f"{done.returncode}"])[-1].split(
                            ":"
                        )[0]
                    elif number >= 0:
                        results[name][percent].append(float(lines[0]))
                        print(f"  {number + 1} {name} at {percent} %: {float(lines[0]):.3f} s", flush=True)
    from benchmarks.loader import versions

    about = (
        f"{arguments.rounds} rounds; an epoch of {STEPS} batches of {loaders.BATCH} rows, {loaders.WORKERS} workers; "
        f"{versions()}; {platform.machine()}, {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}."
    )
    text = "\n".join([*table(results, failed), "", about])
    print(f"\n{text}")
    if arguments.write:
        page.put("resume", text)


if __name__ == "__main__":
    main()
