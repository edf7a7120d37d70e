"""Finds what other distributions bring: what they plug in by their entry points, and packages of an extra.

[project.entry-points."unisono.trackers"]
mlflow = "unisono_mlflow.tracker"

`importlib.metadata` finds the same, but takes three quarters of the time of `unisono --help` for it: it imports the
email package, and parses all distributions anew for every group. So the files that installers write are read here, once
and only where they name one of our groups (`python -m benchmarks.start_up`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from unisono.runtime.errors import ConfigError

_PREFIX = "unisono."  # of our groups
_SUFFIXES = (".dist-info", ".egg-info")  # folders in which installers write entry_points.txt


class EntryPoint(NamedTuple):
    """What a distribution plugs in.

    Attributes:
        name: Under which it is asked for.
        value: `package.module`, or `package.module:object`.
        group: Of entry points.
    """

    name: str
    value: str
    group: str

    @property
    def module(self) -> str:
        """Where it is defined."""
        return self.value.partition(":")[0].strip()

    def load(self) -> Any:
        """Import it."""
        found: Any = import_module(self.module)
        for attribute in filter(None, self.value.partition(":")[2].strip().split(".")):
            found = getattr(found, attribute)
        return found


@cache
def find_entry_points(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, in the order of their names; none of them is imported."""
    backwards = reversed(_read_all(tuple(sys.path)))  # so that the first on the path wins
    found = {entry.name: entry for entry in backwards if entry.group == group}
    return dict(sorted(found.items()))


def import_extra(module: str, extra: str, what: str, *, of: str = "unisono") -> Any:
    """Import a module that an extra of a distribution installs, for what needs it, e.g. a setting.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(_missing(what, error.name, f"{of}[{extra}]")) from error


def require_extra(module: str, extra: str, what: str) -> None:
    """Refuse what needs a module, as `import_extra` does, without importing it yet.

    Raises:
        ConfigError: If it is not installed.
    """
    if find_spec(module) is None:
        raise ConfigError(_missing(what, module, f"unisono[{extra}]"))


def _missing(what: str, package: str | None, wanted: str) -> str:
    return f"{what} needs the package '{package}': pip install '{wanted}'"


@cache
def _read_all(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """All entry points of our groups, in the order of `sys.path`."""
    texts = [text for folder in dict.fromkeys(path) for text in _read_texts(folder or os.curdir)]
    return tuple(entry for text in texts if _PREFIX in text for entry in _parse(text))


def _read_texts(folder: str) -> Iterator[str]:
    """The entry points of the distributions in a folder of `sys.path`."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIXES))  # noqa: PTH208 - names only
    except OSError:  # not there, or an archive
        return
    for name in names:
        path = Path(folder, name, "entry_points.txt")
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue


def _parse(text: str) -> Iterator[EntryPoint]:
    """Read the format of `entry_points.txt`: sections, and in them `name = value`; extras in brackets do not matter."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[]").strip()
        elif "=" in line and group.startswith(_PREFIX) and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield EntryPoint(name.strip(), value.partition("[")[0].strip(), group)
