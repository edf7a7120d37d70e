"""Whether a gloo group with so many threads corrupts the memory of its process: torch alone, on one process.

    python -m benchmarks.gloo_threads [--threads 2] [--call gather|reduce] [--seconds 60]

Gathers in flight, as `DTensor.full_tensor` makes them, are named `ALLGATHER_COALESCED`, which `std::string` keeps on
the heap; reductions are `ALLREDUCE`, which it does not. With two threads, gathers end in "malloc(): unaligned tcache
chunk detected" after some ten thousand; it is a matter of chance, and rarer where the threads share a core.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

_IN_FLIGHT = 256


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--call", choices=("gather", "reduce"), default="gather")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # tracebacks of its flight recorder would take most of the time
    torch.set_num_threads(1)
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._timeout, options._threads = timedelta(seconds=600), given.threads
    options._devices = [kind.create_device(interface="lo")]
    group = kind(dist.HashStore(), 0, 1, options)  # type: ignore[attr-defined]
    part, whole = torch.ones(1), torch.zeros(1)
    end, count = time.monotonic() + given.seconds, 0
    while time.monotonic() < end:
        calls = range(_IN_FLIGHT)
        if given.call == "gather":
            works = [group.allgather_coalesced([[whole]], [part]) for _ in calls]
        else:
            works = [group.allreduce([part]) for _ in calls]
        for work in works:
            work.wait()
        count += _IN_FLIGHT
        print(f"\r{count:,}", end="", flush=True)
    print(f" calls of {given.call} with {given.threads} threads, and the process is well")


if __name__ == "__main__":
    main()
