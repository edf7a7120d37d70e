"""What evaluations say of each held-out source: loss, perplexity, bits per byte."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers

import unisono
from recipes.language.tests.corpora import DIFFICULT, overrides, sentences, word_level, write_jsonl
from unisono.cli import main
from unisono.launch.trained.run import evaluate
from unisono.runtime.errors import ConfigError
from unisono_language.data import by_source
from unisono_language.data.texts import Texts
from unisono_language.data.tokenizer import load_tokenizer, train_tokenizer
from unisono_language.settings import CorpusFiles

NAMES = ("books", "code", "news")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources: two to train on, and one that is only evaluated."""
    folder = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(NAMES):
        write_jsonl(folder / name / "a.jsonl", sentences(30, seed))
    return folder


def run(folders: Path, runs: Path, **more: Any) -> Any:
    """The result of two updates in fp64 on two of the sources."""
    values = overrides(folders, runs, **{
        "data.sources": {name: {"path": str(folders / name)} for name in NAMES[:2]}, "data.held_out": 0.2,
        "data.held_out_sources": {"news": {"path": str(folders / "news")}}, "data.cache": str(folders / "cache"),
        "train.precision": "fp64", "train.global_batch": 6, "eval.rows": None, "observe.progress": False, **more,
    })  # fmt: skip
    del values["data.path"]
    return unisono.train("language", values)


@pytest.fixture(scope="module")
def alone(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(folders, tmp_path_factory.mktemp("runs"))


def test_each_source_has_the_loss_perplexity_and_bits_per_byte_of_its_own_documents(alone: Any) -> None:
    """The claim: they are those of the rows of that source and no other, computed here by transformers alone."""
    opened = unisono.open_run(alone.folder)
    task: Any = opened.task
    model = opened.load_model(precision="fp64")
    nats, targets, size = (dict.fromkeys(NAMES, 0.0) for _ in range(3))
    for name, part in task.library.held_out().items():
        for row in range(len(part)):
            ids = torch.as_tensor(np.asarray(part[row]))
            with torch.no_grad():
                logits = model(input_ids=ids[None, :-1]).logits[0]
            nats[name] += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            targets[name] += len(ids) - 1
            size[name] += len(task.tokenizer.decode(ids[1:].tolist()).encode())
    found = alone.evaluation
    for name in NAMES:
        assert found[f"{name}/loss"] == pytest.approx(nats[name] / targets[name], rel=1e-9)
        assert found[f"{name}/perplexity"] == pytest.approx(math.exp(found[f"{name}/loss"]), rel=1e-12)
        assert found[f"{name}/bits_per_byte"] == pytest.approx(nats[name] / math.log(2) / size[name], rel=1e-9)
    total = sum(nats.values())
    assert found["loss"] == pytest.approx(total / sum(targets.values()), rel=1e-9)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / sum(size.values()), rel=1e-9)
    assert len({round(found[f"{name}/loss"], 6) for name in NAMES}) == 3


def test_all_documents_of_a_held_out_source_are_evaluated_and_none_is_trained_on(alone: Any, folders: Path) -> None:
    task: Any = unisono.open_run(alone.folder).task
    assert set(task.data()) == {"books", "code"}
    texts = [json.loads(line)["text"] for line in (folders / "news" / "a.jsonl").read_text().splitlines()]
    chosen = task.library.split["news"][1]
    assert len(chosen) == len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_values_by_source_are_the_same_on_any_world_size(alone: Any, folders: Path, tmp_path: Path, world: int) -> None:
    found = run(folders, tmp_path, **{"layout.world_size": world}).evaluation
    assert found.keys() == alone.evaluation.keys()
    for name, value in alone.evaluation.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.slow
def test_patience_and_the_best_checkpoint_go_by_a_held_out_source(folders: Path, tmp_path: Path) -> None:
    """The claim: a run ends, and keeps what it keeps, by the values of one source that is not trained on.

    Its rate is so large that its loss on that source soon rises again.
    """
    best = {"metric": "news/loss", "count": 1}
    settings = {"train.steps": 12, "eval.every": 1, "checkpoint.every": 1, "checkpoint.keep": 1, "optim.lr": 0.3}
    words = {"eval.patience": 2, "eval.metric": "news/bits_per_byte", "checkpoint.keep_best": best}
    done = run(folders, tmp_path, **settings, **words)
    lines = (done.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {one["step"]: one["news/loss"] for one in map(json.loads, lines) if "news/loss" in one}
    smallest = min(losses, key=lambda step: losses[step])
    assert len(losses) == smallest + 2 < 12, "two evaluations without an improvement"
    kept = sorted(path.name for path in (done.folder / "checkpoints").glob("step-*"))
    assert kept == [f"step-{smallest:08d}", f"step-{max(losses):08d}"]


def test_a_run_is_evaluated_on_other_data(alone: Any, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The claim: by name, and with the run's tokenizer, whatever the run was trained on."""
    named = evaluate(alone.folder, [f"data.held_out_sources={{more: {{path: {folders / 'news'}}}}}"])
    assert named["more/loss"] == pytest.approx(alone.evaluation["news/loss"], rel=1e-9)
    words = ["data=corpus", f"data.path={folders / 'news'}", "data.held_out=0.5"]
    capsys.readouterr()
    assert main.main(["evaluate", str(alone.folder), *words, "data.sources={}", "data.held_out_sources={}"]) == 0
    said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert {"loss", "perplexity", "bits_per_byte"} <= said.keys()
    assert not any("/" in name for name in said)


def test_a_model_without_a_run_is_evaluated_by_name(
    alone: Any, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The claim: `model.path=DIR` in place of a run is that model, which knows what the run knew."""
    assert main.main(["export", str(alone.folder), f"out={tmp_path / 'model'}"]) == 0
    words = ["data=corpus", f"data.path={folders / 'books'}", "data.held_out=0.2", "eval.rows=null"]
    words += [f"data.held_out_sources={{news: {{path: {folders / 'news'}}}}}", "task.sequence=16"]
    capsys.readouterr()
    assert main.main(["evaluate", f"model.path={tmp_path / 'model'}", *words]) == 0
    said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert float(said["held_out/loss"]) == pytest.approx(alone.evaluation["books/loss"], rel=1e-5)
    assert float(said["news/bits_per_byte"]) == pytest.approx(alone.evaluation["news/bits_per_byte"], rel=1e-5)


def test_a_source_of_which_no_row_was_drawn_has_no_value() -> None:
    values = {"loss": 2.0, "a/loss": 2.0, "a/accuracy": 0.0, "b/loss": 0.0, "b/accuracy": 0.0}
    found = by_source.summarise(values, in_pairs=False)
    assert found["a/accuracy"] == 0.0
    assert all(math.isnan(found[name]) for name in ("b/loss", "b/accuracy", "b/perplexity"))


def test_what_is_said_of_all_rows_stands_first_and_then_source_after_source() -> None:
    values = {"loss": 2.0, "accuracy": 0.5, "a/accuracy": 0.5, "a/loss": 2.0, "b/accuracy": 0.5, "b/loss": 2.0}
    kinds = ("loss", "perplexity", "accuracy")
    found = by_source.summarise(values, in_pairs=False)
    assert list(found) == [f"{source}{kind}" for source in ("", "a/", "b/") for kind in kinds]
    assert list(by_source.summarise(values, in_pairs=True)) == [name for name in found if "perplexity" not in name]


@pytest.mark.parametrize(("name", "why"), [("books", "is in data.sources, too"), ("ema", "mistaken"), ("a/b", "mista")])
def test_a_name_that_would_mean_two_things_is_refused(folders: Path, tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run(folders, tmp_path, **{"data.held_out_sources": {name: {"path": str(folders / "news")}}})


def test_the_bytes_of_tokens_add_up_to_those_of_the_text(tmp_path: Path) -> None:
    """The claim: of byte-level tokens exactly, of SentencePiece's likewise; where blanks are lost, none are claimed."""
    write_jsonl(tmp_path / "c" / "a.jsonl", DIFFICULT)
    own = train_tokenizer({"": Texts.from_files(CorpusFiles(path=str(tmp_path / "c")))}, 300, tmp_path / "cache")
    for text in DIFFICULT:
        ids, _ = own.encode([text])
        assert own.token_bytes is not None
        assert own.token_bytes[ids].sum() == len(text.encode())
    engine = Engine(
        models.BPE({"\u2581": 0, "a": 1, "<0xC3>": 2, "<0xA4>": 3, "\u2581a": 4}, [("\u2581", "a")], byte_fallback=True)
    )
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    engine.save(str(tmp_path / "tokenizer.json"))
    pieces = load_tokenizer(tmp_path / "tokenizer.json")
    ids, _ = pieces.encode(["a \u00e4"])
    assert pieces.token_bytes is not None
    assert pieces.token_bytes[ids].sum() == len(" a \u00e4".encode())
    assert load_tokenizer(word_level(tmp_path / "words", {"a": 0, "b": 1})).token_bytes is None


def test_what_is_held_out_by_name_is_not_trained_on_by_another_path(folders: Path, tmp_path: Path) -> None:
    link = tmp_path / "law"
    link.symlink_to(folders / "code")
    with pytest.raises(ConfigError, match=r"law/a.jsonl of 'law' is trained on, too \(source 'code'\)"):
        run(folders, tmp_path, **{"data.held_out_sources": {"law": {"path": str(link)}}})
