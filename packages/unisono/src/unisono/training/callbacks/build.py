"""The user's callbacks of a run: from the configuration, from the task, and from Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from unisono.callback import Callback
from unisono.config.code import references
from unisono.config.schema.run import RunConfig
from unisono.protocols import Illustrated
from unisono.runtime.errors import ConfigError, nearest
from unisono.task import Task
from unisono.training.callbacks.early_stopping import Patience
from unisono.training.callbacks.plateau import FallOnPlateau
from unisono.training.callbacks.task_samples import TaskSamples

BUILT_IN = {"early_stopping": "unisono.training.callbacks.early_stopping:EarlyStopping"}


def build_callbacks(config: RunConfig, task: Task) -> list[Callback]:
    """The callbacks that the configuration names, those of the task, and those of `eval.patience` and of a plateau.

    Raises:
        ConfigError: naming the entry and its fault.
    """
    own = list(task.callbacks())
    for one in own:
        if not isinstance(one, Callback):
            raise ConfigError(f"{type(task).__name__}.callbacks() returned {one!r}, which is not a unisono.Callback")
    return [
        *(_build_callback(number, entry) for number, entry in enumerate(config.callbacks)),
        *own,
        *([TaskSamples(task)] if isinstance(task, Illustrated) else []),
        *Patience.from_config(config),
        *FallOnPlateau.from_config(config),
    ]


def find_callback(reference: str) -> type[Callback]:
    """The class that a configuration names: one of ours, `path/to/file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: if the file or the class is missing, or it is not a callback.
    """
    resolved = BUILT_IN.get(reference, reference)
    if ":" not in resolved:
        raise ConfigError(f"unknown callback '{reference}', {nearest(reference, BUILT_IN)} (or path/to/file.py:Class)")
    return references.load_class(reference, resolved, Callback)


def name_user_callbacks(config: RunConfig, task: Task) -> list[str]:
    """The callbacks of a run that are the user's own, by name; those of the configuration are not built for that.

    Of those that are there it is said whether they save anything: what another one has changed is lost on a resume.
    """
    made = task.callbacks()
    own = [f"{type(one).__name__}{' (no state() is saved)' * (type(one).state is Callback.state)}" for one in made]
    configured = [f"{_read_entry(entry)[0]}" for entry in config.callbacks]
    return [*own, *(name for name in configured if name not in BUILT_IN)]


def _read_entry(entry: str | dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What an entry of the configuration refers to, and its settings."""
    settings = dict(entry) if isinstance(entry, dict) else {"callback": entry}
    return settings.pop("callback", None), settings


def _build_callback(number: int, entry: str | dict[str, Any]) -> Callback:
    where = f"callbacks[{number}]"
    reference, settings = _read_entry(entry)
    if not isinstance(reference, str):
        raise ConfigError(
            f"{where} names no callback: write early_stopping, or {{callback: early_stopping, patience: 3}}"
        )
    kind = find_callback(reference)
    try:
        return kind(TypeAdapter(kind.Config).validate_python(settings, extra="forbid"))
    except ValidationError as error:
        raise ConfigError("\n".join(_format_errors(error, where, reference, kind))) from error


def _format_errors(error: ValidationError, where: str, reference: str, kind: type[Callback]) -> Sequence[str]:
    messages = []
    for mistake in error.errors():
        key = ".".join(map(str, mistake["loc"]))
        if mistake["type"] == "extra_forbidden":
            known = list(getattr(kind.Config, "model_fields", {}))
            messages.append(f"{where}: {reference} has no setting '{key}', {nearest(key, known)}")
        elif mistake["type"] == "missing":
            messages.append(f"{where}: {reference} needs the setting '{key}'")
        else:
            text = mistake["msg"][0].lower() + mistake["msg"][1:]
            messages.append(f"{where}: '{key}' of {reference}: {text}, got {mistake['input']!r}")
    return messages
