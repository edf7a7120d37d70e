"""Whose code a file is: the user's, this package's, a library's or Python's own."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path

_OURS = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple(
    {
        folder + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        for folder in (sysconfig.get_path(name), os.path.realpath(sysconfig.get_path(name)))
    }
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")  # of any environment


def is_library_file(file: str) -> bool:
    """Whether a file is Python's own or that of an installed package, whichever environment it is in."""
    return file.startswith(_INSTALLED) or any(folder in file for folder in _PACKAGES)


def is_user_file(file: str) -> bool:
    """Whether a file is user code, not Python's, a library's or ours; installed recipes count as user code."""
    if file.startswith((_OURS, "<")):
        return False
    return not is_library_file(file) or any(f"{os.sep}{name}{os.sep}" in file for name in _recipe_packages())


@cache
def _recipe_packages() -> frozenset[str]:
    from importlib.metadata import entry_points

    return frozenset(entry.module.partition(".")[0] for entry in entry_points(group="unisono.recipes"))


def shorten_library_path(file: str) -> str:
    """Shorten a library's file to its import path: the installation directory is noise."""
    installed = file.rpartition(_PACKAGES[0])[2]
    found = next((folder for folder in _INSTALLED if installed.startswith(folder)), "")
    return installed.removeprefix(found)
