"""The cache of tokens: used where nothing has changed, never half made, never what it should not give."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import models

from tests.recipes.language.corpora import corpus, decoded, sentences, tokenised, word_level, write_jsonl
from unisono.recipes.language import tokenizer, tokens
from unisono.recipes.language.settings import Corpus
from unisono.recipes.language.texts import Texts
from unisono.recipes.language.tokenizer import train_tokenizer
from unisono.recipes.language.tokens import TokenStore
from unisono.runtime.errors import DataError


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "language").iterdir() if path.suffix != ".lock")


def test_the_second_time_the_cache_is_used(small: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenised(small)
    written = (first.folder / "manifest.json").stat().st_mtime_ns
    monkeypatch.setattr(tokens.prepare, "prepare", lambda *_, **__: pytest.fail("tokenised again"))
    monkeypatch.setattr(tokenizer, "_train", lambda *_: pytest.fail("trained again"))
    second = tokenised(small)
    assert second.folder == first.folder
    assert (second.folder / "manifest.json").stat().st_mtime_ns == written


def _grow(config: Corpus) -> None:
    with (_folder(config) / "a.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')


def _touch(config: Corpus) -> None:
    path = _folder(config) / "a.jsonl"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1000))


def _rename(config: Corpus) -> None:
    (_folder(config) / "a.jsonl").rename(_folder(config) / "b.jsonl")


def _add(config: Corpus) -> None:
    write_jsonl(_folder(config) / "b.jsonl", ["another file"])


def _folder(config: Corpus) -> Path:
    assert isinstance(config.path, str)
    return Path(config.path)


@pytest.mark.parametrize("change", [_grow, _touch, _rename, _add])
def test_changed_files_are_tokenised_again(small: Corpus, change: Any) -> None:
    before = tokenised(small).folder
    change(small)
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


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(small: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"the cache .*file cannot be used \(.*\); set data\.cache or \$UNISONO_CACHE"):
        tokenised(small.model_copy(update={"cache": tmp_path / "file"}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission_is_named_with_the_remedy(small: Corpus, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o500)
    with pytest.raises(DataError, match=r"the cache .* cannot be used \(Permission denied\)"):
        tokenised(small)


class Interruption(BaseException):
    pass


@pytest.mark.parametrize("where", ["pathlib.Path.replace", "pyarrow.ipc.new_file", "os.fsync"])
def test_an_interrupted_preparation_leaves_nothing_that_is_taken_for_finished(
    small: Corpus, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    assert small.cache is not None
    train_tokenizer({"": Texts.from_files(small.files[""])}, small.vocab_size, small.cache)

    def interrupt(*_: Any, **__: Any) -> None:
        raise Interruption

    with monkeypatch.context() as patched:
        patched.setattr(where, interrupt)
        with pytest.raises(Interruption):
            tokenised(small)
    (begun,) = entries(small.cache)
    assert not (begun / "manifest.json").exists()
    store = tokenised(small)
    assert store.folder == begun
    assert not list(begun.glob("*.writing"))
    assert decoded(store) == sentences(20)


def _die_while_writing(config: Corpus) -> None:
    pa.ipc.new_file = lambda *_: os._exit(9)
    tokenised(config)


def test_a_process_that_dies_while_preparing_keeps_nobody_waiting(small: Corpus) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_while_writing, args=(small,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    began = time.monotonic()
    assert decoded(tokenised(small)) == sentences(20)
    assert time.monotonic() - began < 10


def _prepare_together(config: Corpus, ready: Any, results: Any) -> None:
    make, train = tokens.TokenisePreparation.make, tokenizer._train
    made: list[str] = []

    def slowly(self: tokens.TokenisePreparation, first: int, last: int) -> Any:
        made.append("shard")
        time.sleep(0.5)
        return make(self, first, last)

    def train_slowly(*arguments: Any) -> Any:
        made.append("tokenizer")
        time.sleep(0.5)
        return train(*arguments)

    tokens.TokenisePreparation.make, tokenizer._train = slowly, train_slowly  # type: ignore[method-assign]
    ready.wait(60)
    store = tokenised(config)
    results.put((made, str(store.folder), store.manifest["content"]))


def test_two_processes_at_once_make_one_entry(small: Corpus) -> None:
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_prepare_together, args=(small, ready, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert small.cache is not None
    assert sorted(what for made, _, _ in found for what in made) == ["shard", "tokenizer"]
    assert {folder for _, folder, _ in found} == {str(path) for path in entries(small.cache)}
    assert len({content for _, _, content in found}) == 1


def test_a_cut_off_shard_is_refused_and_what_the_error_says_helps(small: Corpus) -> None:
    path = tokenised(small).folder / "shard-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"{path} is damaged .*; remove this file and prepare the data again"):
        tokenised(small)
    path.unlink()
    assert decoded(tokenised(small)) == sentences(20)


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


def test_half_a_character_is_refused_before_the_tokenizer_sees_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .* unpaired surrogate"):
        tokenised(corpus(tmp_path))
