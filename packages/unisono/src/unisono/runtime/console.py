"""The one place that prints to the terminal, so that all output passes the same two filters.

A host name, a file, a record or a library's error may contain a secret, or control characters that move the cursor and
forge lines. `clean` removes both; logs, events and fault records use it as well.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from contextlib import suppress
from typing import IO, Any, TextIO

from unisono.runtime import secrets
from unisono.runtime.text import escape_controls, fold

lost: str | None = None  # why the first message that could not be written was not


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
    except OSError as error:
        lose(stream, error)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The characters that fit into a line of stdout, or of another stream; None if that is not a terminal."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return None
    with suppress(OSError, ValueError):
        return (os.get_terminal_size(stream.fileno()).columns or 80) - 1  # some terminals wrap a line that fills them
    return 79


def lose(stream: IO[str], error: OSError) -> None:
    """React to output that could not be written: go on without, if its reader or its terminal is gone for good."""
    if error.errno in (errno.EPIPE, errno.EIO):
        discard_output(stream)
    else:
        note_lost(error)


def note_lost(error: OSError) -> None:
    """Note that a message could not be written, as into a file on a full disk: no run ends for that."""
    global lost
    if lost is None:
        lost = error.strerror or str(error)  # not the error, whose traceback keeps all that its frames hold
        with suppress(OSError):  # it may lead to the same file
            sys.stderr.write(f"unisono: WARNING: what this command prints is lost: {lost}\n")
            sys.stderr.flush()


def is_lost() -> bool:
    """Whether a message could not be written."""
    return lost is not None


def open_missing_streams() -> None:
    """Give a process that was started without standard streams (`>&-`) ones that lead nowhere.

    Otherwise the next file that is opened, a checkpoint or a record, would be what a library's C code prints into.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number, inheritable=True)
                os.close(descriptor)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def clean_warnings() -> None:
    """Let what libraries warn of pass the filters too: it may quote a name from somebody else's data."""
    plain = warnings.formatwarning

    def format_cleanly(*arguments: Any, **named: Any) -> str:
        return clean(plain(*arguments, **named))

    warnings.formatwarning = format_cleanly


def discard_output(stream: IO[str]) -> None:
    """Discard what is written from now on, since the reader is gone: `unisono train … | head` must not end the run."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
