"""Tasks and callbacks given as Python objects: how other processes find their class, and what they would miss.

Other processes import the class from its file and build the object from its settings, so it must have no other state.
"""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.callback import Callback
from unisono.config.code import recipes, references
from unisono.config.compose import ComposedConfig, escape_interpolation
from unisono.config.schema.run import RunConfig
from unisono.launch.notebook import cell_source
from unisono.runtime.errors import ConfigError
from unisono.task import Task, setup_attributes
from unisono.task_config import composed_engine


def reference_to(kind: type[Any] | Callable[..., Any], runs: Path = Path("runs")) -> str:
    """Return `path/to/file.py:name` for a class or function, or `module:name` if only that makes its imports work.

    Args:
        kind: The class or function.
        runs: Folder of the runs, where a class of a notebook's cells is written.

    Raises:
        ConfigError: For something that another process could not import.
    """
    cell = cell_source.read_class(kind)
    if cell is not None:
        cell.refuse_missing(f"{cell.kind.__name__} is needed by other processes")
        return cell.write(runs)
    name = getattr(kind, "__qualname__", type(kind).__name__)
    try:
        path = inspect.getfile(kind)
        if not Path(path).is_file():
            raise OSError(path)
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"{name} is not defined in a file, so no other process can import it; move it into one"
        ) from error
    if name.endswith("<lambda>"):
        raise ConfigError("a lambda has no name by which other processes could import it; define a function instead")
    if "." in name:
        raise ConfigError(f"{name} is defined inside a function or class; move it to the top level of its file")
    by_module = f"{kind.__module__}:{kind.__name__}"
    file = f"{path}:{kind.__name__}"
    return recipes.find_recipe_name(by_module) or (
        by_module if _in_folder_without_init(kind.__module__, Path(path)) else file
    )


def refuse_state(task: Task, reason: str) -> None:
    """Refuse a task object with state beyond its settings, where a new object takes its place.

    Raises:
        ConfigError: Naming the attributes, not counting those kept by a `cached_property` or created by `setup`.
    """
    cached = {
        name for name in vars(task) if isinstance(inspect.getattr_static(type(task), name, None), cached_property)
    }
    extra = sorted(vars(task).keys() - cached - setup_attributes(task) - {"config", "model_config", "data_config"})
    if extra:
        raise ConfigError(
            f"the {type(task).__name__} object has {', '.join(extra)} in addition to its settings, but {reason} from "
            "its class and settings alone. Move what it needs into settings, and what follows from them into a "
            "cached_property"
        )


def callback_entry(callback: Callback | type[Callback] | str) -> str | dict[str, Any]:
    """Return the configuration entry of a callback, from which other processes can build it.

    Raises:
        ConfigError: For an object with state beyond its settings, or that no other process could import.
    """
    if isinstance(callback, str):
        return callback
    if isinstance(callback, type):
        return reference_to(callback)
    kind = type(callback)
    fresh = vars(kind(callback.config))
    extra = sorted(name for name, value in vars(callback).items() if name not in fresh or fresh[name] != value)
    if extra:
        raise ConfigError(
            f"the {kind.__name__} object has {', '.join(extra)} in addition to its settings, but other processes build "
            "their own from its class and settings alone. Move what it needs into settings (class Config)"
        )
    return {"callback": reference_to(kind), **callback.config.model_dump(mode="json")}


def settings_of(owner: Task | RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of the three groups that belong to a task, as JSON values."""
    task, model, data = (owner.config, owner.model_config, owner.data_config) if isinstance(owner, Task) else (
        owner.task, owner.model, owner.data
    )  # fmt: skip
    return {name: group.model_dump(mode="json") for name, group in (("task", task), ("model", model), ("data", data))}


def merge_settings(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override the settings of a task object by group; a group with another `kind` keeps none of its settings."""
    merged = {}
    for group, values in settings.items():
        changes = overrides.get(group) or {}
        is_other_kind = changes.get("kind", values.get("kind")) != values.get("kind")
        merged[group] = {**({} if is_other_kind else values), **changes}
    return merged


def with_engine(composed: ComposedConfig, kind: type[Task]) -> ComposedConfig:
    """Return a configuration with a class's engine; the recipe may have another class, for another engine.

    Raises:
        ConfigError: If the configuration asks for another engine.
    """
    requested = composed_engine(composed.values)
    if requested not in ("auto", kind.engine):
        raise ConfigError(
            f"layout.engine={requested}, but {kind.__name__} is written in {kind.engine}; leave layout.engine out"
        )
    layout = {**(composed.values.get("layout") or {}), "engine": kind.engine}
    return replace(composed, values={**composed.values, "layout": layout})


def format_override(value: Any) -> str:
    """Format a Python value in the grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(format_override(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{format_override(item)}" for name, item in value.items()) + "}"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    return (
        "'"
        + re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (match[2] and "\\'"), escape_interpolation(str(value)))
        + "'"
    )


def _in_folder_without_init(module: str, path: Path) -> bool:
    """Whether a file is in a package that its location does not show, but can be imported by module name."""
    if "." not in module or references.find_package(path.resolve())[1]:
        return False
    spec = find_spec(module)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve()
