"""Optional packages: imported where they are needed, or named with the command that installs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unisono.runtime.errors import ConfigError


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra of `unisono` installs, for what needs it, e.g. a setting.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs the package '{error.name}': pip install 'unisono[{extra}]'") from error
