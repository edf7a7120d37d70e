"""The one label path: delay, labels, and the shift from a label to the place that predicts it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import HiggsAudioV2Processor

from recipes.speech.tests import made
from unisono import Context
from unisono_speech.data import labels, samples, tokens
from unisono_speech.data.labels import IGNORED, Stream
from unisono_speech.data.samples import Clip, Conversation, Message

STREAM = Stream(8, 8, 9)
CLIP = Clip("clip", voice=(0, "ba", 0))


@given(st.integers(0, 20), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_delayed_stream_gives_its_codes_back_and_says_that_it_has_ended(count: int, books: int) -> None:
    stream = Stream(books, 8, 9)
    codes = made.random_codes(count, books=books)
    restored, finished = stream.restore(stream.delay(codes))
    assert finished and np.array_equal(restored, codes)


def test_a_stream_that_was_cut_off_gives_its_complete_frames_and_says_so() -> None:
    codes = made.random_codes(12)
    restored, finished = STREAM.restore(STREAM.delay(codes)[:12])
    assert not finished and np.array_equal(restored, codes[: 12 - 8])
    assert len(STREAM.restore(STREAM.delay(codes)[:3])[0]) == 0


def test_the_delay_is_that_of_transformers() -> None:
    codes = made.random_codes(5)
    whole = np.concatenate([np.full((1, 8), 8), codes, np.full((1, 8), 9)])
    names = SimpleNamespace(audio_stream_bos_id=8, audio_stream_eos_id=9)
    theirs = HiggsAudioV2Processor.build_delay_pattern(names, torch.from_numpy(whole.T)[None])
    assert np.array_equal(STREAM.delay(codes), theirs[0].T.numpy())


def test_labels_are_the_codes_and_one_end_code_of_each_codebook() -> None:
    codes = made.random_codes(5)
    found = STREAM.labels(STREAM.delay(codes))
    for book in range(8):
        real = found[:, book][found[:, book] != IGNORED]
        assert real.tolist() == [*codes[:, book].tolist(), 9]


def test_only_the_turns_of_the_assistant_from_the_start_on_are_targets() -> None:
    known = tokens.of_bytes()
    messages = (
        Message("system", ("sys",)), Message("user", ("ask",)), Message("assistant", ("first", CLIP)),
        Message("user", ("more",)), Message("assistant", ("second", CLIP)),
    )  # fmt: skip
    codes = made.random_codes(4)
    row = labels.row_of(Conversation("c", messages, 3), known, STREAM, lambda clip: codes)
    assert known.decode(row.text_labels[row.text_labels != IGNORED]) == "second<|audio_out_bos|><|audio_eos|><|eot_id|>"
    assert (row.audio_labels[: len(row.frames) // 2] == IGNORED).all()
    assert (row.audio_labels[len(row.frames) // 2 :] != IGNORED).sum() == 8 * (4 + 1)
    assert labels.audio_places(row.ids, known).sum() == len(row.frames)


def test_the_targets_of_a_place_are_the_labels_of_the_next_one() -> None:
    known = tokens.of_bytes()
    messages = (Message("user", ("ask",)), Message("assistant", ("yes", CLIP)))
    row = labels.row_of(Conversation("c", messages, 1), known, STREAM, lambda clip: made.random_codes(4))
    text, audio = labels.next_targets(row, known)
    assert np.array_equal(text[:-1], row.text_labels[1:]) and text[-1] == IGNORED
    first = int(np.flatnonzero(labels.audio_places(row.ids, known))[0])
    assert np.array_equal(audio[first : first + len(row.frames) - 1], row.audio_labels[1:])
    assert (audio[first - 1] == IGNORED).all()  # the begin codes are given


class Copier:
    """A model that says what stands at each place, or, with `ahead`, what stands at the next one."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def model(self, input_ids: Any, audio_input_ids: Any, audio_input_ids_mask: Any, use_cache: bool) -> Any:
        known = tokens.of_bytes().ids
        seen = torch.full((*input_ids.shape, 1 + audio_input_ids.shape[2]), 0)
        seen[..., 0] = input_ids
        places = (input_ids == known[tokens.AUDIO]) | (input_ids == known[tokens.DELAY])
        seen[..., 1:][places] = audio_input_ids[audio_input_ids_mask]
        return SimpleNamespace(last_hidden_state=torch.roll(seen, -self.ahead, 1))

    def text_lm_head(self, seen: Any) -> Any:
        return torch.nn.functional.one_hot(seen[:, 0], 300).float()

    def audio_lm_head(self, seen: Any) -> Any:
        return torch.nn.functional.one_hot(seen[:, 1:], 10).float().flatten(1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_model_that_copies_its_input_scores_no_better_than_chance(tmp_path: Path, ahead: int) -> None:
    task = made.task(tmp_path)
    messages = samples.prompt("a text", "", [])
    talk = Conversation("c", (*messages, Message("assistant", (CLIP,))), len(messages))
    row = labels.row_of(talk, task.tokens, task.stream, lambda clip: made.random_codes(400))
    batch = {name: torch.from_numpy(value) for name, value in task.collate([row]).items()}
    context = Context(0, training=True)
    right, count = task.loss(task.outputs(Copier(ahead), batch, context), batch, context).metrics["accuracy"]
    share = float(right) / float(count)
    if ahead:
        assert share == 1.0  # so the score can tell
    else:
        assert share == pytest.approx(1 / 8, abs=4 * np.sqrt(1 / 8 * 7 / 8 / 3200))
