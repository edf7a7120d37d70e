"""The recipe from end to end, as a user runs it: real processes, real text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from packages.unisono.tests.real_data import real
from recipes.language.tests.corpora import overrides, sentences, store_in, write_jsonl
from unisono.data.preview import preview
from unisono.launch.task_objects import format_override
from unisono.task_config import build_task, read_run
from unisono_language.task import Language


def unisono(*arguments: str, code: int = 0, **environment: str) -> str:
    """Run the command; returns what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(settings: Mapping[str, Any], **environment: str) -> Path:
    unisono("train", "language", *(f"{key}={format_override(value)}" for key, value in settings.items()), **environment)
    return Path(settings["run.dir"]) / settings["run.name"]


def facts(run: Path) -> dict[str, Any]:
    return json.loads((run / "fingerprint.json").read_text())["data"]


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events]


def test_check_builds_the_model_without_memory_and_warns_of_documents_without_text(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    lines = [json.dumps({"text": None if number % 13 == 0 else f"word {number} " * 20}) for number in range(65)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    words = ("check", "language", "data=corpus", f"data.path={tmp_path}/texts.jsonl", f"run.dir={tmp_path}")
    code, told, errors = command(*words)
    assert code == 0 and "5 of 65 documents have no text (null or empty) and are left out" in errors, errors
    assert "parameters: 1," in told and "not checked: the model" not in told
    code, _, errors = command(*words, "optim.groups=[{match: 'nothing.*'}]")
    assert code == 2 and "'nothing.*' matches no parameter" in errors
    (tmp_path / "texts.jsonl").write_text("\n".join(line for line in lines if "null" not in line))
    assert "have no text" not in command(*words)[2]


@pytest.mark.slow
def test_the_real_corpora_are_trained_on_together(tmp_path: Path) -> None:
    """41 MB: eight, four, two and one shards of Parquet, and a text file; the README between them is passed over."""
    folder, tokenizer = real("text_corpora"), real("tiny_models/gpt2_tokenizer")
    settings = {
        "data.tokenizer": str(tokenizer),
        "data.held_out": 0.01,
        "task.sequence": 128,
        "train.steps": 4,
        "eval.rows": 8,
        "data.cache": str(tmp_path / "cache"),
    }
    run = train(overrides(folder, tmp_path / "runs", **settings))
    known = facts(run)
    assert (known["files"], known["documents"], known["ignored"]) == (16, 1607, ["README.md"])
    assert known["vocabulary"] == 50257
    assert 10.0 < losses(run)[0] < 11.0  # ln 50257 = 10.82
    assert 6.5 < known["unigram_entropy"] < 7.5
    assert corpora_of_rows(run, folder) == {"books", "manpages", "pydocs", "wiki", "shakespeare"}


def corpora_of_rows(run: Path, folder: Path) -> set[str]:
    """Where the first rows of a longer run like this one come from: rows to documents to folders of files."""
    of_documents: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".parquet", ".txt"):
            count = pq.read_metadata(path).num_rows if path.suffix == ".parquet" else 1
            of_documents += [path.parent.name] * count
    config = read_run(run, trust=True)
    language = build_task(config)
    assert isinstance(language, Language)
    documents = language.library.split[""][0]
    rows = -(-(store_in(language).lengths[documents] - 1) // 128)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 640})})
    of_rows = np.repeat(documents, rows)[[shown.row for shown in preview(language, longer, 0, 2560, 1)]]
    return {of_documents[document] for document in of_rows}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes."""
    folder = tmp_path_factory.mktemp("two")
    write_jsonl(folder / "corpus" / "a.jsonl", sentences(60))
    return train(overrides(folder / "corpus", folder / "runs", **{"layout.world_size": 2, "train.steps": 4}))


@pytest.mark.slow
def test_a_run_on_two_processes_writes_from_its_prompt_the_same_every_time(run: Path) -> None:
    first, second = (unisono("generate", str(run), "abc", "tokens=8") for _ in range(2))
    assert first == second
    assert first.startswith("abc")


@pytest.mark.slow
def test_a_run_is_evaluated_to_what_its_last_evaluation_said(run: Path) -> None:
    said = dict(line.split(": ") for line in unisono("evaluate", str(run)).splitlines() if ": " in line)
    assert float(said["loss"]) == pytest.approx(losses(run)[-1], rel=1e-5)


@pytest.mark.slow
def test_a_check_tells_the_facts_and_makes_no_run(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", [*sentences(20), "", None])
    (tmp_path / "corpus" / "notes.md").write_text("passed over")
    settings = overrides(tmp_path / "corpus", tmp_path / "runs")
    told = unisono("check", "language", *(f"{key}={format_override(value)}" for key, value in settings.items()))
    assert "documents: 20" in told
    assert "empty: 2" in told
    assert "ignored: notes.md" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_broken_corpus_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    settings = overrides(tmp_path / "corpus", tmp_path / "runs")
    told = unisono("train", "language", *(f"{key}={format_override(value)}" for key, value in settings.items()), code=2)
    assert "unisono: error: " in told
    assert "a.jsonl, line 2: 'text' contains the unpaired surrogate" in told
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()
