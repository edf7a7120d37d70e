"""Reads rows from files of several formats, local or remote, as one indexable sequence."""

from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.discovery import Found, find
from unisono.data.sources.files import Files, open_source, records
from unisono.data.sources.storage import File, create_cache_folder

__all__ = ["ColumnRequest", "File", "Files", "Found", "create_cache_folder", "find", "open_source", "records"]
