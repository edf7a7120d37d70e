"""Build the native core and its codecs under AddressSanitizer and UBSan, and give them mutated recordings.

    python -m packages.unisono-audio.tests.fuzz --count 20000

Of three mutations in five, the values that a format holds are changed and sealed again, as `recording_forms` has them.

The codecs of miniaudio are compiled anew from its source distribution, so that the sanitizers see them; libsndfile is
the library that the package soundfile brings, of which they see what it allocates.
"""

from __future__ import annotations

import argparse
import io
import random
import struct
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tests.security.mutations import mutated

from .recording_forms import form_of, in_ogg, resealed

HERE = Path(__file__).parent
NATIVE = HERE.parents[2] / "packages/unisono-audio/src/unisono_audio/native"
SANITIZE = ["-g", "-O1", "-fPIC", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize=alignment"]
# dr_flac shifts negative numbers to the left, which every compiler it supports does as meant.
OURS = ["-fno-sanitize-recover=all"]
PART = 500  # mutations that one process reads
KINDS = {
    "wav": [("WAV", "PCM_16", 22050), ("WAV", "PCM_24", 22050), ("WAV", "FLOAT", 22050), ("WAVEX", "PCM_U8", 22050),
            ("RF64", "PCM_16", 22050)],
    "compressed WAV": [("WAV", "IMA_ADPCM", 22050), ("WAV", "MS_ADPCM", 22050), ("WAV", "ULAW", 8000),
                       ("W64", "PCM_16", 8000)],
    "aiff": [("AIFF", "PCM_16", 22050), ("AIFF", "FLOAT", 8000)],
    "au and caf": [("AU", "PCM_16", 8000), ("CAF", "PCM_16", 22050), ("CAF", "ALAC_16", 22050)],
    "flac": [("FLAC", "PCM_16", 22050), ("FLAC", "PCM_24", 22050)],
    "vorbis": [("OGG", "VORBIS", 22050)],
    "opus": [("OGG", "OPUS", 16000)],
    "flac in ogg": [("FLAC", "PCM_16", 22050)],
    "mp3": [("MP3", "MPEG_LAYER_III", 22050), ("MP3", "MPEG_LAYER_III", 44100)],
}  # fmt: skip


def build(directory: Path) -> list[str]:
    """Compile what is fuzzed; returns the command up to its counts."""
    name = f"miniaudio=={version('miniaudio')}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", name]
    if not list(directory.glob("miniaudio-*/miniaudio")):
        subprocess.run([*pip, "--dest", str(directory)], check=True)
        with tarfile.open(next(directory.glob("miniaudio-*.tar.gz"))) as archive:
            archive.extractall(directory, filter="data")
    sources = next(directory.glob("miniaudio-*/miniaudio"))
    (directory / "codecs.c").write_text(
        "#define MA_NO_DEVICE_IO\n#define MA_NO_ENGINE\n#define MA_NO_ENCODING\n#define MA_NO_GENERATION\n"
        "#define MA_NO_RESOURCE_MANAGER\n#define MA_NO_NODE_GRAPH\n#define MINIAUDIO_IMPLEMENTATION\n"
        f'#include "{sources / "miniaudio.h"}"\n'
    )
    library, program = directory / "codecs.so", directory / "fuzz"
    subprocess.run(["gcc", *SANITIZE, "-shared", str(directory / "codecs.c"), "-o", str(library), "-lm"], check=True)
    own = [
        str(NATIVE / f"{name}.cpp")
        for name in ("codecs", "ogg", "vorbis_setup", "vorbis_floor", "vorbis", "pipeline", "dispatch", "kernels")
    ]
    own = [path for path in own if Path(path).exists()]
    subprocess.run(
        ["g++", "-std=c++17", *SANITIZE, *OURS, "-Wno-psabi", str(HERE / "fuzz.cpp"), *own, "-o", str(program), "-ldl",
         "-lpthread"], check=True,
    )  # fmt: skip
    import soundfile

    return [
        str(program),
        str(library),
        str(Path(soundfile._snd_path if hasattr(soundfile, "_snd_path") else _sndfile())),
    ]


def _sndfile() -> str:
    import _soundfile_data

    return str(next(Path(_soundfile_data.__file__).parent.glob("libsndfile*")))


@cache
def recordings(kind: str) -> list[bytes]:
    """Small recordings of a format to start from, in mono and stereo."""
    import soundfile

    noise, found = np.random.default_rng(0), []
    for form, subtype, rate in KINDS[kind]:
        for channels in (1, 2):
            time = np.arange(int(0.4 * rate)) / rate
            tone = 0.3 * np.sin(2 * np.pi * (300 + 900 * time) * time) + 0.02 * noise.standard_normal(len(time))
            file = io.BytesIO()
            soundfile.write(file, np.stack([tone] * channels, 1), rate, format=form, subtype=subtype)
            content = _with_tags(file.getvalue())
            found.append(in_ogg(content) if kind == "flac in ogg" else content)
    return found


def _with_tags(content: bytes) -> bytes:
    """With what other programs write besides: tags around an MP3, and points to seek to in a FLAC."""
    if content[:4] == b"fLaC":
        points = b"".join(struct.pack(">QQH", sample, 0, 4096) for sample in (0, 4096, 0xFFFFFFFFFFFFFFFF))
        return content[:42] + b"\3\0\0" + bytes([len(points)]) + points + content[42:]
    if content[:1] == b"\xff":
        tag = b"TIT2" + struct.pack(">IH", 5, 0) + b"\3bird"
        return b"ID3\4\0\0" + struct.pack(">I", len(tag)) + tag + content + b"TAG" + bytes(125)
    return content


def mutation(kind: str, which: int) -> tuple[bytes, bool]:
    """A mutation by its number, and whether it was changed in its values and sealed again."""
    chance = random.Random(f"{kind} {which}")
    content = chance.choice(recordings(kind))
    changed, structural = mutated(content, chance, form_of(content))
    if not structural and chance.random() < 0.5:
        changed = resealed(changed)  # or hardly any changed byte of an Ogg file would be seen behind its checksum
    return changed, structural


def run(command: list[str], kind: str, first: int, count: int) -> tuple[list[int], str]:
    """Give some mutations of a format to the program.

    Returns:
        How many were changed in their values, decoded, refused and left to FFmpeg; and what went wrong.
    """
    made = [mutation(kind, which) for which in range(first, first + count)]
    given = b"".join(struct.pack("<I", len(content)) + content for content, _ in made)
    environment = {"ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run([*command, str(first)], env=environment, input=given, capture_output=True, check=False)
    if ended.returncode:
        return [0] * 4, f"ended with {ended.returncode}\n{ended.stderr.decode(errors='replace')[-4000:]}"
    return [sum(structural for _, structural in made), *map(int, ended.stdout.split())], ""


def main() -> int:
    """Run, and say for each format what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="mutated recordings of each format")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first, which with --count 1 makes one again"
    )
    parser.add_argument("--formats", default=",".join(KINDS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path("build/fuzz"))
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    command, failed, last = build(directory), 0, options.first + options.count
    for kind in options.formats.split(","):
        parts = [(first, min(PART, last - first)) for first in range(options.first, last, PART)]
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda part, kind=kind: run(command, kind, *part), parts))
        numbers = [sum(column) for column in zip(*(numbers for numbers, _ in results), strict=True)]
        wrong = [text for _, text in results if text]
        failed += len(wrong)
        print(f"{kind}: {options.count} mutated, {numbers[0]} of them in their values: {numbers[1]} decoded, "
              f"{numbers[2]} refused, {numbers[3]} left to FFmpeg", flush=True)  # fmt: skip
        for text in wrong:
            print(f"{kind}: FAIL: {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
