"""A test on several processes is an ordinary function: `run(function, world_size, *arguments)`.

Each process joins a gloo group on this host and calls `function(place, group, *arguments)`; what they return
(picklable) comes back as a list in rank order. A process that raises fails the test with its traceback.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from unisono.engines.torch.parallel import process_group
from unisono.runtime.communicator import Alone, Place


def run(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300.0) -> list[Any]:
    """Call a module-level function on `world_size` new processes."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_enter, args=(function, rank, world_size, port, results, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    returned: dict[int, Any] = {}
    faults: list[str] = []
    try:
        for _ in range(world_size):
            rank, value, fault = results.get(timeout=timeout)
            returned[rank] = value
            if fault:
                faults.append(f"rank {rank}:\n{fault}")
                break
    finally:
        for process in processes:
            process.join(timeout=20 if not faults else 1)
            if process.is_alive():
                process.kill()
    if faults:
        raise AssertionError("\n".join(faults))
    return [returned[rank] for rank in range(world_size)]


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the same function in this process, as the only one."""
    return function(Place(), Alone(), *arguments)


def _enter(function: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    place = Place(rank, world_size, rank, world_size, "test")
    try:
        group = process_group.start(place, torch.device("cpu"), timeout=60, start_timeout=60)
        value, fault = function(place, group, *arguments), None
    except BaseException:
        value, fault = None, traceback.format_exc()
    results.put((rank, value, fault))
    results.close()
    results.join_thread()
    os._exit(0 if fault is None else 1)
