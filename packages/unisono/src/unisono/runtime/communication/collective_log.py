"""The collectives of each process, in order: a ring of the most recent calls, and a digest of all of them.

Every collective has a fingerprint: operation, ReduceOp, dtype, shape, root, and calling line. All members of a process
group issue the same calls in the same order, so their digests are equal; if they are not, the rings show the first call
at which two ranks differ. If `$UNISONO_HEARTBEAT` names a directory, the ring is a file in shared memory: it can be
read while its process hangs and after it has died. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from unisono.runtime.heartbeat import DIRECTORY_VARIABLE
from unisono.runtime.text import find_stretches
from unisono.runtime.untrusted import safe_paths

log = logging.getLogger(__name__)

RING_SIZE = 1024  # calls kept in a ring
COMPARISON = "the comparison of collectives"  # site of the calls that compare digests

_SLOT = 512  # bytes per call
_HEAD = struct.Struct("<8sIII")  # magic, rank, slots, bytes per slot
_MAGIC = b"calls-2\n"
# Number, turn in the group, fingerprint, group digest after the call, length of the text; text and checksum follow.
_CALL = struct.Struct("<QQQQH")
_CHECKSUM = 4  # bytes
_MASK = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64: no call is ever multiplied away


@dataclass(frozen=True)
class Collective:
    """One kind of call, however often it is issued.

    Attributes:
        group: Name of the process group, the same on all members.
        ranks: Its members, as `0-3` or `0,2`; empty if the list would be too long.
        operation: Name as users know it, e.g. `all_reduce`.
        reduce: The ReduceOp, e.g. `SUM`; empty if nothing is reduced.
        root: Rank in the group that sends to or receives from all others; -1 if there is none.
        dtype: Of the tensors, e.g. `float32`.
        shape: The part of the shape that must be the same on all members, as text.
        site: `path:line` of the caller, for messages.
        key: The part of the call site that must be the same on all members and hosts; empty if it may differ.
        unordered: Whether the call's position in the order is irrelevant: point-to-point, or from another thread.
    """

    group: str
    ranks: str
    operation: str
    reduce: str = ""
    root: int = -1
    dtype: str = ""
    shape: str = ""
    site: str = ""
    key: str = ""
    unordered: bool = False

    @property
    def fingerprint(self) -> int:
        """A 64-bit hash, equal on two members if they issue the same call."""
        parts = [self.operation, self.reduce, self.root, self.dtype, self.shape, self.key]
        return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "little")

    def __str__(self) -> str:
        parts = [self.reduce, self.dtype, self.shape, f"root {self.root}" if self.root >= 0 else ""]
        return f"{self.operation}({', '.join(filter(None, parts))}) at {self.site or 'an unknown line'}"


@dataclass(frozen=True)
class Call:
    """One entry of a ring.

    Attributes:
        number: Position among all calls of this process, from 1.
        turn: Position among the calls of its group, from 1; 0 for calls that are `unordered`.
        fingerprint: See `Collective`.
        digest: Of the group's calls up to and including this one.
        what: The call.
    """

    number: int
    turn: int
    fingerprint: int
    digest: int
    what: Collective

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Call:
        """Rebuild a call from its `dataclasses.asdict`."""
        return cls(**{**values, "what": Collective(**values["what"])})


@dataclass
class GroupState:
    """The calls of a process in one group so far.

    Attributes:
        name: Name of the group.
        ranks: Global ranks of the members, in group order.
        group_rank: Rank of this process in the group.
        turn: Number of calls so far.
        digest: Digest of these calls, in order.
    """

    name: str
    ranks: Sequence[int]
    group_rank: int
    turn: int = 0
    digest: int = 0
    ranks_text: str = field(init=False)

    def __post_init__(self) -> None:
        self.ranks_text = format_ranks(self.ranks)


class CollectiveLog:
    """The log of this process's collectives.

    `add` records each call. The sum of `check` over all processes is zero as long as no rank's calls differ.

    Args:
        rank: Of this process.
        folder: Directory for the ring file; None keeps the ring in memory, where no other process can read it.
    """

    def __init__(self, rank: int, folder: Path | None = None) -> None:
        self.path = None if folder is None else folder / f"rank-{rank:05d}.calls"
        self._ring: mmap.mmap | bytearray = bytearray(_HEAD.size + RING_SIZE * _SLOT)
        if self.path is not None:
            try:
                self._ring = _create_ring(self.path, len(self._ring))
            except OSError as error:
                log.warning("%s: the last collectives are kept in memory only, unreadable for other processes", error)
                self.path = None
        self._ring[: _HEAD.size] = _HEAD.pack(_MAGIC, rank, RING_SIZE, _SLOT)
        self._call_count = 0
        self._lock = threading.Lock()
        self.groups: dict[str, GroupState] = {}

    def add(self, members: GroupState, fingerprint: int, text: bytes, unordered: bool = False) -> None:
        """Record a call, encoded by `encode_call`, just before it is issued."""
        with self._lock:
            made = self._call_count = self._call_count + 1
            if unordered:
                turn = 0
            else:
                turn = members.turn = members.turn + 1
                members.digest = (members.digest * _FACTOR + fingerprint) & _MASK
            call = _CALL.pack(made, turn, fingerprint, members.digest, len(text)) + text
            # Another process may read halfway through this write; the checksum lets it recognise a torn entry.
            call += zlib.crc32(call).to_bytes(_CHECKSUM, "little")
            at = _HEAD.size + (made - 1) % RING_SIZE * _SLOT
            self._ring[at : at + len(call)] = call

    def check(self) -> int:
        """Return a number whose sum over all processes is 0 modulo 2**64 if the members of each group agree.

        Every member multiplies its group digest by its own factor, and the factors of a group add up to zero. One sum
        of one number therefore compares all groups, whatever their members.
        """
        with self._lock:
            return (
                sum(_group_factor(g.name, g.group_rank, len(g.ranks)) * g.digest for g in self.groups.values()) & _MASK
            )

    def calls(self) -> list[Call]:
        """Return the calls in the ring, in order."""
        with self._lock:
            return _parse_ring(bytes(self._ring))

    def close(self) -> None:
        """Close the ring; its file stays."""
        if isinstance(self._ring, mmap.mmap):
            self._ring.close()
        self._ring = bytearray(_HEAD.size + RING_SIZE * _SLOT)


def _create_ring(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, 0)  # discard the calls of an earlier attempt
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # else a full /dev/shm kills the process at its first call
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def ring_dir() -> Path | None:
    """Return the directory of this node's rings if the parent process reads them, else None."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named and Path(named).is_dir() else None


def encode_call(what: Collective) -> bytes:
    """Encode a call for the ring; a long path loses its beginning, a long shape its end."""
    shape = what.shape if len(what.shape) <= 80 else what.shape[:79] + "…"
    about = [
        what.group[:64],
        what.ranks,
        what.operation[:40],
        what.reduce,
        what.root,
        what.dtype,
        shape,
        what.unordered,
    ]
    site = what.site
    while len(text := json.dumps([*about, site], ensure_ascii=False).encode()) > _SLOT - _CALL.size - _CHECKSUM:
        site = "…" + site[len(site) // 4 + 1 :]
    return text


def truncate_ring(content: bytes, calls: int) -> bytes:
    """Return the content of a ring file reduced to its last `calls` calls."""
    magic, rank, slots, size = _HEAD.unpack_from(content)
    made = [content[at : at + size] for at in range(_HEAD.size, _HEAD.size + slots * size, size)]
    kept = sorted((one for one in made if _slot_number(one)), key=_slot_number)[-calls:]
    return bytes(_HEAD.pack(magic, rank, len(kept), size) + b"".join(kept))


def _slot_number(slot: bytes) -> int:
    return int(_CALL.unpack_from(slot)[0])


def read_ring(path: Path) -> list[Call]:
    """Return the calls of a ring file, in order; a call that is being written is left out.

    Raises:
        ValueError: If the file is not a ring.
    """
    content = safe_paths.read_bytes(path.parent, path.name)
    if len(content) < _HEAD.size or _HEAD.unpack_from(content)[0] != _MAGIC:
        raise ValueError(f"{path} is not a ring of calls, or its process has only begun to create it")
    return _parse_ring(content)


def read_rings(folder: Path) -> dict[int, list[Call]]:
    """Return the rings in a directory by rank; unreadable ones are left out."""
    rings = {}
    for path in sorted(folder.glob("rank-*.calls")):
        try:
            rings[int(path.stem.removeprefix("rank-"))] = read_ring(path)
        except (OSError, ValueError):
            continue
    return rings


def _parse_ring(content: bytes) -> list[Call]:
    _, _, slots, size = _HEAD.unpack_from(content)
    found = []
    for at in range(_HEAD.size, min(len(content), _HEAD.size + slots * size), size):
        number, turn, fingerprint, digest, length = _CALL.unpack_from(content, at)
        end = at + _CALL.size + length
        checksum = int.from_bytes(content[end : end + _CHECKSUM], "little")
        if number and zlib.crc32(content[at:end]) == checksum:
            text = content[at + _CALL.size : end]
            group, ranks, operation, reduce, root, dtype, shape, unordered, site = json.loads(text)
            what = Collective(group, ranks, operation, reduce, root, dtype, shape, site, unordered=unordered)
            found.append(Call(number, turn, fingerprint, digest, what))
    return sorted(found, key=lambda call: call.number)


# where two rings differ ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallMismatch:
    """The first calls at which two ranks differ.

    Attributes:
        turn: Position of the calls in their group; 0 if they belong to two groups.
        ranks: The two ranks.
        calls: Their calls; None for a rank that did not issue it.
    """

    turn: int
    ranks: tuple[int, int]
    calls: tuple[Call | None, Call | None]

    def __str__(self) -> str:
        number = f"call {self.turn}" if self.turn else "their last call"
        one, other = (f"rank {rank} {_describe_call(call)}" for rank, call in zip(self.ranks, self.calls, strict=True))
        return f"{number}: {one}, {other}"


def _describe_call(call: Call | None) -> str:
    if call is None:
        return "made no such call"
    return f"came to {COMPARISON}" if call.what.site == COMPARISON else f"did {call.what}"


def find_mismatch(
    rank: int, mine: Sequence[Call], other: int, theirs: Sequence[Call], *, ended: bool = False
) -> CallMismatch | None:
    """Return the first call at which two ranks differ, as far back as both rings reach.

    If both have `ended` at the same point of the program, an additional call is a difference; else one may be ahead.
    """
    for name in _shared_groups(rank, mine, other, theirs):
        here, there = ({c.turn: c for c in ring if c.turn and c.what.group == name} for ring in (mine, theirs))
        if not (here or there):  # only calls of other threads
            continue
        first = max((min(turns) for turns in (here, there) if turns), default=0)
        last = (max if ended else min)(max(here, default=0), max(there, default=0))
        for turn in range(first, last + 1):
            one, two = here.get(turn), there.get(turn)
            if one is None or two is None or one.fingerprint != two.fingerprint:
                return CallMismatch(turn, (rank, other), (one, two))
    return None


def find_deadlock(rank: int, mine: Sequence[Call], other: int, theirs: Sequence[Call]) -> CallMismatch | None:
    """Return the calls of two stalled ranks that wait for each other: in two groups, neither joined by the other."""
    shared = _shared_groups(rank, mine, other, theirs)
    last = [next((c for c in reversed(ring) if c.turn and c.what.group in shared), None) for ring in (mine, theirs)]
    here, there = last
    if here is None or there is None or here.what.group == there.what.group:
        return None
    if _count_calls(theirs, here.what.group) < here.turn and _count_calls(mine, there.what.group) < there.turn:
        return CallMismatch(0, (rank, other), (here, there))
    return None


def explain_hang(rings: Mapping[int, Sequence[Call]]) -> CallMismatch | None:
    """Find two stalled or dead processes that issued different calls or wait for each other.

    A rank that is merely ahead is not a mismatch: it waited for the other, or the other died.
    """
    for look in (find_mismatch, find_deadlock):
        for one, other in combinations(sorted(rings), 2):
            if found := look(one, rings[one], other, rings[other]):
                return found
    return None


def _shared_groups(rank: int, mine: Sequence[Call], other: int, theirs: Sequence[Call]) -> list[str]:
    """Return the groups that contain both ranks, in order of first use."""
    names: dict[str, None] = {}
    for call in [*mine, *theirs]:
        if call.what.group not in names and {rank, other} <= _parse_ranks(call.what.ranks):
            names[call.what.group] = None
    return list(names)


def _count_calls(ring: Sequence[Call], group: str) -> int:
    """Return how many calls of a group a ring proves; if older entries were overwritten, assume as many as possible."""
    turns = [call.turn for call in ring if call.turn and call.what.group == group]
    return turns[-1] if turns else 0 if ring and ring[0].number == 1 else _MASK


@cache
def _parse_ranks(ranks_text: str) -> frozenset[int]:
    members: set[int] = set()
    for part in filter(None, ranks_text.split(",")):
        first, _, last = part.partition("-")
        members |= set(range(int(first), int(last or first) + 1))
    return frozenset(members)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format the members of a group as short text; empty if it would be long.

    >>> format_ranks([0, 1, 2, 5])
    '0-2,5'
    """
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in find_stretches(sorted(ranks)))
    return text if len(text) <= 80 else ""


@cache
def _group_factor(name: str, own: int, size: int) -> int:
    """Return a member's factor; the factors of a group add up to zero."""
    if own < size - 1:
        digest = hashlib.blake2b(f"{name}/{own}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") | 1
    return -sum(_group_factor(name, other, size) for other in range(size - 1))
