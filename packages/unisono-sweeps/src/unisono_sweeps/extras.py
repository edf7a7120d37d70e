"""Libraries that only some verbs need, imported where they are."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unisono.runtime.errors import ConfigError


def import_plots(module: str, what: str) -> Any:
    """A module of the extra `plots`.

    Raises:
        ConfigError: if it is not installed.
    """
    return _import(module, "plots", what)


def import_optuna() -> Any:
    """Optuna.

    Raises:
        ConfigError: if it is not installed.
    """
    return _import("optuna", "search", "unisono search")


def import_submitit() -> Any:
    """Submitit.

    Raises:
        ConfigError: if it is not installed.
    """
    return _import("submitit", "slurm", "launcher=slurm")


def import_ray() -> Any:
    """Ray.

    Raises:
        ConfigError: if it is not installed.
    """
    ray = _import("ray", "ray", "launcher=ray")
    _import("ray.util.scheduling_strategies", "ray", "launcher=ray")
    return ray


def _import(module: str, extra: str, what: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs the package '{error.name}': pip install 'unisono-sweeps[{extra}]'") from error
