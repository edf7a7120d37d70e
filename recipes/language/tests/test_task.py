"""The task: rows to batches, what is counted, what is known about the data, and what a run keeps of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.unisono.tests.runs import configuration, trace
from recipes.language.tests.corpora import corpus, model, overrides, sentences, store_in, store_of, task, write_jsonl
from unisono.data.prepare import Windows
from unisono.launch import train
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import DataError, KernelError
from unisono_language.data import tokens
from unisono_language.settings import Corpus, LanguageConfig, Pretrained
from unisono_language.task import IGNORED, Language

# batches ----------------------------------------------------------------------------------------------------------


def test_rows_are_shifted_by_one_and_padded_to_the_longest_rounded_up_with_targets_that_are_ignored(
    data: Corpus,
) -> None:
    language = task(data, pad_to_multiple=4)
    batch = language.collate([np.array([7, 8]), np.arange(1, 7), np.array([5, 6, 7])])
    assert batch["inputs"].tolist() == [[7] + [0] * 7, [1, 2, 3, 4, 5, 0, 0, 0], [5, 6] + [0] * 6]
    ignored = [IGNORED] * 8
    assert batch["targets"].tolist() == [[8, *ignored[1:]], [2, 3, 4, 5, 6, *ignored[5:]], [6, 7, *ignored[2:]]]
    assert language.counts(language.collate([np.array([0, 0, 0])])) == {"next_token": 2.0}  # the padding's id counts


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(2, 70), min_size=1, max_size=6), multiple=st.integers(1, 64))
def test_a_batch_is_as_wide_as_it_must_be_and_counts_its_real_targets(lengths: list[int], multiple: int) -> None:
    language = Language(LanguageConfig(pad_to_multiple=multiple), model=model("gpt2"), data=corpus(Path()))
    batch = language.collate([np.arange(1, length + 1) for length in lengths])
    assert batch["inputs"].shape == batch["targets"].shape
    assert batch["inputs"].shape[1] % multiple == 0
    assert 0 <= batch["inputs"].shape[1] - (max(lengths) - 1) < multiple
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int64
    assert language.counts(batch) == {"next_token": float(sum(lengths) - len(lengths))}


def test_an_epoch_counts_every_target_of_the_training_documents_once(data: Corpus) -> None:
    language = task(data)
    source = language.data()
    config = configuration(train={"epochs": 1.0, "global_batch": 7})
    done = trace(ProcessInfo(), SingleProcess(), language, config)
    assert sorted(row for rows in done.rows for row in rows) == list(range(len(source)))
    documents = language.library.split[""][0]
    assert sum(step["tokens"] for step in done.metrics) == (store_in(language).lengths[documents] - 1).sum()


def test_accuracy_is_the_share_of_tokens_that_the_model_would_have_chosen(data: Corpus) -> None:
    language = task(data)
    config = configuration(train={"steps": 20, "global_batch": 16}, optim={"kind": "adamw", "lr": 1e-2})
    done = trace(ProcessInfo(), SingleProcess(), language, config)
    assert set(done.evaluation) == {"loss", "next_token", "accuracy", "bits_per_byte"}
    assert done.evaluation["loss"] == done.evaluation["next_token"]
    torch.manual_seed(0)
    found = language.build().eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            parameter.copy_(torch.from_numpy(done.parameters[name]))
        held = language.held_out()
        assert held is not None
        hits, targets, nats = 0, 0, 0.0
        for number in range(len(held)):
            row = torch.from_numpy(held[number])
            scores = found(input_ids=row[None, :-1]).logits[0].log_softmax(-1)
            hits += int((scores.argmax(-1) == row[1:]).sum())
            nats -= float(scores.gather(1, row[1:, None]).sum())
            targets += len(row) - 1
    assert 0 < hits < targets
    assert done.evaluation["accuracy"] == hits / targets
    assert done.evaluation["loss"] == pytest.approx(nats / targets, rel=1e-5)


# the data ---------------------------------------------------------------------------------------------------------


def test_rows_and_held_out_rows_share_no_document(data: Corpus) -> None:
    language = task(data)
    training, held = language.data(), language.held_out()
    assert held is not None
    assert training.lengths.sum() + held.lengths.sum() == int((store_in(language).lengths - 1).sum())
    documents, kept_apart = (set(part.tolist()) for part in language.library.split[""])
    assert len(kept_apart) == 8 and not documents & kept_apart


def test_nothing_is_held_out_where_the_fraction_is_zero(data: Corpus) -> None:
    language = task(data.model_copy(update={"held_out": 0.0}))
    assert language.held_out() is None
    assert "unigram_entropy" not in language.facts()
    assert language.data().lengths.sum() == int((store_in(language).lengths - 1).sum())


def test_the_facts_are_those_of_the_corpus(data: Corpus) -> None:
    language = task(data)
    facts, store = language.facts(), store_in(language)
    assert json.loads(json.dumps(facts)) == facts
    entropy = facts.pop("unigram_entropy")
    assert facts == {
        "files": 1,
        "documents": 40,
        "empty": 0,
        "tokens": int(store.lengths.sum()),
        "ignored": [],
        "vocabulary": 300,
    }
    assert entropy == pytest.approx(
        tokens.unigram_entropy(tokens.unigram_counts(store, language.library.split[""][1])), abs=5e-5
    )


def test_the_fingerprint_follows_the_text_and_not_where_it_lies(tmp_path: Path) -> None:
    texts = sentences(12)
    write_jsonl(tmp_path / "one" / "a.jsonl", texts)
    write_jsonl(tmp_path / "two" / "b.jsonl", texts[:5])
    write_jsonl(tmp_path / "two" / "c.jsonl", texts[5:])
    write_jsonl(tmp_path / "other" / "a.jsonl", texts[::-1])
    one, two, other = (task(corpus(tmp_path / name)).data().fingerprint for name in ("one", "two", "other"))
    assert one == two != other


def test_a_row_of_a_source_is_its_sample(tmp_path: Path) -> None:
    """Nothing is drawn at random on the way: the loader's rows are the corpus's."""
    rows = Windows(store_of(tmp_path, [5, 9]), np.arange(2), 4, overlap=1)
    language = Language(LanguageConfig(), model=model("gpt2"), data=corpus(tmp_path))
    context: Any = None
    assert [language.sample(rows[i], context).tolist() for i in range(3)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [9, 10, 11, 12, 13],
    ]


# before and after the run -----------------------------------------------------------------------------------------


def test_an_attention_that_is_not_there_is_refused_before_processes_start(data: Corpus, tmp_path: Path) -> None:
    asked = overrides(Path(str(data.path)), tmp_path, **{"layout.world_size": 2, "model.attention": "flex"})
    with pytest.raises(KernelError, match=r"model\.attention=flex cannot be used: .*set model\.attention=sdpa"):
        train.train("language", asked)
    assert not (tmp_path / "run").exists()


def test_a_pretrained_model_without_tokenizer_says_what_is_needed(tmp_path: Path, data: Corpus) -> None:
    language = Language(task(data).config, model=Pretrained(kind="pretrained", path=tmp_path), data=data)
    with pytest.raises(DataError, match=r"no tokenizer at .*: give a directory with tokenizer\.json"):
        language.check()


def test_a_run_keeps_the_tokenizer_its_ends_and_the_models_configuration(data: Corpus, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Engine
    from transformers import AutoConfig

    language = task(data, "qwen3, untied")
    language.save_assets(tmp_path)
    kept, mine = Engine.from_file(str(tmp_path / "tokenizer.json")), Engine.from_file(str(language.tokenizer.path))
    assert kept.get_vocab() == mine.get_vocab()
    assert json.loads((tmp_path / "special_tokens.json").read_text()) == {"first": 0, "last": 0}
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.vocab_size, config.head_dim) == ("qwen3", 300, 8)
