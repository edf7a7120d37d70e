"""The one place that prints to the terminal, so that all output passes the same two filters.

A host name, a file, a record or a library's error may contain a secret, or control characters that move the cursor and
forge lines. `clean` removes both; logs, events and fault records use it as well.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from unisono.runtime import secrets
from unisono.runtime.text import escape_controls, fold


def clean(text: object) -> str:
    """Make a message safe to show and store: mask secrets, escape control characters except tabs and newlines."""
    return escape_controls(secrets.mask(str(text)))


def say(text: object = "", *, error: bool = False, end: str = "\n") -> None:
    """Print and flush a message, then `end`: to stderr if `error` (errors and warnings, folded on a terminal)."""
    stream = sys.stderr if error else sys.stdout
    message = clean(text)
    if error and stream.isatty():
        message = fold(message, _width(stream) - 1)  # some terminals wrap a line that fills them
    try:
        print(message, file=stream, flush=True, end=end)
    except BrokenPipeError:
        discard_output(stream)


def _width(stream: TextIO) -> int:
    """Of a terminal, in characters; that of none is 80."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def discard_output(stream: TextIO) -> None:
    """Discard what is written from now on, since the reader is gone: `unisono train … | head` must not end the run."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
