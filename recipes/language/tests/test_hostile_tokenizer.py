"""A tokenizer of somebody else's may be anything: it ends in a sentence, also where the library panics."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from unisono import DataError
from unisono.recipe_tools import safe_paths
from unisono_language.data import chat
from unisono_language.data import tokenizer as module
from unisono_language.data.chat import ChatTemplate, Conversation
from unisono_language.data.tokenizer import Tokenizer, load_tokenizer

HONEST: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2}, "unk_token": "<unk>"},
}  # fmt: skip


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_in_the_folder_of_a_model_is_not_followed(tmp_path: Path, name: str) -> None:
    """What is beside a tokenizer becomes an asset of the run, and an export publishes it."""
    folder = write(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("{}")
    (tmp_path / "private").write_text("{}" if name == "tokenizer_config.json" else json.dumps(HONEST))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../private")
    with pytest.raises((DataError, safe_paths.UnsafePathError), match="is a link"):
        load_tokenizer(folder)
        ChatTemplate.from_tokenizer(folder, None, {}, "all")


class Panic(BaseException):
    """As pyo3's, which is no `Exception`."""


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({**HONEST, **changes}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}},
        {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"added_tokens": [{"id": 2**40, "content": "x"}]},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
)
def test_a_hostile_tokenizer_is_a_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"cannot be read as a tokenizer|cannot tokenise"):
        load_tokenizer(write(tmp_path / "t", **changes)).encode(["a \u0000 b", "\U0001f600"])


@pytest.mark.parametrize("call", ["from_file", "encode_batch_fast", "decode"])
def test_a_panic_of_the_library_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    folder = write(tmp_path / "t")
    found = load_tokenizer(folder)
    module._load.cache_clear()

    class Engine:
        model = None
        no_truncation = no_padding = staticmethod(lambda: None)
        get_vocab = staticmethod(lambda **_: {})

        @staticmethod
        def from_file(path: str) -> Any:
            return panic() if call == "from_file" else Engine()

        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            panic()

        def decode(self, *_: Any, **__: Any) -> Any:
            panic()

    def panic() -> Any:
        raise Panic("index out of bounds: the len is 1 but the index is 5\x1b[2J")

    monkeypatch.setattr(tokenizers, "Tokenizer", Engine)
    with pytest.raises(DataError, match=r"index out of bounds.*\\x1b\[2J"):
        _ = found.encode(["a"]), found.decode([0])
    module._load.cache_clear()


@pytest.mark.parametrize("special", ['{"first": "a", "last": 1}', '{"first": 1}', "[]", '{"first": 1, "last": [2]}'])
def test_special_tokens_that_are_no_numbers_are_a_sentence(tmp_path: Path, special: str) -> None:
    folder = write(tmp_path / "t")
    (folder / "special_tokens.json").write_text(special)
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load(folder)


# A table of SentencePiece's normaliser: the length of its index, the index, and texts that end with a zero.
LONG_TEXTS = b64encode((16).to_bytes(4, "little") + bytes(16) + b"x" * 1000 + b"\0y").decode()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 1000}}, "makes up to 1000 characters of one"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}] * 6}},
            r"makes up to 900 characters of one .*\(from 0\): 4, 5; shorten",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "B" * 30},
                {"type": "Sequence", "normalizers": [{"type": "Lowercase"},
                    {"type": "Replace", "pattern": {"String": "b"}, "content": "c" * 30}]}]}},
            r"makes up to 900 characters of one .*: 0, 2; shorten",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 30},
                {"type": "Replace", "pattern": {"String": "bb"}, "content": "c"},
                {"type": "Replace", "pattern": {"Regex": "[c]"}, "content": "d" * 30}]}},
            r"makes up to 900 characters of one",
        ),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 2**32 - 1}, "unk_token": "a"}}, "id 4294967295"),
        (
            {"decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}] * 4}},
            r"makes up to 900 characters of one by rules of its decoder \(from 0\): 2, 3; shorten",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG_TEXTS}},
            r"makes up to 1000 characters of one by .* normalizer \(from 0\): 0; shorten",
        ),
        (
            {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 1025, 0.0]]}},
            r"has a piece of 1025 characters in its vocabulary, more than 1024, .*: 'a{40}'…",
        ),
    ],
    ids=[
        "long prefix", "thirty of one, six times", "in lower case", "by a pattern", "id", "decoder",
        "table of SentencePiece", "long piece",
    ],
)  # fmt: skip
def test_a_tokenizer_that_takes_memory_or_hours_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """A text of 2,000 letters became gigabytes, and a table of 4 billion ids took 32 GiB."""
    with pytest.raises(DataError, match=told):
        _ = load_tokenizer(write(tmp_path / "t", **changes)).token_bytes


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "holes", "link"])
def test_what_lies_beside_a_tokenizer_is_read_only_as_a_file_of_its_size(tmp_path: Path, name: str, kind: str) -> None:
    """A file of 5 GB of holes was copied, for minutes; a pipe was passed over in silence, and with it the settings."""
    folder = write(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("{}")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.touch()
        os.truncate(path, 5 << 30)
    with pytest.raises(DataError, match={"pipe": "a pipe", "holes": "has 5368709120 bytes", "link": "a link"}[kind]):
        ChatTemplate.from_tokenizer(folder, None, {}, "assistant")
    if name == "tokenizer_config.json":
        with pytest.raises(DataError, match="does not have the settings of a tokenizer"):
            load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "vocab.txt", "merges.txt", "vocab.json"])
def test_other_formats_of_tokenizers_are_not_opened(tmp_path: Path, name: str) -> None:
    """Models of SentencePiece among them: only tokenizer.json and what is beside it is read."""
    folder = write(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    os.mkfifo(folder / name)
    assert load_tokenizer(folder).size == 3
    assert ChatTemplate.from_tokenizer(folder, None, {}, "assistant").source == ""


def test_what_tokenizers_of_sentencepiece_write_is_allowed(tmp_path: Path) -> None:
    steps = [{"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]
    assert load_tokenizer(write(tmp_path / "t", normalizer={"type": "Sequence", "normalizers": steps})).size == 3


def test_many_rules_for_different_characters_are_allowed(tmp_path: Path) -> None:
    """Their lengths were multiplied, so seven made 972 characters of one."""
    signs = {
        "\u2026": "...",
        "\u00bd": "1/2",
        "\u00bc": "1/4",
        "\u2122": "(tm)",
        "\u00a9": "(c)",
        "\u2014": "--",
        "\u20ac": "EUR",
    }
    steps = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in signs.items()]
    assert load_tokenizer(write(tmp_path / "t", normalizer={"type": "Sequence", "normalizers": steps})).size == 3


def test_a_special_token_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    with pytest.raises(DataError, match="cannot have the special token"):
        load_tokenizer(folder)


HONEST_TEMPLATE = "{% for m in messages %}{{ m.role }} {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "s of processor time"),
        ("{{ ('a' * 5000000000) | length }}", "numbers of millions"),
        ("{{ 'a' | center(4000000000) }}", "numbers of millions"),
        ("{{ '%1000000000d' | format(1) }}", "numbers of millions"),
        ("{{ ('a' * (100000 * 100000)) | length }}", "numbers of millions"),
        ("{{ ('a' * ('9' * 10) | int) | length }}", "numbers of millions"),
        ("{% set n = 999999 %}{{ ([0, 1] * n) | length }}", "numbers of millions"),
        ("{{ 'a' | center(999999 + 999999) }}", "numbers of millions"),
        ("{{ 'a' | center(('9' * 10) | int) }}", "numbers of millions"),
        ("{{ 'a'.ljust(('9' * 10) | int) }}", "numbers of millions"),
        ("{{ ('%' ~ '9' * 10 ~ 'd') | format(1) }}", "numbers of millions"),
        ("{{ '%*d' % (('9' * 10) | int, 1) }}", "numbers of millions"),
        ("{{ '{:{}}'.format(1, ('9' * 10) | int) }}", "numbers of millions"),
        ("{{ (10 ** 10000000) | string }}", "powers"),
        ("{{ [1, 2] | random }}", "draws random numbers"),
        ("{{ lipsum(n=100000) }}", "draws random numbers"),
    ],
)  # fmt: skip
def test_a_template_that_takes_time_memory_or_chance_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, told: str
) -> None:
    """It comes with a model, and ran for hours, took gigabytes, or made other tokens every time."""
    monkeypatch.setattr(chat, "call_bounded", partial(chat.call_bounded, seconds=0.1))
    tokenizer = load_tokenizer(write(tmp_path / "t", pre_tokenizer={"type": "WhitespaceSplit"}))
    talk = Conversation([{"role": "a", "content": "b"}, {"role": "assistant", "content": "a"}])
    honest = ChatTemplate(HONEST_TEMPLATE, "", {}, {}, "assistant")
    assert honest.encode(talk, tokenizer).size
    with pytest.raises(DataError, match=told):
        ChatTemplate(template + HONEST_TEMPLATE, "", {}, {}, "assistant").encode(talk, tokenizer)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Updated:20240726, {'id':1234567}, 100 % 1000000 ", None),
        ("{{ 'Updated:20240726' }}", "Updated:20240726"),
        ("{{ ' ' * (2 * 3) }}|{{ 1 + 2 }}|{{ 'a' + 'b' }}", "      |3|ab"),
        ("{{ '%05.1f%%' | format(99.5) }}|{{ '%s' % 'x' }}|{{ '{:>4}'.format(7) }}", "099.5%|x|   7"),
        ("{{ ('a\nb') | indent(2) }}|{{ 'a' | center(3) }}|{{ [1, 2, 3] | batch(2) | list }}", None),
    ],
)
def test_a_template_that_writes_dates_and_widths_is_used(template: str, text: str | None) -> None:
    made, _ = ChatTemplate(template, "", {}, {}, "all")._render([], Conversation([]))
    assert made and (text is None or made == text)
