"""Where the functions of a task begin in the user's code, and its errors as sentences."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    places = {name: find_place(getattr(task, name, None)) for name in _FUNCTIONS}
    return {name: place for name, place in places.items() if place}


def find_place(function: Any) -> str:
    """Where a function begins that the user has written, as `task.py:12`; empty for any other."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or not is_user_file(code.co_filename):
        return ""
    file = Path(code.co_filename)
    inside = file.is_relative_to(Path.cwd())
    return f"{file.relative_to(Path.cwd()) if inside else file.name}:{code.co_firstlineno}"


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
