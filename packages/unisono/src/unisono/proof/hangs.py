"""A process of a proof that takes too long is ended, and all processes leave the line where they were."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.supervise.hangs import stacks

_STACK = ".stack"  # how the file ends in which a process leaves where it was


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


def read_stacks(folder: Path, world_size: int) -> dict[int, str]:
    """By rank, the line where it was, if a process took too long; empty if not."""
    files = {rank: folder / "logs" / f"rank-{rank:05d}{_STACK}" for rank in range(world_size)}
    texts = {rank: file.read_text("utf-8", "replace") for rank, file in files.items() if file.is_file()}
    if not any(text.startswith("Timeout") for text in texts.values()):
        return {}
    return {rank: str(stacks.parse_stack(text).relevant_frame or "an unknown line") for rank, text in texts.items()}
