"""Converts untrusted weights to safetensors; the only place where a pickle is ever read.

Reading a pickle can run arbitrary code. Here it is only read on the user's explicit request, with torch's restricted
reader, in a sandboxed process: no network, no files except Python's own and the two that are open, no environment
variables of the user, no access to other processes, and limits on memory, time and output. The result is checked like
any other safetensors file.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from unisono.checkpoint.exchange import hf_config, hf_shards
from unisono.checkpoint.exchange.dcp_folder import METADATA, SUFFIX, Taking
from unisono.checkpoint.exchange.hf_shards import ShardedFiles
from unisono.checkpoint.exchange.model_names import ModelTensors
from unisono.config.schema.verbs import Import
from unisono.engines.state import ADAM_MOMENTS
from unisono.runtime.console import say
from unisono.runtime.errors import CheckpointError, RunError
from unisono.runtime.files import atomic_file, atomic_folder, own_folder, remove_folder
from unisono.runtime.untrusted import safe_paths

_MIN_BYTES_PER_SECOND = 4 << 20  # bytes per second, after a minute to start
_PATIENCE = 10  # seconds that may pass for one of the processor's, on a host that is busy
_OTHER_FILES = 256  # that a process may have open besides those of a folder
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}  # it may start no others
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # of the environment
_COPIED_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")  # of a folder, besides tensors
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


Tensors = ShardedFiles | ModelTensors


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        out: the new file or folder.
        tensors: number of tensors.
        size: of the tensors in bytes.
        left_out: descriptions of other entries next to the tensors of a pickle.
        moments: number of parameters whose moments were taken, too.
    """

    out: Path
    tensors: int
    size: int
    left_out: tuple[str, ...] = ()
    moments: int = 0


def import_weights(source: Path, words: Import) -> Imported:
    """Convert untrusted weights to safetensors: a `.pt` file, a folder of DCP, or safetensors to be checked.

    Args:
        source: a file, or a folder with `pytorch_model.bin` or safetensors, with their index and configuration; or one
            that torch.distributed.checkpoint (DCP) has written.
        words: of the command.

    Raises:
        RunError: where something is there already, or cannot be written.
        CheckpointError: for what cannot be read, holds no tensors, or would run code.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    out = words.out
    for key, path in (("out", out), ("moments", words.moments)):
        if path is not None and os.path.lexists(path):
            raise RunError(f"{path} already exists and is not overwritten; choose another {key}=")
        if path is not None:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
    left: list[str] = []
    moments = 0
    try:
        with ExitStack() as stack:
            readable: Path = stack.enter_context(_as_safetensors(source, words, out.absolute().parent, left))
            files = ShardedFiles(readable)
            if not files.entries:
                raise CheckpointError(f"{source} holds no tensors")
            found = files if words.like is None else ModelTensors(files, words.like, source)
            if words.moments is not None:
                own = stack.enter_context(_moments(source, words, words.moments, left))
                _write_file(own, words.moments)
                moments = len(own.entries) // len(ADAM_MOMENTS)
            if out.suffix == ".safetensors":
                _write_file(found, out)
            else:
                _write_folder(found, source, words, out)
    except FileExistsError as error:
        raise RunError(
            f"{out} was created by someone else meanwhile and was not changed. Choose another out="
        ) from error
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}; the partial output was removed") from error
    return Imported(out, len(found.entries), sum(entry.size for entry in found.entries), tuple(left), moments)


def _write_file(found: Tensors, out: Path) -> None:
    with atomic_file(out) as temporary:
        with temporary.open("wb") as file:
            hf_shards.write(file, found.entries, found.content)
        if os.path.lexists(out):
            raise FileExistsError(out)


def _write_folder(found: Tensors, source: Path, words: Import, out: Path) -> None:
    files = hf_shards.plan_files(found.entries, words.shard_mb * 1e6)
    with atomic_folder(out) as temporary:
        for file in files:
            with (temporary / file.name).open("wb") as opened:
                hf_shards.write(opened, file.entries, found.content)
        if len(files) > 1:
            (temporary / "model.safetensors.index.json").write_text(hf_shards.index_json(files), encoding="utf-8")
        origin = words.like or source
        for pattern in _COPIED_FILES if origin.is_dir() else ():
            for path in origin.glob(pattern):
                if not path.name.endswith(".index.json"):
                    hf_config.copy_settings(origin, path.name, temporary)


@contextmanager
def _moments(source: Path, words: Import, out: Path, left: list[str]) -> Iterator[Tensors]:
    """The moments of Adam in a folder of DCP, under the names of the model that they are for."""
    folder = own_folder(".importing-", out.absolute().parent)
    try:
        file = folder / "moments.safetensors"
        wrong = _extract_tensors(source, METADATA, None, file, taking="moments")
        files = ShardedFiles(file)
        found: Tensors = files
        if words.like is not None:
            found = ModelTensors(files, words.like, source, moments=True)
            wrong += found.left_out
        left += wrong
        yield found
    finally:
        remove_folder(folder)


@contextmanager
def _as_safetensors(source: Path, words: Import, beside: Path, left: list[str]) -> Iterator[Path]:
    """What can be read as safetensors: the source itself, or what is taken out of its pickles for the time being."""
    pickles, key = _pickles(source), words.key
    if words.moments is not None and pickles != [METADATA]:
        raise RunError(f"moments= is for folders of torch.distributed.checkpoint; {source} has no {METADATA}")
    if not pickles:
        if key is not None:
            raise RunError(f"key={key} is for .pt files; {source} holds safetensors, which have no nested names")
        yield source
        return
    folder = own_folder(".importing-", beside)
    taking: Taking = "weights" if words.moments is None else "weights beside moments"
    try:
        for number, pickle in enumerate(pickles):
            left += _extract_tensors(source, pickle, key, folder / f"{number:05d}.safetensors", taking)
        yield folder
    finally:
        remove_folder(folder)


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
    if (source / METADATA).exists():
        return [METADATA]
    steps = sorted(path.parent.name for path in source.glob(f"*/{METADATA}"))
    inner = f". It has folders of torch.distributed.checkpoint: give one of {', '.join(steps[-5:])}" if steps else ""
    raise CheckpointError(
        f"{source} has neither *.safetensors nor {_BIN} nor {METADATA}; give the path of the file itself{inner}"
    )


def _extract_tensors(source: Path, name: str, key: str | None, out: Path, taking: Taking) -> list[str]:
    """Have a process take the tensors out of a pickle; returns what else was there."""
    shown = source / name if source.is_dir() else source
    with ExitStack() as opened:
        pickle = opened.enter_context(_open(source, name))
        pieces = None
        if name == METADATA:
            names = sorted(path.name for path in source.glob(f"*{SUFFIX}"))
            _allow_open_files(len(names))
            pieces = {piece: opened.enter_context(_open(source, piece)) for piece in names}
        file = opened.enter_context(out.open("wb"))
        done = _run(pickle, pieces, {"key": key, "taking": taking}, file, shown)
    reply: dict[str, Any] = {}
    with suppress(ValueError, IndexError):
        reply = dict(safe_paths.parse_json(done.stdout.splitlines()[-1], _Reply))
    if done.returncode == 0 and "left" in reply:
        if missing := reply.get("without"):
            say(
                f"unisono: WARNING: the process that read {shown} did without {' and '.join(map(_printable, missing))}",
                error=True,
            )
        return [_printable(line) for line in reply["left"]]
    raise CheckpointError(f"{shown} {_explain_failure(done, reply)}")


def _allow_open_files(count: int) -> None:
    """Allow as many open files as a folder has of a run of thousands of ranks, if that is up to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < (needed := count + _OTHER_FILES):
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class _Reply(TypedDict):
    needed: NotRequired[str]
    left: NotRequired[list[str]]
    without: NotRequired[list[str]]
    sentence: NotRequired[str]


def _open(source: Path, name: str) -> BufferedReader:
    try:
        return safe_paths.open_inside(source, name) if source.is_dir() else safe_paths.open_regular(source)
    except OSError as error:
        shown = source / name if source.is_dir() else source
        raise CheckpointError(f"{shown} cannot be read: {error.strerror or error}") from error


def _run(
    pickle: BufferedReader,
    pieces: dict[str, BufferedReader] | None,
    what: Mapping[str, str | None],
    file: BufferedWriter,
    shown: Path,
) -> subprocess.CompletedProcess[str]:
    """The process that reads a pickle: open files are all it is given, and so many seconds of the processor."""
    given = [pickle, *(pieces or {}).values()]
    size = sum(os.fstat(one.fileno()).st_size for one in given)
    seconds, limit = 60 + size // _MIN_BYTES_PER_SECOND, 4 * size + (64 << 20)
    request = {
        **what, "source": safe_paths.path_of(pickle), "limit": limit, "seconds": seconds,
        "files": None if pieces is None else {name: safe_paths.path_of(one) for name, one in pieces.items()},
    }  # fmt: skip
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # noqa: PTH100 - a text in, a text out
    command = [sys.executable, "-P", "-m", "unisono.checkpoint.exchange.pickle_process"]
    try:
        return subprocess.run(
            [*command, str(file.fileno())],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            env={**kept, **_ONE_THREAD, "PYTHONPATH": path},
            pass_fds=(file.fileno(), *(one.fileno() for one in given)),
            cwd="/",
            timeout=_PATIENCE * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"{shown}: reading it took longer than {_PATIENCE * seconds} s; it was stopped and its output removed. If "
            "this host is very busy, try again later"
        ) from None


def _explain_failure(done: subprocess.CompletedProcess[str], reply: dict[str, Any]) -> str:
    """What is wrong with a pickle, as the end of a sentence."""
    if "needed" in reply:
        needed = _printable(reply["needed"])
        return (
            f"was refused: reading it would need {needed}, which is neither a tensor nor plain data and "
            "could run code. Nothing of it was run. The file's author can save only the tensors: "
            "torch.save(model.state_dict(), …), or safetensors.torch.save_file"
        )
    if "sentence" in reply:
        return _printable(reply["sentence"])
    if done.returncode == -signal.SIGXCPU:
        return "cannot be read: it took more of the processor's time than any honest file; its output was removed"
    if done.returncode < 0:
        return f"cannot be read: the reading process was killed by signal {-done.returncode}; its output was removed"
    last = _printable((done.stderr.strip().splitlines() or ["without a word"])[-1])
    return f"cannot be read: the reading process exited with code {done.returncode} ({last})"


def _printable(text: object) -> str:
    """Text from an untrusted file, made safe for a terminal."""
    shown = re.sub(r"[^\x20-\x7e]", "?", str(text))
    return shown if len(shown) <= 600 else shown[:600] + "…"
