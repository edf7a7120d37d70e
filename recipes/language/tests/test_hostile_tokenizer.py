"""A tokenizer of somebody else's may be anything: it ends in a sentence, also where the library panics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from unisono import DataError
from unisono.recipe_tools import safe_paths
from unisono_language.data import tokenizer as module
from unisono_language.data.chat import ChatTemplate
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
