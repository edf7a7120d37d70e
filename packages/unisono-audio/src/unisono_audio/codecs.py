"""Decodes recordings without the native core, and with FFmpeg for formats that nothing else supports.

Each format has exactly one decoder, so decoded samples do not depend on the window: WAV is read here, FLAC by dr_flac
(miniaudio), Opus and AAC by FFmpeg, and all others by libsndfile (soundfile). Checks and messages are the same as in
the native core (`native/codecs.cpp`).
"""

from __future__ import annotations

import io
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono_audio import ogg
from unisono_audio.recordings import BadRecording as BadRecording
from unisono_audio.recordings import Window

Samples = NDArray[np.float32]
LEAST_RATE, MOST_RATE, MOST_CHANNELS = 1000, 1_000_000, 64
MOST_FRAMES = 1 << 28
_CHUNK = 1 << 16
_SEARCHED = 4 << 20  # bytes of a file that is searched for a second stream for windows of it, too


class NeedsFFmpeg(Exception):  # noqa: N818 - no error yet
    """A format that only FFmpeg decodes."""


@dataclass(frozen=True)
class Header:
    """The header of a recording.

    Attributes:
        format: `wav`, `flac`, `vorbis`, `mp3` or `other`.
        rate: in Hz.
        channels: number of channels.
        frames: samples per channel; None if unknown.
    """

    format: str
    rate: int
    channels: int
    frames: int | None


class Stream(ABC):
    """An open recording."""

    header: Header

    @abstractmethod
    def seek(self, frame: int) -> bool:
        """Seek to a frame; returns False if that fails."""

    @abstractmethod
    def read(self, frames: int) -> Samples:
        """The next frames, (n, channels); fewer at the end."""

    def close(self) -> None:  # noqa: B027 - not all have to
        """Release resources."""


def probe(data: memoryview) -> Header:
    """Read the header."""
    with _open_stream(data) as stream:
        return stream.header


def decode(data: memoryview, window: Window, duration: float | None) -> tuple[Samples, int, int]:
    """Decode a window of a recording.

    Returns:
        Samples mixed to mono, (n,) float32; the rate in Hz; and the frame they begin at.

    Raises:
        BadRecording: with the reason.
        NeedsFFmpeg: for Opus and AAC.
    """
    with _open_stream(data) as stream:
        header = stream.header
        if not duration or len(data) < _SEARCHED:
            _refuse_joined(data, header.format)
        wanted = None if not duration else int(np.ceil(duration * header.rate))
        start = window.bounds(header.frames, wanted, header.rate)
        if start and header.frames is not None and start >= header.frames:
            raise BadRecording(f"has {header.frames} frames, and the window begins at frame {start}")
        if start and not stream.seek(start):
            raise BadRecording(f"cannot be decoded from frame {start} on: it is damaged or cut off")
        most = MOST_FRAMES if wanted is None else min(wanted, MOST_FRAMES)
        parts, count = list[Samples](), 0
        while count < most:
            ask = min(_CHUNK, most - count)
            part = stream.read(ask)
            parts.append(mono(part))
            count += len(part)
            if len(part) < ask:  # the end: libsndfile goes on behind it from somewhere else
                break
    if wanted is None and count == MOST_FRAMES:
        raise BadRecording(f"is longer than {MOST_FRAMES} samples; read windows of it")
    if not count:
        raise BadRecording("has no samples")
    if header.frames is not None and count < min(header.frames - start, most):
        raise BadRecording(
            f"is damaged or cut off: its header says {header.frames} frames, and decoding ended after {start + count}"
        )
    if header.format == "flac" and wanted is None and header.frames is not None and count > header.frames - start:
        raise BadRecording(f"is damaged: its header says {header.frames} frames, and there are {start + count}")
    return check_finite(np.concatenate(parts), start), header.rate, start


def mono_share(data: memoryview) -> float:
    """The energy of a recording mixed to mono, as a share of its channels' mean energy: 0 for opposite phases.

    Raises:
        BadRecording: as `decode`.
        NeedsFFmpeg: as `decode`.
    """
    mixed = channels = 0.0
    with _open_stream(data) as stream:
        count = 0
        while count < MOST_FRAMES and len(part := stream.read(_CHUNK)):
            mixed += float(np.square(mono(part), dtype=np.float64).sum())
            channels += float(np.square(part, dtype=np.float64).sum()) / part.shape[1]
            count += len(part)
    return mixed / channels if channels else 1.0


def check_finite(samples: Samples, start: int = 0) -> Samples:
    """The samples, after checking that all are finite."""
    good = np.isfinite(samples)
    if not good.all():
        raise BadRecording(f"has samples that are not finite, the first at frame {start + int(np.argmin(good))}")
    return samples


def mono(frames: Samples) -> Samples:  # (n, channels) -> (n,)
    """The mean of the channels, added in their order."""
    if frames.shape[1] == 1:
        return frames[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused behind this
        total = frames[:, 0] + frames[:, 1]
        for channel in range(2, frames.shape[1]):
            total += frames[:, channel]
    return np.asarray(total * np.float32(1 / np.float32(frames.shape[1])), dtype=np.float32)


@contextmanager
def _open_stream(data: memoryview) -> Iterator[Stream]:
    stream = _open(data)
    try:
        header = stream.header
        if header.channels < 1:
            raise BadRecording("has no channels")
        if header.channels > MOST_CHANNELS:
            raise BadRecording(f"has {header.channels} channels; at most {MOST_CHANNELS} are read")
        if not LEAST_RATE <= header.rate <= MOST_RATE:
            raise BadRecording(
                f"has a sample rate of {header.rate} Hz; rates from {LEAST_RATE} to {MOST_RATE} Hz are read"
            )
        yield stream
    finally:
        stream.close()


def _open(data: memoryview) -> Stream:
    head = bytes(data[:40])
    if not head:
        raise BadRecording("is empty")
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        wav = _wav(data)
        if wav is not None:
            return wav
    elif bytes(data[(at := _behind_id3(head)) : at + 4]) == b"fLaC":
        return _Flac(data[at:])
    elif head[:4] == b"OggS":
        packet = 27 + data[26] if len(data) > 26 else 0  # wherever the first page's content begins
        if bytes(data[packet : packet + 8]) == b"OpusHead":
            raise NeedsFFmpeg("Opus")
        pages = ogg.check_pages(data)
        if bytes(data[packet : packet + 5]) == b"\x7fFLAC":
            return _Flac(memoryview(b"".join(pages))[ogg.FLAC_MAPPING :])
    elif head[4:8] == b"ftyp":
        raise NeedsFFmpeg("MPEG-4 audio (AAC)")
    elif len(head) > 2 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        raise NeedsFFmpeg("AAC")
    elif head[:4] == b"\x1a\x45\xdf\xa3":
        raise NeedsFFmpeg("Matroska or WebM")
    known = head[:3] == b"ID3" or head[:4] in (b"OggS", b"RIFF", b"FORM", b".snd", b"caff", b"riff", b"RF64")
    if not known and not (len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0):
        beginning = "".join(chr(c) if 32 <= c < 127 and c != 39 else "." for c in head[:12])
        raise BadRecording(f"is not audio: it begins with '{beginning}'")
    return _Sound(data)


def _behind_id3(head: bytes) -> int:
    """The byte behind an ID3 tag at the beginning of a file, which may precede a FLAC; 0 without one."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    return 10 + sum((head[9 - place] & 127) << 7 * place for place in range(4))


def _wav(data: memoryview) -> Stream | None:
    """An uncompressed WAV; None if it is compressed."""
    at, described = 12, None
    while True:
        if at + 8 > len(data):
            raise BadRecording("is cut off: it has no samples" if described else "is a WAV without a format")
        kind, size = bytes(data[at : at + 4]), struct.unpack_from("<I", data, at + 4)[0]
        left = len(data) - at - 8
        if kind == b"fmt ":
            if described is not None:
                raise BadRecording("is a WAV with two formats")
            if size < 16 or left < size:
                raise BadRecording("is a WAV whose format is cut off")
            code, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", data, at + 8)
            if code == 0xFFFE and size >= 26:
                code = struct.unpack_from("<H", data, at + 32)[0]
            if channels < 1:
                raise BadRecording("has no channels")
            if align != channels * bits // 8:
                code = -1
            described = code, channels, min(rate, 0x7FFFFFFF), bits
        elif kind == b"data":
            if described is None:
                raise BadRecording("is a WAV without a format before its samples")
            code, channels, rate, bits = described
            if (code, bits) not in _WAV:
                return None
            width = channels * bits // 8
            if size == 0xFFFFFFFF or (size == 0 and left):
                size = left // width * width
            if size > left:
                raise BadRecording(f"is cut off: its header says {size // width} frames, and there are {left // width}")
            _refuse_second_data(data, at + 8 + size + (size & 1))
            return _Wav(
                data[at + 8 : at + 8 + size // width * width], Header("wav", rate, channels, size // width), bits, code
            )
        at += 8 + size + (size & 1)


def _refuse_second_data(data: memoryview, at: int) -> None:
    while at + 8 <= len(data):
        if bytes(data[at : at + 4]) in (b"data", b"RIFF"):
            raise BadRecording(
                "holds several blocks of samples, of which other programs read the first alone; write it again with "
                "all of them in one"
            )
        size = struct.unpack_from("<I", data, at + 4)[0]
        at += 8 + size + (size & 1)


def _refuse_joined(data: memoryview, format: str) -> None:
    """Refuse a file that was put together from several, of which decoders read the first alone."""
    name, found = {"flac": ("FLAC", _FLAC_BEGIN), "mp3": ("MP3", _MP3_BEGIN)}.get(format, ("", None))
    places = [place.start() for place in found.finditer(data)] if found else []
    if len(places) > 1:
        raise BadRecording(
            f"holds several {name} streams, the second from byte {places[1]} on; take it apart, or write it again as "
            "one"
        )


_FLAC_BEGIN = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")  # and the header of STREAMINFO
# A frame whose side information is zero, as encoders write one in front with the length of the whole.
_MP3_BEGIN = re.compile(rb"\xff[\xe0-\xff]..\x00{9}(?:\x00{8}(?:\x00{15})?)?(?:Xing|Info)", re.DOTALL)
_WAV = {(1, 8): 128.0, (1, 16): 32768.0, (1, 24): 8388608.0, (1, 32): 2147483648.0, (3, 32): 1.0, (3, 64): 1.0}


class _Wav(Stream):
    def __init__(self, data: memoryview, header: Header, bits: int, code: int) -> None:
        self._data, self.header, self._bits, self._code, self._at = data, header, bits, code, 0

    def seek(self, frame: int) -> bool:
        self._at = frame
        return True

    def read(self, frames: int) -> Samples:
        width = self.header.channels * self._bits // 8
        part = self._data[self._at * width : (self._at + frames) * width]
        self._at += len(part) // width
        scale = np.float32(1 / _WAV[self._code, self._bits])
        if self._code == 3:
            values = np.frombuffer(part, f"<f{self._bits // 8}").astype(np.float32)
        elif self._bits == 8:
            values = (np.frombuffer(part, np.uint8).astype(np.float32) - np.float32(128)) * scale
        elif self._bits == 24:
            wide = np.zeros((len(part) // 3, 4), dtype=np.uint8)
            wide[:, 1:] = np.frombuffer(part, np.uint8).reshape(-1, 3)
            values = (wide.view("<i4")[:, 0] >> 8).astype(np.float32) * scale
        else:
            values = np.frombuffer(part, f"<i{self._bits // 8}").astype(np.float32) * scale
        return values.reshape(-1, self.header.channels)


class _Flac(Stream):
    """dr_flac, through the same functions that the native core calls."""

    def __init__(self, data: memoryview) -> None:
        miniaudio = _package("miniaudio")
        self._ffi, self._lib = miniaudio.ffi, miniaudio.lib
        if len(data) < 42:
            raise BadRecording("is cut off in its header")
        if data[4] & 0x7F:
            raise BadRecording("is a FLAC without a header of its stream")
        packed = int.from_bytes(data[18:26], "big")  # STREAMINFO, RFC 9639 section 8.2
        frames = packed & (1 << 36) - 1
        self.header = Header("flac", packed >> 44, (packed >> 41 & 7) + 1, frames or None)
        self._data = self._ffi.from_buffer(data)
        self._handle = self._lib.ma_dr_flac_open_memory(self._data, len(data), self._ffi.NULL)
        if self._handle == self._ffi.NULL:
            raise BadRecording("cannot be decoded as FLAC: its headers are damaged")

    def seek(self, frame: int) -> bool:
        return bool(self._lib.ma_dr_flac_seek_to_pcm_frame(self._handle, frame))

    def read(self, frames: int) -> Samples:
        out = np.empty((frames, self.header.channels), dtype=np.float32)
        got = self._lib.ma_dr_flac_read_pcm_frames_f32(self._handle, frames, self._ffi.from_buffer("float[]", out))
        return out[:got]

    def close(self) -> None:
        self._lib.ma_dr_flac_close(self._handle)


class _Sound(Stream):
    """libsndfile, reading from an anonymous file in memory, without Python's lock."""

    def __init__(self, data: memoryview) -> None:
        soundfile = _package("soundfile")
        self._memory = os.memfd_create("recording") if hasattr(os, "memfd_create") else -1
        try:
            if self._memory >= 0:
                with os.fdopen(os.dup(self._memory), "wb") as file:
                    file.write(data)
                os.lseek(self._memory, 0, os.SEEK_SET)
                self._file = soundfile.SoundFile(self._memory, closefd=False)
            else:
                self._file = soundfile.SoundFile(io.BytesIO(data))
        except (soundfile.LibsndfileError, RuntimeError, ValueError) as error:
            self.close()
            reason = getattr(error, "error_string", str(error))
            raise BadRecording(f"cannot be decoded: {reason}") from error
        kind = {"MP3": "mp3", "FLAC": "flac", "MPEG": "mp3"}.get(self._file.format, "other")
        if self._file.subtype == "VORBIS":
            kind = "vorbis"
        frames = self._file.frames
        unknown = not 0 < frames < (1 << 63) - 1
        self.header = Header(kind, self._file.samplerate, self._file.channels, None if unknown else frames)

    def seek(self, frame: int) -> bool:
        try:
            return bool(self._file.seek(frame) == frame)
        except RuntimeError:
            return False

    def read(self, frames: int) -> Samples:
        try:
            return np.asarray(self._file.read(frames, dtype="float32", always_2d=True))
        except RuntimeError:
            return np.zeros((0, self.header.channels), dtype=np.float32)

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def ffmpeg(data: memoryview, what: str) -> tuple[Samples, int]:
    """Decode a whole recording with FFmpeg: samples mixed to mono, (n,) float32, and the rate in Hz.

    Uses PyAV, which includes FFmpeg, or else torchcodec.
    """
    if bytes(data[:4]) == b"OggS":
        ogg.check_pages(data)
    for decoder in (_pyav, _torchcodec):
        try:
            return decoder(data)
        except (ImportError, OSError):
            continue
    raise BadRecording(f"is {what}, which FFmpeg decodes: pip install 'unisono-audio[ffmpeg]'")


def _torchcodec(data: memoryview) -> tuple[Samples, int]:
    try:
        from torchcodec.decoders import AudioDecoder
    except RuntimeError as error:  # torchcodec is installed, but FFmpeg's libraries are not
        raise ImportError(str(error)) from error
    try:
        samples = AudioDecoder(bytes(data)).get_all_samples()
    except (RuntimeError, ValueError) as error:
        raise BadRecording(f"cannot be decoded: {str(error).splitlines()[0]}") from error
    return check_finite(mono(np.ascontiguousarray(samples.data.numpy().T))), int(samples.sample_rate)


def _pyav(data: memoryview) -> tuple[Samples, int]:
    import av

    try:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.audio[0]
            rate = int(stream.rate)
            resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)
            parts = [part.to_ndarray() for frame in container.decode(stream) for part in resampler.resample(frame)]
            parts += [part.to_ndarray() for part in resampler.resample(None)]
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise BadRecording(f"cannot be decoded: {error}") from error
    if not parts:
        raise BadRecording("has no samples")
    return check_finite(mono(np.ascontiguousarray(np.concatenate(parts, axis=1).T))), rate


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except (ImportError, OSError) as error:
        extra = "[ffmpeg]" if name == "av" else ""
        raise BadRecording(
            f"cannot be decoded without the package {name}: pip install 'unisono-audio{extra}'"
        ) from error
