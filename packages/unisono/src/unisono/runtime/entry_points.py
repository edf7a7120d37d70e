"""Finds what other distributions plug in, by the entry points that they declare in their `pyproject.toml`.

[project.entry-points."unisono.trackers"]
mlflow = "unisono_mlflow.tracker"
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def find_entry_points(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, in the order of their names; none of them is imported."""
    from importlib.metadata import entry_points  # takes a tenth of a second, which not every process has to spend

    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}
