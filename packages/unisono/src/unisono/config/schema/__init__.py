"""Every setting of a run, its type and its default: one file a group; and what all groups are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unisono.runtime.console import say

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]


class Settings(BaseModel):
    """A group of settings: immutable, typed, and with no room for a key it does not know.

    Attributes:
        retired: settings that the group had in earlier versions, by name: the value with which it did what it does
            now, and a sentence that says why the setting was removed. Files of earlier runs may have it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_retired(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        found = {name for name in cls.retired.keys() & values.keys() if values[name] == cls.retired[name][0]}
        for name in sorted(found):
            _say_once(f"{name} is no longer a setting, and is ignored. {cls.retired[name][1]}")
        return {name: value for name, value in values.items() if name not in found} if found else values


@cache
def _say_once(text: str) -> None:
    say(f"unisono: {text}", error=True)


def retired_values(group: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings, at any depth, that a group had in earlier versions: key, and the value that changes nothing."""
    yield from ((f"{prefix}{name}", value) for name, (value, _) in type(group).retired.items())
    for name in type(group).model_fields:
        if isinstance(inner := getattr(group, name), Settings):
            yield from retired_values(inner, f"{prefix}{name}.")


@dataclass(frozen=True)
class Only:
    """Marks a setting that one engine alone can use; with the other, any value but the default is refused.

    Attributes:
        engine: that uses it.
        why: the other has no use for it.
    """

    engine: Literal["torch", "jax"]
    why: str


def foreign_settings(group: Settings, engine: str, prefix: str = "") -> Iterator[tuple[str, Any, Only]]:
    """Settings, at any depth, that only the other engine uses and that are not at their default: key, value, mark."""
    for name, declared in type(group).model_fields.items():
        value, key = getattr(group, name), f"{prefix}{name}"
        if isinstance(value, Settings):
            yield from foreign_settings(value, engine, f"{key}.")
        for mark in declared.metadata:
            if isinstance(mark, Only) and mark.engine != engine and value != declared.get_default():
                yield key, value, mark
