"""Recordings whose pages, frames and values were changed and sealed again: read whole, or refused in one sentence."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest

import unisono_audio as audio
from unisono_audio.shared import DataError

from .backends import BACKENDS, native
from .fuzz import KINDS, mutation, recordings
from .recording_forms import form_of, in_ogg
from .test_decode import clip, soundfile

pytest.importorskip("miniaudio")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_apart_and_sealed_is_the_same_file(kind: str) -> None:
    """Else the fuzzer would show little: what it changes would be refused for what it did not change."""
    for content in recordings(kind):
        form = form_of(content)
        assert form.seal(form.parse(content)) == content


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutation_is_read_or_refused_in_one_sentence(kind: str, backend: Any) -> None:
    """Floats beyond their range were a warning of NumPy, where channels are mixed."""
    if kind == "opus":
        pytest.importorskip("av")
    read = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for which in range(80):
            try:
                read += bool(len(audio.decode(mutation(kind, which)[0], backend=backend).samples))
            except DataError as error:
                assert "\n" not in str(error)
    assert 0 < read < 80


def long_recording(form: str, subtype: str) -> bytes:
    file = io.BytesIO()
    if subtype == "FLAC":
        return in_ogg(long_recording("FLAC", "PCM_16"))
    soundfile.write(file, clip(16000, 6.0), 16000, format=form, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["VORBIS", "OPUS", "FLAC"])
@pytest.mark.parametrize(
    ("change", "number", "due"), [("lost", 6, 5), ("doubled", 5, 6), ("swapped", 6, 5)]
)  # fmt: skip
def test_a_page_of_ogg_that_is_missing_or_in_a_wrong_place_is_named(
    form: str, change: str, number: int, due: int, backend: Any
) -> None:
    """FFmpeg decoded five seconds of six of an Opus recording without a page, and nothing said so."""
    if form == "OPUS":
        pytest.importorskip("av")
    content = long_recording("OGG", form)
    pages = form_of(content).parse(content)
    assert len(pages) > 7
    if change == "lost":
        del pages[5]
    elif change == "doubled":
        pages.insert(5, copy.deepcopy(pages[5]))
    else:
        pages[5], pages[6] = pages[6], pages[5]
    with pytest.raises(DataError, match=rf"damaged: Ogg page {number} is at byte \d+, where page {due} should be"):
        audio.decode(form_of(content).seal(pages), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flac_of_more_frames_than_its_header_says_is_refused(backend: Any) -> None:
    content = long_recording("FLAC", "PCM_16")
    parts = form_of(content).parse(content)
    parts["frames"].insert(4, copy.deepcopy(parts["frames"][4]))
    changed = form_of(content).seal(parts)
    with pytest.raises(DataError, match="is damaged: its header says 96000 frames, and there are 100096"):
        audio.decode(changed, backend=backend)
    assert len(audio.decode(changed, 0.0, 1.0, backend=backend).samples) == 16000


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_codec_reads_behind_a_short_part_is_no_part_of_a_recording(backend: Any) -> None:
    """Without the native core the end was asked for again, and libsndfile gave 12 samples more of some other place."""
    content = recordings("au and caf")[1]
    values = {**form_of(content).parse(content), "offset": 0, "size": 0xFFFFFFFF, "encoding": 2}
    with pytest.raises(DataError, match="its header says 6412 frames, and decoding ended after 6400"):
        audio.decode(form_of(content).seal(values), backend=backend)


@native
def test_the_codec_of_an_ogg_file_is_told_by_where_its_first_page_ends() -> None:
    """One with another table of segments went to libsndfile, which keeps what it allocates for a damaged Vorbis."""
    content = recordings("vorbis")[0]
    pages = form_of(content).parse(content)
    pages[0]["packets"].append(b"more")
    with pytest.raises(DataError, match="cannot be decoded as Ogg Vorbis: its headers are damaged"):
        audio.decode(form_of(content).seal(pages), backend="native")
