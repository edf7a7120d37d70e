"""Python files of the user's own that list or propose settings; an error in them is reported by its lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.config import fingerprint
from unisono.config.code import references
from unisono.runtime.errors import ConfigError


def load_function(word: str, path: Path, name: str, promise: str) -> Callable[..., Any]:
    """A function of a file, which raises no errors but ours.

    Args:
        word: that names the file.
        path: of the file.
        name: of the function.
        promise: how it is called and what it returns, e.g. `configs() -> list[dict]`.

    Raises:
        ConfigError: if there is none.
    """
    if not path.is_file():
        raise ConfigError(f"{word}={path}: no such file")
    function = getattr(references.load_module(f"{word}={path}", str(path)), name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {promise}")

    def call(*arguments: Any) -> Any:
        with references.explain_errors(f"{path}: {name}() failed"):
            return function(*arguments)

    return call


def flatten_settings(path: Path, given: dict[Any, Any]) -> dict[str, Any]:
    """Settings by dotted key.

    Raises:
        ConfigError: for keys that are no texts, the place of a run, or a dictionary within itself.
    """
    try:
        values = fingerprint.flatten(given)
    except RecursionError:
        raise ConfigError(f"{path}: a dictionary of settings holds itself") from None
    if wrong := [key for key in values if not isinstance(key, str)]:
        raise ConfigError(f"{path}: the key {wrong[0]!r} of a setting is not a text, as 'optim.lr' is")
    if place := next((key for key in ("run.name", "run.dir") if key in values), None):
        raise ConfigError(f"{path}: {place} is not its to set: each run has its own folder in that of all")
    return values
