"""Builds the typed configuration from a task's name and the user's overrides, and the task from the configuration.

The types of the groups `task`, `model` and `data` are those of the task, so whoever validates a configuration has to
find its task first; `unisono.config` itself knows no task.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.config import foreign_run, recipes, references, safe_yaml, validate
from unisono.config.compose import GROUPS_DIR, ComposedConfig, apply_overrides, compose
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError, nearest
from unisono.task import Task


def load_config(
    recipe: str, overrides: Sequence[str] = (), config_dir: Path | None = None
) -> tuple[RunConfig, ComposedConfig]:
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
        task: as for `unisono.config.foreign_run.resolve_task`, which says what may be imported.
        overrides: settings that replace those of the run, as for `read_config`.
        trust: the same.

    Raises:
        RunError: if the folder is not that of a run.
        TrustError: if the run names a task that nobody has vouched for.
        ConfigError: where its file is not a configuration of this task.
    """
    config = read_config(
        folder / foreign_run.CONFIG_FILE, foreign_run.resolve_task(folder, task, trust=trust), overrides
    )
    return config.model_copy(update={"callbacks": []})  # code of its author, which acts on a training only


def read_config(path: Path, task: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, from its `config.yaml`, for a task that the caller names.

    What the file itself names as its task is never imported: a file of a run may come from anywhere. Whoever has no
    task to name asks `read_run`.

    Args:
        path: of the file.
        task: reference of the task whose settings these are.
        overrides: settings that replace those of the run. Where one chooses another `kind` of a group, what the run has
            stays as far as that kind has a key of the same name and type.

    Raises:
        ConfigError: where the file is missing or is not a configuration.
    """
    values = {**safe_yaml.read_yaml(path), "recipe": task}
    composed = ComposedConfig(values, {name: str(path) for name in values})
    return validate_config(_apply_overrides(composed, overrides) if overrides else composed)


def validate_config(composed: ComposedConfig) -> RunConfig:
    """A typed configuration from composed values; see `load_config`."""
    kind = find_task(validate.task_reference(composed), composed_engine(composed.values))
    groups = {group: getattr(kind, attribute) for group, attribute in validate.TASK_GROUPS.items()}
    return validate.validate(composed, groups)


def build_task(config: RunConfig) -> Task:
    """The task that a configuration names, with its settings."""
    return find_task(config.recipe, config.layout.engine)(config.task, model=config.model, data=config.data)


def composed_engine(values: Mapping[str, Any]) -> str:
    """What `layout.engine` is in values that nobody has validated; auto where that is no engine."""
    layout = values.get("layout")
    engine = layout.get("engine") if isinstance(layout, Mapping) else None
    return engine if engine in ("torch", "jax") else "auto"


def resolve_engine(config: RunConfig) -> str:
    """The engine of a run: what its layout names, or else what its task is written in."""
    named = config.layout.engine
    return find_task(config.recipe).engine if named == "auto" else named


def find_task(reference: str, engine: str = "auto") -> type[Task]:
    """The task that a config names: a packaged recipe, `path/to/file.py:Class` or `package.module:Class`.

    Args:
        reference: to the task.
        engine: `layout.engine`, which chooses among the tasks of a recipe.

    Raises:
        ConfigError: where the file, the class or one of its methods is missing, or a recipe has no task for the engine.
    """
    place, _, name = references.resolve_reference(reference, engine).rpartition(":")
    module = references.load_module(reference, place)
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


def _apply_overrides(composed: ComposedConfig, overrides: Sequence[str]) -> ComposedConfig:
    """Values of a run with some of them replaced."""
    reference = validate.task_reference(composed)
    folders = [GROUPS_DIR]
    if reference in recipes.recipe_names():
        folders.insert(0, recipes.config_folder(reference))
    changed = apply_overrides(composed, overrides, folders)
    task = find_task(reference, composed_engine(changed.values))
    for group, attribute in validate.TASK_GROUPS.items():
        before, now = composed.values.get(group) or {}, changed.values.get(group) or {}
        if before.get("kind") == now.get("kind") or "kind" not in before:
            continue
        theirs, ours = (_fields(getattr(task, attribute), values) for values in (before, now))
        known = {name for name, kind in ours.items() if name == "kind" or theirs.get(name, kind) == kind}
        given = {
            key.removeprefix(f"{group}.").split(".")[0] for key in changed.origins.keys() - composed.origins.keys()
        }
        changed.values[group] = {name: value for name, value in now.items() if name in known | given}
    return changed


def _fields(group: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a group with these values, and their types."""
    models = validate.settings_models(group, values)
    return {name: field.annotation for model in models for name, field in model.model_fields.items()}
