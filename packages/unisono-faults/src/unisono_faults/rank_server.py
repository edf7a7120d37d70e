"""Ranks that start without the seconds of imports: forks of one process that has already imported everything.

Otherwise, nearly all the time between two random kills would go into imports. A fork does what a rank under another
launcher does (see `unisono.launch.cluster`): it joins the others, reads the checkpoint, trains, and saves. It has no
launcher and no monitor; kills during the imports, and of one rank alone, use the real command.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.launch.processes.fork_server import ForkServer
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


class RankServer(ForkServer):
    """The process from which ranks are forked; several threads may use it."""

    def __init__(self) -> None:
        super().__init__([__name__, "unisono.launch.train"], {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        self._lock = threading.Lock()

    def start(
        self, folder: Path, task: str, words: Sequence[str], variables: Mapping[str, str], output: Path
    ) -> RankProcesses:
        """Fork the ranks of a job with these settings."""
        ranks = [{**variables, "RANK": f"{n}", "LOCAL_RANK": f"{n}"} for n in range(int(variables["WORLD_SIZE"]))]
        with self._lock:
            assert self.ready, "the fork server has started a thread, which would not survive a fork"
            return RankProcesses(self.fork(__name__, [f"{folder}", f"{output}", task, *words], ranks))


def main(folder: Path, output: str, task: str, *words: str) -> None:
    """Run one rank."""
    from unisono.launch import train

    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    train.train(task, words)
