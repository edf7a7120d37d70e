"""Detects changed files: those that were trained on, compared with those that are there now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]  # of a file: its name, and whatever else of it must stay: rows, digest, size, stamp


def find_change(before: Sequence[Entry], now: Sequence[Entry]) -> str | None:
    """What happened to the first file that is not what it was; None where all are.

    >>> find_change([{"name": "a.npy", "rows": 3}], [{"name": "a.npy", "rows": 2}])
    'a.npy has changed: it had 3 rows and has 2'
    """
    pairs = list(zip(before, now, strict=False))
    for part in ("name", "rows", "digest", "size", "stamp"):  # a time says least: copies have times of their own
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
        return f"{new['name']} stands where {old['name']} stood"
    if part in ("rows", "size"):
        unit = {"rows": "rows", "size": "bytes"}[part]
        return f"{new['name']} has changed: it had {old[part]} {unit} and has {new[part]}"
    if part == "digest":
        return f"{new['name']} has changed: it has other content"
    return f"{new['name']} was written again"
