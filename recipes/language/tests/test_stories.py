"""A real pretrained model (TinyStories, 260,032 parameters) on real text: the loss its makers measured, and below.

Its README has 1.266 nats per token: each of the five stories by itself, after the token that begins a document, without
the one that ends it. The model never saw that end token, which costs it about 25 nats a story: with it, the task says
1.333. Cut at the bare marker, the stories keep the line ends around it, and it says 1.41.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Engine
from transformers import AutoModelForCausalLM

import unisono
from packages.unisono.tests.real_data import real
from packages.unisono.tests.runs import configuration, trace
from recipes.language.tests.corpora import corpus, write_jsonl
from unisono.config.schema.run import RunConfig
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono_language.generate import generate
from unisono_language.settings import Corpus, LanguageConfig, Pretrained
from unisono_language.task import Language

pytestmark = pytest.mark.slow
STORIES, TARGETS = 5, 1804  # without the ends
README = 1.2664


@pytest.fixture(scope="module")
def pretrained() -> Path:
    return real("tiny_models/stories260K")


@pytest.fixture(scope="module")
def stories(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five stories, without the marker and the line ends between them."""
    text = (pretrained / "tinystories_sample.txt").read_text(encoding="utf-8")
    parts = [part.strip() for part in text.split("<|endoftext|>")]
    return write_jsonl(tmp_path_factory.mktemp("stories") / "stories.jsonl", [part for part in parts if part])


@pytest.fixture(scope="module")
def without_ends(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer, told of the token that begins a document and of none that ends it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copyfile(pretrained / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return folder


def task(pretrained: Path, data: Corpus) -> Language:
    """Rows as long as the model's context, so that every story is in one row."""
    return Language(LanguageConfig(sequence=512), model=Pretrained(kind="pretrained", path=pretrained), data=data)


def all_at_once(language: Language, steps: int = 1, lr: float = 1e-4) -> RunConfig:
    """Every step sees all the stories, so a step's loss is the loss of the text before it."""
    return configuration(
        train={"steps": steps, "global_batch": len(language.data())},
        optim={"kind": "adamw", "lr": lr, "weight_decay": 0.0},
    )


def test_the_loss_is_the_one_that_its_makers_measured(pretrained: Path, stories: Path, without_ends: Path) -> None:
    language = task(pretrained, corpus(stories, tokenizer=without_ends, held_out=0.0))
    done = trace(ProcessInfo(), SingleProcess(), language, all_at_once(language))
    assert done.metrics[0]["tokens"] == TARGETS
    assert done.losses[0] == pytest.approx(README, abs=5e-5)


def test_the_ends_of_the_stories_make_the_difference_to_its_own_tokenizer(pretrained: Path, stories: Path) -> None:
    language = task(pretrained, corpus(stories, held_out=0.0))
    done = trace(ProcessInfo(), SingleProcess(), language, all_at_once(language))
    assert done.metrics[0]["tokens"] == TARGETS + STORIES
    assert done.losses[0] == pytest.approx(1.3329, abs=5e-5)
    of_the_ends = (done.losses[0] * (TARGETS + STORIES) - README * TARGETS) / STORIES
    assert 24 < of_the_ends < 26.6, "no model has ever been surer that a story goes on"


def test_held_out_stories_are_measured_like_any_others(pretrained: Path, stories: Path, without_ends: Path) -> None:
    language = task(pretrained, corpus(stories, tokenizer=without_ends, held_out=0.4))
    done = trace(ProcessInfo(), SingleProcess(), language, all_at_once(language, lr=0.0))
    kept, held = language.data(), language.held_out()
    assert held is not None
    assert len(held) == 2
    together = done.losses[0] * int(kept.lengths.sum()) + done.evaluation["loss"] * int(held.lengths.sum())
    assert together / TARGETS == pytest.approx(README, abs=5e-5)
    assert 0.6 < done.evaluation["accuracy"] < 0.7


def test_the_text_file_can_be_read_as_it_is(pretrained: Path) -> None:
    """The line ends around the marker stay with the stories, and a sixth document is the last of them alone."""
    sample = pretrained / "tinystories_sample.txt"
    language = task(pretrained, corpus(sample, separator="<|endoftext|>", held_out=0.0))
    done = trace(ProcessInfo(), SingleProcess(), language, all_at_once(language))
    assert language.facts()["documents"] == STORIES + 1
    assert done.losses[0] == pytest.approx(1.4139, abs=5e-5)


def test_training_goes_on_from_where_its_makers_stopped(pretrained: Path, stories: Path, without_ends: Path) -> None:
    language = task(pretrained, corpus(stories, tokenizer=without_ends, held_out=0.0))
    done = trace(ProcessInfo(), SingleProcess(), language, all_at_once(language, steps=6))
    assert done.losses[0] == pytest.approx(README, abs=5e-5)
    assert done.losses == sorted(done.losses, reverse=True)
    assert README - 0.25 < done.losses[-1] < README - 0.15


def test_it_trains_as_in_a_plain_loop(pretrained: Path, stories: Path, without_ends: Path) -> None:
    """Story by story through the library's own loss, and torch's own clipping and AdamW."""
    language = task(pretrained, corpus(stories, tokenizer=without_ends, held_out=0.0))
    done = trace(ProcessInfo(), SingleProcess(), language, all_at_once(language, steps=3, lr=1e-3))
    found = AutoModelForCausalLM.from_pretrained(pretrained)
    optimizer = torch.optim.AdamW(found.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for _ in range(3):
        rows = [torch.from_numpy(language.data()[number])[None] for number in range(STORIES)]
        loss = sum(found(input_ids=row, labels=row).loss * (row.numel() - 1) for row in rows) / TARGETS
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(found.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert done.losses == pytest.approx(losses, rel=1e-5)
    assert done.norms == pytest.approx(norms, rel=1e-4)


def test_the_model_learns_where_stories_end(pretrained: Path, stories: Path) -> None:
    language = task(pretrained, corpus(stories, held_out=0.0))
    done = trace(ProcessInfo(), SingleProcess(), language, all_at_once(language, steps=4, lr=1e-3))
    assert done.losses[-1] < README - 0.1


# the whole way ----------------------------------------------------------------------------------------------------


def test_a_run_from_it_tells_stories(pretrained: Path, stories: Path, tmp_path: Path) -> None:
    """One step that changes nothing; then what the run writes is what the pretrained model writes."""
    settings = {
        "model": "pretrained", "model.path": str(pretrained), "data": "corpus", "data.path": str(stories),
        "data.held_out": 0.0, "layout.world_size": 1, "train.steps": 1, "train.global_batch": 2, "optim.lr": 0.0,
        "run.dir": str(tmp_path), "run.name": "stories", "observe.progress": False,
    }  # fmt: skip
    folder = unisono.train("language", settings).folder
    engine = Engine.from_file(str(pretrained / "tokenizer.json"))
    prompt = "Once upon a time, there was a little girl named Lily."
    ids = torch.tensor([[1, *engine.encode(prompt, add_special_tokens=False).ids]])
    found = AutoModelForCausalLM.from_pretrained(pretrained).eval()
    with torch.no_grad():
        own = found.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    text = generate(unisono.open_run(folder), prompt, tokens=30)
    assert text == engine.decode(own[0].tolist())
    assert text.startswith(prompt + " She loved to play")
