"""Decoding: every format, windows without what lies before, and one sentence for each kind of bad recording."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unisono_audio as audio
from unisono_audio.shared import DataError

from .backends import BACKENDS, native
from .make_golden import clip
from .recording_forms import in_ogg

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("miniaudio")
FORMS = {
    "wav16": ("WAV", "PCM_16", 1e-3), "wav24": ("WAV", "PCM_24", 1e-6), "wav8": ("WAV", "PCM_U8", 0.1),
    "wav32": ("WAV", "PCM_32", 1e-6), "float": ("WAV", "FLOAT", 1e-7), "double": ("WAV", "DOUBLE", 1e-7),
    "adpcm": ("WAV", "IMA_ADPCM", 0.5), "flac16": ("FLAC", "PCM_16", 1e-3), "flac24": ("FLAC", "PCM_24", 1e-6),
    "vorbis": ("OGG", "VORBIS", 0.5), "mp3": ("MP3", "MPEG_LAYER_III", 0.3), "aiff": ("AIFF", "PCM_16", 1e-3),
}  # fmt: skip


def recording(form: str, rate: int = 22050, channels: int = 1, seconds: float = 1.5, x: Any = None) -> bytes:
    x = clip(rate, seconds) if x is None else x
    frames = np.stack([x * (1 - 0.3 * c) for c in range(channels)], 1)
    file = io.BytesIO()
    kind, subtype, _ = FORMS[form]
    soundfile.write(file, frames, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_format_is_decoded_to_the_mean_of_its_channels(form: str, backend: Any) -> None:
    for channels in (1, 2):
        data = recording(form, channels=channels)
        reference = soundfile.read(io.BytesIO(data), dtype="float64", always_2d=True)[0].mean(1)
        x, rate = audio.decode(data, backend=backend)
        assert (rate, x.shape, x.dtype) == (22050, reference.shape, np.float32)
        assert np.abs(x - reference).max() < 2e-6  # of libsndfile's
        if form != "mp3":  # which begins with silence of its encoder's
            off = x[:33075] - clip(22050, 1.5) * (1 - 0.15 * (channels - 1))
            assert off.std() < FORMS[form][2] * x.std()
        header = audio.probe(data)
        assert (header.rate, header.channels, header.frames) == (22050, channels, len(reference))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["flac16", "flac24"])
def test_flac_in_ogg_is_the_flac(form: str, backend: Any) -> None:
    """libsndfile, which was said to read it, has "unknown error in flac decoder" for it."""
    flac = recording(form, channels=2, seconds=3.0)
    data = in_ogg(flac)
    assert audio.probe(data) == audio.probe(flac)
    whole = audio.decode(flac)
    assert whole.samples.std() > 0.01
    for start, duration in ((0.0, None), (0.9, 0.5), (2.7, None)):
        expected = audio.decode(flac, start, duration)
        assert np.array_equal(audio.decode(data, start, duration, backend=backend).samples, expected.samples)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flac_behind_an_id3_tag_is_the_flac(backend: Any) -> None:
    """It went to libsndfile as an MP3, and was refused for what it is not."""
    flac = recording("flac16")
    data = b"ID3\4\0\0\0\0\1\2" + bytes(130) + flac
    assert audio.probe(data) == audio.probe(flac)
    assert np.array_equal(audio.decode(data, 0.5, backend=backend).samples, audio.decode(flac, 0.5).samples)
    with pytest.raises(DataError, match=f"holds several FLAC streams, the second from byte {len(data)} on"):
        audio.decode(data + flac, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["wav16", "flac16", "vorbis", "mp3"])
def test_a_window_is_what_the_whole_has_there(form: str, backend: Any) -> None:
    x = np.concatenate([clip(22050, 3.0, seed) for seed in range(5)])
    data = recording(form, channels=2, x=x)
    whole, rate = audio.decode(data, backend=backend)
    for start in (0.0, 0.7, 3.03, 11.111, 14.5):
        part, _ = audio.decode(data, start, 0.5, backend=backend)
        first = round(start * rate)
        expected = whole[first : first + len(part)]
        assert len(part) == min(int(np.ceil(0.5 * rate)), len(whole) - first)
        assert np.abs(part - expected).max() <= 1e-7, start
        assert expected.any()


@native
@pytest.mark.parametrize("form", ["flac16", "vorbis", "mp3", "wav24", "adpcm"])
def test_both_paths_decode_alike(form: str) -> None:
    data = recording(form, channels=2)
    one, other = (audio.decode(data, 0.3, 0.8, backend=b).samples for b in ("native", "numpy"))
    assert np.abs(one - other).max() < 2e-6


def _wav(channels: int = 1, rate: int = 16000, bits: int = 16, data: bytes = bytes(3200)) -> bytes:
    width = channels * bits // 8
    head = struct.pack("<HHIIHH", 1, channels, rate & 0xFFFFFFFF, rate * width & 0xFFFFFFFF, width & 0xFFFF, bits)
    before = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + head
    return before + b"data" + struct.pack("<I", len(data)) + data


def _with(value: float) -> bytes:
    x = clip(16000, 0.5)
    x[1234] = value
    return recording("float", rate=16000, x=x)


def bad_recordings() -> dict[str, tuple[bytes, str]]:
    """By kind: its bytes, and what is said of it."""
    flac, vorbis, mp3, wav = (recording(form) for form in ("flac16", "vorbis", "mp3", "wav16"))
    lying = bytearray(flac)
    lying[21:26] = (100_000_000).to_bytes(5, "big")
    lying[20] = flac[20]
    lying[21] = (flac[21] & 0xF0) | lying[21] & 0x0F
    return {
        "empty": (b"", "is empty"),
        "text": (b"<!DOCTYPE html><html>", "is not audio: it begins with '<!DOCTYPE ht'"),
        "zeros": (bytes(500), "is not audio"),
        "image": (b"\x89PNG\r\n\x1a\n" + bytes(100), "is not audio: it begins with '.PNG"),
        "half a WAV": (wav[: len(wav) // 2], "is cut off: its header says 33075 frames, and there are 16"),
        "a WAV's head": (wav[:30], "is a WAV whose format is cut off"),
        "a WAV with two formats": (_wav()[:36] + _wav()[12:36] + _wav()[36:], "is a WAV with two formats"),
        "a WAV without samples": (_wav(data=b""), "has no samples"),
        "half a FLAC": (flac[: len(flac) // 2], "is damaged or cut off: its header says 33075 frames"),
        "a FLAC that says more": (bytes(lying), "is damaged or cut off: its header says"),
        "half a Vorbis": (vorbis[: len(vorbis) // 2], "is cut off"),
        "a Vorbis' head": (vorbis[:200], "cut off"),
        "no channels": (_wav(channels=0), "has no channels"),
        "many channels": (_wav(channels=200), "has 200 channels; at most 64 are read"),
        "rate 0": (_wav(rate=0), "has a sample rate of 0 Hz"),
        "rate 2 GHz": (_wav(rate=2_000_000_000), "has a sample rate of 2000000000 Hz"),
        "NaN": (_with(np.nan), "has samples that are not finite, the first at frame 1234"),
        "Inf": (_with(np.inf), "has samples that are not finite, the first at frame 1234"),
        "two chained Ogg streams": (vorbis + vorbis, "holds several Ogg streams; take it apart"),
        "two Ogg streams with a byte between them": (
            vorbis + b"x" + vorbis,
            "holds several Ogg streams; take it apart",
        ),
        "two WAV files": (wav + wav, "holds several blocks of samples"),
        "two FLAC streams": (flac + flac, f"holds several FLAC streams, the second from byte {len(flac)} on"),
        "two MP3 streams": (mp3 + mp3, f"holds several MP3 streams, the second from byte {len(mp3)} on"),
        "a WAV with two blocks": (
            _wav() + b"data" + struct.pack("<I", 3200) + bytes(3200),
            "holds several blocks of samples",
        ),
        "a WAV with a later second block": (
            _wav() + b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"data" + struct.pack("<I", 2) + bytes(2),
            "holds several blocks of samples",
        ),
        "MP3 garbage": (mp3[:4] + bytes(range(256)) * 8, ""),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", bad_recordings())
def test_a_bad_recording_is_one_sentence(kind: str, backend: Any, tmp_path: Path) -> None:
    data, reason = bad_recordings()[kind]
    path = tmp_path / "bird.flac"  # whatever its ending says
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        audio.decode(str(path), backend=backend)
    text = str(caught.value)
    assert text.startswith(f"{path} ")
    assert reason in text
    assert "\n" not in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damaged_stretch_is_not_decoded_silently(backend: Any) -> None:
    data = bytearray(recording("flac16"))
    data[len(data) // 2] ^= 0x10  # dr_flac checks each frame's CRC
    with pytest.raises(DataError, match="damaged or cut off"):
        audio.decode(bytes(data), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_damaged_page_of_ogg_is_named(subtype: str, backend: Any) -> None:
    """FFmpeg leaves out a page in which a bit has changed: an Opus recording of six seconds became one of five."""
    if subtype == "OPUS":
        pytest.importorskip("av")
    file = io.BytesIO()
    soundfile.write(file, clip(16000, 6.0), 16000, format="OGG", subtype=subtype)
    data = bytearray(file.getvalue())
    data[len(data) // 2] ^= 0x10
    with pytest.raises(DataError, match=r"the checksum of its Ogg page at byte \d+ is wrong"):
        audio.decode(bytes(data), backend=backend)


def test_a_wrong_ending_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "recording.wav"
    path.write_bytes(recording("mp3"))
    assert audio.probe(path).format == "mp3"
    assert len(audio.decode(path).samples)


def test_recordings_come_from_bytes_paths_and_ranges_of_them(tmp_path: Path) -> None:
    data = recording("flac16")
    path = tmp_path / "a b.flac"
    path.write_bytes(data)
    expected = audio.decode(data).samples
    for source in (path, str(path), path.as_uri().replace("%20", " "), bytearray(data), memoryview(data),
                   audio.ByteRange(str(path), 0, len(data))):  # fmt: skip
        assert (audio.decode(source).samples == expected).all()
    with pytest.raises(DataError, match="cannot be opened: No such file"):
        audio.decode(tmp_path / "none.wav")


def test_recordings_come_from_urls_and_ranges_of_them() -> None:
    pytest.importorskip("unisono", reason="without unisono, nothing is read behind a URL")
    fsspec = pytest.importorskip("fsspec")
    data = recording("flac16")
    with fsspec.open("memory://store/tar", "wb") as file:
        file.write(b"before" + data + b"after")
    found = audio.decode(audio.ByteRange("memory://store/tar", 6, 6 + len(data))).samples
    assert (found == audio.decode(data).samples).all()
    with pytest.raises(DataError, match="cannot be read"):
        audio.decode("memory://store/x")


def test_opus_needs_ffmpeg_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    soundfile.write(file, clip(16000, 1.0), 16000, format="OGG", subtype="OPUS")
    data = file.getvalue()
    pytest.importorskip("av")
    x, rate = audio.decode(data)
    assert rate == 48000
    assert x.std() > 0.01
    part, _ = audio.decode(data, 0.25, 0.5)
    assert (part == x[12000:36000]).all()
    for backend in BACKENDS:
        make = audio.Pipeline(16000, 0.5, audio.Fbank(), backend=backend)  # type: ignore[arg-type]
        batch = make([data], [audio.Window(0.25)])
        assert (batch.lengths.tolist(), batch.starts.tolist(), make.counters()["bytes"]) == ([48], [0.25], len(data))
        with pytest.raises(DataError, match="has 48000 frames, and the window begins at frame 96000"):
            audio.decode(data, 2.0, backend=backend)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(DataError, match=r"is Opus, which FFmpeg decodes: pip install 'unisono-audio\[ffmpeg\]'"):
        audio.decode(data)


def test_importing_it_imports_neither_torch_nor_jax() -> None:
    code = "import sys, unisono_audio; print([n for n in ('torch', 'jax', 'pydantic', 'pyarrow') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_follows_the_samples_of_a_wav_and_is_none_is_passed_over(backend: Any) -> None:
    """Chunks of other kinds stand there, and bytes that are no chunk."""
    for more in (b"LIST" + struct.pack("<I", 3) + b"abc\0", b"data", b"\0\1\2", b"LIST" + struct.pack("<I", 1 << 31)):
        assert len(audio.decode(_wav() + more, backend=backend).samples) == 1600


def test_a_chained_recording_that_ffmpeg_decodes_is_refused_too() -> None:
    """Opus: FFmpeg decoded the first stream alone, half of the recording, and nothing said so."""
    pytest.importorskip("av")
    file = io.BytesIO()
    soundfile.write(file, clip(48000, 0.5), 48000, format="OGG", subtype="OPUS")
    opus = file.getvalue()
    audio.decode(opus)
    with pytest.raises(DataError, match="holds several Ogg streams; take it apart"):
        audio.decode(opus + opus)
