"""Made-up voices: syllables of a noise burst and a vowel, by two formants over a pulse train.

Nothing is recorded or downloaded. A voice is a pitch and a length of the vocal tract, both keyed by its number; a take
varies pitch and speed a little, as people do. Formants of the vowels are the averages of Peterson & Barney (1952).
"""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import generator

RATE = 8000
VOWELS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}  # Hz
CONSONANTS = {"b": 300, "d": 1800, "g": 1200, "s": 3400, "t": 2800}  # Hz, centre of the burst
SYLLABLE = 0.16  # seconds

Array = NDArray[np.float64]


def text(speaker: int, take: int) -> str:
    """Two syllables, such as `ba to`."""
    rng = generator("speech", "text", speaker, take)
    return " ".join(str(rng.choice(list(CONSONANTS))) + str(rng.choice(list(VOWELS))) for _ in range(2))


def wav(speaker: int, said: str, take: int) -> bytes:
    """A text in a voice, as a WAV file: 16 bit, mono, 8 kHz."""
    rng = generator("speech", "take", speaker, take)
    voice = generator("speech", "voice", speaker)
    pitch = float(voice.uniform(90, 220)) * float(rng.uniform(0.95, 1.05))
    tract = float(voice.uniform(0.9, 1.15))
    speed = float(rng.uniform(0.9, 1.1))
    sound = np.concatenate([_syllable(part, pitch, tract, speed, rng) for part in said.split()])
    return pcm_wav(0.5 * 32767 * sound / np.abs(sound).max(), RATE)


def pcm_wav(samples: NDArray[np.floating[Any]], rate: int) -> bytes:
    """A WAV file of samples (n,) within ±32767: 16 bit, mono."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", "not compressed"))
        file.writeframes(np.round(samples).astype("<i2").tobytes())
    return buffer.getvalue()


def _syllable(part: str, pitch: float, tract: float, speed: float, rng: np.random.Generator) -> Array:
    length = int(RATE * SYLLABLE / speed)
    time = np.arange(length) / RATE
    vowel = np.zeros(length)
    for harmonic in range(1, int(RATE / 2 / (pitch * 1.1))):
        frequency = harmonic * pitch
        strength = sum(1 / (1 + ((frequency - tract * formant) / 90) ** 2) for formant in VOWELS[part[1]])
        vowel += strength * np.sin(2 * np.pi * frequency * (1 - 0.05 * time / time[-1]) * time)
    burst = rng.normal(size=length) * np.cos(2 * np.pi * CONSONANTS[part[0]] * time)
    onset = np.clip((time - 0.03) / 0.02, 0, 1) * np.clip((time[-1] - time) / 0.03, 0, 1)
    made: Array = vowel * onset / np.abs(vowel).max() + 0.25 * burst * np.exp(-(((time - 0.015) / 0.01) ** 2))
    return made
