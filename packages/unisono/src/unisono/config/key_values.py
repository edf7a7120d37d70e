"""The settings of a command itself, which stand among its words as `key=value` without a group, as in `steps=4`.

Those of a run belong to groups, and are composed (`unisono.config.compose`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.runtime.errors import ConfigError


def split_words(words: Sequence[str], kind: Any) -> tuple[dict[str, str], list[str]]:
    """The words that are settings of a kind, by key, and the others.

    >>> from unisono.config.schema.verbs import Preview
    >>> split_words(["count=3", "data.path=x.csv"], Preview)
    ({'count': '3'}, ['data.path=x.csv'])
    """
    own = {
        key: text for key, sign, text in (word.partition("=") for word in words) if sign and key in kind.model_fields
    }
    return own, [word for word in words if word.partition("=")[0] not in own]


def validate_words(words: Mapping[str, str], kind: Any) -> Any:
    """The settings of a kind that words give.

    A text that does not fit as it stands is read in Hydra's grammar, as settings of a run are: a list, or `null`.

    Args:
        words: by key.
        kind: a subclass of `Settings`.

    Raises:
        ConfigError: naming each word that does not fit.
    """
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
