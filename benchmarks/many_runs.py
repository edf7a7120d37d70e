"""How long 500 runs take to be resolved and checked, with the trial of their model and without.

    python -m benchmarks.many_runs

Prints seconds of wall time and of processor time of all processes, and the load of the host: with other work beside it,
only the processor time says anything.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

RATES, DECAYS, SEEDS = 5, 10, 10
WORDS = (
    f"optim.lr={','.join(f'{number}e-3' for number in range(1, RATES + 1))}",
    f"optim.weight_decay={','.join(map(str, range(DECAYS)))}", f"seeds={SEEDS}", "--dry-run",
)  # fmt: skip


def main() -> None:
    """Print a line for each of the two."""
    with tempfile.TemporaryDirectory() as folder:
        for trial in ("trial=false", "trial=true"):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            command = [sys.executable, "-m", "unisono", "sweep", "language", *WORDS, trial, f"run.dir={folder}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"{RATES * DECAYS * SEEDS} runs, {trial}: {wall:.1f} s, of processors {cpu:.1f} s "
                f"(load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
                flush=True,
            )


if __name__ == "__main__":
    main()
