"""Real recordings, where they are: two folders with a metadata.json."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import speech_ljspeech
from recipes.speech.tests import made
from unisono.observe import events
from unisono_speech.data import folder
from unisono_speech.data.library import Library
from unisono_speech.settings import Folder

DATA = Path(__file__).parents[4] / "shared" / "data"


def recordings(name: str) -> Path:
    path = DATA / name
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    return path


@pytest.mark.parametrize(("name", "count"), [("speech_digits", 400), ("speech_ljspeech", 110)])
def test_a_real_folder_is_read(name: str, count: int) -> None:
    found = folder.read(Folder(kind="folder", path=recordings(name)))
    assert len(found) == count and all(
        sample.cloning and sample.text and sample.scene == "quiet room" for sample in found
    )
    assert found[0].text == ("zero" if name == "speech_digits" else found[0].text)


def test_a_speaker_is_held_out() -> None:
    config = Folder(kind="folder", path=recordings("speech_digits"), split="speaker", held_out_speakers=["jackson"])
    assert Library(config).facts() == {"samples": 400, "held_out": 100, "speakers": 4}


@pytest.mark.slow
def test_read_speech_is_learned_on_two_processes_through_a_kill_and_said_alike_by_plain_peft_and_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recordings("speech_ljspeech")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    own = [word for word in made.OVERRIDES if not word.startswith(("data.speakers", "data.clips", "data.held_out"))]
    words = (
        *own, "data=folder", f"data.path={path}", "data.held_out=0.05", "data.max_seconds=12", "data.codec.rate=8000",
        "data.codec.fit_clips=10", "optim.lr=1e-2", "layout.world_size=2", "layout.strategy=ddp", "layout.device=cpu",
        "layout.micro_batch=1", "train.steps=6", "eval.every=6", "checkpoint.every=2", "task.shown=0",
    )  # fmt: skip
    job = speech_ljspeech.Job(tmp_path / "runs", words)
    whole = job.train("whole")
    books = [f"loss/codebook_{number}" for number in range(8)]
    first, last = speech_ljspeech.steps(whole)[0], events.last_evaluation(events.read_events(whole / "events.jsonl"))
    assert all(last[name] < first[name] for name in books), (first, last)
    updates, arrays = speech_ljspeech.same_bits(speech_ljspeech.kill_and_resume(job, "cut", 5), whole)
    assert updates == 6 and arrays > 100  # weights and both moments

    base = job.export(whole, "base")
    more = ("model=pretrained", f"model.path={base}", "adapter=higgs", "train.steps=4", "eval.every=null")
    adapters = tuple(word for word in words if not word.startswith("model.settings"))
    tuned = speech_ljspeech.Job(job.folder, adapters).train("adapters", *more)
    prompts = speech_ljspeech.prompts_of(tuned, 2)
    ours, before = (speech_ljspeech.said_here(run, prompts, 12) for run in (tuned, whole))
    assert not all(np.array_equal(a, b) for a, b in zip(ours, before, strict=True))  # the adapters are heard
    adapter, merged = job.export(tuned, "adapter"), job.export(tuned, "merged", "merge=true")
    for folder_, own_adapter in ((base, adapter), (merged, None)):
        theirs = speech_ljspeech.said_elsewhere(tuned, folder_, own_adapter, prompts, 12)
        assert all(len(a) and np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
