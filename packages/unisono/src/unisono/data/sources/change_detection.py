"""Detects changed files, by comparing those trained on with those present now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]  # a file's name, and any of its rows, digest, size and stamp


def find_change(before: Sequence[Entry], now: Sequence[Entry]) -> str | None:
    """Describe the first difference between two lists of files; None if there is none.

    >>> find_change([{"name": "a.npy", "rows": 3}], [{"name": "a.npy", "rows": 2}])
    'a.npy has changed: it had 3 rows and has 2'
    """
    pairs = list(zip(before, now, strict=False))
    for part in ("name", "rows", "digest", "size", "stamp"):  # time comes last, since copies have their own
        for old, new in pairs:
            if old.get(part) != new.get(part):
                return _describe_change(
                    part, old, new, [file["name"] for file in before], [file["name"] for file in now]
                )
    if len(before) != len(now):
        longer, what = (now, "was not there") if len(now) > len(before) else (before, "is gone")
        return f"{longer[len(pairs)]['name']} {what}"
    return None


def _describe_change(part: str, old: Entry, new: Entry, before: Sequence[str], now: Sequence[str]) -> str:
    if part == "name":
        if old["name"] not in now:
            return f"{old['name']} is gone"
        if new["name"] not in before:
            return f"{new['name']} was not there"
        return f"{new['name']} is now where {old['name']} was"
    if part in ("rows", "size"):
        unit = {"rows": "rows", "size": "bytes"}[part]
        return f"{new['name']} has changed: it had {old[part]} {unit} and has {new[part]}"
    if part == "digest":
        return f"{new['name']} has changed: its content differs"
    return f"{new['name']} was written again"
