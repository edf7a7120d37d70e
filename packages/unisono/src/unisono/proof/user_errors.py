"""Where the functions of a task begin in the user's code, and its errors as sentences."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from unisono.proof.invariants import COLLATED, DOCUMENTS, NEIGHBOURS, PADDING
from unisono.runtime.code.source_files import is_user_file
from unisono.runtime.code.user_code import format_user_error
from unisono.runtime.errors import RunError

# The functions that make a quantity, as far as they alone do: gradients and what follows come from all of them.
_MADE_BY = {
    "initial parameters": ("build",),
    "sample ids": ("data",),
    "samples": ("sample", "collate"),
    "outputs": ("outputs",),
    "loss": ("loss", "counts", "totals"),
    "metrics": ("loss",),
    NEIGHBOURS: ("outputs",),
    DOCUMENTS: ("outputs",),
    PADDING: ("outputs", "loss"),
    COLLATED: ("collate",),
}


_FUNCTIONS = ("data", "sample", "collate", "build", "counts", "outputs", "totals", "loss", "optimizer")


def find_functions(task: type) -> dict[str, str]:
    """Where the functions of a task begin that the user has written, as `task.py:12`, by their names."""
    found: dict[str, str] = {}
    for name in _FUNCTIONS:
        code = getattr(inspect.unwrap(getattr(task, name, lambda: None)), "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            file = Path(code.co_filename)
            inside = file.is_relative_to(Path.cwd())
            found[name] = f"{file.relative_to(Path.cwd()) if inside else file.name}:{code.co_firstlineno}"
    return found


def describe_makers(quantity: str, places: Mapping[str, str]) -> str:
    """The functions that make a quantity, with their lines; empty where none does alone, or is the user's.

    >>> describe_makers("loss", {"loss": "task.py:12", "outputs": "task.py:9"})
    'loss() at task.py:12'
    """
    return ", ".join(f"{name}() at {places[name]}" for name in _MADE_BY.get(quantity, ()) if name in places)


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
