"""A process of a proof that takes too long is ended, and all processes leave the line where they were."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unisono.launch.processes.children import ChildProcesses
from unisono.supervise import processes
from unisono.supervise.hangs import stacks

_STACK = ".stack"  # how the file ends in which a process leaves where it was
_SAMPLES = 20  # of the states of processes, one a second
_RUNNING = 0.5  # of them, in which a process that computes is running or may run; one that waits sleeps


class HangWatch:
    """Ends this process if something takes too long; the others, which are ended for that, leave their lines too.

    Args:
        folder: of the processes, in which `logs` is.
        rank: of this one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / "logs" / f"rank-{rank:05d}{_STACK}").open("w")
        faulthandler.register(signal.SIGTERM, self._file, all_threads=False, chain=True)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """End the process if what runs inside takes longer, even where an extension holds the interpreter."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


class StateSamples:
    """What the kernel says of processes once a second: a starved one may run, and one that waits sleeps.

    Args:
        started: receives the processes once they exist.
    """

    def __init__(self, started: Sequence[ChildProcesses]) -> None:
        self._started, self._ended = started, threading.Event()
        self._seen: deque[list[str]] = deque(maxlen=_SAMPLES)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """While what is inside goes on."""
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(1.0):
            for one in self._started:
                now = [processes.find_process(pid) for pid in one.pids]
                if all(now):
                    self._seen.append([process.state if process else "" for process in now])

    def find_running(self) -> list[int]:
        """The ranks that were running, or might have, most of the time before a process ended."""
        by_rank = zip(*self._seen, strict=True)
        return [rank for rank, states in enumerate(by_rank) if states.count("R") >= _RUNNING * len(states)]


def find_computing(folder: Path, running: Collection[int]) -> list[int]:
    """Of the ranks that were running, those that were not where a process waits for others."""
    found = {rank: stacks.parse_stack(_read_stack(folder, rank)) for rank in running}
    return [rank for rank, one in found.items() if one.frames and not (one.is_waiting or _is_polling(one))]


def _is_polling(stack: stacks.Stack) -> bool:
    """Whether it looks again and again how far the other processes have come."""
    return any(frame.file.endswith("rank_progress.py") for frame in stack.frames)


def _read_stack(folder: Path, rank: int) -> str:
    file = folder / "logs" / f"rank-{rank:05d}{_STACK}"
    return file.read_text("utf-8", "replace") if file.is_file() else ""


def read_stacks(folder: Path, world_size: int) -> dict[int, str]:
    """By rank, the line where it was, if a process took too long; empty if not."""
    texts = {rank: _read_stack(folder, rank) for rank in range(world_size)}
    if not any(text.startswith("Timeout") for text in texts.values()):
        return {}
    return {rank: str(stacks.parse_stack(text).relevant_frame or "an unknown line") for rank, text in texts.items()}
