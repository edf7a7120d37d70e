"""Weights that somebody else has written, made safetensors; the one place where a pickle is ever read.

Reading a pickle can run whatever its author wants. Here it is read on the user's explicit word only, by torch's
restricted reader and no other, in a process of its own that has no network, none of the user's variables, bounds on
memory, time and what it writes, and one open file to write to. What it leaves is checked as any safetensors file is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

from unisono.checkpoint.exchange import hf_config, hf_shards
from unisono.checkpoint.exchange.hf_shards import Sharded
from unisono.config.schema.export_verb import Import
from unisono.runtime import safe_paths
from unisono.runtime.errors import CheckpointError, RunError
from unisono.runtime.files import whole, whole_folder

_SLOWEST = 4 << 20  # bytes per second, after a minute to start
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")  # of the environment
_COPIED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")  # of a folder, besides tensors
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Imported:
    """What an import came to.

    Attributes:
        out: file or folder that was made.
        tensors: in it.
        size: of them in bytes.
        left_out: what else a pickle held where its tensors are, for people.
    """

    out: Path
    tensors: int
    size: int
    left_out: tuple[str, ...] = ()


def import_(source: Path, words: Import) -> Imported:
    """Make safetensors of somebody's weights: a `.pt` file, or a folder or file of safetensors that is checked.

    Args:
        source: a file, or a folder with `pytorch_model.bin` or safetensors, with their index and configuration.
        words: of the command.

    Raises:
        RunError: where something is there already, or cannot be written.
        CheckpointError: for what cannot be read, holds no tensors, or would run code.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    out = words.out
    if os.path.lexists(out):
        raise RunError(f"{out} is there already, and nothing is overwritten; choose another out=")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    left: list[str] = []
    try:
        with ExitStack() as stack:
            readable: Path = stack.enter_context(_readable(source, words.key, out.absolute().parent, left))
            found = Sharded(readable)
            if not found.entries:
                raise CheckpointError(f"{source} holds no tensors")
            if out.suffix == ".safetensors":
                _write_file(found, out)
            else:
                _write_folder(found, source, words, out)
    except FileExistsError as error:
        raise RunError(f"{out} has come into being meanwhile; it is as it was. Choose another out=") from error
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}; nothing is left of it") from error
    return Imported(out, len(found.entries), sum(entry.size for entry in found.entries), tuple(left))


def _write_file(found: Sharded, out: Path) -> None:
    with whole(out) as temporary:
        with temporary.open("wb") as file:
            hf_shards.write(file, found.entries, found.content)
        if os.path.lexists(out):
            raise FileExistsError(out)


def _write_folder(found: Sharded, source: Path, words: Import, out: Path) -> None:
    files = hf_shards.planned(found.entries, words.shard_mb * 1e6)
    with whole_folder(out) as temporary:
        for file in files:
            with (temporary / file.name).open("wb") as opened:
                hf_shards.write(opened, file.entries, found.content)
        if len(files) > 1:
            (temporary / "model.safetensors.index.json").write_text(hf_shards.index(files), encoding="utf-8")
        for pattern in _COPIED if source.is_dir() else ():
            for path in source.glob(pattern):
                if not path.name.endswith(".index.json"):
                    hf_config.copy_settings(source, path.name, temporary)


@contextmanager
def _readable(source: Path, key: str | None, beside: Path, left: list[str]) -> Iterator[Path]:
    """What can be read as safetensors: the source itself, or what is taken out of its pickles for the time being."""
    pickles = _pickles(source)
    if not pickles:
        if key is not None:
            raise RunError(
                f"key={key} is for .pt files; {source} holds safetensors, whose tensors have one level of names"
            )
        yield source
        return
    with tempfile.TemporaryDirectory(dir=beside, prefix=".importing-") as folder:
        for number, pickle in enumerate(pickles):
            left += _taken_out(source, pickle, key, Path(folder) / f"{number:05d}.safetensors")
        yield Path(folder)


def _pickles(source: Path) -> list[str]:
    """Names of the pickles of a folder, or of the file itself; none where it has safetensors."""
    if source.is_file():
        return [] if source.suffix == ".safetensors" else [source.name]
    if any(source.glob("*.safetensors")) or any(source.glob("*.safetensors.index.json")):
        return []
    if (source / _BIN_INDEX).exists():
        return sorted(set(hf_shards.read_index(source, _BIN_INDEX).values()))
    if (source / _BIN).exists():
        return [_BIN]
    raise CheckpointError(f"{source} has neither *.safetensors nor {_BIN}; name the file itself")


def _taken_out(source: Path, name: str, key: str | None, out: Path) -> list[str]:
    """Have a process take the tensors out of a pickle; returns what else was there."""
    shown = source / name if source.is_dir() else source
    with ExitStack() as opened:
        try:
            pickle = opened.enter_context(
                safe_paths.open_inside(source, name) if source.is_dir() else safe_paths.open_regular(source)
            )
        except OSError as error:
            raise CheckpointError(f"{shown} cannot be read: {error.strerror or error}") from error
        size = os.fstat(pickle.fileno()).st_size
        file = opened.enter_context(out.open("wb"))
        done = _run(pickle, key, size, file, shown)
    told = _answer(done.stdout)
    if done.returncode == 0 and told is not None and "left" in told:
        return [_plain(line) for line in told["left"]]
    raise CheckpointError(f"{shown} {_why(done, told)}")


def _run(
    pickle: BufferedReader, key: str | None, size: int, file: BufferedWriter, shown: Path
) -> subprocess.CompletedProcess[str]:
    """The process that reads a pickle: two open files are all it is given."""
    asked = {"source": safe_paths.path_of(pickle), "key": key, "limit": 4 * size + (64 << 20)}
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # noqa: PTH100 - a text in, a text out
    command = [sys.executable, "-P", "-m", "unisono.checkpoint.exchange.pickle_process"]
    try:
        return subprocess.run(
            [*command, str(file.fileno())],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            errors="replace",
            env={**kept, "PYTHONPATH": path},
            pass_fds=(file.fileno(), pickle.fileno()),
            cwd="/",
            timeout=60 + size / _SLOWEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"{shown}: reading it took longer than {60 + size / _SLOWEST:.0f} s; it was ended, and nothing is left"
        ) from None


def _answer(text: str) -> dict[str, Any] | None:
    try:
        told = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return told if isinstance(told, dict) else None


def _why(done: subprocess.CompletedProcess[str], told: dict[str, Any] | None) -> str:
    """What is wrong with a pickle, as the end of a sentence."""
    if told is not None and "global" in told:
        asked = _plain(told["global"])
        return (
            f"is refused: to be read it asks for {asked}, which is neither a tensor nor plain data and "
            "could run code. Nothing of it was run. Who made the file can save tensors alone: "
            "torch.save(model.state_dict(), …), or safetensors.torch.save_file"
        )
    if told is not None and "sentence" in told:
        return _plain(told["sentence"])
    if done.returncode < 0:
        return f"cannot be read: the process that read it was ended by signal {-done.returncode}; nothing is left of it"
    last = _plain((done.stderr.strip().splitlines() or ["without a word"])[-1])
    return f"cannot be read: the process that read it ended with code {done.returncode} ({last})"


def _plain(text: object) -> str:
    """What comes out of somebody's file, fit for a terminal."""
    shown = re.sub(r"[^\x20-\x7e]", "?", str(text))
    return shown if len(shown) <= 600 else shown[:600] + "…"
