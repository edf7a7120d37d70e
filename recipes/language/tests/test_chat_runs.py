"""Runs on conversations: packed as alone, trained wholly or by adapters, answering by the template, and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import unisono
from recipes.language.tests.chats import (
    CHATML,
    CONVERSATIONS,
    MARKED,
    TEXT_PAIRS,
    assistant,
    chat_model,
    chat_task,
    system,
    user,
    write_rows,
)
from recipes.language.tests.corpora import TEXTS, write_jsonl
from recipes.language.tests.data.test_packed import gradients
from recipes.language.tests.kernels import distance
from unisono.cli import main
from unisono.observe.events import read_events
from unisono.runtime.errors import RunError
from unisono_language.generate import generate

ANSWERS = {"who sleeps?": "the lazy dog", "who jumps?": "the quick brown fox", "and then?": "it sleeps, too"}
TALK = [
    {"messages": [user("who sleeps?"), assistant(ANSWERS["who sleeps?"])]},
    {
        "messages": [
            user("who jumps?"),
            assistant(ANSWERS["who jumps?"]),
            user("and then?"),
            assistant(ANSWERS["and then?"]),
        ]
    },
    {"messages": [system("in capitals"), user("who sleeps?"), assistant("THE DOG")]},
]


def words(folder: Path, path: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run on one process."""
    return {
        "model": "pretrained", "model.path": str(folder), "data": "chat", "data.path": str(path),
        "data.cache": str(folder / "cache"), "data.held_out": 0.0, "task.sequence": 128, "layout.world_size": 1,
        "layout.threads": 1, "train.steps": 60, "train.global_batch": 3, "optim.lr": 1e-2, "eval.every": None,
        "checkpoint.every": None, "observe.trackers": [], "observe.progress": False,
        "run.dir": str(folder / "runs"), **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("base"), CHATML)


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    """A run that learned conversations by heart, packed, and has answered two of them at its end."""
    data = write_rows(base / "talk" / "a.jsonl", TALK)
    held = write_rows(base / "held" / "a.jsonl", TALK)
    more = {
        "run.name": "full", "data.packing": {"length": 128}, "task.prompts": list(ANSWERS)[:2],
        "task.prompt_tokens": 24, "data.held_out_sources": {"again": {"path": str(held)}},
    }  # fmt: skip
    result = unisono.train("language", words(base, data, **more))
    assert result.loss < 0.1
    return Path(result.folder)


# packing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["no marks", "marks"])
def test_gradients_of_packed_conversations_are_those_of_each_alone(tmp_path: Path, template: str) -> None:
    folder = chat_model(tmp_path / "model", template)
    task = chat_task(write_rows(tmp_path / "a.jsonl", CONVERSATIONS), folder, packing={"length": 256})
    rows = [task.sample(row, None) for row in task.data()]  # type: ignore[arg-type]
    together = task.collate([task.pack(rows[:3]), task.pack(rows[3:])])
    assert (together["targets"] >= 0).sum() < together["real"].sum() < together["real"].size
    ways = {
        "packed": [together],
        "alone": [task.collate([row]) for row in rows],
        "mixed": [{name: together[name] for name in ("inputs", "targets", "real")}],
        "all": [task.collate([np.where(row < 0, ~row, row)]) for row in rows],
    }
    found = {way: gradients(task, batches) for way, batches in ways.items()}
    assert all(np.any(gradient) for gradient in found["alone"][0].values())
    assert distance(found["packed"][0], found["alone"][0]) < 1e-12
    assert found["packed"][1] == pytest.approx(found["alone"][1], rel=1e-13)
    assert distance(found["mixed"][0], found["alone"][0]) > 1e-3, "conversations that see each other do matter"
    assert distance(found["all"][0], found["alone"][0]) > 1e-1, "so does what the loss counts"


def test_routers_count_every_token_that_is_read(tmp_path: Path) -> None:
    """Context is routed as targets are, so a mixture of experts is balanced over both, and not over padding."""
    task = chat_task(write_rows(tmp_path / "a.jsonl", CONVERSATIONS), chat_model(tmp_path / "model"))
    task.model_config = task.model_config.model_copy(update={"router_z_weight": 0.1})
    rows = task.data()
    counts = task.counts(task.collate([rows[0], rows[1]]))
    assert counts["router_z"] == len(rows[0]) + len(rows[1]) - 2 > counts["next_token"] > 0


@pytest.mark.slow
def test_layouts_compute_the_same_on_packed_conversations(base: Path) -> None:
    data = write_rows(base / "proof" / "a.jsonl", [*CONVERSATIONS, *TALK])
    settings = [
        "model=pretrained", f"model.path={base}", "data=chat", f"data.path={data}", f"data.cache={base / 'cache'}",
        "data.held_out=0.25", "data.packing={length: 200}", "task.sequence=200", "train.global_batch=4",
    ]  # fmt: skip
    proved = unisono.prove("language", ["layouts=[ddp:2,fsdp:2]", "steps=2", *settings])
    assert proved.passed, proved


# what a run answers ---------------------------------------------------------------------------------------------------


def test_a_run_of_conversations_answers_by_its_template_and_stops(run: Path) -> None:
    opened = unisono.open_run(run)
    assert generate(opened, "who sleeps?") == ANSWERS["who sleeps?"]
    assert generate(opened, "who sleeps?", system="in capitals") == "THE DOG"
    plain = generate(opened, "who sleeps?", chat=False, tokens=8)
    assert isinstance(plain, str)
    assert plain.startswith("who sleeps?") and ANSWERS["who sleeps?"] not in plain.removeprefix("who sleeps?")[:5]


def test_prompts_in_training_are_answered_up_to_the_templates_end_as_generate_does(run: Path) -> None:
    """The claim: a turn ends at the template's token, which need not be the last of a document."""
    [shown] = [event for event in read_events(run / "events.jsonl") if event.get("sample") == "samples"]
    found = [dict(zip(shown["columns"], row, strict=True)) for row in shown["rows"]]
    assert found == [{"prompt": prompt, "text": ANSWERS[prompt]} for prompt in list(ANSWERS)[:2]]


def test_a_file_of_conversations_is_answered_line_by_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any batches; several turns are the context of the next."""
    asked = [{"prompt": "who sleeps?"}, {"messages": TALK[1]["messages"][:3]}, {"messages": [user("who jumps?")]}]
    path = write_rows(tmp_path / "asked.jsonl", asked)
    for batch in (1, 2, 8):
        assert main.main(["generate", str(run), f"@{path}", f"batch={batch}"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["text"] for row in rows] == ["the lazy dog", "it sleeps, too", "the quick brown fox"]
        assert rows[0]["prompt"] == "who sleeps?"


def test_an_export_answers_as_the_run_and_as_transformers_does(run: Path, tmp_path: Path) -> None:
    assert main.main(["export", str(run), f"out={tmp_path / 'out'}"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for question in ("who sleeps?", "who jumps?"):
        inputs = tokenizer.apply_chat_template([user(question)], add_generation_prompt=True, return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=20, do_sample=False)  # ends by what the export says
        theirs = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert theirs == ANSWERS[question]
        for folder in (run, tmp_path / "out"):
            assert generate(unisono.open_run(folder), question) == theirs


def test_adapters_learn_conversations_and_a_prepared_folder_keeps_its_template(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    data = write_rows(tmp_path / "a.jsonl", TALK[:1])
    prepare = ["data=chat", f"data.path={data}", "model=pretrained", f"model.path={base}", f"out={tmp_path / 'out'}"]
    assert main.main(["data", "prepare", "language", *prepare]) == 0
    settings = words(base, data, **{"run.name": "lora", "adapter": "lora", "adapter.rank": 16, "adapter.alpha": 64.0})
    settings["adapter.targets"] = ["*_proj", "lm_head"]
    settings |= {"data": "prepared", "data.path": str(tmp_path / "out"), "train.global_batch": 1}
    del settings["data.cache"]
    result = unisono.train("language", settings)
    assert result.loss < 0.2
    assert generate(unisono.open_run(result.folder), "who sleeps?") == ANSWERS["who sleeps?"]


def test_new_conversations_are_evaluated_with_the_runs_template(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "a.jsonl", [TALK[0]])
    asked = [f"data.path={tmp_path / 'a.jsonl'}", f"data.cache={tmp_path / 'cache'}", f"out={tmp_path / 'p.csv'}"]
    assert main.main(["predict", str(run), "rows=training", "data.packing=null", *asked]) == 0
    (row,) = unisono.open_source(tmp_path / "p.csv", key="out")
    targets = (chat_task(tmp_path / "a.jsonl", Path(run.parent.parent)).data()[0] >= 0).sum()
    assert float(row["targets"]) == targets
    assert float(row["nats_per_target"]) < 0.3 and float(row["accuracy"]) == 1.0


def test_a_run_on_texts_with_completions_begins_prompts_as_its_training_did(tmp_path: Path) -> None:
    base = chat_model(tmp_path / "bare", None)
    data = write_rows(tmp_path / "a.jsonl", TEXT_PAIRS)
    result = unisono.train("language", words(base, data, **{"train.steps": 50, "run.name": "texts"}))
    assert result.loss < 0.1
    opened = unisono.open_run(result.folder)
    assert generate(opened, "the quick") == "the quick brown fox"
    with pytest.raises(RunError, match="need a chat template, and this model has none"):
        generate(opened, "the quick", chat=True)


def test_a_run_on_documents_answers_no_conversations(base: Path, tmp_path: Path) -> None:
    """Though the model that it began with has a template: what a run was trained on decides."""
    write_jsonl(tmp_path / "corpus" / "a.jsonl", TEXTS)
    settings = words(base, tmp_path / "corpus", **{"data": "corpus", "train.steps": 1, "run.name": "documents"})
    folder = unisono.train("language", settings).folder
    assert str(generate(unisono.open_run(folder), "the", tokens=1)).startswith("the")
    assert torch.is_grad_enabled()
