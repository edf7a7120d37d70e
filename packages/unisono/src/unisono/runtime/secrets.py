"""Finds secrets (passwords, keys, tokens) by name, by format and in the environment, and masks them.

A run writes its configuration into files that are compared, mailed and sent to trackers, and other processes read it
from there. So a configuration that plainly holds a secret is refused before anything is written; in text that reaches a
file by other routes (task facts, log lines, library errors) secrets are masked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

MASK = "[hidden]"

# Endings of names that plainly mean a secret, and those that often mean something else (an end-of-text token).
_PLAIN = (
    r"\w*passw(or)?d|\w*passphrase|(db|user|login|smtp|pg|mysql|redis)_?pass|secret|secrets|jwt|authorization|cookie"
    r"|(access|account|anthropic|api|azure|aws|encryption|gcp|master|openai|private|secret|shared|signing|ssh|ssl"
    r"|storage|subscription|tls|wandb)[_-]?key|credentials?|connection_?string"
    r"|(access|api|auth|bearer|hf|hub|github|gitlab|id|jwt|oauth|refresh|sas|session|wandb|write)[_-]?token"
)
_PLAIN_NAME = re.compile(rf"(^|[._-])({_PLAIN})$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"(^|_)({_PLAIN}|auth|dsn|key|key_id|pass|pat|token)$", re.IGNORECASE)

_TOKEN_FORMATS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|wandb_v\d_[A-Za-z0-9_]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|glpat-[\w-]{20,}|sk-[\w-]{20,}|(AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
)
_AUTH_HEADER = re.compile(
    r"(?i)(?<=\b)((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)?\s*)[^\s'\",}]+"
)
# user:password@ in any URL, and anything@ in a web URL; ssh://git@host holds no secret
_IN_URL = re.compile(r"(?:(?<=http://)|(?<=https://)|(?<=://)(?=[^\s/@?#'\"]*:))[^\s/@?#'\"]+@(?=[^\s@])")
_IN_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:[\w-]*(?:token|password|secret|signature|api_?key|access_?key|credential))|sig|sas)=[^&\s#'\"]+"
)
_MIN_LENGTH = 12  # characters; a shorter value occurs in other texts by chance


def find(values: Any) -> list[str]:
    """The nested configuration values that plainly hold a secret: each key, and why, without the value."""
    return [f"'{key}' {why}" for key, why in _find_secrets(values, _environment_secrets())]


def hidden(values: Any) -> Any:
    """Return nested values with secrets masked: values under keys that name one, and secrets within texts."""
    known = _environment_secrets()

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                _mask(str(key), known): MASK if _is_secret_name(str(key)) and _is_text(inner) else hide(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [hide(inner) for inner in value]
        return _mask(value, known) if isinstance(value, str) else value

    return hide(values)


def mask(text: str) -> str:
    """Mask every secret in a text: known formats of keys, passwords in URLs, values of secret environment variables."""
    return _mask(text, _environment_secrets())


def _mask(text: str, known: Sequence[str]) -> str:
    if not text:
        return text
    for value in known:
        text = text.replace(value, MASK)
    text = _AUTH_HEADER.sub(rf"\1{MASK}", _IN_QUERY.sub(rf"\1={MASK}", _IN_URL.sub(f"{MASK}@", text)))
    return _TOKEN_FORMATS.sub(MASK, text)


def names_secret(key: str) -> bool:
    """Whether the last part of a dotted key plainly names a secret."""
    return bool(_PLAIN_NAME.search(key))


def _is_secret_name(key: str) -> bool:
    return names_secret(key) or key.lower() == "token"


def _find_secrets(values: Any, known: Sequence[str], key: str = "") -> list[tuple[str, str]]:
    """Return the keys that hold a secret, each with the reason."""
    if isinstance(values, Mapping):
        inner = [(f"{key}.{name}" if key else str(name), value) for name, value in values.items()]
    elif isinstance(values, list | tuple):
        inner = [(f"{key}.{number}", value) for number, value in enumerate(values)]
    else:
        why = _describe_secret(key, values, known)
        return [(key, why)] if why else []
    return [found for name, value in inner for found in _find_secrets(value, known, name)]


def _describe_secret(key: str, value: Any, known: Sequence[str]) -> str | None:
    if not _is_text(value):
        return None
    text = str(value.get_secret_value()) if hasattr(value, "get_secret_value") else value
    if names_secret(key) or hasattr(value, "get_secret_value"):
        return "is the name of a secret"
    if _IN_URL.search(text) or _IN_QUERY.search(text):
        return "is a URL that contains a password or key"
    if _TOKEN_FORMATS.search(text) or _AUTH_HEADER.search(text):
        return "looks like an access token"
    if any(secret in text for secret in known):
        return "contains the value of a secret environment variable"
    return None


@lru_cache(maxsize=4096)  # each line of a log asks for every variable of the environment
def _holds_secret(variable: str) -> bool:
    return bool(_SECRET_VARIABLE.search(variable))


def _is_text(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or hasattr(value, "get_secret_value"))


def _environment_secrets() -> list[str]:
    """Return the values of environment variables that hold a secret; paths are not secret themselves."""
    values = {os.environ.get(name, "") for name in os.environ if _holds_secret(name)}
    secrets = (value for value in values if len(value) >= _MIN_LENGTH and not value.startswith(("/", "~")))
    return sorted(secrets, key=len, reverse=True)
