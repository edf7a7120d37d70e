"""Reads rows from files of several formats, local or remote, as one indexable sequence.

Names are resolved on first use, since the readers import pyarrow, which a task with rows of its own does not need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.data.sources.column_schema import ColumnRequest
    from unisono.data.sources.discovery import Found, find
    from unisono.data.sources.files import Files, open_source, records
    from unisono.data.sources.storage import File, create_cache_folder

_HOME = {
    "ColumnRequest": "column_schema", "File": "storage", "Files": "files", "Found": "discovery",
    "create_cache_folder": "storage", "find": "discovery", "open_source": "files", "records": "files",
}  # fmt: skip

__all__ = ["ColumnRequest", "File", "Files", "Found", "create_cache_folder", "find", "open_source", "records"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.data.sources' has no attribute {name!r}")
    return getattr(import_module(f"unisono.data.sources.{_HOME[name]}"), name)
