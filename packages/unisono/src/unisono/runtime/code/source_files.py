"""Whose code a file is: the user's, this package's, a library's or Python's own."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from unisono.runtime.code.entry_points import find_entry_points

PLUGIN_GROUPS = ("unisono.verbs", "unisono.data_verbs", "unisono.fault_injection")  # of packages that are no recipes
_OURS = str(Path(__file__).parents[2]) + os.sep
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


def is_our_file(file: str) -> bool:
    """Whether a file is one of this package or of a plug-in of its verbs."""
    return file.startswith((_OURS, *_package_folders(*PLUGIN_GROUPS)))


def is_user_file(file: str) -> bool:
    """Whether a file is user code, not Python's, a library's or ours; installed recipes count as user code."""
    if file.startswith("<") or is_our_file(file):
        return False
    recipes = installed_packages("unisono.recipes")
    return not is_library_file(file) or any(
        f"{folder}{name}{os.sep}" in file for folder in _PACKAGES for name in recipes
    )


@cache
def installed_packages(*groups: str) -> frozenset[str]:
    """Names of the packages that the entry points of these groups lie in."""
    found = (entry for group in groups for entry in find_entry_points(group).values())
    return frozenset(entry.module.partition(".")[0] for entry in found)


@cache
def _package_folders(*groups: str) -> tuple[str, ...]:
    specs = (find_spec(name) for name in sorted(installed_packages(*groups)))
    return tuple(folder + os.sep for spec in specs if spec for folder in spec.submodule_search_locations or ())


def shorten_library_path(file: str) -> str:
    """Shorten a library's file to its import path: the installation directory is noise."""
    installed = file.rpartition(_PACKAGES[0])[2]
    found = next((folder for folder in _INSTALLED if installed.startswith(folder)), "")
    return installed.removeprefix(found)
