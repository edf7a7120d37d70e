"""A run that may come from someone else: its configuration is data, and never decides which code is imported.

A run folder arrives by a copy, a shared disk or an object store, and its `config.yaml` names the file of its task. To
import that file is to run whatever its author wrote. So the task of a run comes from the command (`--task`), from a
packaged recipe, or from what this process has imported already; or this user has made the run (`own_runs`), and its
code is what it was then. Else the verb stops, says which file it would run and whose it is, and asks for `--trust`.
"""

from __future__ import annotations

import inspect
import os
import pwd
import stat
import sys
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from unisono.config import CONFIG_FILE, fingerprint, safe_yaml, validate
from unisono.config.code import own_runs, recipes, references
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError, RunError
from unisono.runtime.text import one_line

if TYPE_CHECKING:
    from unisono.task import Task


class TrustError(ConfigError):
    """A run whose task would have to be imported from a file that nobody has vouched for."""


def read_values(path: Path) -> dict[str, Any]:
    """The values of a run's `config.yaml` as plain data; its task is not imported.

    What every run has is validated and filled with defaults; the groups of its task are as they stand in the file.

    Raises:
        ConfigError: where the file is missing or is not the configuration of a run.
    """
    values = safe_yaml.read_yaml(path)
    if not isinstance(values.get("recipe"), str):
        raise ConfigError(f"{path} is not the configuration of a run (it names no task: recipe is missing)")
    own = {group: values.get(group) or {} for group in validate.TASK_GROUPS}
    if wrong := next((group for group, given in own.items() if not isinstance(given, dict)), None):
        raise ConfigError(f"{path} is not the configuration of a run: '{wrong}' is not a group of keys")
    try:
        config = RunConfig.model_validate({**values, **{group: {} for group in own}})
    except (ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} is not the configuration of a run: {_first_mistake(error)}") from error
    return {**fingerprint.to_json(config), **own}


def resolve_task(folder: Path, task: str | type[Task] | None = None, *, trust: bool = False) -> str:
    """The reference of the task to import for a run.

    Args:
        folder: of the run.
        task: that the caller names: `path/to/file.py:Class`, a recipe or a class; the file's own is then ignored.
        trust: import the task that the run names, wherever it lies.

    Raises:
        RunError: if the folder is not that of a run.
        TrustError: if the run names a file that nobody has vouched for, and it is not this user's own run.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise RunError(f"{folder} is not a run directory (no {CONFIG_FILE})")
    if task is not None:
        return task if isinstance(task, str) else _reference_to(task)
    config = safe_yaml.read_yaml(folder / CONFIG_FILE)
    named = str(config.get("recipe"))
    if trust or recipes.find_recipe_name(named) is not None or is_imported(named):
        return named
    reason = own_runs.why_not_own(folder, config)
    if reason is None:
        return named
    raise TrustError(
        f"{folder / CONFIG_FILE} names a task of its own, {describe_reference(named)}. {one_line(reason, 2000)}. Using "
        "this run would execute that file with your rights, so it was not imported. Name the task yourself "
        "(--task path/to/file.py:Class), or add --trust if you trust everyone who can write that file"
    )


def is_imported(reference: str) -> bool:
    """Whether this process has imported the class already, so that naming it runs nothing new."""
    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        return inspect.isclass(getattr(sys.modules.get(place), name, None))
    path = str(Path(place).resolve())
    loaded = [module for module in list(sys.modules.values()) if _module_file(module) == path]
    return any(inspect.isclass(getattr(module, name, None)) for module in loaded)


def describe_reference(reference: str) -> str:
    """What a reference would run, whose it is and who else may write it, for people."""
    place = reference.rpartition(":")[0]
    if not place.endswith(".py"):
        spec = None
        with suppress(ImportError, ValueError):  # of the top-level package alone: to look deeper would import it
            spec = util.find_spec(place.partition(".")[0]) if place else None
        found = f" (found in {one_line(spec.origin)})" if spec is not None and spec.origin else " (not installed here)"
        return f"'{one_line(reference)}'{found}"
    path = Path(os.path.abspath(place))  # noqa: PTH100 - not resolved: a link is shown as it is named
    shown = f"'{one_line(path)}:{one_line(reference.rpartition(':')[2])}'"
    try:
        status = path.stat()
    except (OSError, ValueError):
        return f"{shown} (which does not exist)"
    others = [who for who, bit in (("its group", stat.S_IWGRP), ("anybody", stat.S_IWOTH)) if status.st_mode & bit]
    also = f", writable by {' and '.join(others)}" if others else ""
    return f"{shown} (owner {owner_name(status.st_uid)}{also})"


def owner_name(number: int) -> str:
    """The name of a user, or the number where there is none."""
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"uid {number}"


def _reference_to(task: type[Task]) -> str:
    """The reference of a class that this process has imported already."""
    place = task.__module__
    if place == "__main__":
        place = references.registered_file(task) or inspect.getfile(task)
    return f"{place}:{task.__qualname__}"


def _module_file(module: Any) -> str | None:
    with suppress(Exception):  # some modules compute their attributes
        file = getattr(module, "__file__", None)
        return str(Path(file).resolve()) if isinstance(file, str) and file.endswith(".py") else None
    return None


def _first_mistake(error: Exception) -> str:
    """The first mistake of a validation, in one line."""
    if not isinstance(error, ValidationError):
        return "it is nested too deeply"
    mistakes = error.errors(include_input=False, include_url=False)
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    return f"{one_line('.'.join(map(str, mistakes[0]['loc'])))}: {one_line(mistakes[0]['msg'])}{more}"
