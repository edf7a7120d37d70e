"""Nested dicts, lists and tuples of arrays: batches, and what a task returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(arrays: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested batch with a name that says where it stands."""
    if isinstance(arrays, Mapping):
        for key, value in arrays.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(arrays, list | tuple):
        for number, value in enumerate(arrays):
            yield from leaves(value, f"{name}.{number}")
    else:
        yield name, arrays


def each(act: Callable[[Any], Any], value: Any) -> Any:
    """The same nested value with something done to every leaf."""
    if isinstance(value, Mapping):
        return {name: each(act, inner) for name, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each(act, inner) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(each(act, inner) for inner in value)
    return act(value)
