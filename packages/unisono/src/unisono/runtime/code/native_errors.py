"""Turns whatever a library's reader throws at somebody else's file into one sentence.

Readers in C++ and Rust throw what they like: bare `Exception`, errors of their own without a common base, and, of a
Rust panic, a `BaseException` that passes every `except Exception`. All of them mean that the file cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.runtime.errors import DataError, UnisonoError
from unisono.runtime.text import one_line

_MAX_TEXT = 500  # characters of a library's message


@contextmanager
def wrap_native_errors(what: str, kind: type[UnisonoError] = DataError, advice: str = "") -> Iterator[None]:
    """Convert every error of a library's reader; errors of ours pass as they are.

    Args:
        what: What cannot be done, e.g. `tokenizer.json cannot be read as a tokenizer`.
        kind: Of the error that is raised instead.
        advice: What to do, if it is known.

    Raises:
        UnisonoError: Of that kind.

    >>> with wrap_native_errors("a.bin cannot be read"):
    ...     raise Exception("unexpected byte")
    Traceback (most recent call last):
    unisono.runtime.errors.DataError: a.bin cannot be read: unexpected byte
    """
    try:
        yield
    except (UnisonoError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        said = str(error).partition("\nException raised from")[0]  # behind it, torch lists its own calls
        said = one_line(said or type(error).__name__, _MAX_TEXT)
        raise kind(f"{what}: {said}{f'; {advice}' if advice else ''}") from error
