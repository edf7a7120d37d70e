"""What a YAML file may be before anything reads it: of a sane size, its aliases written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from unisono.runtime.errors import ConfigError

BYTES = 1 << 20
VALUES = 100_000
DEPTH = 64


def read(path: Path) -> dict[str, Any]:
    """The values of a configuration in a file, which may come from anywhere.

    Raises:
        ConfigError: where the file is missing, is refused by `check`, or does not hold keys and values.
    """
    try:
        check(path)
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a configuration: it holds a {type(values).__name__}, not keys and values")
    return values


def check(path: Path) -> None:
    """Refuse a file that would be enormous or endless in memory; what is no YAML at all is left to whoever reads it.

    An alias costs a few bytes and stands for all that it names, and aliases of aliases grow as powers do; a reader that
    writes them out never ends.

    Raises:
        ConfigError: naming the file.
    """
    if (size := path.stat().st_size) > BYTES:
        raise ConfigError(f"{path} has {size} bytes, a configuration at most {BYTES}; data belong into other files")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError):
        return
    except RecursionError:
        raise ConfigError(f"{path}: nested more than {DEPTH} deep") from None
    if root is not None and (count := _values(root, path, {}, 1)) > VALUES:
        raise ConfigError(
            f"{path}: its aliases (*name) stand for {count:.1e} values; a configuration has at most {VALUES}"
        )


def _values(node: yaml.Node, path: Path, known: dict[int, int], depth: int) -> int:
    """How many values a node is, its aliases written out."""
    if id(node) in known:
        if not known[id(node)]:
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: an alias (*name) for something that it is part of")
        return known[id(node)]
    if depth > DEPTH:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: nested more than {DEPTH} deep")
    known[id(node)] = 0  # being counted
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    known[id(node)] = 1 + sum(_values(part, path, known, depth + 1) for part in parts)
    return known[id(node)]
