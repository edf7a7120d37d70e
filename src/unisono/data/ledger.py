"""What each step consumed, as it was in fact made: a line per step and process, in files that only grow.

A line says which rows of the global batch a process made, and digests of which samples they were and of what these
held. Every line carries a digest of all before it, so that none can be changed or left out unseen. Where a run goes on
after an interruption, a line says from which step and on how many processes; what was made before and is made again
stays in the file, to be compared. `unisono.data.audit` reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from unisono.data.loading.batch_builder import MicroBatch
from unisono.data.order.order import mix
from unisono.data.order.plan import Taken
from unisono.runtime.errors import RecordError, RunError
from unisono.runtime.files import recording

FOLDER = "ledger"
_BYTES = 8  # of a digest
_CHAIN = ',"chain":"'
_EVERY = 256  # lines that are held back at most
_TAIL = 1 << 20  # bytes at the end of a file in which its last line is looked for
_REASON = 300  # characters of a reason that are kept


def ids_of(taken: Iterable[Taken]) -> str:
    """A digest of which samples stand where: their rows, epochs and pieces, in order."""
    digest = blake2b(digest_size=_BYTES)
    for part in taken:
        digest.update(np.ascontiguousarray(np.stack(part.columns, axis=1), dtype="<i8").data)
    return digest.hexdigest()


def contents_of(taken: Taken, contents: np.ndarray[Any, np.dtype[np.uint64]]) -> int:
    """What samples hold and where they stand, as a number whose sum over parts of a batch is that of the batch."""
    place = mix(taken.slots.astype(np.uint64)) ^ mix(taken.rows.astype(np.uint64) + np.uint64(1 << 32))
    place ^= mix(taken.first.astype(np.uint64) + np.uint64(1 << 48))
    return int(mix(contents ^ place).sum(dtype=np.uint64))


class Ledger:
    """The file of one process.

    Args:
        folder: of the run.
        rank: of this process.
        world_size: number of processes.
        first: the step that is made first, from 0.
        start: a name for this start of the run, the same for all processes.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, first: int, start: str) -> None:
        self._path = path = folder / FOLDER / f"rank-{rank:05d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._chain, torn = _recover(path)
        self._consumed = 0
        self._held: list[str] = []
        self._file = path.open("a", encoding="utf-8")
        marker = {"start": start, "first": first, "world_size": world_size, "rank": rank}
        self._write({**marker, "torn": torn} if torn else marker)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, RunError):  # else the file belongs to who has taken over the run
            # The error that ends the run is told, and not what follows from it.
            with suppress(RecordError) if kind is not None else nullcontext():
                self.flush()
        with suppress(OSError):  # of what could not be written
            self._file.close()

    def step(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """A step was made with these micro-batches; `step` counts from 0."""
        made = [micro.made for micro in batches if micro.made is not None and len(micro.made.slots)]
        taken = [part.taken for part in made]
        total = sum(contents_of(part.taken, part.contents) for part in made if len(part.contents))
        line: dict[str, Any] = {
            "step": step,
            "rows": [made[0].slots.start, made[-1].slots.stop] if made else [0, 0],
            "samples": sum(map(len, taken)),
            "ids": ids_of(taken),
            "content": f"{total % (1 << 64):016x}",
        }
        masked = [sample for part in made for sample in part.masked]
        if masked:
            line["masked"] = [[m.slot, m.row, m.epoch, m.first, m.reason[:_REASON]] for m in masked]
        self._consumed = (self._consumed + total * _factor(step)) % (1 << 64)
        self._write(line)
        if len(self._held) >= _EVERY:
            self._pour()

    def flush(self) -> None:
        """Have everything on disk; before a checkpoint, which must not know more than the ledger.

        Raises:
            RecordError: if it cannot be written.
        """
        self._pour()
        with recording(self._path):
            os.fsync(self._file.fileno())

    def mark(self) -> dict[str, Any]:
        """Where the flushed file of this process stands, for a checkpoint: see `joined`."""
        size = os.fstat(self._file.fileno()).st_size
        return {"file": Path(self._file.name).name, "bytes": size, "chain": self._chain, "consumed": self._consumed}

    def _write(self, line: dict[str, Any]) -> None:
        body = json.dumps(line, separators=(",", ":"))
        self._chain = _chained(self._chain, body)
        self._held.append(f'{body[:-1]}{_CHAIN}{self._chain}"}}\n')

    def _pour(self) -> None:
        with recording(self._path):
            self._file.write("".join(self._held))
            self._file.flush()
        self._held.clear()


def joined(before: Mapping[str, Any] | None, marks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a checkpoint keeps of the ledger.

    Args:
        before: the same of the checkpoint from which the run goes on.
        marks: of all processes, since then.

    Returns:
        `consumed`, a digest of the samples of all steps so far, which depends neither on the processes nor on
        interruptions; and how far each file goes, with the digest of its last line.
    """
    start: Mapping[str, Any] = before or {"consumed": "0", "files": {}}
    total = int(start["consumed"], 16) + sum(mark["consumed"] for mark in marks)
    files = {mark["file"]: {"bytes": mark["bytes"], "chain": mark["chain"]} for mark in marks}
    return {"consumed": f"{total % (1 << 64):016x}", "files": {**start["files"], **files}}


def missing(folder: Path, kept: Mapping[str, Any]) -> list[str]:
    """Files that a checkpoint knows of and that are not there."""
    return [name for name in kept["files"] if not (folder / FOLDER / name).is_file()]


def fault(folder: Path, name: str, until: Mapping[str, Any]) -> str | None:
    """Why a file is not what it was when a checkpoint was written, or None; what was added since is not looked at.

    Args:
        folder: of the run.
        name: of the file.
        until: how far the checkpoint knows it.
    """
    with (folder / FOLDER / name).open("rb") as file:
        content = file.read(until["bytes"])
    chain, step = "", "its first line"
    for number, raw in enumerate(content.splitlines(), start=1):
        body, said = _parted(raw.decode("utf-8", errors="replace"))
        if body is None or said != _chained(chain, body):
            place = _step_of(raw) or f"after {step}"
            return f"{name}, line {number} ({place}) is not what was written, or lines before it are missing"
        chain, step = said, _step_of(raw) or step
    if len(content) < until["bytes"]:
        return f"{name} ends after {step}, and the checkpoint knows {until['bytes'] - len(content)} bytes more"
    return None if chain == until["chain"] else f"{name} is of another run: {step} is not what the checkpoint knows"


def _step_of(line: bytes) -> str | None:
    """The step of a line, counted from 1 as everywhere outside of this file, as part of a sentence."""
    try:
        return f"step {int(json.loads(line)['step']) + 1}"
    except (ValueError, KeyError, TypeError):
        return None


def _factor(step: int) -> int:
    """An odd number for each step, so that the same samples in other steps add up to something else."""
    return int(mix(np.array([step], dtype=np.uint64))[0]) | 1


@dataclass(frozen=True)
class Line:
    """What a process says of a step.

    Attributes:
        number: of the line in its file, from 1.
        rank: of the process.
        step: from 0.
        rows: of the global batch.
        samples: that were made.
        ids: digest of which they were.
        content: digest of what they held.
        masked: slot, row, epoch, first unit and reason of each that could not be made.
    """

    number: int
    rank: int
    step: int
    rows: range
    samples: int
    ids: str
    content: int
    masked: list[tuple[int, int, int, int, str]]


@dataclass
class Start:
    """A start of the run, as one process or all of them saw it.

    Attributes:
        name: the same for all processes.
        first: the step that was to be made first.
        world_size: number of processes.
        lines: of each rank.
    """

    name: str
    first: int
    world_size: int
    lines: dict[int, list[Line]] = field(default_factory=dict)


def read(path: Path) -> tuple[list[Start], list[str]]:
    """The starts in a process's file, and what is wrong with it. A last line that was cut off is no fault."""
    rank = int(path.stem.removeprefix("rank-"))
    starts: list[Start] = []
    faults: list[str] = []
    chain = ""
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        body, said = _parted(line)
        if body is None or said != _chained(chain, body):
            faults.append(f"{path.name}, line {number}: it was changed, or lines before it are missing")
        chain = said or chain
        try:
            found = json.loads(body or line)
            if "start" in found:
                starts.append(Start(found["start"], found["first"], found["world_size"], {rank: []}))
                continue
            masked = [(slot, row, epoch, first, why) for slot, row, epoch, first, why in found.get("masked", [])]
            starts[-1].lines[rank].append(
                Line(
                    number, rank, found["step"], range(*found["rows"]), found["samples"], found["ids"],
                    int(found["content"], 16), masked,
                )
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, IndexError):
            faults.append(f"{path.name}, line {number} cannot be read")
    return starts, faults


def _recover(path: Path) -> tuple[str, int]:
    """The digest of a file's last whole line; what comes after it is cut off. Returns how many bytes that were."""
    if not path.exists():
        return "", 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        end = tail.rfind(b"\n") + 1
        torn = len(tail) - end
        file.truncate(size - torn)
        lines = tail[:end].decode("utf-8", errors="replace").splitlines()
    return (_parted(lines[-1])[1] or "" if lines else ""), torn


def _parted(line: str) -> tuple[str | None, str | None]:
    """A line without its digest, and that."""
    body, found, rest = line.rpartition(_CHAIN)
    if not found or not rest.endswith('"}') or len(rest) != 2 * _BYTES + 2:
        return None, None
    return body + "}", rest[:-2]


def _chained(chain: str, body: str) -> str:
    return blake2b(f"{chain}{body}".encode(), digest_size=_BYTES).hexdigest()
