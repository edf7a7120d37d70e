"""From the name of a task and the words of a user to a typed configuration, and from that to the task.

The types of the groups `task`, `model` and `data` are those of the task, so whoever validates a configuration has to
find its task first; `unisono.config` itself knows no task.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from unisono.config import foreign_run, recipes, references, safe_yaml, validate
from unisono.config.compose import GROUPS, Composed, change, compose
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


def read_run(
    folder: Path, task: str | type[Task] | None = None, overrides: Sequence[str] = (), *, trust: bool = False
) -> RunConfig:
    """The configuration of a run that may be somebody else's, typed by a task that may be imported, without callbacks.

    Args:
        folder: of the run.
        task: as for `unisono.config.foreign_run.task_of`, which says what may be imported.
        overrides: settings that replace those of the run, as for `read_config`.
        trust: the same.

    Raises:
        RunError: if the folder is not that of a run.
        TrustError: if the run names a task that nobody has vouched for.
        ConfigError: where its file is not a configuration of this task.
    """
    config = read_config(folder / foreign_run.NAME, foreign_run.task_of(folder, task, trust=trust), overrides)
    return config.model_copy(update={"callbacks": []})  # code of its author, which acts on a training only


def read_config(path: Path, task: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, from its `config.yaml`, for a task that the caller names.

    What the file itself names as its task is never imported: a file of a run may come from anywhere. Whoever has no
    task to name asks `read_run`.

    Args:
        path: of the file.
        task: reference of the task whose settings these are.
        overrides: settings that replace those of the run. Where one chooses another `kind` of a group, what the run has
            stays as far as that kind has it.

    Raises:
        ConfigError: where the file is missing or is not a configuration.
    """
    values = {**safe_yaml.read(path), "recipe": task}
    composed = Composed(values, {name: str(path) for name in values})
    return validate_config(_changed(composed, overrides) if overrides else composed)


def validate_config(composed: Composed) -> RunConfig:
    """A typed configuration from composed values; see `load_config`."""
    kind = find_task(validate.reference_of(composed))
    groups = {group: getattr(kind, attribute) for group, attribute in validate.TASK_GROUPS.items()}
    return validate.validate(composed, groups)


def build_task(config: RunConfig) -> Task:
    """The task that a configuration names, with its settings."""
    return find_task(config.recipe)(config.task, model=config.model, data=config.data)


def engine_of(config: RunConfig) -> str:
    """The engine of a run: what its layout names, or else what its task is written in."""
    named = config.layout.engine
    return find_task(config.recipe).engine if named == "auto" else named


def find_task(reference: str) -> type[Task]:
    """The task that a config names: a packaged recipe, `path/to/file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: where the file, the class or one of its methods is missing.
    """
    place, _, name = references.located(reference).rpartition(":")
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


def _changed(composed: Composed, overrides: Sequence[str]) -> Composed:
    """Values of a run with some of them replaced."""
    reference = validate.reference_of(composed)
    task, folders = find_task(reference), [GROUPS]
    if reference in recipes.names():
        folders.insert(0, recipes.folder(reference))
    changed = change(composed, overrides, folders)
    for group, attribute in validate.TASK_GROUPS.items():
        before, now = composed.values.get(group) or {}, changed.values.get(group) or {}
        if before.get("kind") == now.get("kind") or "kind" not in before:
            continue
        known = {name for model in validate.models_of(getattr(task, attribute), now) for name in model.model_fields}
        given = {
            key.removeprefix(f"{group}.").split(".")[0] for key in changed.origins.keys() - composed.origins.keys()
        }
        changed.values[group] = {name: value for name, value in now.items() if name in known | given}
    return changed
