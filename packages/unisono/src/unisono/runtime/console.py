"""The one place that prints to the terminal, so that all output passes the same two filters.

A host name, a file, a record or a library's error may contain a secret, or control characters that move the cursor and
forge lines. `clean` removes both; logs, events and fault records use it as well.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from unisono.runtime import secrets
from unisono.runtime.text import escape_controls


def clean(text: object) -> str:
    """Make a message safe to show and store: mask secrets, escape control characters except tabs and newlines."""
    return escape_controls(secrets.mask(str(text)))


def say(text: object = "", *, error: bool = False, end: str = "\n") -> None:
    """Print and flush a message: to stderr if `error` (errors and warnings), else to stdout; `end` follows it."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(clean(text), file=stream, flush=True, end=end)
    except BrokenPipeError:
        discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Discard what is written from now on, since the reader is gone: `unisono train … | head` must not end the run."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
