"""Build the native core and its codecs under AddressSanitizer and UBSan, and give them mutated recordings.

    python -m packages.unisono-audio.tests.fuzz --count 20000

The codecs of miniaudio are compiled anew from its source distribution, so that the sanitizers see them; libsndfile is
the library that the package soundfile brings, of which they see what it allocates.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
NATIVE = HERE.parents[2] / "packages/unisono-audio/src/unisono_audio/native"
SANITIZE = ["-g", "-O1", "-fPIC", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize=alignment"]
# dr_flac shifts negative numbers to the left, which every compiler it supports does as meant.
OURS = ["-fno-sanitize-recover=all", "-DUNISONO_FUZZ"]


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


def recordings(directory: Path) -> dict[str, list[str]]:
    """Small recordings of each format to start from."""
    import soundfile

    random = np.random.default_rng(0)
    kinds = {
        "wav": [("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAVEX", "PCM_U8"), ("WAV", "IMA_ADPCM")],
        "flac": [("FLAC", "PCM_16"), ("FLAC", "PCM_24")],
        "vorbis": [("OGG", "VORBIS")],
        "mp3": [("MP3", "MPEG_LAYER_III")],
        "other": [("AIFF", "PCM_16"), ("AU", "PCM_16"), ("CAF", "PCM_16"), ("RF64", "PCM_16"), ("OGG", "OPUS")],
    }
    found: dict[str, list[str]] = {}
    for name, forms in kinds.items():
        for number, (form, subtype) in enumerate(forms):
            for channels in (1, 2):
                rate = 16000 if subtype == "OPUS" else 22050
                time = np.arange(int(0.4 * rate)) / rate
                tone = 0.3 * np.sin(2 * np.pi * (300 + 900 * time) * time) + 0.02 * random.standard_normal(len(time))
                path = directory / f"{name}-{number}-{channels}"
                with path.open("wb") as file:
                    soundfile.write(file, np.stack([tone] * channels, 1), rate, format=form, subtype=subtype)
                found.setdefault(name, []).append(str(path))
    return found


def main() -> int:
    """Run, and say for each format what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="mutated recordings of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default="wav,flac,vorbis,mp3,other")
    parser.add_argument("--directory", type=Path, default=Path("build/fuzz"))
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    command, files = build(directory), recordings(directory)
    half = options.count // 2
    failed = 0
    environment = {"ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1", "PATH": "/usr/bin:/bin"}
    for name in options.formats.split(","):
        parts = [(half, options.seed), (options.count - half, options.seed + half)]
        with ThreadPoolExecutor(2) as pool:
            results = list(
                pool.map(
                    lambda part, name=name: subprocess.run(
                        [*command, str(part[0]), str(part[1]), *files[name]], env=environment, capture_output=True,
                        text=True, check=False,
                    ),
                    parts,
                )
            )  # fmt: skip
        for result in results:
            if result.returncode:
                failed += 1
                print(f"{name}: FAIL ({result.returncode})\n{result.stderr[-4000:]}")
            else:
                print(f"{name}: {result.stdout.strip()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
