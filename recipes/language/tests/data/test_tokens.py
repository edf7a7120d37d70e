"""Documents as tokens: nothing is lost, nothing is repeated, and the cache never gives what it should not."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import models

from packages.unisono.tests.real_data import real
from recipes.language.tests.corpora import (
    DIFFICULT,
    corpus,
    decoded,
    sentences,
    store_of,
    tokenised,
    word_level,
    write_jsonl,
)
from unisono.data.holding_out import hold_out
from unisono.data.prepare import Windows, shards
from unisono.data.prepare.manifest import build_manifest
from unisono.data.prepare.shards import Shards, ShardWriter
from unisono.runtime.errors import DataError
from unisono_language.data import tokenizer, tokens
from unisono_language.data.tokens import TokenStore
from unisono_language.settings import Corpus, EmbeddedDocuments


def with_token(folder: Path, document: int, token: int, dtype: str) -> None:
    """Write a store once more with another second token of one document; sizes and hashes fit, as if it were meant."""
    old = Shards(folder)
    rows = [old[number].astype(np.int64) for number in range(len(old))]
    rows[document][1] = token
    (entry,) = old.manifest["shards"]
    with ShardWriter(folder / entry["file"], old.manifest["column"], dtype) as writer:
        writer.add(np.concatenate(rows), np.array([len(row) for row in rows]))
        made = {**entry, **writer.close()}
    manifest = build_manifest(old.manifest["column"], dtype, old.manifest["of"], [made])
    (folder / "manifest.json").write_text(json.dumps(manifest))


# there and back ---------------------------------------------------------------------------------------------------


def test_decoding_gives_the_documents_back(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", DIFFICULT)
    assert decoded(tokenised(corpus(tmp_path / "corpus"))) == DIFFICULT


def test_decoding_gives_the_documents_back_with_the_tokenizer_of_gpt2(tmp_path: Path) -> None:
    given = tokenizer.load_tokenizer(real("tiny_models/gpt2_tokenizer"))
    write_jsonl(tmp_path / "corpus" / "a.jsonl", DIFFICULT)
    store = tokenised(corpus(tmp_path / "corpus"), given)
    assert decoded(store) == DIFFICULT
    assert store.tokenizer.size == 50257
    assert store.tokenizer.first == store.tokenizer.last == 50256


def test_null_and_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one", None, "", "two", ""])
    pq.write_table(pa.table({"text": ["three", None, ""]}), tmp_path / "b.parquet")
    store = tokenised(corpus(tmp_path))
    assert decoded(store) == ["one", "two", "three"]
    assert (store.manifest["rows"], store.manifest["left_out"]) == (3, 5)


def test_more_documents_than_one_call_of_the_tokenizer_takes_keep_their_order(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(3 * tokenizer._BATCH + 1)]
    write_jsonl(tmp_path / "a.jsonl", texts[:500])
    write_jsonl(tmp_path / "b.jsonl", texts[500:])
    assert decoded(tokenised(corpus(tmp_path))) == texts


def test_the_embedded_corpus_is_the_standard_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from unisono_language.data import texts as documents

    found = documents.standard_library()
    few = documents.sources.Found(tuple(file for file in found.files if file.name.startswith("json/")))
    monkeypatch.setattr(documents, "standard_library", lambda: few)
    store = tokenised(EmbeddedDocuments(kind="embedded", vocab_size=300, cache=tmp_path))
    assert decoded(store) == [Path(file.path).read_text(encoding="utf-8") for file in few.files]


def test_a_trained_tokenizer_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(sentences(300)))
    (tmp_path / "b.txt").write_text("more")
    for size in (257, 320):
        assert tokenised(corpus(tmp_path, vocab_size=size)).tokenizer.size == size


def test_a_corpus_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="the 1 records produced no rows: 1 were left out as empty"):
        tokenised(corpus(tmp_path / "empty.txt"))
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["known", "unknown"])
    Engine(models.BPE({"x": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"the 2 records produced no rows: 0 .* that the tokenizer can encode\?"):
        tokenised(corpus(tmp_path / "corpus"), tokenizer.load_tokenizer(tmp_path))
    given = tokenizer.load_tokenizer(word_level(tmp_path / "words", {"known": 0}))
    with pytest.raises(DataError, match=r"tokenizer\.json cannot tokenise the documents: .*Missing \[UNK\]"):
        tokenised(corpus(tmp_path / "corpus"), given)


# ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_ids_take_two_bytes_up_to_65536_tokens_and_four_above(tmp_path: Path, size: int, dtype: str) -> None:
    given = tokenizer.load_tokenizer(word_level(tmp_path / "tokenizer", {f"w{i}": i for i in range(size)}))
    assert given.size == size
    write_jsonl(tmp_path / "corpus" / "a.jsonl", [f"w{size - 1} w0 w{size - 1}", "w1 w65535"])
    store = tokenised(corpus(tmp_path / "corpus"), given)
    assert store.manifest["dtype"] == dtype
    assert store.shards[0].dtype == np.dtype(dtype)
    assert store.shards[0].nbytes == 3 * int(dtype[-1])
    assert store.slice(0, 0, 9).tolist() == [size - 1, 0, size - 1]
    assert store.slice(1, 0, 9).tolist() == [1, 65535]


def test_ids_with_gaps_count_by_the_largest_and_without_special_tokens_documents_stay_bare(tmp_path: Path) -> None:
    given = tokenizer.load_tokenizer(word_level(tmp_path / "tokenizer", {"a": 0, "b": 70_000}))
    assert (given.size, given.first, given.last) == (70_001, None, None)
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["a b a", "b"])
    store = tokenised(corpus(tmp_path / "corpus"), given)
    assert store.slice(0, 0, 9).tolist() == [0, 70_000, 0]
    assert (store.tokenizer.size, store.lengths.tolist()) == (70_001, [3, 1])


def test_truncation_and_padding_of_a_tokenizer_file_are_not_obeyed(tmp_path: Path) -> None:
    folder = word_level(tmp_path / "tokenizer", {"a": 0, "b": 1})
    engine = Engine.from_file(str(folder / "tokenizer.json"))
    engine.enable_truncation(2)
    engine.enable_padding(length=5)
    engine.save(str(folder / "tokenizer.json"))
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["a b a b a b a", "b"])
    store = tokenised(corpus(tmp_path / "corpus"), tokenizer.load_tokenizer(folder))
    assert store.lengths.tolist() == [7, 1]


# tokenizers -------------------------------------------------------------------------------------------------------

WORDS = {"<s>": 0, "</s>": 1, "<|endoftext|>": 2, "a": 3}


@pytest.mark.parametrize(
    ("beside", "first", "last"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, 0, 1),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": {"content": "</s>"}}, 0, 1),
        ({"bos_token": None, "eos_token": "</s>"}, 1, 1),
        ({"bos_token": "<s>"}, 0, 2),
        ({}, 2, 2),
        ({"bos_token": "<unheard of>", "eos_token": "</s>"}, 1, 1),
    ],
    ids=["text", "dictionaries", "no bos", "no eos", "no file", "unknown bos"],
)
def test_the_special_tokens_are_found(tmp_path: Path, beside: dict[str, Any], first: int, last: int) -> None:
    folder = word_level(tmp_path / "tokenizer", WORDS, **beside)
    for path in (folder, folder / "tokenizer.json"):
        given = tokenizer.load_tokenizer(path)
        assert (given.first, given.last, given.size) == (first, last, 4)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("README.md", "", r"no tokenizer at .*: give a directory with tokenizer\.json, or that file"),
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read as a tokenizer"),
        ("tokenizer.json", "{}", r"tokenizer\.json cannot be read as a tokenizer"),
        ("tokenizer.json", "[1]", r"tokenizer\.json cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json does not have the settings of a tokenizer: Expecting"),
        (
            "tokenizer_config.json",
            "[1]",
            r"tokenizer_config\.json does not have the settings of a tokenizer: Input should be a valid dict",
        ),
    ],
)
def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path, name: str, content: str, told: str) -> None:
    folder = word_level(tmp_path / "tokenizer", WORDS)
    if name == "README.md":
        (folder / "tokenizer.json").unlink()
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=told):
        tokenizer.load_tokenizer(folder)


# rows -------------------------------------------------------------------------------------------------------------


@st.composite
def _cut(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    chosen = sorted(draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    return lengths, chosen, draw(st.integers(2, 45))


@settings(max_examples=60, deadline=None)
@given(_cut())
def test_every_target_occurs_once_in_rows_that_cross_no_document_and_are_full_but_for_the_last(
    cut: tuple[list[int], list[int], int],
) -> None:
    lengths, chosen, sequence = cut
    with tempfile.TemporaryDirectory() as folder:
        rows = Windows(store_of(Path(folder), lengths), np.asarray(chosen), sequence, overlap=1)
        cut_up = [rows[number] for number in range(len(rows))]
    begins = np.cumsum([0, *lengths])
    wanted = [token for document in chosen for token in range(begins[document] + 1, begins[document + 1])]
    assert [int(token) for row in cut_up for token in row[1:]] == wanted
    assert rows.lengths.tolist() == [len(row) - 1 for row in cut_up]
    for row in cut_up:
        document = int(np.searchsorted(begins, row[0], side="right")) - 1
        assert document in chosen
        assert np.array_equal(row, np.arange(row[0], row[0] + len(row)))
        assert 2 <= len(row) <= sequence + 1
        assert row[-1] < begins[document + 1]
        assert len(row) == sequence + 1 or row[-1] == begins[document + 1] - 1


def test_neighbouring_rows_of_a_document_overlap_by_one_token(tmp_path: Path) -> None:
    rows = Windows(store_of(tmp_path, [3, 8, 2]), np.array([1, 2]), size=3, overlap=1)
    assert [rows[number].tolist() for number in range(len(rows))] == [[3, 4, 5, 6], [6, 7, 8, 9], [9, 10], [11, 12]]
    for row in (-1, 4):
        with pytest.raises(IndexError, match=f"row {row} of 4"):
            rows[row]


def test_documents_without_a_target_make_no_rows(tmp_path: Path) -> None:
    rows = Windows(store_of(tmp_path, [1, 0, 1]), np.array([0, 1, 2]), size=3, overlap=1)
    assert (len(rows), rows.lengths.sum()) == (0, 0)
    whole = Windows(store_of(tmp_path / "some", [5, 1, 17, 0]), np.arange(4), None, overlap=1)
    assert whole.lengths.tolist() == [len(whole[row]) - 1 for row in range(len(whole))] == [4, 16]


# held out ---------------------------------------------------------------------------------------------------------


def test_the_unigram_entropy_is_that_of_a_direct_computation(small: Corpus) -> None:
    store = tokenised(small)
    mask = hold_out(len(store), 0.2)
    training, held = np.flatnonzero(~mask), np.flatnonzero(mask)

    def targets(documents: Any) -> list[int]:
        return [int(t) for d in documents for t in store.slice(int(d), 0, int(store.lengths[d]))[1:]]

    seen, size = Counter(targets(training)), store.tokenizer.size
    total = sum(seen.values()) + size  # one is added to every count
    nats = [-math.log((seen[token] + 1) / total) for token in targets(held)]
    assert len(nats) > 100
    assert tokens.unigram_entropy(tokens.unigram_counts(store, held)) == pytest.approx(sum(nats) / len(nats), rel=1e-12)


def test_the_token_frequencies_are_those_of_the_targets(small: Corpus) -> None:
    store = tokenised(small)
    rows = Windows(store, np.arange(len(store)), 7, overlap=1)
    counted = Counter(int(token) for number in range(len(rows)) for token in rows[number][1:])
    assert store.unigram.tolist() == [counted[token] for token in range(store.tokenizer.size)]
    assert store.unigram.sum() == rows.lengths.sum()


@pytest.mark.parametrize(("dtype", "token"), [("<u2", 65535), ("<u4", 300), ("<i4", -1)])
def test_a_token_outside_of_the_vocabulary_is_told_by_its_file_and_row(small: Corpus, dtype: str, token: int) -> None:
    folder = tokenised(small).folder
    (folder / "unigram.npy").unlink(missing_ok=True)
    with_token(folder, 13, token, dtype)
    store = TokenStore(folder)
    assert store.tokenizer.size == 300
    told = (
        rf"{folder}/shard-\S+\.arrow, row 13 \(from 0\): token {token} is not in the tokenizer, whose ids are 0 to 299"
    )
    with pytest.raises(DataError, match=told):
        store.unigram  # noqa: B018
    rows = Windows(store, np.arange(len(store)), None, overlap=1)
    with pytest.raises(DataError, match=told):
        rows[13]
    assert (rows[12] < 300).all()


def test_long_work_on_tokens_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claims: counting tokens, verifying shards and merging pairs were silent, however long they took."""
    monkeypatch.setattr(shards, "_PATIENCE", 0.0)
    monkeypatch.setattr(tokens, "_PATIENCE", 0.0)
    phases: list[str] = []
    monkeypatch.setattr(tokenizer, "preparing", lambda what: phases.append(what) or nullcontext())
    write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(40))
    store = tokenised(corpus(tmp_path / "corpus", cache=tmp_path / "cache"))
    assert phases == ["merging pairs for 300 tokens"]
    capsys.readouterr()
    store.shards.verify()
    assert store.unigram.sum() > 0
    shown = capsys.readouterr().err
    assert f"verifying {store.folder}: 40 of 40 rows" in shown
    assert "counting tokens: 40 of 40 documents" in shown
