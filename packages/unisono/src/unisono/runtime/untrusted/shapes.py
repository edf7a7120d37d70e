"""Types of untrusted JSON, checked once by pydantic before use instead of by guards at every use."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Object = dict[str, Any]  # a JSON object with any keys


class HashedFile(TypedDict):
    """Size in bytes and SHA-256 of a file."""

    size: Integer
    sha256: str


def misfit(value: Any, shape: Any) -> str | None:
    """Describe where a value does not match its type, without a full stop; None if it matches.

    Args:
        value: Parsed JSON; nothing is converted, and keys that a `TypedDict` lacks are ignored.
        shape: A type, such as a `TypedDict` of `typing_extensions`.

    >>> misfit({"a": [1, "x"]}, dict[str, list[Integer]])
    "'a.1' should be a valid integer"
    """
    try:
        _adapter(shape).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:100] for part in first["loc"])
        return f"'{place}' {first['msg'].removeprefix('Input ').removeprefix('Field ')}" if place else first["msg"]
    return None


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)
