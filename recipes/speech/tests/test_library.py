"""Recordings: read once per sample, decoded once at all; codecs; splits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import unisono_audio as audio
from recipes.speech.tests import made
from unisono import ConfigError, DataError, SampleContext, generator
from unisono_speech import codec
from unisono_speech.codec import KMeansCodec
from unisono_speech.data import library, samples, voices
from unisono_speech.data.library import Library
from unisono_speech.data.samples import Clip, same_recording
from unisono_speech.settings import Embedded, Folder, Higgs, KMeans


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often recordings are read and decoded."""
    counted: Counter[str] = Counter()
    read, decode = Clip.read, audio.decode

    def counting_read(self: Clip) -> bytes:
        counted["read"] += 1
        return read(self)

    def counting_decode(*given: object, **named: object) -> object:
        counted["decode"] += 1
        return decode(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Clip, "read", counting_read)
    monkeypatch.setattr(library.audio, "decode", counting_decode)
    return counted


def test_a_recording_is_read_once_per_sample_and_decoded_once_at_all(tmp_path: Path, calls: Counter[str]) -> None:
    task = made.task(tmp_path)
    calls.clear()
    [row] = made.rows(task, 1)  # a reference and a target
    assert calls == {"read": 2, "decode": 2}
    made.rows(task, 1)
    assert calls == {"read": 2, "decode": 2}  # its codes are in memory
    other = made.task(tmp_path)  # as another process: codec and codes are on the disk
    calls.clear()
    [again] = made.rows(other, 1)
    assert calls == {"read": 2}
    assert np.array_equal(row.frames, again.frames)


def test_a_file_with_other_content_gets_other_codes(tmp_path: Path) -> None:
    task = made.task(tmp_path / "cache")
    file = tmp_path / "a.wav"
    file.write_bytes(voices.wav(0, "ba", 0))
    first = library.CodeStore(task.codec, tmp_path / "cache")(Clip("a", file))
    file.write_bytes(voices.wav(1, "so ti", 1))
    second = library.CodeStore(task.codec, tmp_path / "cache")(Clip("a", file))
    assert first.shape != second.shape


def test_a_recording_that_is_none_is_named(tmp_path: Path) -> None:
    task = made.task(tmp_path / "cache")
    (tmp_path / "a.wav").write_bytes(b"RIFFnonsense")
    with pytest.raises(DataError, match=r"sample 3, a\.wav"):
        task.codes(Clip("m.json, sample 3, a.wav", tmp_path / "a.wav"))


def test_the_codec_says_more_with_each_codebook_and_is_the_same_each_time(tmp_path: Path) -> None:
    config = KMeans(rate=8000, mels=16, codes=16)
    sounds = [audio.decode(voices.wav(s, voices.text(s, t), t)).samples for s in range(2) for t in range(8)]
    first, second = codec.fit(config, sounds), codec.fit(config, sounds)
    assert first.digest == second.digest
    truth, codes = codec.frames(config, sounds[0]), first.encode(sounds[0])
    assert codes.shape == (len(truth), 8) and codes.max() < 16
    said = np.cumsum([book[codes[:, stage]] for stage, book in enumerate(first.books)], axis=0)
    errors = np.abs(truth - said).mean(axis=(1, 2)).tolist()
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.5 * errors[0]
    first.save(tmp_path)
    assert KMeansCodec.load(config, tmp_path).digest == first.digest
    with pytest.raises(DataError, match="other settings"):
        KMeansCodec.load(KMeans(rate=8000, mels=8, codes=16), tmp_path)


def test_sound_comes_back_from_codes(tmp_path: Path) -> None:
    config = KMeans(rate=8000, mels=32, codes=32)
    sounds = [audio.decode(voices.wav(0, voices.text(0, t), t)).samples for t in range(8)]
    made_codec = codec.fit(config, sounds)
    back = made_codec.decode(made_codec.encode(sounds[0]))
    assert 0 <= len(back) - len(sounds[0]) < 320 and back.dtype == np.float32
    truth, heard = codec.frames(config, sounds[0]), codec.frames(config, back)
    other = codec.frames(config, sounds[1])
    count = min(len(truth), len(other))
    assert np.abs(truth - heard).mean() < 0.5 * np.abs(truth[:count] - other[:count]).mean()
    assert len(made_codec.decode(np.zeros((0, 8), dtype=np.int64))) == 0


def test_too_few_frames_for_a_codebook_are_refused() -> None:
    with pytest.raises(DataError, match=r"fewer than data\.codec\.codes=4096"):
        codec.fit(KMeans(rate=8000, codes=4096), [np.zeros(800, dtype=np.float32)])


def test_speakers_are_held_out_whole(tmp_path: Path) -> None:
    place = made.folder(tmp_path / "data", speakers=3)
    found = Library(Folder(kind="folder", path=place, split="speaker", held_out_speakers=["voice 1"]))
    kept = found.held_out()
    assert kept is not None and {kept[n].speaker for n in range(len(kept))} == {"voice 1"}
    training = found.training()
    assert {training[n].speaker for n in range(len(training))} == {"voice 0", "voice 2"}
    with pytest.raises(ConfigError, match=r"data\.held_out_speakers: no row has speaker=nobody"):
        Library(Folder(kind="folder", path=place, split="speaker", held_out_speakers=["nobody"]))
    by_share = Library(Folder(kind="folder", path=place, split="speaker", held_out=0.34))
    assert (
        len({sample.speaker for sample, out in zip(by_share.source.rows, by_share.is_held_out, strict=True) if out})
        == 1
    )


def test_held_out_speakers_need_a_split_by_speaker() -> None:
    with pytest.raises(ValueError, match=r"set data\.split=speaker"):
        Embedded(kind="embedded", held_out_speakers=["voice 1"])


def test_a_directory_that_is_no_codec_is_refused(tmp_path: Path) -> None:
    from unisono_speech.higgs_codec import HiggsCodec

    for content, told in (
        (None, r"data\.codec\.path: .* has no config\.json"),
        ('{"model_type": "llama"}', "holds a llama, not the Higgs tokenizer"),
        ('{"model_type": "higgs_audio_v2_tokenizer", "sample_rate": "x"}', r"data\.codec\.path: .* cannot be read"),
    ):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=told):
            HiggsCodec(Higgs(kind="higgs", path=tmp_path))


def test_a_copy_of_a_recording_is_not_its_own_reference(tmp_path: Path) -> None:
    """A reference that is the target would let the model copy it."""
    place = made.folder(tmp_path / "data", speakers=1, clips=3)
    (place / "copy.wav").write_bytes((place / "0_0.wav").read_bytes())
    made.changed(place, 1, audio_file="copy.wav")
    found = Library(Folder(kind="folder", path=place, held_out=0.0))
    source = found.training()
    for number, epoch in ((n, e) for n in (0, 1) for e in range(12)):
        reference, target = found.conversation(source[number], SampleContext(generator("epoch", epoch), True)).clips
        assert not same_recording(reference, target)
        assert reference.path.name == "0_2.wav"
    made.changed(place, 2, audio_file="0_0.wav")
    with pytest.raises(DataError, match=r"3 of 3 samples cannot be used: .* has no other recording to train on"):
        Library(Folder(kind="folder", path=place, held_out=0.0))


def test_held_out_recordings_that_the_data_name_as_references_are_told(tmp_path: Path) -> None:
    place = made.folder(tmp_path / "data", speakers=2, clips=3)
    chosen = {"split": "speaker", "held_out_speakers": ["voice 1"]}
    assert "held_out_as_references" not in Library(Folder(kind="folder", path=place, **chosen)).facts()
    made.changed(place, 0, ref_audio_file="1_0.wav")
    assert Library(Folder(kind="folder", path=place, **chosen)).facts()["held_out_as_references"] == 1


def test_a_row_is_as_long_as_its_recordings_and_texts(tmp_path: Path) -> None:
    place = made.folder(tmp_path / "data", speakers=1, clips=3)
    read = Library(Folder(kind="folder", path=place, held_out=0.0)).source
    seconds = [sample.clip.seconds for sample in read.rows]
    assert len(set(seconds)) > 1
    assert np.argmax(read.lengths) == np.argmax(seconds)
    others = read.lengths - np.array([round(25 * second) for second in seconds])
    texts = [samples.prompt(sample.text, sample.scene, ()) for sample in read.rows]
    assert others.tolist() == [sum(len(part) for message in one for part in message.parts) for one in texts]
