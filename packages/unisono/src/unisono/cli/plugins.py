"""Verbs that other distributions add to the command, found by their entry points.

    [project.entry-points."unisono.verbs"]
    faults = "unisono_faults.verb:add_verb"

Such a function is given argparse's collection of verbs, and adds its own; `unisono.data_verbs` does the same for
`unisono data`. Its module imports nothing heavy: every command imports it.
"""

from __future__ import annotations

from typing import Any

from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.console import say


def add_verbs(group: str, verbs: Any) -> None:
    """Add the verbs of all plug-ins of a group; one that cannot be imported is left out, and named."""
    for entry in find_entry_points(group).values():
        try:
            entry.load()(verbs)
        except Exception as error:  # whatever a package raises while it is imported
            say(f"unisono: WARNING: the verbs of '{entry.name}' ({entry.value}) cannot be used: {error}", error=True)
