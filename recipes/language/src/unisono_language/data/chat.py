"""Conversations as token ids: what a chat template makes of them, and which of the tokens the loss counts.

A token that is context only is stored as its complement, `~id`, which is negative. So a conversation is one array, as a
document is, and is cut, packed and hashed like one.

Which tokens are the assistant's is known from the template: it marks them (`{% generation %}`), or the text up to each
of the assistant's turns is a beginning of the whole text. Where neither holds, nobody could tell, and the conversation
is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError
from unisono.recipe_tools import call_bounded, safe_paths
from unisono_language.data.tokenizer import BESIDE, FILE, Tokenizer, read_engine

TEMPLATE_FILE, ASSET = "chat_template.jinja", "chat.json"
_MORE_TEMPLATES = "additional_chat_templates"  # a folder of the library
IGNORED = -100  # a target that the loss does not count
Message = Mapping[str, Any]
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ALL_MARKERS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_OWN_TEMPLATE = "give a template that marks them in data.chat_template=FILE"


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Attributes:
        messages: with `role` and `content`; or a text.
        prompt: how many of the messages, or which text before, are the prompt; None where nothing says so.
        tools: JSON schemas of the functions that the assistant may call.
        settings: what else the template reads, e.g. `enable_thinking`.
    """

    messages: Sequence[Message] | str
    prompt: int | str | None = None
    tools: Sequence[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatTemplate:
    """How conversations become tokens.

    Attributes:
        source: the template, in Jinja; empty if there is none, and only texts can be read.
        source_with_tools: of conversations that have tools.
        special: special tokens by name, which templates read.
        settings: what else the template reads, in every conversation.
        loss_on: the tokens that the loss counts: `assistant`, `completion` or `all`.
    """

    source: str
    source_with_tools: str
    special: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    loss_on: str = "assistant"

    @classmethod
    def from_tokenizer(
        cls, path: Path, template: Path | None, settings: Mapping[str, Any], loss_on: str
    ) -> ChatTemplate:
        """The template of a tokenizer's directory, or one in a file.

        Raises:
            DataError: if one of them cannot be read.
        """
        folder = path if path.is_dir() else path.parent
        sources, special = ["", ""], {}
        if any(os.path.lexists(folder / name) for name in ("tokenizer_config.json", TEMPLATE_FILE)):
            try:
                tokenizer = _read_tokenizer(folder)
                named = tokenizer.special_tokens_map
                special = {name: token for name, token in named.items() if isinstance(token, str)}
                if tokenizer.chat_template:
                    sources = [tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])]
            except Exception as error:  # the library raises many kinds
                raise DataError(f"the chat template of {folder} cannot be read: {error}") from error
        if template is not None:
            try:
                sources = [safe_paths.read_regular(template).decode()] * 2
            except (OSError, ValueError) as error:
                raise DataError(f"data.chat_template={template} cannot be read: {error}") from error
        return cls(sources[0], sources[1], special, dict(settings), loss_on)

    @classmethod
    def from_json(cls, values: Any, where: object) -> ChatTemplate:
        """Read what `describe` returned, from a file that need not be trusted; templates run in a sandbox."""
        try:
            source, with_tools, loss_on = (values[name] for name in ("source", "source_with_tools", "loss_on"))
            special, settings = dict(values["special"]), dict(values["settings"])
            if not all(isinstance(text, str) for text in (source, with_tools, loss_on, *special.values())):
                raise TypeError("a template that is not text")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: the chat template cannot be read ({error}); copy it again from its origin"
            ) from error
        return cls(source, with_tools, special, settings, loss_on)

    @property
    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @cached_property
    def marks(self) -> bool:
        """Whether the template itself marks the assistant's tokens."""
        return _MARKERS.search(self.source) is not None

    def encode(self, conversation: Conversation, tokenizer: Tokenizer) -> NDArray[np.int32]:
        """The tokens of a conversation, (tokens,); the complement of those that the loss does not count.

        Raises:
            DataError: where they cannot be told apart, or none is left to count; without naming the conversation.
        """
        engine = read_engine(tokenizer.path)
        if isinstance(conversation.messages, str):
            ids, counted = self._encode_text(conversation, tokenizer, engine)
        else:
            ids, counted = self._encode_messages(conversation, conversation.messages, engine)
        if not counted[1:].any():
            what = "message of the assistant" if self.loss_on == "assistant" else "completion"
            raise DataError(f"it has no {what}, so there is nothing that the loss could count; remove it")
        return np.where(counted, ids, ~ids)

    def encode_prompt(
        self, messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Any] | None = None
    ) -> list[int]:
        """The tokens after which the assistant answers."""
        text, _ = self._render(messages, Conversation(messages, tools=tools), ask=True)
        return list(read_engine(tokenizer.path).encode(text, add_special_tokens=False).ids)

    def encode_text_prompt(self, prompt: str, tokenizer: Tokenizer) -> list[int]:
        """The tokens of a prompt that is a text, as of one with a completion in training."""
        return list(read_engine(tokenizer.path).encode(prompt).ids)

    def find_end(self, tokenizer: Tokenizer) -> int | None:
        """The token with which the assistant ends a turn; None where the template has none."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        engine = read_engine(tokenizer.path)
        try:
            before, _ = self._render(messages[:1], Conversation(messages), ask=True)
            whole, _ = self._render(messages, Conversation(messages))
        except DataError:
            return None
        special = {number for number, token in engine.get_added_tokens_decoder().items() if token.special}
        turn = engine.encode(whole[len(before) :], add_special_tokens=False).ids if whole.startswith(before) else []
        return next((token for token in turn if token in special), None)

    def _encode_text(
        self, conversation: Conversation, tokenizer: Tokenizer, engine: Any
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A prompt and its completion that are texts; the completion ends with the end token."""
        end = "" if tokenizer.last is None else engine.id_to_token(tokenizer.last)
        prompt = str(conversation.prompt)
        whole = prompt + str(conversation.messages)
        ids = np.asarray(engine.encode(whole if whole.endswith(end) else whole + end).ids, dtype=np.int32)
        counted = np.ones(len(ids), dtype=bool)
        if self.loss_on != "all":
            counted[: _common_length(engine.encode(prompt).ids, ids)] = False
        return ids, counted

    def _encode_messages(
        self, conversation: Conversation, messages: Sequence[Message], engine: Any
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        text, ranges = self._render(messages, conversation)
        encoding = engine.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int32)
        counted = np.ones(len(ids), dtype=bool)
        if self.loss_on == "assistant":
            if not self.marks:
                ranges = self._find_turns(text, messages, conversation)
            counted = _tokens_in(ranges, encoding)
        if self.loss_on == "completion" or (self.loss_on == "assistant" and conversation.prompt is not None):
            if conversation.prompt is None:
                raise DataError(
                    "it has messages, but no prompt and completion, as data.loss_on=completion needs; "
                    "set data.loss_on=assistant"
                )
            assert isinstance(conversation.prompt, int)
            prompt, _ = self._render(messages[: conversation.prompt], conversation, ask=True)
            if not text.startswith(prompt):
                raise DataError(_describe_instability(prompt, text, "its prompt"))
            counted[: _common_length(engine.encode(prompt, add_special_tokens=False).ids, ids)] = False
        return ids, counted

    def _find_turns(self, text: str, messages: Sequence[Message], conversation: Conversation) -> list[tuple[int, int]]:
        """Where the assistant's turns are in the whole text, of a template that does not mark them."""
        turns = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise DataError(
                    "its first message is the assistant's, and the chat template does not mark where that begins "
                    f"({{% generation %}}); {_OWN_TEMPLATE}, or remove the message"
                )
            before, _ = self._render(messages[:number], conversation, ask=True)
            through = text if number + 1 == len(messages) else self._render(messages[: number + 1], conversation)[0]
            for part, whole in ((before, through), (through, text)):
                if not whole.startswith(part):
                    raise DataError(_describe_instability(part, whole, f"message {number} (from 0) of the assistant"))
            turns.append((len(before), len(through)))
        return turns

    def _render(
        self, messages: Sequence[Message], conversation: Conversation, ask: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and the ranges of characters that the template marks as the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        from unisono_language.data.sandbox import use_bounded_sandbox

        source = self.source_with_tools if conversation.tools else self.source
        if not source:
            raise DataError(
                "its messages need a chat template, which this tokenizer does not have; give one in "
                "data.chat_template=FILE"
            )
        # A string that is called fails, where a function would write the day of tokenising into the text.
        dated = {"strftime_now": "the day"} if "strftime_now" in source and not ask else {}
        known = {**self.special, **dated, **self.settings, **conversation.settings}
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        _check_source(source)
        use_bounded_sandbox()

        def render() -> tuple[list[str], list[list[tuple[int, int]]]]:
            found: tuple[list[str], list[list[tuple[int, int]]]] = render_jinja_template(
                conversations=[plain],
                tools=list(conversation.tools) if conversation.tools else None,
                chat_template=source,
                return_assistant_tokens_mask=self.marks,
                add_generation_prompt=ask,
                **known,
            )
            return found

        try:
            rendered, ranges = call_bounded(render, "it: the chat template")
        except DataError:
            raise
        except Exception as error:  # templates raise many kinds
            if dated and "not callable" in str(error):
                raise DataError(
                    "the chat template writes today's date, so its tokens would depend on the day; set the variable "
                    'that it reads, e.g. data.template_settings.date_string="26 Jul 2024"'
                ) from error
            raise DataError(f"the chat template refuses it: {error}") from error
        return rendered[0], ranges[0] if ranges else []


def _read_tokenizer(folder: Path) -> Any:
    """The library's tokenizer of a folder that may be anybody's, of which it sees only what the door lets through."""
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory(prefix="unisono-tokenizer-") as clean:
        (Path(clean) / _MORE_TEMPLATES).mkdir()
        more = sorted(path.name for path in (folder / _MORE_TEMPLATES).glob("*.jinja"))
        for name in (FILE, *BESIDE, *(f"{_MORE_TEMPLATES}/{name}" for name in more)):
            if os.path.lexists(folder / name):
                limit = safe_paths.WHOLE if name == FILE else safe_paths.TEXT
                safe_paths.copy_inside(folder, name, Path(clean) / name, limit)
        return PreTrainedTokenizerFast.from_pretrained(clean, local_files_only=True)


@lru_cache(maxsize=16)
def _check_source(source: str) -> None:
    """Refuse a template that draws random numbers, or has numbers of millions (others are computed).

    Raises:
        DataError: with the reason.
    """
    import jinja2

    from unisono_language.data.sandbox import LARGEST

    plain = _ALL_MARKERS.sub("", source)  # which are the library's own
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except (jinja2.TemplateError, RecursionError, MemoryError):
        return  # the library says what is wrong with it
    if any(name.name == "lipsum" for name in tree.find_all(jinja2.nodes.Name)) or any(
        used.name == "random" for used in tree.find_all(jinja2.nodes.Filter)
    ):
        raise DataError("the chat template draws random numbers, so its tokens are not reproducible")
    constants = [constant.value for constant in tree.find_all(jinja2.nodes.Const)]
    large = any(abs(value) > LARGEST for value in constants if isinstance(value, int | float))
    if large or next(tree.find_all(jinja2.nodes.Pow), None) is not None:
        raise DataError("the chat template has powers, or numbers of millions, which no template needs")


def check_template(template: ChatTemplate, tokenizer: Tokenizer, where: object) -> None:
    """Refuse a template that cannot read the simplest conversation.

    Raises:
        ConfigError: with the reason.
    """
    if not template.source:
        return
    asked = [{"role": "user", "content": "Hello"}]
    try:
        template.encode_prompt(asked, tokenizer)
    except DataError as error:
        raise ConfigError(f"the chat template of {where} cannot be used: {error}") from error


def _tokens_in(ranges: Sequence[tuple[int, int]], encoding: Any) -> NDArray[np.bool_]:
    """The tokens that these ranges of characters touch, (tokens,)."""
    counted = np.zeros(len(encoding.ids), dtype=bool)
    for begin, end in ranges:
        there = (encoding.char_to_token(place) for place in range(begin, end))  # blanks may have no token
        first = next((token for token in there if token is not None), None)
        there = (encoding.char_to_token(place) for place in range(end - 1, begin - 1, -1))
        last = next((token for token in there if token is not None), None)
        if first is not None and last is not None:
            counted[first : last + 1] = True
    return counted


def _common_length(some: Sequence[int], others: Sequence[int] | NDArray[np.int32]) -> int:
    """Leading tokens that both have in common."""
    for number, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return number
    return min(len(some), len(others))


def _describe_instability(part: str, whole: str, what: str) -> str:
    """Why a text that should be a beginning of another is none."""
    place = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    return (
        f"the chat template writes what comes before {what} differently once the conversation continues "
        f"({part[place : place + 24]!r} becomes {whole[place : place + 24]!r}), so nobody can tell which tokens are "
        f"the assistant's ({{% generation %}} would mark them); {_OWN_TEMPLATE}"
    )
