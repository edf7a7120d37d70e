"""A log file for every rank, and the console for rank 0 alone; secrets in what is logged are masked."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from unisono.config import secrets
from unisono.runtime.communicator import Place

_undo = ExitStack()


def start(run: Path, place: Place) -> None:
    """Send the `unisono` logger of this process to its file; warnings of rank 0 go to the console too."""
    stop()
    logger = logging.getLogger("unisono")
    _undo.callback(logger.setLevel, logger.level)
    _undo.callback(setattr, logger, "propagate", logger.propagate)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    file = logging.FileHandler(_file(run, place), encoding="utf-8")
    file.setFormatter(_Masked(f"%(asctime)s rank {place.rank} %(levelname)s %(name)s: %(message)s"))
    _add(logger, file)
    if place.is_first:
        console = logging.StreamHandler()
        console.setLevel(logging.WARNING)
        console.setFormatter(_Masked("%(levelname)s: %(message)s"))
        _add(logger, console)


def stop() -> None:
    """Flush and close what `start` opened, and leave the logger as it was before."""
    _undo.close()


def fault(run: Path, place: Place, text: str) -> None:
    """Write what ended this process into its file, if that can be, whether `start` was called or is over."""
    with suppress(OSError), _file(run, place).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {place.rank} ERROR: {secrets.mask(text.rstrip())}\n")


class _Masked(logging.Formatter):
    """Lines without secrets: a library's error may hold the URL it failed to open, with its password."""

    def format(self, record: logging.LogRecord) -> str:
        return secrets.mask(super().format(record))


def _file(run: Path, place: Place) -> Path:
    folder = run / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank-{place.rank:05d}.log"


def _add(logger: logging.Logger, handler: logging.Handler) -> None:
    logger.addHandler(handler)
    _undo.callback(handler.close)
    _undo.callback(logger.removeHandler, handler)
