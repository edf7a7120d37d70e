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


def say(text: object = "", *, error: bool = False, end: str = "\n", verbatim: bool = False) -> None:
    """Print and flush a message, then `end`. On a terminal, lines are folded between words.

    Args:
        text: For people, or for programs.
        error: To stderr: errors, warnings, and what is being prepared.
        end: What follows it.
        verbatim: Whether it stays as it is: what is copied or parsed, or written by others.
    """
    stream = sys.stderr if error else sys.stdout
    message = clean(text)
    if not verbatim and (width := terminal_width(stream)) is not None:
        message = fold(message, width)
    try:
        print(message, file=stream, flush=True, end=end)
    except BrokenPipeError:
        discard_output(stream)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The characters that fit into a line of stdout, or of another stream; None if that is not a terminal."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return None
    with suppress(OSError, ValueError):
        return (os.get_terminal_size(stream.fileno()).columns or 80) - 1  # some terminals wrap a line that fills them
    return 79


def discard_output(stream: TextIO) -> None:
    """Discard what is written from now on, since the reader is gone: `unisono train … | head` must not end the run."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
