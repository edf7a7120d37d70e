"""Where documents come from: one corpus or several, tokenised ahead or on the fly, and the samples are the same."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from packages.unisono.tests.data.numbers import content
from packages.unisono.tests.runs import configuration
from recipes.language.tests.corpora import DIFFICULT, corpus, model, sentences, tokenised, write_jsonl
from unisono.data.order.planning import build_plan, build_source, checkable_sources
from unisono.data.prepare.partitions import Partition, merge_partitions
from unisono.data.prepare.preparation import prepare
from unisono.data.prepare.reshard import reshard
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.rng import generator
from unisono.task import SampleContext
from unisono_language.data import tokenizer
from unisono_language.data.library import OnTheFlyTexts, open_library, preparations
from unisono_language.data.texts import Texts
from unisono_language.data.tokenizer import Tokenizer, load_tokenizer
from unisono_language.data.tokens import TokenisePreparation
from unisono_language.settings import Corpus, LanguageConfig, PreparedDocuments
from unisono_language.task import Language

CONTEXT = SampleContext(generator("not used"), training=True)


@pytest.fixture
def given_tokenizer(tmp_path: Path) -> Path:
    """A byte-level tokenizer, so that any text can be tokenised."""
    write_jsonl(tmp_path / "for the tokenizer" / "a.jsonl", sentences(60))
    return tokenised(corpus(tmp_path / "for the tokenizer", cache=tmp_path / "cache")).folder


@pytest.fixture
def two(tmp_path: Path) -> Corpus:
    """Two corpora of 30 and 50 documents, with a tokenizer trained on both."""
    write_jsonl(tmp_path / "books" / "a.jsonl", sentences(30, seed=1))
    write_jsonl(tmp_path / "code" / "a.jsonl", sentences(50, seed=2))
    sources = {name: {"path": tmp_path / name} for name in ("books", "code")}
    return corpus_of(sources, tmp_path)


def corpus_of(sources: dict[str, Any], tmp_path: Path, **more: Any) -> Corpus:
    return Corpus(kind="corpus", sources=sources, vocab_size=300, held_out=0.2, cache=tmp_path / "cache", **more)


def language(data: Any, sequence: int = 16) -> Language:
    return Language(LanguageConfig(sequence=sequence), model=model("llama, tied"), data=data)


def samples(task: Language) -> list[list[int]]:
    source: Any = task.data()
    return [task.sample(source[row], CONTEXT).tolist() for row in range(len(source))]


# on the fly -------------------------------------------------------------------------------------------------------


def test_samples_made_on_the_fly_are_those_prepared_ahead(tmp_path: Path, given_tokenizer: Path) -> None:
    texts = [*DIFFICULT[:-2], "x" * 1000, *sentences(20), "the last one"]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts[:15])
    write_jsonl(tmp_path / "corpus" / "b.jsonl", texts[15:])
    ahead = corpus(tmp_path / "corpus", tokenizer=given_tokenizer, cache=tmp_path / "cache")
    live = ahead.model_copy(update={"tokenise": "on_the_fly"})
    made = samples(language(ahead, sequence=5000))
    assert len(made) > 20
    assert len({len(sample) for sample in made}) > 10
    assert samples(language(live, sequence=5000)) == made
    held: Any = [language(data, sequence=5000).held_out() for data in (ahead, live)]
    encode = language(live).library.tokenizer.encode
    tokens = [[row.tolist() for row in held[0]], [encode([row.text])[0].tolist() for row in held[1]]]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > 3


def test_on_the_fly_a_document_without_text_is_a_sample_without_target(tmp_path: Path, given_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["one", "", None, "two"])
    data = corpus(tmp_path / "corpus", tokenizer=given_tokenizer, cache=tmp_path, tokenise="on_the_fly", held_out=0.0)
    task = language(data)
    source: Any = task.data()
    made = [task.sample(source[row], CONTEXT) for row in range(len(source))]
    assert len(made) == 4
    assert [len(sample) > 1 for sample in made] == [True, False, False, True]
    assert task.counts(task.collate(made[1:3]))["next_token"] == 0
    assert task.counts(task.collate(made))["next_token"] == sum(len(sample) - 1 for sample in made)


def test_on_the_fly_a_document_longer_than_a_row_stops_or_is_cut(tmp_path: Path, given_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["abcdefgh " * 50])
    data = corpus(tmp_path / "corpus", tokenizer=given_tokenizer, cache=tmp_path, tokenise="on_the_fly", held_out=0.0)
    with pytest.raises(
        DataError, match=r"a document has \d+ targets, more than task\.sequence=16: .* begins with 'abc"
    ):
        samples(language(data))
    (cut,) = samples(language(data.model_copy(update={"too_long": "cut"})))
    (whole,) = samples(language(data, sequence=5000))
    assert cut == whole[:17]
    assert len(whole) > 100


def test_on_the_fly_nothing_is_told_that_would_need_the_tokens(tmp_path: Path, given_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(10))
    task = language(corpus(tmp_path / "corpus", tokenizer=given_tokenizer, cache=tmp_path, tokenise="on_the_fly"))
    assert task.facts() == {"files": 1, "documents": 10, "ignored": [], "vocabulary": 300}
    assert task.data().lengths is None  # type: ignore[union-attr]


def test_on_the_fly_packed_rows_hold_the_same_documents_as_ahead(tmp_path: Path, given_tokenizer: Path) -> None:
    """The lengths are measured as the plan asks for them; documents longer than a row are cut by the plan."""
    texts = [*sentences(30), "abcdefgh " * 30, *sentences(10, seed=8)]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts)
    common = {"tokenizer": given_tokenizer, "cache": tmp_path / "cache", "held_out": 0.0, "packing": {"chunk": 16}}
    rows = {}
    for way in ("ahead", "on_the_fly"):
        task = language(corpus(tmp_path / "corpus", **common, tokenise=way, shuffle="none"))
        config = configuration(train={"steps": 12, "global_batch": 4}).model_copy(update={"data": task.data_config})
        source = build_source(task, config)
        plan = build_plan(task, source, config)
        lengths = [len(source[row]) if way == "ahead" else len(task.sample(source[row], CONTEXT)) for row in range(41)]
        assert max(lengths) > 100
        taken = [plan.samples(step, range(4)) for step in range(3)]
        documents = {
            (step, slot): [
                task.sample(source[int(row)], CONTEXT)[first : last + 1 if last >= 0 else None].tolist()
                for at, row, first, last in zip(t.slots, t.rows, t.first, t.last, strict=True)
                if at == slot
            ]
            for step, t in enumerate(taken)
            for slot in range(4)
        }
        rows[way] = [sorted(document for document in row if len(document) > 1) for row in documents.values()]
    assert rows["ahead"] == rows["on_the_fly"]
    assert max(len(row) for row in rows["ahead"]) > 1
    assert all(sum(len(document) - 1 for document in row) <= 16 for row in rows["ahead"])


def test_on_the_fly_a_document_without_text_takes_no_place_in_a_packed_row(
    tmp_path: Path, given_tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["", *sentences(6), "", ""])
    task = language(
        corpus(
            tmp_path / "corpus", tokenizer=given_tokenizer, cache=tmp_path, held_out=0.0, tokenise="on_the_fly",
            packing={"length": 400},
        ),
        400,
    )  # fmt: skip
    config = configuration(train={"steps": 1, "global_batch": 1}).model_copy(update={"data": task.data_config})
    source = build_source(task, config)
    taken = build_plan(task, source, config).samples(0, range(1))
    assert set(taken.rows.tolist()) <= {1, 2, 3, 4, 5, 6}
    made = [task.sample(source[int(row)], CONTEXT) for row in taken.rows]
    assert task.counts(task.collate([task.pack(made)]))["next_token"] == sum(len(sample) - 1 for sample in made) > 300


def test_other_documents_or_another_tokenizer_have_another_fingerprint(tmp_path: Path, given_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "one" / "a.jsonl", sentences(10))
    write_jsonl(tmp_path / "two" / "a.jsonl", sentences(10, seed=5))
    cache = tmp_path / "cache"
    kinds = [
        corpus(tmp_path / "one", cache=cache, tokenizer=given_tokenizer),
        corpus(tmp_path / "two", cache=cache, tokenizer=given_tokenizer),
        corpus(tmp_path / "one", cache=cache),
        corpus(tmp_path / "one", cache=cache, tokenizer=given_tokenizer, held_out=0.5),
    ]
    for way in ("ahead", "on_the_fly"):
        found = [language(kind.model_copy(update={"tokenise": way}), 5000).data() for kind in kinds]
        assert len({source.fingerprint for source in found}) == 4  # type: ignore[union-attr]


# several corpora --------------------------------------------------------------------------------------------------


def test_several_corpora_are_a_mapping_with_one_tokenizer_and_a_held_out_part_of_each(two: Corpus) -> None:
    task = language(two)
    sources = task.data()
    assert isinstance(sources, dict)
    assert list(sources) == ["books", "code"]
    library = task.library
    assert {store.tokenizer.digest for store in library.corpora.values()} == {task.tokenizer.digest}
    assert [len(library.split[name][1]) for name in sources] == [6, 10]
    held: Any = task.held_out()
    parts = [library.held_out()[name] for name in ("books", "code")]
    assert len(held) == sum(map(len, parts))
    assert [row.content.tolist() for row in _rows(held)] == [row.tolist() for part in parts for row in _rows(part)]


def _rows(source: Any) -> list[Any]:
    return [source[row] for row in range(len(source))]


def test_the_tokenizer_of_several_corpora_is_trained_on_all_of_them(two: Corpus, tmp_path: Path) -> None:
    together = tmp_path / "together"
    together.mkdir()
    for name in ("books", "code"):
        shutil.copy(tmp_path / name / "a.jsonl", together / f"{name}.jsonl")
    one = tokenised(corpus(together, cache=tmp_path / "cache"))
    alone = tokenised(corpus(tmp_path / "books", cache=tmp_path / "cache"))
    assert language(two).tokenizer.digest == one.tokenizer.digest != alone.tokenizer.digest


def test_the_facts_of_several_corpora_tell_of_each(two: Corpus) -> None:
    task = language(two)
    facts = task.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert {name: told["documents"] for name, told in facts["corpora"].items()} == {"books": 30, "code": 50}
    counted: Counter[int] = Counter()
    for source in task.data().values():  # type: ignore[union-attr]
        for row in _rows(source):
            counted.update(row[1:].tolist())
    held: Any = task.held_out()
    total = sum(counted.values()) + 300
    nats = [-np.log((counted[int(token)] + 1) / total) for row in _rows(held) for token in row.content[1:]]
    assert facts["unigram_entropy"] == pytest.approx(np.mean(nats), abs=5e-5)


def test_several_corpora_on_the_fly_are_a_mapping_too(two: Corpus) -> None:
    task = language(two.model_copy(update={"tokenise": "on_the_fly"}), 5000)
    sources: Any = task.data()
    ahead: Any = language(two, 5000).data()
    assert list(sources) == ["books", "code"]
    for name, source in sources.items():
        assert [task.sample(row, CONTEXT).tolist() for row in source] == [row.tolist() for row in _rows(ahead[name])]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, r"set data\.path, or data\.sources for several by name$"),
        ({"path": "x", "sources": {"a": {"path": "y"}}}, r"set data\.path, or data\.sources .*, not both"),
        ({"sources": {"": {"path": "y"}}}, r"data\.sources: a source needs a name"),
    ],
)
@pytest.mark.parametrize("kind", [Corpus, PreparedDocuments])
def test_one_way_to_say_where_documents_are(kind: Any, settings: dict[str, Any], told: str) -> None:
    name = kind.model_fields["kind"].annotation.__args__[0]
    with pytest.raises(ValueError, match=told.rstrip("$")):
        kind(kind=name, **settings)


# prepared ---------------------------------------------------------------------------------------------------------


def prepared(data: Corpus, out: Path, **how: Any) -> Path:
    for name, (preparation, _) in preparations(data, None).items():
        prepare(preparation, out / name if name else out, **how)
    return out


def test_prepared_documents_are_trained_on_without_the_documents(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(40))
    data = corpus(tmp_path / "corpus", cache=tmp_path / "cache")
    out = prepared(data, tmp_path / "out")
    before = language(data)
    made, facts = samples(before), before.facts()
    shutil.rmtree(tmp_path / "corpus")
    shutil.rmtree(tmp_path / "cache")
    moved = Path(shutil.move(out, tmp_path / "elsewhere"))
    after = language(PreparedDocuments(kind="prepared", path=moved, held_out=0.2))
    after.check()
    assert samples(after) == made
    assert after.facts() == facts
    assert after.data().fingerprint == before.data().fingerprint  # type: ignore[union-attr]
    again = reshard(moved, 3, tmp_path / "three")
    assert len(again.manifest["shards"]) == 3
    cut = language(PreparedDocuments(kind="prepared", path=tmp_path / "three", held_out=0.2))
    assert samples(cut) == made
    assert cut.data().fingerprint == before.data().fingerprint  # type: ignore[union-attr]


def test_several_prepared_corpora_are_mixed_like_the_documents(two: Corpus, tmp_path: Path) -> None:
    out = prepared(two, tmp_path / "out")
    data = PreparedDocuments(
        kind="prepared", sources={name: {"path": out / name} for name in ("books", "code")}, held_out=0.2
    )
    before, after = language(two).data(), language(data).data()
    assert {name: source.fingerprint for name, source in after.items()} == {  # type: ignore[union-attr]
        name: source.fingerprint
        for name, source in before.items()  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("verify", ["content", "sizes"])
def test_a_changed_byte_is_found_before_the_start_where_content_is_verified(tmp_path: Path, verify: Any) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(40))
    out = prepared(corpus(tmp_path / "corpus", cache=tmp_path / "cache"), tmp_path / "out")
    path = out / "shard-00000-of-00001.arrow"
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    task = language(PreparedDocuments(kind="prepared", path=out, verify=verify))
    if verify == "sizes":
        task.check()
    else:
        with pytest.raises(DataError, match=f"{path} is damaged .*; remove this file and prepare the data again"):
            task.check()


@pytest.mark.parametrize("kind", ["prepared", "ahead", "on_the_fly"])
def test_a_file_that_changes_under_a_run_is_named_where_the_run_reads_it(tmp_path: Path, kind: str) -> None:
    path = write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(40))
    data: Any = corpus(tmp_path / "corpus", cache=tmp_path / "cache")
    if kind == "prepared":
        out = prepared(data, tmp_path / "out")
        data, path = PreparedDocuments(kind="prepared", path=out), out / "shard-00000-of-00001.arrow"
    elif kind == "on_the_fly":
        data = data.model_copy(update={"tokenise": "on_the_fly"})
    task = language(data, sequence=64)
    sources = [*checkable_sources(build_source(task)), *checkable_sources(task.held_out())]  # type: ignore[arg-type]
    assert len(sources) == 2
    with path.open("ab") as file:
        file.write(b"{}\n")
    for source in sources:
        source.check_files(1, 2)  # another process looks at the only file
        if kind == "ahead":
            source.check_files()  # its tokens lie elsewhere, and are what they were
            continue
        with pytest.raises(DataError, match=f"{path} has changed since it was opened: it had"):
            source.check_files()


def test_corpora_of_different_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    folders = {}
    for name, seed in (("a", 1), ("b", 2)):
        write_jsonl(tmp_path / name / "a.jsonl", sentences(40, seed))
        folders[name] = {"path": prepared(corpus(tmp_path / name, cache=tmp_path / "cache"), tmp_path / f"out {name}")}
    with pytest.raises(DataError, match=r"'a' and 'b' were prepared with different tokenizers; prepare both with one"):
        language(PreparedDocuments(kind="prepared", sources=folders)).data()


def test_documents_of_another_tokenizer_than_the_pretrained_models_are_refused(
    tmp_path: Path, given_tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(40, seed=9))
    out = prepared(corpus(tmp_path / "corpus", cache=tmp_path / "cache"), tmp_path / "out")
    data = PreparedDocuments(kind="prepared", path=out)
    with pytest.raises(DataError, match=r"was prepared with a different tokenizer than .*data\.tokenizer="):
        open_library(data, 16, given_tokenizer)
    same = prepared(corpus(tmp_path / "corpus", cache=tmp_path, tokenizer=given_tokenizer), tmp_path / "same")
    model_of = tmp_path / "model"
    model_of.mkdir()
    shutil.copy(given_tokenizer / "tokenizer.json", model_of)  # written differently, and the same
    written = json.loads((model_of / "tokenizer.json").read_text())
    (model_of / "tokenizer.json").write_text(json.dumps({**written, "truncation": None}, indent=3))
    assert open_library(PreparedDocuments(kind="prepared", path=same), 16, model_of).tokenizer.size == 300


def test_what_was_prepared_is_not_prepared_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data=prepared is already prepared; give the documents"):
        preparations(PreparedDocuments(kind="prepared", path=tmp_path), None)


# the same tokens by any way ---------------------------------------------------------------------------------------

ODD = st.lists(
    st.sampled_from(["", "\0", " \t\n", "\0\0a\0", "x" * (1 << 20), "é" * 3000, "🎻", "a b c", "\ufeff", "\r\n"])
    | st.text(max_size=40).filter(lambda text: not any(0xD800 <= ord(sign) < 0xE000 for sign in text)),
    min_size=1,
    max_size=12,
).filter(any)


@settings(max_examples=12, deadline=None)
@given(texts=ODD, count=st.integers(1, 3))
def test_odd_documents_come_back_and_shares_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], count: int
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    write_jsonl(folder / "corpus" / "a.jsonl", texts)
    preparation = TokenisePreparation(Texts.from_files(corpus(folder / "corpus").files[""]), _byte_level(folder))
    made = prepare(preparation, folder / "whole")
    assert made is not None
    engine = Engine.from_file(str(folder / "whole" / "tokenizer.json"))
    found = [engine.decode(made[row].tolist()[1:-1], skip_special_tokens=False) for row in range(len(made))]
    assert found == [text for text in texts if text]
    assert made.manifest["left_out"] == texts.count("")
    for number in range(1, count + 1):
        prepare(preparation, folder / "shares", share=Partition(number, count), workers=2)
    merge_partitions(folder / "shares")
    assert content(folder / "shares") == content(folder / "whole")


def _byte_level(folder: Path) -> Tokenizer:
    """A byte-level tokenizer without merges."""
    engine = tokenizer._train([], 257)
    engine.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_tokens_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    for name in "abcd":
        write_jsonl(tmp_path / "corpus" / f"{name}.jsonl", sentences(300, seed=ord(name)))
    data = corpus(tmp_path / "corpus", cache=tmp_path / "cache")
    one = prepared(data, tmp_path / "one", shard_mb=0.02, workers=1)
    assert len(list(one.glob("*.arrow"))) == 4
    assert content(prepared(data, tmp_path / "two", shard_mb=0.02, workers=2, kind="processes")) == content(one)


def test_a_live_library_can_be_sent_to_another_process(two: Corpus) -> None:
    import pickle

    task = language(two.model_copy(update={"tokenise": "on_the_fly"}), 5000)
    source = task.data()["code"]  # type: ignore[index]
    assert isinstance(task.library.corpora["code"], OnTheFlyTexts)
    assert pickle.loads(pickle.dumps(source))[3] == source[3]
    ahead = language(two).data()["code"]  # type: ignore[index]
    assert pickle.loads(pickle.dumps(ahead))[3].tolist() == ahead[3].tolist()
