"""The conversations of a data set by number: JSONL, Parquet, Arrow and saved data sets, in one fixed order.

A row has `messages`, or `prompt` and `completion` (both messages, or both texts), and optionally `tools` and
`chat_template_kwargs`: what TRL reads, too. A row of preferences has `prompt`, `chosen` and `rejected`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unisono import DataError, sources
from unisono_language.data.chat import Conversation
from unisono_language.data.texts import digest
from unisono_language.settings import ConversationFiles

_FORMATS = ("jsonl", "parquet", "arrow")
_CACHE_MB = 64.0  # of blocks that were read last
_REMEDY = "a row needs messages, or prompt and completion"
_PAIR = "a row needs chosen and rejected, and prompt unless both are whole conversations"
_TOOLS_OF_TEXT = "its prompt is a text, which no chat template reads, but it has tools or settings for one"


@dataclass(frozen=True)
class Conversations:
    """Conversations in files, which are read on first use.

    Attributes:
        found: the files.
        in_pairs: whether a row is two of them, of which the first was chosen.
    """

    found: sources.Found
    in_pairs: bool = False

    @classmethod
    def from_files(cls, files: ConversationFiles, in_pairs: bool = False) -> Conversations:
        """The conversations that the settings name."""
        paths = files.path if isinstance(files.path, list) else [files.path]
        return cls(sources.find(paths, files.pattern, files.split, formats=_FORMATS), in_pairs)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, first: int, last: int) -> Iterator[tuple[Conversation, ...]]:
        """The conversations of the rows `first..last-1`, in order, read block by block.

        Raises:
            DataError: naming file and row.
        """
        for number, record in enumerate(self.rows.read(first, last), first):
            try:
                yield parse_pair(record) if self.in_pairs else (parse_conversation(record),)
            except DataError as error:
                raise DataError(f"{self.where(number)}: {error}") from error

    def where(self, number: int) -> str:
        """The file of a conversation, and its number in it, for messages."""
        ends = np.cumsum([int(shard.rows.sum()) for shard in self.rows.shards])
        shard = int(np.searchsorted(ends, number, side="right"))
        inside = number - (int(ends[shard - 1]) if shard else 0)
        return f"{self.rows.shards[shard].file.path}, conversation {inside + 1} (from 1)"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the files' content, independent of their location."""
        return digest([self.rows.fingerprint, *self._kind])

    @cached_property
    def stamp(self) -> str:
        """Changes whenever a file is rewritten; opens no file."""
        return digest([self.found.stamp, *self._kind])

    @property
    def _kind(self) -> list[str]:
        return ["conversations", *(["in pairs"] if self.in_pairs else [])]

    @cached_property
    def rows(self) -> sources.Files:
        """The rows of the files."""
        files = sources.Files(self.found, sources.ColumnRequest(), cache_mb=_CACHE_MB)
        names = files.schema.names
        if self.in_pairs:
            if not {"chosen", "rejected"} <= set(names):
                raise DataError(
                    f"data.path: {files.shards[0].file.path} has the columns {', '.join(names)}; a row of preferences "
                    "needs chosen and rejected"
                )
            return files
        if "messages" not in names and not {"prompt", "completion"} <= set(names):
            hint = ""
            if "conversations" in names:
                hint = "; rename conversations to messages, and from and value to role and content"
            raise DataError(
                f"data.path: {files.shards[0].file.path} has the columns {', '.join(names)}; {_REMEDY}{hint}"
            )
        return files


def parse_conversation(record: Mapping[str, Any]) -> Conversation:
    """A row as a conversation.

    Raises:
        DataError: for a row that is none, without naming it.
    """
    tools, settings = parse_template_columns(record)
    messages, prompt, completion = (record.get(name) for name in ("messages", "prompt", "completion"))
    if messages is not None and prompt is not None:
        raise DataError(f"it has messages and a prompt; {_REMEDY}")
    if messages is not None:
        return Conversation(parse_messages(messages, "messages"), None, tools, settings)
    if prompt is None or completion is None:
        raise DataError(_REMEDY)
    if isinstance(prompt, str) and isinstance(completion, str):
        if tools or settings:
            raise DataError(_TOOLS_OF_TEXT)
        return Conversation(completion, prompt)
    before, after = parse_messages(prompt, "prompt"), parse_messages(completion, "completion")
    return Conversation([*before, *after], len(before), tools, settings)


def parse_pair(record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """A row of preferences as its chosen and its rejected conversation.

    Raises:
        DataError: for a row that is no pair, without naming it.
    """
    tools, settings = parse_template_columns(record)
    prompt, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
    if chosen is None or rejected is None:
        raise DataError(_PAIR)
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str):
        if tools or settings:
            raise DataError(_TOOLS_OF_TEXT)
        return Conversation(chosen, prompt), Conversation(rejected, prompt)
    answers = [parse_messages(one, name) for one, name in ((chosen, "chosen"), (rejected, "rejected"))]
    if prompt is None:
        first, second = answers
        both = enumerate(zip(first, second, strict=False))
        common = next((number for number, (one, other) in both if one != other), 0)
        if not common:
            raise DataError(f"chosen and rejected have no common beginning with answers after it; {_PAIR}")
        before, answers = first[:common], [first[common:], second[common:]]
    else:
        before = parse_messages(prompt, "prompt")
    one, other = (Conversation([*before, *answer], len(before), tools, settings) for answer in answers)
    return one, other


def parse_template_columns(record: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A row's tools, and what else its template reads; empty where it has none.

    Raises:
        DataError: for something else, without naming the row.
    """
    return _as_json(record, "tools", list), _as_json(record, "chat_template_kwargs", dict)


def parse_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages without their nulls, which files of one schema for all rows write where a message has no such key.

    Raises:
        DataError: for what is no list of messages.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"'{name}' is {_name_kind(value)}, not a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise DataError(f"'{name}', message {number} (from 0) is {_name_kind(message)}, not an object with role")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            remedy = "; rename from and value to role and content" if "from" in message else ""
            raise DataError(f"'{name}', message {number} (from 0) has no role{remedy}")
        if all(message.get(key) is None for key in message if key != "role"):
            raise DataError(f"'{name}', message {number} (from 0) of the {role} is empty: it needs content")
    cleaned: list[dict[str, Any]] = _without_nulls(value)
    return cleaned


def _as_json(record: Mapping[str, Any], name: str, kind: type) -> Any:
    """An optional column, which may be JSON in a string; empty if it is missing."""
    value = record.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"'{name}' is not JSON: {error}") from error
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise DataError(f"'{name}' is {_name_kind(value)}, not {'a list' if kind is list else 'an object'}")
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | np.ndarray):
        return [_without_nulls(part) for part in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return value


def _name_kind(value: Any) -> str:
    kinds = {str: "a text", dict: "an object", list: "an empty list", type(None): "missing", bool: "true or false"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
