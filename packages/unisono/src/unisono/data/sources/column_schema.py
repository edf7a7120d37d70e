"""Expected types of columns, in words that mean the same in every format, and whether nulls are allowed.

The types are `text`, `bytes`, `bool`, `int`, `float`, `number`, types with a width such as `int64` or `float32`,
`list`, `list<int64>` and `struct`. A trailing `?` allows nulls. Fields of structs are named with a dot: `audio.bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from unisono.runtime.errors import ConfigError, DataError, nearest

_WIDTHS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_WORDS = ("text", "bytes", "bool", "int", "float", "number", "list", "struct", *_WIDTHS)
_ALIASES = {"str": "text", "string": "text", "binary": "bytes", "double": "float64", "halffloat": "float16"}


@dataclass(frozen=True)
class ColumnType:
    """The expected type of a column.

    Attributes:
        word: one of the words above.
        nulls: whether nulls are allowed.
        item: the type of a list's elements.
    """

    word: str
    nulls: bool = False
    item: ColumnType | None = None

    @classmethod
    def parse(cls, written: str) -> ColumnType:
        """Parse a type, e.g. `int64?` or `list<int64>`.

        Raises:
            ConfigError: for an unknown type.
        """
        text = written.strip()
        nulls, text = text.endswith("?"), text.removesuffix("?").strip()
        if text.startswith("list<") and text.endswith(">"):
            return cls("list", nulls, cls.parse(text[5:-1]))
        word = _ALIASES.get(text, text)
        if word not in _WORDS:
            raise ConfigError(f"'{written}' is not a column type, {nearest(word, _WORDS)}")
        return cls(word, nulls)

    def __str__(self) -> str:
        return (f"list<{self.item}>" if self.item else self.word) + (" or null" if self.nulls else "")

    def fits(self, kind: Any) -> bool:
        """Whether an Arrow type matches."""
        kind = unwrap_type(kind)
        if pa.types.is_null(kind):
            return self.nulls
        if self.word == "list":
            return is_list(kind) and (self.item is None or self.item.fits(kind.value_type))
        return bool(
            _TYPE_CHECKS[self.word](kind) if self.word in _TYPE_CHECKS else kind == pa.type_for_alias(self.word)
        )

    def read(self, value: Any) -> tuple[bool, Any]:
        """Whether a JSON value matches, and the value as other formats would return it: lists as arrays."""
        if value is None:
            return self.nulls, None
        if self.word != "list":
            fits = type(value) in _JSON_TYPES.get(self.word, (int, float)) and (
                not self._whole or self._limits[0] <= value <= self._limits[1]
            )
            if not (fits and self.word.startswith("float")):
                return fits, value
            fits, _ = self._floats(value)
            return fits, float(value) if fits else value
        if not isinstance(value, list) or self.item is None:
            return isinstance(value, list), value
        if self.item.dtype and not (self.item.nulls and None in value):
            return self.item._array(value)
        read = [self.item.read(part) for part in value]
        return all(fits for fits, _ in read), [part for _, part in read]

    def _array(self, values: list[Any]) -> tuple[bool, Any]:
        if not set(map(type, values)) <= set(_JSON_TYPES.get(self.word, (int, float))):
            return False, values
        if self.word == "bool":
            return True, np.asarray(values, dtype=self.dtype)
        if not self._whole:
            return self._floats(values)
        try:
            array = np.asarray(values, dtype=np.int64)
        except OverflowError:
            array = np.asarray(values, dtype=object)
        fits = not len(array) or bool(self._limits[0] <= array.min() and array.max() <= self._limits[1])
        return fits, array.astype(self.dtype) if fits else values

    def _floats(self, value: Any) -> tuple[bool, Any]:
        """A number, or a list of them, as an array; it does not fit if one of them becomes infinite."""
        try:
            wide = np.asarray(value, dtype=np.float64)
        except OverflowError:  # an integer of more than 308 digits
            return False, value
        with np.errstate(over="ignore"):
            narrow = wide.astype(self.dtype)
        endless = np.isinf(narrow)
        return not endless.any() or bool(np.isinf(wide[endless]).all()), narrow

    @property
    def _whole(self) -> bool:
        return self.word.startswith(("int", "uint"))

    @cached_property
    def _limits(self) -> tuple[int, int]:
        limits = np.iinfo(self.dtype)
        return int(limits.min), int(limits.max)

    @property
    def dtype(self) -> str:
        """The dtype of an array of such values; empty if they are not numbers."""
        named = {"int": "int64", "float": "float64", "number": "float64", "bool": "bool"}
        return named.get(self.word, self.word if self.word in _WIDTHS else "")


def is_text(kind: Any) -> bool:
    """Whether it is any of Arrow's three string types."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: Any) -> bool:
    """Whether it is any of Arrow's four binary types."""
    names = ("is_binary", "is_large_binary", "is_binary_view", "is_fixed_size_binary")
    return any(getattr(pa.types, name)(kind) for name in names)


def is_list(kind: Any) -> bool:
    """Whether it is any of Arrow's five list types."""
    names = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(getattr(pa.types, name)(kind) for name in names)


def is_number(kind: Any) -> bool:
    """Whether it is a numeric or boolean type, as in NumPy."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def unwrap_type(kind: Any) -> Any:
    """The underlying type of dictionary and extension types."""
    while isinstance(kind, pa.DictionaryType | pa.BaseExtensionType):
        kind = kind.value_type if isinstance(kind, pa.DictionaryType) else kind.storage_type
    return kind


def is_same_type(one: Any, other: Any) -> bool:
    """Whether columns of these types have values of the same Python type."""
    one, other = unwrap_type(one), unwrap_type(other)
    if is_list(one) and is_list(other):
        return is_same_type(one.value_type, other.value_type)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        names = {one.field(i).name for i in range(one.num_fields)}
        if names != {other.field(i).name for i in range(other.num_fields)}:
            return False
        return all(is_same_type(one.field(name).type, other.field(name).type) for name in names)
    return bool((is_text(one) and is_text(other)) or (is_bytes(one) and is_bytes(other)) or one == other)


_TYPE_CHECKS = {
    "text": is_text,
    "bytes": is_bytes,
    "bool": pa.types.is_boolean,
    "int": pa.types.is_integer,
    "float": pa.types.is_floating,
    "number": lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind),
    "struct": pa.types.is_struct,
}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,), "bytes": (), "bool": (bool,), "struct": (dict,),
    **{word: (int,) for word in _WORDS if word.startswith(("int", "uint"))},
}  # fmt: skip


@dataclass(frozen=True)
class ColumnRequest:
    """The columns to read from every file, and their expected types.

    Attributes:
        columns: names of the columns of a record; None for all.
        types: of columns, by name.
        separator: between the documents of a text file; None if a file is one document.
        hint: the setting that contains the column's name, for errors.
    """

    columns: tuple[str, ...] | None = None
    types: tuple[tuple[str, ColumnType], ...] = ()
    separator: str | None = None
    hint: str = ""

    @classmethod
    def parse(
        cls,
        columns: Sequence[str] | None = None,
        expect: Mapping[str, str] | None = None,
        separator: str | None = None,
        hint: str = "",
    ) -> ColumnRequest:
        """Create a request from a user's arguments.

        Raises:
            ConfigError: for an unknown type, or a type for a column that is not requested.
        """
        types = tuple((name, ColumnType.parse(written)) for name, written in (expect or {}).items())
        if columns is not None:
            for name, _ in types:
                if name.split(".")[0] not in columns and name not in columns:
                    raise ConfigError(
                        f"expect names the column '{name}', which is not selected, {nearest(name, columns)}"
                    )
        return cls(None if columns is None else tuple(columns), types, separator, f" ({hint})" if hint else "")

    @property
    def without_nulls(self) -> tuple[tuple[str, ...], ...]:
        """Columns that must not contain nulls, as paths."""
        return tuple(tuple(name.split(".")) for name, kind in self.types if not kind.nulls)

    def check(self, path: str, schema: Any) -> None:
        """Raise unless a schema has the requested columns and types.

        Raises:
            DataError: naming file and column.
        """
        for column in self.columns or ():
            if column not in schema.names:
                raise DataError(f"{path} has no column '{column}', {nearest(column, schema.names)}{self.hint}")
        for name, kind in self.types:
            there = _find_field(path, schema, name, self.hint)
            if not kind.fits(there):
                raise DataError(
                    f"{path}: column '{name}' is {there}, not {kind}{self.hint}; convert it when the file is "
                    "written, or choose another column"
                )

    def check_nulls(self, where: Callable[[], str], record: Mapping[str, Any]) -> None:
        """Raise if a record has a null in a column that must not contain any.

        Raises:
            DataError: with the location given by `where`, and the column.
        """
        for steps in self.without_nulls:
            value: Any = record
            for step in steps:
                value = value.get(step) if isinstance(value, Mapping) else None
            if value is None:
                raise DataError(
                    f"{where()}: column '{'.'.join(steps)}' is null{self.hint}; remove the row, or allow nulls "
                    "(add ? to the type)"
                )


def _find_field(path: str, schema: Any, name: str, hint: str) -> Any:
    if name in schema.names:
        return schema.field(name).type
    steps = name.split(".")
    names, kind = schema.names, None
    for step in steps:
        if step not in names:
            raise DataError(f"{path} has no column '{name}', {nearest(step, names)}{hint}")
        kind = schema.field(step).type if kind is None else kind.field(step).type
        names = [kind.field(i).name for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    return kind
