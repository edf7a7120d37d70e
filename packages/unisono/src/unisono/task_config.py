"""Builds the typed configuration from a task's name and the user's overrides, and the task from the configuration.

The task defines the types of the groups `task`, `model` and `data`, so it must be found before a configuration can be
validated; `unisono.config` itself does not depend on tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.config import CONFIG_FILE, safe_yaml, validate
from unisono.config.code import foreign_run, recipes, references
from unisono.config.compose import GROUPS_DIR, ComposedConfig, apply_overrides, compose
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError
from unisono.task import Task


def load_config(
    recipe: str, overrides: Sequence[str] = (), config_dir: Path | None = None
) -> tuple[RunConfig, ComposedConfig]:
    """Compose and validate a configuration; see `unisono.config.compose.compose` for the arguments.

    Raises:
        ConfigError: one line per mistake: the key, the value, where it came from, and the nearest valid key.
    """
    composed = compose(recipe, overrides, config_dir)
    return validate_config(composed), composed


def read_run(
    folder: Path, task: str | type[Task] | None = None, overrides: Sequence[str] = (), *, trust: bool = False
) -> RunConfig:
    """The configuration of a run from any origin, without its callbacks; imports only a task that is trusted.

    Args:
        folder: the run directory.
        task: as for `unisono.config.code.foreign_run.resolve_task`, which decides what may be imported.
        overrides: settings that replace those of the run, as for `read_config`.
        trust: as for `resolve_task`.

    Raises:
        RunError: if the folder is not a run directory.
        TrustError: if the run names a task that is not trusted.
        ConfigError: if its file is not a configuration of this task.
    """
    config = read_config(folder / CONFIG_FILE, foreign_run.resolve_task(folder, task, trust=trust), overrides)
    return config.model_copy(update={"callbacks": []})  # callbacks are the author's code and only act on training


def read_config(path: Path, task: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a run's `config.yaml`, for a task that the caller names.

    The task that the file names is never imported, since the file may be untrusted. Without a task to name, use
    `read_run`.

    Args:
        path: of the file.
        task: reference to the task that the settings are for.
        overrides: settings that replace those of the run. If one selects another `kind` of a group, settings of the run
            are kept where that kind has a key of the same name and type.

    Raises:
        ConfigError: if the file is missing or is not a configuration.
    """
    values = {**safe_yaml.read_yaml(path), "recipe": task}
    composed = ComposedConfig(values, {name: str(path) for name in values})
    return validate_config(override_run(composed, overrides) if overrides else composed)


def validate_config(composed: ComposedConfig) -> RunConfig:
    """A typed configuration from composed values; see `load_config`."""
    reference = references.complete_reference(validate.task_reference(composed), Task)  # type: ignore[type-abstract]
    composed = replace(composed, values={**composed.values, "recipe": reference})
    return validate.validate(composed, _find_groups(reference, composed))


def find_groups(composed: ComposedConfig) -> dict[str, Any]:
    """The types of the groups that belong to a composed configuration's task."""
    return _find_groups(validate.task_reference(composed), composed)


def _find_groups(reference: str, composed: ComposedConfig) -> dict[str, Any]:
    kind = find_task(reference, composed_engine(composed.values))
    return {group: getattr(kind, attribute) for group, attribute in validate.TASK_GROUPS.items()}


def build_task(config: RunConfig) -> Task:
    """The task named by a configuration, with its settings."""
    return find_task(config.recipe, config.layout.engine)(config.task, model=config.model, data=config.data)


def composed_engine(values: Mapping[str, Any]) -> str:
    """`layout.engine` of unvalidated values; `auto` if it does not name an engine."""
    layout = values.get("layout")
    engine = layout.get("engine") if isinstance(layout, Mapping) else None
    return engine if engine in ("torch", "jax") else "auto"


def resolve_engine(config: RunConfig) -> str:
    """The engine of a run: the one named by its layout, or else the one its task is written for."""
    named = config.layout.engine
    return find_task(config.recipe).engine if named == "auto" else named


def find_task(reference: str, engine: str = "auto") -> type[Task]:
    """The task class for a reference: a packaged recipe, `path/to/file.py:Class` or `package.module:Class`.

    A file with one task may be named alone.

    Args:
        reference: to the task.
        engine: `layout.engine`, which selects among the tasks of a recipe.

    Raises:
        ConfigError: if the file, the class or one of its methods is missing, or a recipe has no task for the engine.
    """
    named = references.complete_reference(reference, Task)  # type: ignore[type-abstract]
    resolved = recipes.resolve_reference(named, engine)
    found = references.load_class(named, resolved, Task)  # type: ignore[type-abstract]
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{reference} does not define {', '.join(f'{method}()' for method in missing)}")
    return found


def override_run(composed: ComposedConfig, overrides: Sequence[str]) -> ComposedConfig:
    """A run's values with overrides applied; imports its task."""
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
