"""Nested dicts, lists and tuples of arrays: batches, and what a task returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(arrays: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested batch, with its dotted path as name."""
    if isinstance(arrays, Mapping):
        for key, value in arrays.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(arrays, list | tuple):
        for number, value in enumerate(arrays):
            yield from leaves(value, f"{name}.{number}")
    else:
        yield name, arrays


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with a function applied to every leaf."""
    if isinstance(value, Mapping):
        return {name: map_leaves(function, inner) for name, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, inner) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(function, inner) for inner in value)
    return function(value)
