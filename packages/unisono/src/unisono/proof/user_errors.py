"""Errors of the user's code as a user wants to read them: what happened, and the lines of that code alone."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.runtime.errors import RunError, UnisonoError
from unisono.runtime.source_files import is_user_file


def format_user_error(error: BaseException) -> str:
    """Its name, its text and the frames of the user's code; empty where none of it was in that code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    if not frames or isinstance(error, UnisonoError):
        return ""
    lines = [*traceback.format_exception_only(error), *traceback.format_list(frames)]
    return "".join(lines).rstrip()


@contextmanager
def raise_as_sentences() -> Iterator[None]:
    """Raise an error of the user's code without the frames of ours.

    Raises:
        RunError: with the user's frames alone.
    """
    try:
        yield
    except Exception as error:
        text = format_user_error(error)
        if text:
            raise RunError(text) from error
        raise
