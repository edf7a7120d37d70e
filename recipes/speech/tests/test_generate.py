"""A model says what it was taught, ends where it ends, and says so again after an export."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono
from recipes.speech.tests import made
from unisono import Context, RunError, RunInfo
from unisono_speech.data import labels, samples, voices
from unisono_speech.data.labels import IGNORED
from unisono_speech.data.samples import Conversation, Message, Utterance
from unisono_speech.generate import Sampling, generate, speak
from unisono_speech.show import Show
from unisono_speech.task import Speech


def taught(task: Speech, count: int = 1, steps: int = 90, unshifted: bool = False) -> tuple[Any, list[Conversation]]:
    """A model that has learned a few samples by heart."""
    torch.manual_seed(0)
    model = task.build()
    source = task.data()
    records = [source[n] for n in range(count)]
    talks = []
    for number, record in enumerate(records):
        assert isinstance(record, Utterance)
        references = [] if number == 1 else [(source[count].text, source[count].clip)]
        talks.append(record.conversation(references))
    rows = [labels.row_of(talk, task.tokens, task.stream, task.codes) for talk in talks]
    batch = {name: torch.from_numpy(value) for name, value in task.collate(rows).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts = task.counts(task.collate(rows))
    for step in range(steps):
        loss = task.loss(task.outputs(model, batch, Context(step, True)), batch, Context(step, True))
        total = sum(value / counts[name] for name, value in loss.sums.items())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert float(total) < 0.5, float(total)
    return model.eval(), talks


def prompts(task: Speech, talks: list[Conversation]) -> list[labels.Row]:
    return [labels.prompt_of(talk.messages[:-1], task.tokens, task.stream, task.codes) for talk in talks]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return made.task(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def learned(task: Speech) -> tuple[Any, list[Conversation]]:
    return taught(task, 2)


GREEDY = Sampling()


def test_the_model_generates_what_it_was_taught(task: Speech, learned: Any) -> None:
    model, talks = learned
    for talk in talks:
        [(codes, finished)] = speak(model, task, prompts(task, [talk]), GREEDY, 40)
        assert finished and np.array_equal(codes, task.codes(talk.targets[0]))


def test_prompts_of_different_lengths_are_spoken_together_as_alone(task: Speech, learned: Any) -> None:
    model, talks = learned
    together = speak(model, task, prompts(task, talks), GREEDY, 40)
    assert [np.array_equal(codes, task.codes(t.targets[0])) for (codes, _), t in zip(together, talks, strict=True)] == [
        True,
        True,
    ]


def test_it_says_when_the_end_has_not_come(task: Speech, learned: Any) -> None:
    model, talks = learned
    [(codes, finished)] = speak(model, task, prompts(task, talks[:1]), GREEDY, 3)
    assert not finished and np.array_equal(codes, task.codes(talks[0].targets[0])[:3])


def test_a_stream_that_another_codebook_than_the_first_ends_has_come_to_its_end(
    task: Speech, learned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, talks = learned
    end, books = task.stream.end, task.stream.codebooks
    stream = np.zeros((books + 3, books), dtype=np.int64)
    for book in range(books):
        stream[5 + max(0, book - 2) :, book] = end  # as where the third codebook's end code came first
    assert not task.stream.restore(stream)[1]
    before = len(prompts(task, talks[:1])[0].frames)
    made_ = torch.from_numpy(np.concatenate([np.zeros((before, books), dtype=np.int64), stream]))[None]
    for cut, ended in ((None, True), (-1, False)):
        monkeypatch.setattr(model, "generate", lambda made_=made_[:, :cut], **given: made_)
        [(codes, finished)] = speak(model, task, prompts(task, talks[:1]), GREEDY, 40)
        assert finished == ended and 0 < len(codes) < 5


def test_a_model_taught_without_the_shift_cannot_say_what_it_was_taught(tmp_path: Path) -> None:
    class Unshifted(Speech):
        """Labels at their own places, as the loss must not have them."""

        def targets(self, row: labels.Row) -> tuple[np.ndarray, np.ndarray]:
            beside = np.full((len(row.ids), row.frames.shape[1]), IGNORED)
            beside[labels.audio_places(row.ids, self.tokens)] = row.audio_labels
            return row.text_labels, beside

    task = made.task(tmp_path, Unshifted)
    model, talks = taught(task)  # its loss falls all the same
    [(codes, _)] = speak(model, task, prompts(task, talks), GREEDY, 40)
    truth = task.codes(talks[0].targets[0])
    count = min(len(codes), len(truth))
    assert len(codes) != len(truth) or (codes[:count] == truth[:count]).mean() < 0.5


def test_draws_are_keyed_by_their_seed_and_repetitions_are_drawn_again(task: Speech) -> None:
    torch.manual_seed(1)
    model = task.build().eval()
    row = labels.prompt_of(samples.prompt("do", "", []), task.tokens, task.stream, task.codes)
    how = Sampling(temperature=1.0, top_k=3, top_p=0.9, seed=3)
    one, same, other = (speak(model, task, [row], h, 12)[0][0] for h in (how, how, Sampling(1.0, 3, 0.9, seed=4)))
    assert np.array_equal(one, same) and not (one.shape == other.shape and np.array_equal(one, other))
    narrow = Sampling(temperature=1.0, top_k=1, seed=3)
    again = Sampling(temperature=1.0, top_k=1, window=7, repeats=1, seed=3)
    repeated, drawn = (speak(model, task, [row], h, 12)[0][0] for h in (narrow, again))
    assert not (repeated.shape == drawn.shape and np.array_equal(repeated, drawn))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the recipe, as a user makes it, with adapters."""
    folder = tmp_path_factory.mktemp("run")
    patch = pytest.MonkeyPatch()
    patch.setenv("UNISONO_CACHE", str(folder / "cache"))
    result = unisono.train(
        "speech",
        [
            *made.OVERRIDES, f"run.dir={folder}", "run.name=r", "train.steps=3", "eval.every=3", "adapter=higgs",
            "adapter.dropout=0", "task.text_weight=0", "observe.trackers=[tensorboard]",
        ],
    )  # fmt: skip
    patch.undo()
    return result.folder


def test_an_evaluation_leaves_sounds_and_pictures(run: Path) -> None:
    names = {path.name for path in (run / "samples").iterdir()}
    assert {f"step-00000003-{n}{end}" for n in (0, 1) for end in ("-predicted.wav", "-true.wav", ".png")} <= names
    with wave.open(str(run / "samples" / "step-00000003-0-true.wav")) as file:
        assert file.getframerate() == 8000 and file.getnframes() > 1000


def test_the_first_process_alone_writes_what_is_heard(task: Speech, tmp_path: Path) -> None:
    stream = task.stream.delay(made.random_codes(5))
    for rank in (1, 0):
        show = Show(task)
        show.on_start(RunInfo(tmp_path, task.config, 0, 10, rank=rank, world_size=2))  # type: ignore[arg-type]
        task.shown.append((stream, task.stream.labels(stream)))
        show.on_evaluation(4, {})
        assert not task.shown
        assert (tmp_path / "samples").exists() == (rank == 0)


def test_trackers_have_the_same_sounds_and_pictures(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    tags = shown.Tags()
    assert set(tags["audio"]) == {f"samples/{n}/{name}" for n in (0, 1) for name in ("predicted", "true")}
    assert set(tags["images"]) == {"samples/0/spectrograms", "samples/1/spectrograms"}
    (sound,) = shown.Audio("samples/0/true")
    assert sound.step == 3 and sound.length_frames > 1000


def test_the_verb_writes_a_file_and_names_what_is_wrong(run: Path, tmp_path: Path) -> None:
    opened = unisono.open_run(run)
    reference = tmp_path / "voice.wav"
    reference.write_bytes(voices.wav(0, "ba to", 0))
    with pytest.raises(RunError, match="what is said in it"):
        generate(opened, "do", reference=reference)
    reference.with_suffix(".txt").write_text("ba to\n")
    told = generate(opened, "do", reference=reference, out=tmp_path / "said.wav", seconds=0.4)
    assert (tmp_path / "said.wav").is_file() and str(tmp_path / "said.wav") in told
    with pytest.raises(RunError, match="text is empty"):
        generate(opened, " ")
    with pytest.raises(RunError, match="seconds must be above 0"):
        generate(opened, "do", seconds=0)
    with pytest.raises(RunError, match="does not exist"):
        generate(opened, "do", reference=tmp_path / "no.wav")


def test_exports_load_in_transformers_and_peft_and_speak_alike(run: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import HiggsAudioV2ForConditionalGeneration

    from unisono.cli import main

    assert main.main(["export", str(run), f"out={tmp_path / 'merged'}", "merge=true"]) == 0
    assert main.main(["export", str(run), f"out={tmp_path / 'adapter'}"]) == 0
    opened = unisono.open_run(run)
    task, ours = opened.task, opened.load_model()
    assert isinstance(task, Speech)
    row = labels.prompt_of(samples.prompt("do", "", []), task.tokens, task.stream, task.codes)
    said = speak(ours, task, [row], GREEDY, 10)[0][0]
    merged = HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    assert np.array_equal(speak(merged, task, [row], GREEDY, 10)[0][0], said)
    from unisono.engines.torch.state.train_state import build_model

    base = build_model(task.build, opened.config.run.seed)
    untrained = {name: value.clone() for name, value in base.named_parameters()}
    with_adapters = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().eval()
    assert np.array_equal(speak(with_adapters, task, [row], GREEDY, 10)[0][0], said)
    changed = [name for name, value in ours.named_parameters() if not torch.equal(value, untrained[name])]
    assert changed and all("_proj" in name for name in changed)  # the adapters learned, the heads stayed
    torch.testing.assert_close(
        dict(with_adapters.named_parameters())[changed[0]], dict(ours.named_parameters())[changed[0]]
    )


def test_a_text_head_is_exported_beside_the_model(task: Speech, tmp_path: Path) -> None:
    from transformers import HiggsAudioV2ForConditionalGeneration

    patch = pytest.MonkeyPatch()
    patch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    from unisono.cli import main

    result = unisono.train("speech", [*made.OVERRIDES, f"run.dir={tmp_path}", "train.steps=1", "eval.every=null"])
    patch.undo()
    assert main.main(["export", str(result.folder), f"out={tmp_path / 'whole'}"]) == 0
    plain = HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "whole")
    assert plain.text_lm_head is None
    both, report = HiggsAudioV2ForConditionalGeneration.from_pretrained(
        tmp_path / "whole", use_text_head=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    ours = unisono.load_model(result.folder)
    assert torch.equal(both.text_lm_head.weight, ours.text_lm_head.weight)


def test_a_message_without_audio_can_be_a_prompt(task: Speech) -> None:
    row = labels.prompt_of([Message("user", ("do",))], task.tokens, task.stream, task.codes)
    assert len(row.frames) == 0 and task.tokens.decode(row.ids).endswith(
        "assistant<|end_header_id|>\n\n<|audio_out_bos|>"
    )
