"""The way in for faults that are injected on request; it leads nowhere unless `unisono-faults` is installed.

A production process can be told to do nothing to itself: what acts is not installed with the core. `--fault` and the
variable that it sets are passed on to the plug-in that the entry point group `unisono.fault_injection` names, a module
with the functions `arm(text)` and `install(rank)`; see `unisono_faults.injection`.
"""

from __future__ import annotations

import os
from types import ModuleType

from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.errors import ConfigError

VARIABLE = "UNISONO_FAULT"
ATTEMPT = "UNISONO_ATTEMPT"  # number of restarts before this start
_GROUP = "unisono.fault_injection"


def arm(text: str | None) -> None:
    """Make this process and its children inject faults; None disarms, whatever the environment says.

    Raises:
        ConfigError: If the text is not a valid fault, or nothing is installed that injects one.
    """
    os.environ.pop(VARIABLE, None)
    if text is not None:
        plugin = _find_plugin()
        if plugin is None:
            raise ConfigError("--fault needs the package 'unisono-faults': pip install 'unisono[faults]'")
        plugin.arm(text)


def install(rank: int) -> None:
    """Inject the faults that the command requests for this rank, if any."""
    if VARIABLE in os.environ and (plugin := _find_plugin()) is not None:
        plugin.install(rank)


def _find_plugin() -> ModuleType | None:
    found = next(iter(find_entry_points(_GROUP).values()), None)
    loaded: ModuleType | None = None if found is None else found.load()
    return loaded
