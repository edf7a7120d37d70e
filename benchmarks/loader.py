"""How fast loaders are, ours beside others: tokens a second, and the share of a step that waits for data.

    PYTHONPATH=PEERS:src python -m benchmarks.loader [--rounds 5] [--write]

See `benchmarks.loaders` for what they load and what to install. Every contender runs in a process of its own, in turn
with the others, and ours stands there twice: the second row is what two equal things differ by on this machine. First
batches are taken as fast as they come; then between two batches the consumer sleeps for as long as a step on an
accelerator would take, and its waits are added up. Where other work shares the machine, the CPU time of a batch, of all
processes of a contender, is the figure to trust.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks import loaders, page

WARM_UP = 20
TIMED = {"light": (600, 150, 0.005), "heavy": (150, 100, 0.020)}  # batches at full speed; with steps; seconds a step


def measure(name: str, folder: Path, work: str) -> dict[str, float]:
    """One contender, in this process."""
    fast, stepped, step = TIMED[work]
    batches = loaders.checked(loaders.CONTENDERS[name][1](folder, work), work)
    for _ in range(WARM_UP):
        next(batches)
    began, worked = time.perf_counter(), cpu()
    for _ in range(fast):
        next(batches)
    duration, worked = time.perf_counter() - began, cpu() - worked
    waited, began = 0.0, time.perf_counter()
    for _ in range(stepped):
        waiting_since = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - waiting_since
        time.sleep(step)
    return {
        "rate": fast * loaders.BATCH * loaders.LENGTH / duration,
        "wait": waited / (time.perf_counter() - began),
        "cpu": worked / fast,
    }


def cpu() -> float:
    """Seconds of all cores that this process and its workers have taken."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def ledger_cost(folder: Path) -> tuple[float, float]:
    """Seconds of CPU that the ledger takes: of a row, in a worker, and of a step, in the loop."""
    from unisono.data.ledger import Ledger
    from unisono.data.loading.batch_builder import BatchBuilder
    from unisono.data.loading.micro_batch import Request
    from unisono.data.order.order import Order
    from unisono.data.order.plan import StreamPlan

    plan = StreamPlan.create(Order(loaders.ROWS, loaders.SEED), loaders.BATCH, 200, None)
    every = range(loaders.BATCH)
    requests = [Request(0, every, plan.samples(step, every)) for step in range(plan.steps)]
    best = {}
    for contents in (False, True, False, True, False, True):
        maker = BatchBuilder(loaders.Peer_light(), loaders.Rows(folder), loaders.SEED, "train", contents=contents)
        began = time.process_time()
        batches = [maker.make(request) for request in requests]
        best[contents] = min(best.get(contents, 1e9), (time.process_time() - began) / plan.steps / loaders.BATCH)
    with Ledger(folder, 0, 1, 0, "benchmark") as ledger:
        began = time.process_time()
        for step, batch in enumerate(batches):
            ledger.step(step, [batch])
        ledger.flush()
        return best[True] - best[False], (time.process_time() - began) / plan.steps


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> list[str]:
    """The lines of the page."""
    titles = "".join(f" {work}: tokens/s | waits | CPU ms a batch |" for work in loaders.WORK)
    lines = [f"| |{titles}", "|---" * 7 + "|"]
    for name in loaders.CONTENDERS:
        cells = [name]
        for work in loaders.WORK:
            runs = results[work].get(name)
            if not runs:
                cells += ["not installed", "", ""]
                continue
            rates = sorted(run["rate"] / 1e6 for run in runs)
            cells.append(f"{statistics.median(rates):.2f} M ({rates[0]:.2f} to {rates[-1]:.2f})")
            cells.append(f"{100 * statistics.median(run['wait'] for run in runs):.0f} %")
            cells.append(f"{1e3 * statistics.median(run['cpu'] for run in runs):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def versions() -> str:
    """Of the contenders."""
    names = ("torch", "datasets", "torchdata", "grain")
    return ", ".join(f"{name} {version(name)}" for name in names if loaders.installed(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, folder, work = arguments.one
        print("RESULT", json.dumps(measure(name, Path(folder), work)), flush=True)
        os._exit(0)  # some of them do not end by themselves
    results: dict[str, dict[str, list[dict[str, float]]]] = {work: {} for work in loaders.WORK}
    names = [name for name, (package, _) in loaders.CONTENDERS.items() if loaders.installed(package)]
    with tempfile.TemporaryDirectory() as folder:
        loaders.generate(Path(folder))
        of_a_row, of_a_step = ledger_cost(Path(folder))
        for number in range(arguments.rounds):
            for work in loaders.WORK:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    command = [sys.executable, "-m", "benchmarks.loader", "--one", name, folder, work]
                    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
                    done = subprocess.run(command, capture_output=True, text=True, env=variables)
                    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                    if not lines:
                        raise SystemExit(f"{name}, {work}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
                    results[work].setdefault(name, []).append(json.loads(lines[0].removeprefix("RESULT ")))
                    print(f"  {number + 1} {work} {name}: {results[work][name][-1]}", flush=True)
    about = (
        f"{arguments.rounds} rounds; {loaders.ROWS} rows of {loaders.LENGTH} tokens, batches of {loaders.BATCH}, "
        f"{loaders.WORKERS} workers; steps of {1e3 * TIMED['light'][2]:g} and {1e3 * TIMED['heavy'][2]:g} ms; "
        f"{versions()}; {platform.machine()}, {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}. The ledger takes "
        f"{1e6 * of_a_row:.0f} µs of a row in the workers, and {1e6 * of_a_step:.0f} µs of a step in the loop."
    )
    text = "\n".join([*table(results), "", about])
    print(f"\n{text}")
    if arguments.write:
        page.put("loader", text)


if __name__ == "__main__":
    main()
