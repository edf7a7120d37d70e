"""Songs made on the spot, of species with different calls: the example that needs no download.

A species is a motif of one to three notes (whistles, sweeps, trills, buzzes, warbles) at its own pitch and pace. A
recording is one bird that repeats its motif over background noise; pitch, pace, loudness and start are the bird's own.
Recording *i* is a pure function of the settings and *i*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import Data, generator, key
from unisono_birdsong.settings import SyntheticData

Array = NDArray[np.float32]
_KINDS = ("whistle", "rise", "trill", "buzz", "fall", "warble")
_BIRD = 4  # recordings of one bird


@dataclass(frozen=True)
class Note:
    """A note of a motif.

    Attributes:
        kind: how its pitch moves, or how it is broken up.
        pitch: in Hz.
        seconds: that it lasts.
        gap: of silence after it.
        pace: of trills, buzzes and warbles, in Hz.
    """

    kind: str
    pitch: float
    seconds: float
    gap: float
    pace: float


@dataclass(frozen=True)
class Species:
    """What sings: its motif, and the silence after it in seconds."""

    notes: tuple[Note, ...]
    pause: float


class Songs:
    """Recordings of made-up species; `training` and `held out` have different birds.

    Attributes:
        classes: names of the species.
    """

    def __init__(self, config: SyntheticData, part: str) -> None:
        self._config, self._part = config, part
        self._size = config.recordings if part == "training" else config.held_out
        self.classes = tuple(f"species {number + 1}" for number in range(config.species))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> dict[str, Any]:
        """A recording: `audio` is (samples, rate), `labels` its species, `group` its bird."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        config = self._config
        bird, rng = row // _BIRD, generator(config.seed, "recording", self._part, row)
        singers = generator(config.seed, "bird", self._part, bird)
        count = int(singers.integers(1, config.most + 1))
        labels = sorted(singers.choice(config.species, size=count, replace=False).tolist())
        samples = round(config.seconds * config.rate)
        x = np.zeros(samples)
        for label in labels:
            x += song(self.species[label], samples, config.rate, singers, rng)
        level = np.sqrt(np.mean(np.square(x))) * 10 ** (-(config.snr_db + rng.uniform(-6, 6)) / 20)
        x += level * _pink(samples, rng)
        audio = (0.3 * x / np.abs(x).max()).astype(np.float32)
        return {
            "audio": (audio, config.rate),
            "labels": tuple(labels),
            "group": f"{self._part} bird {bird}",
            "name": f"song {row}",
        }

    @cached_property
    def species(self) -> list[Species]:
        """Those that sing here."""
        config = self._config
        return [species(config.seed, number, config.species, config.rate) for number in range(config.species)]

    @property
    def fingerprint(self) -> str:
        """Of the settings that decide the recordings."""
        chosen = self._config.model_dump(mode="json", exclude=set(Data.model_fields))
        return f"songs-{key(self._part, *(f'{name}={value}' for name, value in sorted(chosen.items()))):016x}"


def species(seed: int, number: int, count: int, rate: int) -> Species:
    """A species: the kinds of its notes go round, and the ranges of pitch share out what a recording holds."""
    rng = generator(seed, "species", number)
    low, high = 900.0, min(6500.0, 0.4 * rate)
    place = ((number * 0.618034) % 1 + rng.uniform(0, 1 / count)) % 1  # well spread, whatever the count
    notes = []
    for turn in range(int(rng.integers(1, 4))):
        kind = _KINDS[(number + turn * int(rng.integers(1, len(_KINDS)))) % len(_KINDS)]
        pitch = low * (high / low) ** place * float(rng.uniform(0.8, 1.25)) ** min(turn, 1)
        notes.append(Note(kind, pitch, rng.uniform(0.08, 0.3), rng.uniform(0.02, 0.1), rng.uniform(18, 45)))
    return Species(tuple(notes), float(rng.uniform(0.15, 0.5)))


def song(who: Species, samples: int, rate: int, bird: np.random.Generator, rng: np.random.Generator) -> Any:
    """A bird that repeats its motif, (samples,) float64 of amplitude up to 1.

    `bird` draws what is the bird's own, and `rng` what is the recording's own.
    """
    pitch, pace = bird.uniform(0.95, 1.05), bird.uniform(0.88, 1.12)
    x = np.zeros(samples)
    at = rng.uniform(-0.5, 0.3)
    while at * rate < samples:
        for note in who.notes:
            y = _sung(note, pitch * rng.uniform(0.99, 1.01), pace, rate) * rng.uniform(0.6, 1.0)
            first = round(at * rate)
            kept = slice(max(0, -first), max(0, min(len(y), samples - first)))
            if kept.start < kept.stop:
                x[first + kept.start : first + kept.stop] += y[kept]
            at += (note.seconds + note.gap) / pace
        at += who.pause * rng.uniform(0.8, 1.2)
    return x


def _sung(note: Note, pitch: float, pace: float, rate: int) -> Any:
    """A note, (samples,) float64."""
    size = max(8, round(note.seconds / pace * rate))
    t, place = np.arange(size) / rate, np.linspace(0, 1, size)
    bend = {"rise": 0.75 + 0.5 * place, "fall": 1.25 - 0.5 * place}.get(note.kind, np.ones(size))
    if note.kind == "warble":
        bend = 1 + 0.15 * np.sin(2 * np.pi * note.pace * 0.5 * t)
    y = np.sin(2 * np.pi * np.cumsum(note.pitch * pitch * bend) / rate)
    if note.kind == "trill":
        y *= np.sin(np.pi * note.pace * t) ** 4
    if note.kind == "buzz":
        y *= 0.5 + 0.5 * np.sign(np.sin(2 * np.pi * 4 * note.pace * t))
    return y * np.minimum(1, np.minimum(place, 1 - place) * 8)


def _pink(samples: int, rng: np.random.Generator) -> Any:
    """Noise whose energy falls with the frequency, of deviation 1."""
    spectrum = np.fft.rfft(rng.standard_normal(samples))
    spectrum /= np.sqrt(np.arange(1, len(spectrum) + 1))
    noise = np.fft.irfft(spectrum, samples)
    return noise / noise.std()
