"""Prompts that are continued while a run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unisono
from recipes.language.tests.corpora import BY_HEART, KNOWN, TEXTS, trained, write_jsonl
from unisono.observe.events import read_events
from unisono_language.generate import generate

PROMPTS = ["the quick", "pack my box"]


def samples(folder: Path, name: str = "run", **more: Any) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run, and what its last evaluation published."""
    write_jsonl(folder / "corpus" / "a.jsonl", TEXTS)
    write_jsonl(folder / "held" / "a.jsonl", TEXTS)
    values = {
        **BY_HEART, "task.prompts": PROMPTS, "task.prompt_tokens": 30, "eval.every": 30,
        "data.held_out_sources": {"again": {"path": str(folder / "held")}}, **more,
    }  # fmt: skip
    run = trained(folder, name, **values).folder
    events = [event for event in read_events(run / "events.jsonl") if event.get("sample") == "samples"]
    assert [event["step"] for event in events] == [30, 60]
    columns = events[-1]["columns"]
    return run, [dict(zip(columns, row, strict=True)) for row in events[-1]["rows"]]


def test_what_is_written_in_training_is_what_generate_writes_afterwards(tmp_path: Path) -> None:
    """The claim: same prompts, same tokens, same end; and what was learned by heart is there."""
    run, found = samples(tmp_path)
    assert [row["prompt"] for row in found] == PROMPTS
    opened = unisono.open_run(run)
    for row in found:
        assert row["prompt"] + row["text"] == generate(opened, row["prompt"], tokens=30, device="cpu")
    assert found[0]["prompt"] + found[0]["text"] == KNOWN


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_prompts_are_continued_alike_on_two_processes(tmp_path: Path, strategy: str) -> None:
    layout = {"layout.world_size": 2, "layout.strategy": strategy, "train.global_batch": 4}
    _, found = samples(tmp_path, **layout)
    _, alone = samples(tmp_path, "alone", **{"train.global_batch": 4})
    assert found == alone
