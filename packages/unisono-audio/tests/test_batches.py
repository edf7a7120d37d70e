"""Whole batches in one call: the rows do not depend on who makes them, with whom, or how many at a time."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unisono_audio as audio
from unisono_audio.shared import BadSamplesError, ConfigError

from .backends import BACKENDS, native
from .make_golden import clip
from .test_decode import bad_recordings, recording

RATES = (44100, 22050, 16000, 48000, 8000)


def pipeline(**more: Any) -> audio.Pipeline:
    settings = {"rate": 16000, "duration": 1.0, "features": audio.Fbank(40), "frames": 110, "mean": -4.0, "std": 3.0}
    return audio.Pipeline(**{**settings, **more})


def made_elsewhere(make: audio.Pipeline, recordings: list[bytes], threads: int = 1, **environment: str) -> str:
    """A hash of what another process makes of recordings."""
    code = (
        "import sys, pickle, hashlib; make, data, threads = pickle.load(sys.stdin.buffer);"
        "print(hashlib.sha256(make(data, threads=threads).values.tobytes()).hexdigest())"
    )
    # A host may say in its environment which kernels BLAS takes, as its processors differ.
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    pickled = pickle.dumps((make, recordings, threads))
    done = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True, env=given)
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def recordings() -> list[bytes]:
    forms = ("flac16", "vorbis", "wav16", "mp3")
    return [
        recording(form, rate, 1 + number % 2, 0.4 + 0.3 * number)
        for number, rate in enumerate(RATES)
        for form in forms
        if not (form == "mp3" and rate == 8000)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_is_its_parts_put_together(recordings: list[bytes], backend: Any) -> None:
    batch = pipeline(backend=backend)(recordings)
    assert batch.values.shape == (len(recordings), 110, 40)
    for row, data in enumerate(recordings):
        x, rate = audio.decode(data, 0.0, 1.0, backend=backend)
        x = audio.resample(x, rate, 16000, backend=backend)[:16000]
        expected = audio.pad_and_normalise(audio.fbank(x, 16000, 40, backend=backend), 110, -4.0, 3.0)
        assert batch.lengths[row] == 1 + (len(x) - 400) // 160
        assert (batch.values[row] == expected).all()
    assert len(set(batch.lengths)) > 2  # shorter ones were padded


@native
def test_neither_threads_nor_neighbours_change_a_bit(recordings: list[bytes]) -> None:
    make = pipeline()
    reference = make(recordings).values
    assert reference.std() > 0.3
    for threads in (2, 5):
        assert (make(recordings, threads=threads).values == reference).all()
    alone = np.concatenate([pipeline()([data]).values for data in reversed(recordings)])[::-1]
    assert (alone == reference).all()
    assert (pickle.loads(pickle.dumps(make))(recordings).values == reference).all()
    assert made_elsewhere(make, recordings, 3) == hashlib.sha256(reference.tobytes()).hexdigest()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_numpy_path_does_not_depend_on_the_threads_of_blas(recordings: list[bytes], threads: str) -> None:
    make, data = pipeline(backend="numpy"), recordings[:6]
    there = made_elsewhere(make, data, OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads)
    assert there == hashlib.sha256(make(data).values.tobytes()).hexdigest()


@native
def test_both_paths_make_the_same_batch(recordings: list[bytes]) -> None:
    off = np.abs(pipeline()(recordings).values - pipeline(backend="numpy")(recordings).values)
    assert off.mean() < 2e-5
    assert off.max() < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_are_cut_where_they_are_asked_for(backend: Any) -> None:
    x = np.concatenate([clip(16000, 1.0, seed) for seed in range(4)])
    data = recording("wav32", 16000, x=x)
    make = pipeline(features=None, frames=None, mean=0.0, std=1.0, backend=backend)
    batch = make([data] * 5, [audio.FIRST, audio.CENTRE, audio.Window(None, 1.0), audio.Window(2.5), audio.Window(3.6)])
    assert batch.starts.tolist() == [0.0, 1.5, 3.0, 2.5, 3.6]
    for row, start in enumerate(batch.starts):
        first = round(start * 16000)
        expected = x[first : first + 16000]
        assert np.abs(batch.values[row, : len(expected)] - expected).max() < 1e-6
    assert batch.lengths.tolist() == [16000] * 4 + [6400]
    assert not batch.values[4, 6400:].any()
    short = make([recording("wav32", 16000, x=x[:5000])], [audio.Window(None, 0.9)])
    assert (short.starts.tolist(), short.lengths.tolist()) == ([0.0], [5000])
    rng = np.random.default_rng(0)
    starts = make([data] * 200, [audio.Window.random(rng) for _ in range(200)]).starts
    assert starts.min() < 0.2
    assert 2.8 < starts.max() <= 3.0


def test_all_windows_of_a_recording_cover_it() -> None:
    assert [w.start for w in audio.windows(80000, 16000, 2.0)] == [0.0, 2.0, 4.0]
    assert [w.start for w in audio.windows(80000, 16000, 2.0, hop=1.5)] == [0.0, 1.5, 3.0]
    assert [w.start for w in audio.windows(32000, 16000, 2.0)] == [0.0]
    assert [w.start for w in audio.windows(100, 16000, 2.0)] == [0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_recordings_of_any_length_are_padded_to_the_longest(backend: Any) -> None:
    make = pipeline(duration=None, frames=None, backend=backend)
    batch = make([recording("flac16", 16000, seconds=s) for s in (0.5, 1.25, 0.01)])
    assert batch.lengths.tolist() == [48, 123, 1]
    assert batch.values.shape == (3, 123, 40)
    assert (batch.values[0, 48:] == batch.values[0, :48].min()).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_recordings_are_named_or_left_out(backend: Any) -> None:
    good, kinds = recording("flac16"), bad_recordings()
    given = [good, *(data for data, _ in kinds.values()), good]
    make = pipeline(duration=2.0, frames=210, backend=backend)
    with pytest.raises(BadSamplesError) as caught:
        make(given)
    assert set(caught.value.reasons) == set(range(1, len(kinds) + 1))
    assert str(caught.value).startswith("the recording is empty")
    batch = make(given, on_error="mask", names=[f"row {i}" for i in range(len(given))])
    assert (batch.values[0] == batch.values[-1]).all()
    assert not batch.values[1:-1].any()
    for number, (_, reason) in enumerate(kinds.values(), start=1):
        assert batch.errors[number].startswith(f"row {number} ")
        assert reason in batch.errors[number]
    assert batch.lengths[1:-1].sum() == 0 < batch.lengths[0]


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings, reason in (
        ({"rate": 10}, "rate=10 Hz"), ({"duration": 0}, "duration=0"), ({"std": 0}, "std=0"),
        ({"backend": "rust"}, "unknown backend 'rust'"),
        ({"features": audio.Fbank(high_freq=9000)}, "bands from 20"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            pipeline(**settings)
    with pytest.raises(ConfigError, match="cannot begin at -1"):
        audio.Window(-1)


def test_what_decides_the_values_is_in_the_fingerprint() -> None:
    one = pipeline().fingerprint()
    for other in (pipeline(method="kaiser_best"), pipeline(std=2.0), pipeline(features=audio.Fbank(41))):
        assert other.fingerprint() != one
    assert one["method"] == "sinc_hann"
    assert pipeline().fingerprint() == one


@native
def test_the_native_core_is_as_far_as_the_cores_go_without_the_gil() -> None:
    """While a batch is made, Python goes on: the core does not hold its lock."""
    data = [recording("vorbis", 44100, seconds=3.0)] * 24
    make = pipeline(duration=3.0, frames=None)
    make(data[:1])
    ticks, thread = 0, threading.Thread(target=make, args=(data,))
    thread.start()
    while thread.is_alive():
        ticks += 1
        time.sleep(1e-4)
    assert ticks > 3


def test_what_was_decoded_is_counted(tmp_path: Path) -> None:
    data, path = recording("flac16"), tmp_path / "a.flac"
    path.write_bytes(data)
    make = pipeline()
    make([data, str(path), b"no", (clip(16000), 16000)], on_error="mask")
    counted = make.counters()
    assert counted.pop("seconds") > 0
    assert counted == {"decoded": 3, "failed": 1, "bytes": 2 * len(data)}
