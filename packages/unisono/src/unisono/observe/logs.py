"""A log file for every rank, and the console for rank 0 only; everything logged passes `clean`."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.console import clean, terminal_width
from unisono.runtime.text import fold
from unisono.runtime.untrusted import safe_writing

_undo = ExitStack()


def start_logging(run: Path, place: ProcessInfo) -> None:
    """Send this process's `unisono` logger to its file; warnings of rank 0 also go to the console."""
    stop_logging()
    logger = logging.getLogger("unisono")
    _undo.callback(logger.setLevel, logger.level)
    _undo.callback(setattr, logger, "propagate", logger.propagate)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    file = _FileHandler(_open_log(run, place))
    file.setFormatter(_MaskingFormatter(f"%(asctime)s rank {place.rank} %(levelname)s %(name)s: %(message)s"))
    _add_handler(logger, file)
    if place.is_first:
        _add_handler(logger, _console_handler())


def warn_once(place: ProcessInfo) -> None:
    """Show each warning of rank 0 once: for a process of a proof, which computes many cases and has no log file."""
    logger, seen = logging.getLogger("unisono"), set[str]()
    logger.propagate = False
    if not place.is_first:
        logger.addHandler(logging.NullHandler())
        return

    def is_new(record: logging.LogRecord) -> bool:
        before = len(seen)
        seen.add(record.getMessage())
        return len(seen) > before

    console = _console_handler()
    console.addFilter(is_new)
    logger.addHandler(console)


def stop_logging() -> None:
    """Flush and close what `start_logging` opened, and restore the logger."""
    _undo.close()


def log_fault(run: Path, place: ProcessInfo, text: str) -> None:
    """Write the error that ended this process into its log file, if possible, whether or not logging is started."""
    with suppress(OSError), _open_log(run, place) as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {place.rank} ERROR: {clean(text.rstrip())}\n")


def _console_handler() -> _ConsoleHandler:
    console = _ConsoleHandler()
    console.setLevel(logging.WARNING)
    console.setFormatter(_FoldingFormatter("%(levelname)s: %(message)s"))
    return console


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to what stderr is now: while a live display is on the screen, that is a stream that draws around it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass


class _MaskingFormatter(logging.Formatter):
    """Masks secrets and escapes control characters: a library's error may contain a URL with its password."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record)).replace("\n", "\n  ")  # or what it quotes could forge an entry


class _FoldingFormatter(_MaskingFormatter):
    """Lines of a terminal are folded between words too."""

    def format(self, record: logging.LogRecord) -> str:
        text, width = super().format(record), terminal_width(sys.stderr)
        return text if width is None else fold(text, width)


def _open_log(run: Path, place: ProcessInfo) -> TextIO:
    """A process's log; the run's folder is never created, since somebody may have renamed it."""
    return safe_writing.open_to_append(run, f"logs/rank-{place.rank:05d}.log")


class _FileHandler(logging.StreamHandler[TextIO]):
    """Writes into an open file, and closes it at the end."""

    def close(self) -> None:
        super().close()
        with suppress(OSError):  # of what could not be written, which was reported then
            self.stream.close()


def _add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
    logger.addHandler(handler)
    _undo.callback(handler.close)
    _undo.callback(logger.removeHandler, handler)
