"""Ranks that start without the seconds of imports: forks of one process that has already imported everything.

Otherwise, nearly all the time between two random kills would go into imports. A fork does what a rank under another
launcher does (see `unisono.launch.cluster`): it joins the others, reads the checkpoint, trains, and saves. It has no
launcher and no monitor; kills during the imports, and of one rank alone, use the real command.

    python -m unisono.faults.rank_server

reads a line of JSON for each job on its standard input, and answers with the process numbers of the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from unisono.supervise import processes


class RankProcesses:
    """The processes of a job, with the interface of `subprocess.Popen`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pid = pids[0]
        self.processes = [process for pid in pids if (process := processes.find_process(pid))]

    def poll(self) -> int | None:
        """None while one of them runs; their exit codes are not collected."""
        return None if any(processes.refresh(one) for one in self.processes) else 0

    def wait(self, timeout: float) -> int:
        """Wait until all have ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("ranks", timeout)
            time.sleep(0.005)
        return 0


class RankServer:
    """The process from which ranks are forked. Use as a context: all its forks end with it."""

    def __enter__(self) -> RankServer:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unisono.faults.rank_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(
        self, folder: Path, task: str, words: Sequence[str], variables: Mapping[str, str], output: Path
    ) -> RankProcesses:
        """Fork the ranks of a job with these settings."""
        order = {
            "folder": f"{folder}",
            "task": task,
            "words": [*words],
            "variables": {**variables},
            "output": f"{output}",
        }
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return RankProcesses(json.loads(self._process.stdout.readline()))


def _fork(act: Callable[[], int]) -> int:
    """Fork a process that runs `act` and exits; return its process number."""
    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        code = act()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(order: Mapping[str, Any], number: int, port: int) -> int:
    from unisono.launch import train
    from unisono.launch.processes.rank_process import die_with_parent

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"], RANK=f"{number}", LOCAL_RANK=f"{number}", MASTER_PORT=f"{port}")
    silent = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, target in ((silent, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    train.train(order["task"], order["words"])
    return 0


def main() -> NoReturn:
    """Entry point of the process."""
    import torch

    import unisono.engines.torch.engine
    import unisono.launch.train
    import unisono.training.loop  # noqa: F401
    from unisono.faults.job import free_port

    assert torch.get_num_threads() == 1, "threads do not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects them
    for line in sys.stdin:
        order, port = json.loads(line), free_port()
        ranks = range(int(order["variables"]["WORLD_SIZE"]))
        answer = [_fork(partial(_run_rank, order, rank, port)) for rank in ranks]
        print(json.dumps(answer), flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    main()
