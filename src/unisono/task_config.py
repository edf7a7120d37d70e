"""From the name of a task and the words of a user to a typed configuration, and from that to the task.

The types of the groups `task`, `model` and `data` are those of the task, so whoever validates a configuration has to
find its task first; `unisono.config` itself knows no task.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from unisono.config import fingerprint, references, safe_yaml, validate
from unisono.config.compose import Composed, compose
from unisono.config.references import TASKS
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError, nearest
from unisono.task import Task


def load_config(
    recipe: str, overrides: Sequence[str] = (), config_dir: Path | None = None
) -> tuple[RunConfig, Composed]:
    """Compose and validate; see `unisono.config.compose.compose` for the arguments.

    Raises:
        ConfigError: one line per mistake: the key, the value, where it came from, and the nearest valid key.
    """
    composed = compose(recipe, overrides, config_dir)
    return validate_config(composed), composed


def read_config(path: Path, moved: str | None = None) -> RunConfig:
    """The configuration of a run, from its `config.yaml`.

    Args:
        path: of the file.
        moved: how the same task is called now, where its file may have been moved since.

    Raises:
        ConfigError: where the file is missing or is not a configuration.
    """
    values = safe_yaml.read(path)
    if moved is not None and fingerprint.task(str(values.get("recipe"))) == fingerprint.task(moved):
        values["recipe"] = moved
    return validate_config(Composed(values, {name: str(path) for name in values}))


def validate_config(composed: Composed) -> RunConfig:
    """A typed configuration from composed values; see `load_config`."""
    kind = find_task(validate.reference_of(composed))
    groups = {group: getattr(kind, attribute) for group, attribute in validate.TASK_GROUPS.items()}
    return validate.validate(composed, groups)


def build_task(config: RunConfig) -> Task:
    """The task that a configuration names, with its settings."""
    return find_task(config.recipe)(config.task, model=config.model, data=config.data)


def find_task(reference: str) -> type[Task]:
    """The task that a config names: a packaged recipe, `path/to/file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: where the file, the class or one of its methods is missing.
    """
    place, _, name = TASKS.get(reference, reference).rpartition(":")
    if not place:
        raise ConfigError(f"unknown recipe '{reference}', {nearest(reference, TASKS)} (or path/to/file.py:Class)")
    module = references.module_of(reference, place)
    found = getattr(module, name, None)
    tasks = [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Task) and v is not Task]
    if found is None:
        raise ConfigError(f"{place} has no class '{name}', {nearest(name, tasks)}")
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ConfigError(f"{reference} is not a unisono.Task")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{reference} does not define {', '.join(f'{method}()' for method in missing)}")
    return found
