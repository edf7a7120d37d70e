"""The settings of a run as a JSON schema, with which an editor completes and checks YAML files of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import create_model

from unisono.config.schema.run import RunConfig
from unisono.config.validate import Groups

_DEFAULTS = {"type": "array", "description": "files that this one begins with, and _self_ for its own place"}


def build_schema(groups: Groups) -> dict[str, Any]:
    """Return the schema of a configuration file.

    A file holds a part of a configuration, so nothing is required, not even the `kind` that tells settings of a group
    apart: another file may have chosen it.

    Args:
        groups: Types of the groups that belong to the task.
    """
    fields: dict[str, Any] = {group: (kind, {}) for group, kind in groups.items()}
    schema = create_model("Configuration", __base__=RunConfig, **fields).model_json_schema()
    partial: dict[str, Any] = _without_requirements(schema)
    partial["properties"]["defaults"] = _DEFAULTS
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **partial, "title": "Unisono configuration"}


def _without_requirements(value: Any, *, names_keys: bool = False) -> Any:
    """A schema that parts of a configuration fit; below `properties` names are keys of the user, not of a schema."""
    if isinstance(value, list):
        return [_without_requirements(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    return {
        "anyOf" if name == "oneOf" and not names_keys else name: _without_requirements(
            inner, names_keys=name in ("properties", "$defs") and not names_keys
        )
        for name, inner in value.items()
        if names_keys or name not in ("required", "discriminator", "default")
    }
