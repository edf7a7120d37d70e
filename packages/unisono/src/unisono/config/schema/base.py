"""What every group of settings is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]


class Settings(BaseModel):
    """A group of settings: immutable, typed, and with no room for a key it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


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
