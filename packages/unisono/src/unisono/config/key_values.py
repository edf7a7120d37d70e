"""The settings of a command itself, which stand among its words as `key=value` without a group, as in `steps=4`.

Those of a run belong to groups, and are composed (`unisono.config.compose`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.runtime.errors import ConfigError


def parse_settings(words: Sequence[str], kind: Any) -> tuple[Any, list[str]]:
    """The settings of a kind that stand among words, and the other words.

    A text that does not fit as it stands is read in Hydra's grammar, as settings of a run are: a list, or `null`. What
    a setting holds by name (`env`) has a word for each: `env.NAME=VALUE`.

    Raises:
        ConfigError: naming each word that does not fit.

    >>> from unisono.config.schema.verbs import Preview
    >>> parse_settings(["count=3", "data.path=x.csv"], Preview)
    (Preview(position=0, count=3, world_size=None), ['data.path=x.csv'])
    """
    own, rest = split_words(words, kind)
    return _validate(own, kind), rest


def split_words(words: Sequence[str], kind: Any) -> tuple[dict[str, Any], list[str]]:
    """The words that are settings of a kind, by key, and the others; no value is looked at more closely.

    Raises:
        ConfigError: for a name that is empty, and names beside a word that has them all.
    """
    own: dict[str, Any] = {}
    rest = []
    for word in words:
        key, sign, text = word.partition("=")
        above, dot, name = key.partition(".")
        if sign and key in kind.model_fields:
            if isinstance(own.get(key), dict):
                raise _given_twice(key)
            own[key] = text
        elif sign and dot and above in kind.model_fields and kind.model_fields[above].annotation == dict[str, str]:
            if not name:
                raise ConfigError(f"'{above}.=…' names no variable: write {above}.NAME=VALUE, one word for each")
            if not isinstance(names := own.setdefault(above, {}), dict):
                raise _given_twice(above)
            names[name] = text
        else:
            rest.append(word)
    return own, rest


def _given_twice(key: str) -> ConfigError:
    return ConfigError(f"'{key}' is given twice: as {key}=… and as {key}.NAME=…; use one of them")


def _validate(words: Mapping[str, Any], kind: Any) -> Any:
    from pydantic import ValidationError

    try:
        return kind.model_validate(words)
    except ValidationError as error:
        unfit = {str(mistake["loc"][0]) for mistake in error.errors() if mistake["loc"]}
    try:
        return kind.model_validate({**words, **{key: _read_value(key, words[key]) for key in unfit & words.keys()}})
    except ValidationError as error:
        raise ConfigError("; ".join(_format_mistake(mistake, kind) for mistake in error.errors())) from error


def _read_value(key: str, text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        return OverridesParser.create().parse_override(f"{key}={text}").value()
    except Exception as error:  # of Hydra's parser, whatever it is
        raise ConfigError(f"'{key}={text}' cannot be parsed: {str(error).splitlines()[0]}") from error


def _format_mistake(mistake: Mapping[str, Any], kind: Any) -> str:
    text = mistake["msg"].removeprefix("Value error, ")
    if not mistake["loc"]:  # of several words together, which the text names
        return str(text)
    name = mistake["loc"][0]
    if mistake["type"] == "missing":
        known = kind.model_fields.get(str(name))
        return f"{name} is missing: add {name}=…{f' ({known.description})' if known and known.description else ''}"
    return f"{name}: {text[0].lower()}{text[1:]}, got {mistake['input']!r}"
