"""Checks YAML files before they are parsed: their size and depth, with all aliases expanded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from unisono.runtime.errors import ConfigError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 64
_HALF = re.compile("[\ud800-\udfff]")  # of a pair in UTF-16, which no file and no message can hold
_MAX_DIGITS = 200  # of a number: 1:1:1 is one to the base of 60


def read_yaml(path: Path) -> dict[str, Any]:
    """The values of a configuration in a file of a run, which may come from anywhere.

    Raises:
        ConfigError: where the file is missing, is a link, is refused by `check_yaml`, or does not hold keys and values.
    """
    try:
        text = safe_paths.read_text(path.parent, path.name, MAX_BYTES)
        _check_size(text, path)
        values = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, ValueError, ArithmeticError, LookupError) as error:
        if isinstance(error, ConfigError):
            raise
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as a configuration: {why}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a configuration: it holds a {type(values).__name__}, not keys and values")
    pending: list[Any] = [values]
    while pending:
        at = pending.pop()
        if isinstance(at, dict) and (odd := next((key for key in at if not isinstance(key, str)), None)) is not None:
            raise ConfigError(f"{path} is not a configuration: its key {one_line(odd)} is a {type(odd).__name__}")
        pending += at.values() if isinstance(at, dict) else at if isinstance(at, list) else ()
    return values


def check_yaml(path: Path) -> str:
    """The text of a file of the user's own, unless it would be enormous or endless in memory.

    What is no YAML at all is left to whoever reads it.

    Raises:
        ConfigError: naming the file.
    """
    try:
        with safe_paths.open_regular(path) as file:
            text = safe_paths.read_limited(file, str(path), MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration: {getattr(error, 'strerror', None) or error}"
        ) from error
    _check_size(text, path)
    return text


def _check_size(text: str, path: Path) -> None:
    """Refuse a text whose values would be too many or too deep.

    An alias costs a few bytes and stands for all that it names, and aliases of aliases grow as powers do; a reader that
    writes them out never ends.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return
    except RecursionError:
        raise ConfigError(f"{path}: nested more than {MAX_DEPTH} deep") from None
    if root is not None and (count := _count_values(root, path, {}, 1)) > MAX_VALUES:
        raise ConfigError(
            f"{path}: its aliases (*name) stand for {count:.1e} values; a configuration has at most {MAX_VALUES}"
        )


def _count_values(node: yaml.Node, path: Path, known: dict[int, int], depth: int) -> int:
    """How many values a node is, its aliases written out."""
    if id(node) in known:
        if not known[id(node)]:
            raise ConfigError(
                f"{path}:{node.start_mark.line + 1}: an alias (*name) refers to something that contains it"
            )
        return known[id(node)]
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: nested more than {MAX_DEPTH} deep")
    if isinstance(node, yaml.ScalarNode) and len(node.value) > _MAX_DIGITS and not node.tag.endswith(":str"):
        kind = node.tag.rpartition(":")[2]
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: a value of {len(node.value)} characters ({kind})")
    if isinstance(node, yaml.ScalarNode) and _HALF.search(node.value):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: half a character ({node.value[:40]!a})")
    known[id(node)] = 0  # being counted
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    known[id(node)] = 1 + sum(_count_values(part, path, known, depth + 1) for part in parts)
    return known[id(node)]
