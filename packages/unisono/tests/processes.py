"""A test on several processes is an ordinary function: `run(function, world_size, *arguments)`.

Each process joins a gloo group on this host and calls `function(place, group, *arguments)`; what they return
(picklable) comes back as a list in rank order. A process that raises fails the test with its traceback, and one that
does not end in time with the stacks of all ranks. The processes are forks (see `packages.unisono.tests.fork_server`) of

    python -m packages.unisono.tests.processes MODULE:FUNCTION RANK WORLD_SIZE FOLDER
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess

ROOT = Path(__file__).parents[3]
_OTHERS = 1.0  # seconds that the other ranks have, after one has failed, to say how they fail


def run(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300.0) -> list[Any]:
    """Call a module-level function on `world_size` new processes."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec is not None and function.__module__ == "__main__" else function.__module__  # `python -m`
    named = f"{module}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, socket.socket() as kept:
        folder = Path(name)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # nobody else gets the port while it is bound
        kept.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{kept.getsockname()[1]}", "GLOO_SOCKET_IFNAME": "lo"}
        (folder / "call").write_bytes(pickle.dumps((sys.path, pickle.dumps(arguments))))
        ranks = [_start(named, rank, world_size, folder, meeting) for rank in range(world_size)]
        try:
            ended = _wait(ranks, timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        results = [_result(folder / f"{rank}.result") for rank in range(world_size)]
        outputs = [(folder / f"{rank}.output").read_text(errors="replace") for rank in range(world_size)]
    if all(result is not None and result[1] is None for result in results):
        print("".join(outputs), end="")
        return [result[0] for result in results if result is not None]
    faults = [
        result[1] if result else f"ended with code {rank.returncode}" if rank in ended else f"ran for {timeout:g} s"
        for rank, result in zip(ranks, results, strict=True)
    ]
    raise AssertionError(
        "\n".join(f"rank {rank}: {fault}\n{outputs[rank]}" for rank, fault in enumerate(faults) if fault is not None)
    )


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the same function in this process, as the only one."""
    return function(ProcessInfo(), SingleProcess(), *arguments)


def ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """What every rank returns; the only one of a single process is this one."""
    return [alone(function, *arguments)] if world_size == 1 else run(function, world_size, *arguments)


def _start(named: str, rank: int, world_size: int, folder: Path, meeting: dict[str, str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "packages.unisono.tests.processes", named, f"{rank}", f"{world_size}", f"{folder}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (folder / f"{rank}.output").open("wb") as output:
        return subprocess.Popen(
            words, env={**os.environ, **meeting, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output,
        )  # fmt: skip


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> set[subprocess.Popen[bytes]]:
    """Those that end by themselves; after the first fault, the others have a second. Stacks of those that hang."""
    deadline = time.monotonic() + timeout
    while not all(ended := [rank.poll() is not None for rank in ranks]) and time.monotonic() < deadline:
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + _OTHERS)
        time.sleep(0.005)
    late = [rank for rank, has in zip(ranks, ended, strict=True) if not has]
    for rank in late:
        rank.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads
    for rank in late:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(5)
    return set(ranks) - set(late)


def _result(path: Path) -> tuple[Any, str | None] | None:
    """What a rank returned and how it failed; None where it did not come that far."""
    return pickle.loads(path.read_bytes()) if path.exists() else None


def main(named: str, rank: int, world_size: int, folder: Path) -> NoReturn:
    """Entry of a process."""
    import torch

    from unisono.engines.torch.parallel import process_group
    from unisono.launch.processes.rank_process import die_with_parent

    die_with_parent()
    faulthandler.enable()
    torch.set_num_threads(1)
    place = ProcessInfo(rank, world_size, rank, world_size, "test")
    module, _, name = named.partition(":")
    try:
        sys.path[:], given = pickle.loads((folder / "call").read_bytes())
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        arguments = pickle.loads(given)
        group = process_group.start(place, torch.device("cpu"), timeout=60, start_timeout=60)
        result, code = pickle.dumps((function(place, group, *arguments), None)), 0
    except BaseException:
        result, code = pickle.dumps((None, traceback.format_exc())), 1
    (folder / f"{rank}.part").write_bytes(result)
    (folder / f"{rank}.part").replace(folder / f"{rank}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
