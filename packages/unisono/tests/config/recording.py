"""Records which settings a process reads: imported by the task of a run, whose processes then write down each key once.

A key counts as read if code outside of the schema itself takes it from a group of settings. What is written down is
the class of the group, and the one that declares the field, with its name, since a group does not know where it lies.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from unisono.config.schema import Settings

VARIABLE = "UNISONO_TEST_READS"  # names the file
_UNCOUNTED = ("unisono.config.schema", "pydantic", "packages.unisono.tests.config.recording", "recording")
_seen: set[tuple[type, str]] = set()


def start() -> None:
    """Begin to record in this process."""
    path = os.environ.get(VARIABLE)
    plain = object.__getattribute__
    if path is None or Settings.__getattribute__ is not plain:
        return

    def read(self: Any, name: str) -> Any:
        if name[0] != "_" and (type(self), name) not in _seen and name in type(self).__pydantic_fields__:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if not reader.startswith(_UNCOUNTED):
                _seen.add((type(self), name))
                with Path(path).open("a", encoding="utf-8") as file:
                    for kind in {_home(type(self), name), type(self).__name__}:
                        file.write(f"{kind}.{name}\n")
        return plain(self, name)

    Settings.__getattribute__ = read  # type: ignore[method-assign]


def _home(kind: type, name: str) -> str:
    """The class that declares a field, so that a recipe's group counts for the core's."""
    return next(base.__name__ for base in reversed(kind.__mro__) if name in getattr(base, "__annotations__", {}))


start()
