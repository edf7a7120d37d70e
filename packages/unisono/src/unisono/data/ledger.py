"""The ledger of what each step consumed: a line per step and process, in append-only files.

A line contains the rows of the global batch that a process built, a digest of which samples they were, and a digest of
their content. It also carries a digest of all lines before it, so changed or missing lines are detected. At each start
of the run, a line records the first step and the number of processes. Repeated steps stay in the file for comparison;
`unisono.data.audit` reads them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.order import mix_bits
from unisono.data.order.plan import SampleIndices
from unisono.runtime.errors import RecordError, RunError, UnavailableError
from unisono.runtime.files import wrap_record_errors
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.runtime.untrusted.shapes import Count

FOLDER = "ledger"
_BYTES = 8  # of a digest
_CHAIN = ',"chain":"'
_MAX_HELD = 256  # lines buffered at most
_TAIL_BYTES = 1 << 20  # bytes at the end of a file that are searched for its last line
_RANK = re.compile(r"rank-[0-9]{1,9}\.jsonl")
_LARGEST = 2 << 30  # bytes of a file
_MAX_REASON = 300  # characters kept of a reason


def digest_ids(taken: Iterable[SampleIndices]) -> str:
    """A digest of the samples' identities and positions: their slots, rows, epochs and pieces, in order."""
    digest = blake2b(digest_size=_BYTES)
    for part in taken:
        digest.update(np.ascontiguousarray(np.stack(part.columns, axis=1), dtype="<i8").data)
    return digest.hexdigest()


def digest_contents(taken: SampleIndices, contents: np.ndarray[Any, np.dtype[np.uint64]]) -> int:
    """A digest of the samples' content and positions that is additive over the parts of a batch."""
    place = mix_bits(taken.slots.astype(np.uint64)) ^ mix_bits(taken.rows.astype(np.uint64) + np.uint64(1 << 32))
    place ^= mix_bits(taken.first.astype(np.uint64) + np.uint64(1 << 48))
    return int(mix_bits(contents ^ place).sum(dtype=np.uint64))


class Ledger:
    """Writes the ledger file of one process.

    Args:
        folder: the run directory.
        rank: of this process.
        world_size: number of processes.
        first: the first step of this start, from 0.
        start: a name for this start of the run, the same for all processes.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, first: int, start: str) -> None:
        name = f"{FOLDER}/rank-{rank:05d}.jsonl"
        self._path = folder / name
        self._consumed = 0
        self._held: list[str] = []
        with wrap_record_errors(self._path):
            self._chain, torn = _truncate_torn(folder, name)
            self._file = safe_writing.open_to_append(folder, name)
        marker = {"start": start, "first": first, "world_size": world_size, "rank": rank}
        self._write({**marker, "torn": torn} if torn else marker)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, RunError):  # after a RunError, another start may own the file
            # A failed write must not hide the error that ends the run.
            with suppress(RecordError) if kind is not None else nullcontext():
                self.flush()
        with suppress(OSError):  # closing flushes what could not be written before
            self._file.close()

    def step(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """Record the micro-batches of a step; `step` counts from 0."""
        infos = [micro.info for micro in batches if micro.info is not None and len(micro.info.slots)]
        taken = [part.samples for part in infos]
        total = sum(digest_contents(part.samples, part.contents) for part in infos if len(part.contents))
        line: dict[str, Any] = {
            "step": step,
            "rows": [infos[0].slots.start, infos[-1].slots.stop] if infos else [0, 0],
            "samples": sum(map(len, taken)),
            "ids": digest_ids(taken),
            "content": f"{total % (1 << 64):016x}",
        }
        masked = [sample for part in infos for sample in part.masked]
        if masked:
            line["masked"] = [[m.slot, m.row, m.epoch, m.first, m.reason[:_MAX_REASON]] for m in masked]
        # An odd factor of the step, so that the same samples in other steps give a different sum.
        factor = int(mix_bits(np.array([step], dtype=np.uint64))[0]) | 1
        self._consumed = (self._consumed + total * factor) % (1 << 64)
        self._write(line)
        if len(self._held) >= _MAX_HELD:
            self._write_held()

    def flush(self) -> None:
        """Write everything to disk; called before a checkpoint, which must not be ahead of the ledger.

        Raises:
            RecordError: if it cannot be written.
        """
        self._write_held()
        with wrap_record_errors(self._path):
            os.fsync(self._file.fileno())

    def mark(self) -> dict[str, Any]:
        """The end of this process's flushed file, for a checkpoint; see `merge_marks`."""
        size = os.fstat(self._file.fileno()).st_size
        return {"file": self._path.name, "bytes": size, "chain": self._chain, "consumed": self._consumed}

    def _write(self, line: dict[str, Any]) -> None:
        body = json.dumps(line, separators=(",", ":"))
        self._chain = _chain_digest(self._chain, body)
        self._held.append(f'{body[:-1]}{_CHAIN}{self._chain}"}}\n')

    def _write_held(self) -> None:
        with wrap_record_errors(self._path):
            self._file.write("".join(self._held))
            self._file.flush()
        self._held.clear()


def merge_marks(before: Mapping[str, Any] | None, marks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of the ledger to save in a checkpoint.

    Args:
        before: the same from the checkpoint that the run resumed from.
        marks: of all processes, since then.

    Returns:
        `consumed`, a digest of the samples of all steps so far, which depends neither on the number of processes nor
        on interruptions; and the size of each file, with the digest of its last line.
    """
    start: Mapping[str, Any] = before or {"consumed": "0", "files": {}}
    total = int(start["consumed"], 16) + sum(mark["consumed"] for mark in marks)
    files = {mark["file"]: {"bytes": mark["bytes"], "chain": mark["chain"]} for mark in marks}
    return {"consumed": f"{total % (1 << 64):016x}", "files": {**start["files"], **files}}


def missing_files(folder: Path, kept: Mapping[str, Any]) -> list[str]:
    """Files recorded in a checkpoint that are missing.

    Raises:
        UnavailableError: if that cannot be seen.
    """
    return [name for name in kept["files"] if _is_missing(folder / FOLDER, name)]


def _is_missing(folder: Path, name: str) -> bool:
    try:
        with _reading(folder / name):
            safe_paths.open_inside(folder, name).close()
    except (FileNotFoundError, NotADirectoryError, safe_paths.UnsafePathError):
        return True
    return False


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError | safe_paths.UnsafePathError):
            raise
        raise UnavailableError(
            f"{path} cannot be read ({error.strerror or error}), so nobody can tell whether it is the ledger of the "
            "checkpoint: see to the file system, or move it away to begin a new one"
        ) from error


def find_fault(folder: Path, name: str, until: Mapping[str, Any]) -> str | None:
    """How a file differs from what it was when a checkpoint was written, ignoring lines added since; None if it agrees.

    Args:
        folder: the run directory.
        name: of the file.
        until: the size and digest recorded in the checkpoint.

    Raises:
        UnavailableError: if it cannot be read.
    """
    with _reading(folder / FOLDER / name), safe_paths.open_inside(folder / FOLDER, name) as file:
        content = file.read(until["bytes"])
    chain, step = "", "its first line"
    for number, raw in enumerate(content.splitlines(), start=1):
        body, said = _split_chain(raw.decode("utf-8", errors="replace"))
        if body is None or said != _chain_digest(chain, body):
            place = _describe_step(raw) or f"after {step}"
            return f"{name}, line {number} ({place}) is not what was written, or lines before it are missing"
        chain, step = said, _describe_step(raw) or step
    if len(content) < until["bytes"]:
        return f"{name} ends after {step}, but the checkpoint recorded {until['bytes'] - len(content)} bytes more"
    return None if chain == until["chain"] else f"{name} is from another run: {step} differs from the checkpoint's"


def _describe_step(line: bytes) -> str | None:
    """The step of a line, e.g. `step 3`, counted from 1 as everywhere outside of this file."""
    try:
        return f"step {safe_paths.parse_json(line, _Numbered)['step'] + 1}"
    except ValueError:
        return None


class _Numbered(TypedDict):
    step: Count


class _Start(TypedDict):
    start: str
    first: Count
    world_size: Count


class _Step(_Numbered):
    rows: Annotated[list[Count], Field(min_length=2, max_length=2)]
    samples: Count
    ids: str
    content: Annotated[str, Field(pattern=r"^[0-9a-f]{1,200}$")]
    masked: NotRequired[list[Annotated[list[Any], Field(min_length=5, max_length=5)]]]


@dataclass(frozen=True)
class LedgerLine:
    """The record of one step by one process.

    Attributes:
        rank: of the process.
        step: from 0.
        rows: of the global batch.
        samples: number of samples built.
        ids: digest of the samples' identities.
        content: digest of the samples' content.
        masked: slot, row, epoch, first unit and reason of each sample that could not be built.
    """

    rank: int
    step: int
    rows: range
    samples: int
    ids: str
    content: int
    masked: list[tuple[int, int, int, int, str]]


@dataclass
class RunStart:
    """A start of the run, as recorded by one process or by all.

    Attributes:
        name: the same for all processes.
        first: the first step of this start.
        world_size: number of processes.
        lines: of each rank.
    """

    name: str
    first: int
    world_size: int
    lines: dict[int, list[LedgerLine]] = field(default_factory=dict)


def find_files(run: Path) -> list[Path]:
    """The files of a run's ledger, one of each process, by rank; what has another name is no part of it."""
    return sorted((path for path in (run / FOLDER).glob("rank-*.jsonl") if _RANK.fullmatch(path.name)), key=rank_of)


def rank_of(path: Path) -> int:
    """The rank of the process that wrote a file."""
    return int(path.stem.removeprefix("rank-"))


def read_ledger(path: Path) -> tuple[list[RunStart], list[str]]:
    """The starts in a process's file, and the faults found in it. A truncated last line is not a fault."""
    rank = rank_of(path)
    starts: list[RunStart] = []
    faults: list[str] = []
    chain = ""
    with safe_paths.open_inside(path.parent, path.name) as file:
        text = safe_paths.read_limited(file, str(path), _LARGEST).decode("utf-8", errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        body, said = _split_chain(line)
        if body is None or said != _chain_digest(chain, body):
            faults.append(f"{path.name}, line {number}: it was changed, or lines before it are missing")
        chain = said or chain
        try:
            found = safe_paths.parse_json(body or line, _Start | _Step)
            if "start" in found:
                starts.append(RunStart(found["start"], found["first"], found["world_size"], {rank: []}))
                continue
            masked = [(slot, row, epoch, first, why) for slot, row, epoch, first, why in found.get("masked", [])]
            starts[-1].lines[rank].append(
                LedgerLine(
                    rank, found["step"], range(*found["rows"]), found["samples"], found["ids"],
                    int(found["content"], 16), masked,
                )
            )  # fmt: skip
        except (ValueError, IndexError):
            faults.append(f"{path.name}, line {number} cannot be read")
    return starts, faults


def _truncate_torn(folder: Path, name: str) -> tuple[str, int]:
    """Truncate a file after its last complete line; returns that line's digest, and the number of bytes removed."""
    with safe_writing.open_to_change(folder, name) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        end = tail.rfind(b"\n") + 1
        torn = len(tail) - end
        file.truncate(size - torn)
        lines = tail[:end].decode("utf-8", errors="replace").splitlines()
    return (_split_chain(lines[-1])[1] or "" if lines else ""), torn


def _split_chain(line: str) -> tuple[str | None, str | None]:
    """A line without its digest, and the digest."""
    body, found, rest = line.rpartition(_CHAIN)
    if not found or not rest.endswith('"}') or len(rest) != 2 * _BYTES + 2:
        return None, None
    return body + "}", rest[:-2]


def _chain_digest(chain: str, body: str) -> str:
    return blake2b(f"{chain}{body}".encode(), digest_size=_BYTES).hexdigest()
