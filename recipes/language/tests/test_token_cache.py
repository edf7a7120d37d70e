"""The cache of tokens: used where nothing has changed, never half made, never what it should not give."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import models

from recipes.language.tests.corpora import corpus, decoded, sentences, tokenised, word_level, write_jsonl
from unisono.runtime.errors import DataError
from unisono_language.data import tokenizer, tokens
from unisono_language.data.tokens import TokenStore
from unisono_language.settings import Corpus


def test_the_second_time_the_cache_is_used(small: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenised(small)
    written = (first.folder / "manifest.json").stat().st_mtime_ns
    monkeypatch.setattr(tokens.prepare, "prepare", lambda *_, **__: pytest.fail("tokenised again"))
    monkeypatch.setattr(tokenizer, "_train", lambda *_: pytest.fail("trained again"))
    second = tokenised(small)
    assert second.folder == first.folder
    assert (second.folder / "manifest.json").stat().st_mtime_ns == written


CHANGES: dict[str, Callable[[Path], Any]] = {
    "longer": lambda path: path.write_text(path.read_text() + '{"text": "more"}\n'),
    "written anew": lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns + 1000)),
    "renamed": lambda path: path.rename(path.with_name("b.jsonl")),
    "not alone": lambda path: write_jsonl(path.with_name("b.jsonl"), ["another file"]),
}


def _folder(config: Corpus) -> Path:
    assert isinstance(config.path, str)
    return Path(config.path)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_tokenised_again(small: Corpus, change: str) -> None:
    before = tokenised(small).folder
    CHANGES[change](_folder(small) / "a.jsonl")
    assert tokenised(small).folder != before


@pytest.mark.parametrize("changed", [{"column": "body"}, {"separator": "b"}, {"vocab_size": 301}])
def test_another_way_of_reading_is_another_entry(tmp_path: Path, changed: dict[str, Any]) -> None:
    table = pa.table({"text": sentences(9), "body": sentences(9, seed=4)})
    (tmp_path / "corpus").mkdir()
    pq.write_table(table, tmp_path / "corpus" / "a.parquet")
    config = corpus(tmp_path / "corpus", cache=tmp_path / "cache")
    folders = [tokenised(c).folder for c in (config, config.model_copy(update=changed), config)]
    assert folders[0] == folders[2] != folders[1]


def test_another_tokenizer_is_another_entry(small: Corpus, tmp_path: Path) -> None:
    ends = {"eos_token": "<s>"}
    words = {"<s>": 0, "a": 1}
    kinds = [
        None,
        word_level(tmp_path / "1", words),
        word_level(tmp_path / "2", words, **ends),
        word_level(tmp_path / "3", {**words, "b": 2}, **ends),
    ]
    (_folder(small) / "a.jsonl").write_text('{"text": "a a"}\n' * 4)
    given = [kind and tokenizer.load_tokenizer(kind) for kind in kinds]
    assert len({tokenised(small, one).folder for one in given}) == 4


def test_a_tokenizer_of_the_same_content_elsewhere_is_the_same(small: Corpus, tmp_path: Path) -> None:
    here = word_level(tmp_path / "1", {"a": 0, "b": 1, "c": 2}, eos_token="a")
    (_folder(small) / "a.jsonl").write_text('{"text": "a b"}\n' * 4)
    there = Path(shutil.copytree(here, tmp_path / "moved"))
    assert len({tokenised(small, tokenizer.load_tokenizer(path)).folder for path in (here, there)}) == 1


def test_the_cache_is_where_the_config_or_the_environment_says(
    small: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "environment"))
    assert tokenised(small).folder.parent == tmp_path / "cache" / "language"
    no_cache = small.model_copy(update={"cache": None})
    assert tokenised(no_cache).folder.parent == tmp_path / "environment" / "language"


def test_a_tokenizer_that_was_exchanged_is_refused(small: Corpus, tmp_path: Path) -> None:
    folder = tokenised(small).folder
    other = word_level(tmp_path / "other", {"a": 0, "b": 1})
    shutil.copy(other / "tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(DataError, match=f"{folder}: its documents were tokenised with a different tokenizer"):
        TokenStore(folder)
    (folder / "special_tokens.json").unlink()
    with pytest.raises(DataError, match=r"its tokenizer \(tokenizer\.json, special_tokens\.json\) cannot be read"):
        TokenStore(folder)


def test_a_tokenizer_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    Engine(models.BPE({"x": 0}, [], dropout=0.5)).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"draws random numbers \(model\.dropout=0\.5\).*; set its dropout to null"):
        tokenizer.load_tokenizer(tmp_path)


def test_an_entry_that_lost_its_manifest_is_made_again(small: Corpus) -> None:
    folder = tokenised(small).folder
    (folder / "manifest.json").unlink()
    assert decoded(tokenised(small)) == sentences(20)
