"""Turns recordings into batches in one call: decode, cut, resample, compute features, pad, normalise.

The native core processes all rows in its own threads, without Python's lock, directly into the batch's buffer. The
NumPy path processes them one by one, with the same results within float32 (docs/audio.md has the measured differences).
Each row depends only on its recording and its window, so neither threads nor the other rows of a batch change a bit.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono_audio import codecs, native_core
from unisono_audio.features import Fbank, Features, Plan, plan_of
from unisono_audio.recordings import FIRST, Window, content, data_of, name_of
from unisono_audio.resample import Method, kernel, resample_numpy
from unisono_audio.shared import BadSamplesError, ConfigError, DataError

Array = NDArray[np.float32]
Backend = Literal["auto", "native", "numpy"]
GOOD, BAD, NEEDS_TABLE, NEEDS_FFMPEG = range(4)  # kinds of answers


class Answer(NamedTuple):
    """What the native core or the NumPy path says of one recording.

    Attributes:
        kind: one of the above.
        text: why it is bad, or what FFmpeg has to decode.
        rate: of the recording in Hz.
        start: frame of the recording at which the row begins.
        length: frames or samples before padding.
        values: the row, if it was not written into a batch.
    """

    kind: int
    text: str = ""
    rate: int = 0
    start: int = 0
    length: int = 0
    values: Any = None


@dataclass(frozen=True)
class Batch:
    """The result of a pipeline.

    Attributes:
        values: (rows, frames, width) float32 features, or (rows, samples) if the pipeline computes no features.
        lengths: (rows,) int64, frames or samples before padding; 0 for a row that failed.
        starts: (rows,) float64, the start of each row in its recording in seconds.
        errors: the reasons of failed rows, by row; their values are zeros.
    """

    values: Array
    lengths: NDArray[np.int64]
    starts: NDArray[np.float64]
    errors: dict[int, str] = field(default_factory=dict)


class Counters:
    """Counters of a pipeline in this process, over all threads."""

    def __init__(self) -> None:
        self._lock, self._values = threading.Lock(), {"decoded": 0, "failed": 0, "bytes": 0, "seconds": 0.0}

    def add(self, decoded: int, failed: int, size: int, seconds: float) -> None:
        """Count a batch."""
        with self._lock:
            for name, value in zip(self._values, (decoded, failed, size, seconds), strict=True):
                self._values[name] += value

    def __call__(self) -> dict[str, float]:
        """Recordings decoded and failed, bytes of them, and seconds that batches took, added over threads."""
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True)
class Pipeline:
    """The processing of recordings, from bytes to rows of a batch.

    Attributes:
        rate: in Hz, to which everything is resampled.
        duration: of a window in seconds; None for whole recordings.
        features: `Fbank`, `Mfcc` or `LogMel`; None for samples.
        frames: number of frames to pad (or cut) rows to; None for that of the duration, or of the longest recording in
            a batch.
        mean: subtracted from the features.
        std: features are divided by it after that.
        pad: value of padded frames before normalisation; `minimum` for each row's own minimum. Samples are padded with
            zeros.
        method: of resampling. It affects features a thousand times more than any other choice here, so keep it fixed.
        backend: `native`, `numpy`, or `auto` for the native core if it is available.
    """

    rate: int = 32_000
    duration: float | None = 5.0
    features: Features | None = field(default_factory=lambda: Fbank(128, window_type="hanning"))
    frames: int | None = None
    mean: float = 0.0
    std: float = 1.0
    pad: float | Literal["minimum"] = "minimum"
    method: Method = "sinc_hann"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if not codecs.LEAST_RATE <= self.rate <= codecs.MOST_RATE:
            raise ConfigError(f"rate={self.rate} Hz: choose one from {codecs.LEAST_RATE} to {codecs.MOST_RATE}")
        if self.duration is not None and not 0 < self.duration * self.rate <= codecs.MOST_FRAMES:
            raise ConfigError(f"duration={self.duration} s is empty, or longer than memory should hold")
        if self.std == 0:
            raise ConfigError("std=0: features cannot be divided by it")
        if self.backend not in ("auto", "native", "numpy"):
            raise ConfigError(f"unknown backend '{self.backend}'; choose auto, native or numpy")
        if self.backend == "native" and native_core.module() is None:
            raise ConfigError(f"backend=native: the native core was {native_core.status()}")
        if self.features is not None:
            plan_of(self.features, self.rate)  # raises for settings that do not fit the rate

    @property
    def native(self) -> bool:
        """Whether the native core is used."""
        return self.backend != "numpy" and native_core.module() is not None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of a row: (frames, width), or (samples,); None for an axis that depends on the batch."""
        samples = None if self.duration is None else round(self.duration * self.rate)
        if self.features is None:
            return (samples,)
        plan = plan_of(self.features, self.rate)
        return (self.frames or (None if samples is None else plan.frames(samples)), plan.width)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that determines the values of a row, including the backend, as JSON."""
        return {
            **json.loads(json.dumps(asdict(self))),
            "features": None if self.features is None else {type(self.features).__name__: asdict(self.features)},
            "backend": "native" if self.native else "numpy",
        }

    def __call__(
        self,
        recordings: Sequence[Any],
        windows: Sequence[Window] | None = None,
        *,
        names: Sequence[str] | None = None,
        threads: int = 1,
        on_error: Literal["raise", "mask"] = "raise",
    ) -> Batch:
        """Process recordings into a batch.

        Args:
            recordings: bytes, paths, URLs and byte ranges; or `(samples, rate)` if already decoded.
            windows: which part of each; the first by default.
            names: for error messages; paths by default.
            threads: number of threads of the native core.
            on_error: `mask` returns zeros for a recording that cannot be used, and the reason in `Batch.errors`.

        Raises:
            BadSamplesError: naming the first recording that cannot be used, and why.
        """
        began = perf_counter()
        windows = [FIRST] * len(recordings) if windows is None else windows
        if len(windows) != len(recordings):
            raise ConfigError(f"{len(recordings)} recordings and {len(windows)} windows")
        names = names or [name_of(recording) for recording in recordings]
        reasons: dict[int, str] = {}
        given: list[Any] = []
        for row, recording in enumerate(recordings):
            try:
                given.append(_samples(*recording) if isinstance(recording, tuple) else content(recording))
            except DataError as error:
                reasons[row] = str(error)
                given.append(b"")
        rows = self.shape[0]
        out = None if rows is None else np.empty((len(given), rows, *self.shape[1:]), dtype=np.float32)
        make = self._run_native if self.native else self._run_numpy
        answers = make(given, list(windows), out, threads)
        for row, answer in enumerate(answers):
            if answer.kind != GOOD:
                reasons.setdefault(row, f"{names[row]} {answer.text}")
        size = sum(_size(each) for row, each in enumerate(given) if row not in reasons)
        self.counters.add(len(given) - len(reasons), len(reasons), size, perf_counter() - began)
        if reasons and on_error == "raise":
            raise BadSamplesError(dict(sorted(reasons.items())))
        values = self._pad_rows([answer.values for answer in answers]) if out is None else out
        for row in reasons:
            values[row] = 0
        lengths = np.array(
            [0 if row in reasons else answer.length for row, answer in enumerate(answers)], dtype=np.int64
        )
        starts = np.array([answer.start / max(1, answer.rate) for answer in answers], dtype=np.float64)
        return Batch(values, lengths, starts, dict(sorted(reasons.items())))

    @property
    def counters(self) -> Counters:
        """Counters of this pipeline in this process."""
        found: Counters = vars(self).setdefault("_counters", Counters())  # atomic, whichever thread is first
        return found

    def _pad_rows(self, rows: list[Array | None]) -> Array:
        """Rows of different lengths, padded to the longest."""
        longest = max([len(row) for row in rows if row is not None], default=0)
        values = np.zeros((len(rows), longest, *self.shape[1:]), dtype=np.float32)
        for number, row in enumerate(rows):
            if row is not None:
                values[number, : len(row)] = row
                if self.features is not None and len(row):
                    values[number, len(row) :] = (
                        row.min() if self.pad == "minimum" else (self.pad - self.mean) / self.std
                    )
        return values

    # the native core --------------------------------------------------------------------------------------------

    @cached_property
    def _engine(self) -> Any:
        plan = None if self.features is None else plan_of(self.features, self.rate)
        return native_engine(
            plan, self.rate, self.duration or 0.0, pad=self.pad, mean=self.mean, std=self.std, instruction_set=""
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_engine", "_counters")}

    def _run_native(self, given: list[Any], windows: list[Window], out: Array | None, threads: int) -> list[Answer]:
        places = np.array([(-1.0 if w.start is None else w.start, w.place, self.duration or 0.0) for w in windows])
        places = places.reshape(len(given), 3)
        answers = [*map(Answer._make, self._engine.run(given, places, out, threads))]
        given, begins = [*given], dict[int, int]()  # first frames of what FFmpeg decoded and cut
        again = [row for row, answer in enumerate(answers) if answer.kind in (NEEDS_TABLE, NEEDS_FFMPEG)]
        while again:  # recordings with a new rate, and those that need FFmpeg
            ready = []
            for row in again:
                said = answers[row]
                try:
                    if said.kind == NEEDS_TABLE:
                        add_table(self._engine, said.rate, self.rate, self.method)
                    else:
                        data = data_of(given[row])
                        samples, rate, begins[row] = _by_ffmpeg(data, windows[row], self.duration, said.text)
                        given[row] = samples, rate
                except (codecs.BadRecording, DataError) as error:
                    answers[row] = Answer(BAD, str(error))
                else:
                    ready.append(row)
            part = None if out is None else np.empty((len(ready), *out.shape[1:]), dtype=np.float32)
            made = self._engine.run([given[row] for row in ready], places[ready], part, threads) if ready else []
            for row, answer in zip(ready, map(Answer._make, made), strict=True):
                answers[row] = answer._replace(start=begins[row]) if answer.kind == GOOD and row in begins else answer
            if out is not None:
                out[ready] = part
            again = [row for row in ready if answers[row].kind in (NEEDS_TABLE, NEEDS_FFMPEG)]
        return answers

    # NumPy ------------------------------------------------------------------------------------------------------

    def _run_numpy(self, given: list[Any], windows: list[Window], out: Array | None, threads: int) -> list[Answer]:
        return [
            self._row(recording, window, None if out is None else out[row])
            for row, (recording, window) in enumerate(zip(given, windows, strict=True))
        ]

    def _row(self, recording: Any, window: Window, out: Array | None) -> Answer:
        try:
            samples, rate, start = self._decode_window(recording, window)
            samples = resample_numpy(samples, rate, self.rate, self.method)
        except (codecs.BadRecording, DataError) as error:
            return Answer(BAD, str(error).removeprefix(f"{recording} "))
        if self.duration is not None:
            samples = samples[: round(self.duration * self.rate)]
        if self.features is None:
            if out is not None:
                out[: len(samples)] = samples
                out[len(samples) :] = 0
            return Answer(GOOD, "", rate, start, len(samples), samples)
        values = plan_of(self.features, self.rate)(samples)[: None if out is None else len(out)]
        if out is not None:
            out[:] = pad_and_normalise(values, len(out), self.mean, self.std, self.pad)
        else:
            values = _normalise(values, self.mean, self.std)
        return Answer(GOOD, "", rate, start, len(values), values)

    def _decode_window(self, recording: Any, window: Window) -> tuple[Array, int, int]:
        if isinstance(recording, tuple):
            return *recording, 0
        return decode_window(data_of(recording), window, self.duration)


def decode_window(data: memoryview, window: Window, duration: float | None) -> tuple[Array, int, int]:
    """Decode a part of a recording without the native core.

    Returns:
        Samples mixed to mono, (n,) float32; the recording's rate in Hz; and the frame they begin at.

    Raises:
        BadRecording: with the reason.
    """
    try:
        return codecs.decode(data, window, duration)
    except codecs.NeedsFFmpeg as need:
        return _by_ffmpeg(data, window, duration, str(need))


def pad_and_normalise(
    features: Array, frames: int, mean: float = 0.0, std: float = 1.0, pad: float | Literal["minimum"] = "minimum"
) -> Array:
    """Pad (or cut) the features of one recording to a number of frames, and normalise them: `(x - mean) / std`.

    Args:
        features: (n, width) float32.
        frames: number of frames.
        mean: subtracted first.
        std: divided by after that.
        pad: value of padded frames before normalisation; `minimum` for the minimum of `features`.

    Returns:
        (frames, width) float32.
    """
    kept = features[:frames]
    out = np.empty((frames, features.shape[1]), dtype=np.float32)
    out[: len(kept)] = kept
    out[len(kept) :] = (kept.min() if pad == "minimum" else pad) if len(kept) < frames else 0
    return _normalise(out, mean, std)


def native_engine(
    plan: Plan | None,
    rate: int,
    duration: float,
    *,
    pad: float | Literal["minimum"] = 0.0,
    mean: float = 0.0,
    std: float = 1.0,
    instruction_set: str = "",
) -> Any:
    """The native core's pipeline; resampling kernels for other rates are added by `add_table`."""
    module: Any = native_core.module()
    native = None
    if plan is not None:
        first, count, values = plan.bands
        native = module.FeaturePlan(
            window=plan.window, hop=plan.hop, size=plan.size, remove_mean=plan.remove_mean, emphasis=plan.emphasis,
            power=plan.power, floor=plan.floor, scale=plan.scale, shape=plan.shape, band_first=first, band_count=count,
            band_values=values, cosines=np.ascontiguousarray(plan.cosines).reshape(-1),
        )  # fmt: skip
    return module.Pipeline(
        codecs=native_core.codecs(), rate=rate, duration=duration, plan=native,
        centred=plan is not None and plan.centred, drop_last=plan is not None and plan.drop_last,
        range=0.0 if plan is None else plan.dynamic_range, pad_minimum=pad == "minimum",
        pad_value=0.0 if pad == "minimum" else pad, mean=mean, deviation=std, instruction_set=instruction_set,
    )  # fmt: skip


def add_table(engine: Any, from_rate: int, to_rate: int, method: Method) -> None:
    """Add the resampling kernel for another rate to a native pipeline."""
    table = kernel(from_rate, to_rate, method)
    taps = np.ascontiguousarray(table.taps).reshape(-1)
    engine.add_table(from_rate, table.source, table.target, table.left, table.first, taps)


def _normalise(values: Array, mean: float, std: float) -> Array:
    if mean != 0 or std != 1:
        values = (values - np.float32(mean)) / np.float32(std)
    return values


def _size(recording: Any) -> int:
    """The encoded size of a recording in bytes; 0 if already decoded."""
    if isinstance(recording, str):
        return Path(recording).stat().st_size
    return 0 if isinstance(recording, tuple) else memoryview(recording).nbytes


def _samples(samples: Any, rate: int) -> tuple[Array, int]:
    array = np.ascontiguousarray(samples, dtype=np.float32)
    if array.ndim != 1 or not len(array):
        raise DataError(f"samples of the shape {array.shape} are not (n,) with n above 0; mix the channels first")
    if not np.isfinite(array).all():
        raise DataError("samples that are not finite")
    return array, int(rate)


def _by_ffmpeg(data: memoryview, window: Window, duration: float | None, what: str) -> tuple[Array, int, int]:
    samples, rate = codecs.ffmpeg(data, what)
    wanted = None if duration is None else int(np.ceil(duration * rate))
    start = window.bounds(len(samples), wanted, rate)
    if start and start >= len(samples):
        raise codecs.BadRecording(f"has {len(samples)} frames, and the window begins at frame {start}")
    return samples[start : None if wanted is None else start + wanted], rate, start
