"""Which process of the job this is, and the few things processes say to each other outside the step.

`ProcessInfo` is a plain value passed to whoever needs it; nothing reads `RANK` on its own. `Communicator` is the
control channel: small JSON messages, named so that a timeout can say what was waited for. Nothing is ever pickled.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REUSE_PORT_OPTION = getattr(
    socket, "SO_REUSEPORT", socket.SO_REUSEADDR
)  # on the sockets of a launcher and its rank 0 alone
STORE_VARIABLE = (
    "UNISONO_STORE"  # set by our launcher on one host: the file by which its processes meet, of this user alone
)
Json = Any  # what `json.dumps` takes: dict, list, str, int, float, bool, None


def format_address(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets.

    >>> format_address("10.0.0.1", 29400), format_address("fd00::1", 29400)
    ('10.0.0.1:29400', '[fd00::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class ProcessInfo:
    """Which process of the job this is.

    Attributes:
        rank: number of this process among all, from 0.
        world_size: number of processes.
        local_rank: number of this process on its host, from 0; it chooses the device.
        local_world_size: number of processes on this host; it divides the cores.
        launcher: who started the processes: `unisono`, `torchrun`, `slurm`, or `none` for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes what is written once."""
        return self.rank == 0


@dataclass(frozen=True)
class Node:
    """Where one host stands among those of a job that `unisono train` started on each.

    Attributes:
        rank: number of this node, from 0.
        count: number of nodes.
        host: address of node 0, at which the processes of all nodes meet.
        port: a free port of it.
        interface: network interface of this node that leads to the others.
    """

    rank: int
    count: int
    host: str
    port: int
    interface: str


def usable_cores() -> int:
    """Cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Channel(Protocol):
    """A control channel between all processes of the job, or all its nodes.

    Every method is collective: all call it, in the same order.
    """

    rank: int
    size: int

    def gather(self, value: Json, what: str) -> list[Json]:
        """The value of every rank, in rank order, on every rank. `what` names the wait in errors."""
        ...

    def barrier(self, what: str) -> None:
        """Return once every rank has come here."""
        ...


class Communicator(Channel, Protocol):
    """The control channel of all processes of the job."""

    def duplicate(self) -> Communicator:
        """A second channel of the same processes, for threads of theirs: neither waits for messages of the other."""
        ...

    def reduce_max(self, numbers: Sequence[int], what: str) -> list[int]:
        """The largest of every rank's numbers, place by place, on every rank: one reduction, for every step."""
        ...


class SingleProcess:
    """The control channel of a single process."""

    rank = 0
    size = 1

    def gather(self, value: Json, what: str) -> list[Json]:
        """A list with the one value."""
        return [value]

    def barrier(self, what: str) -> None:
        """Nobody to wait for."""

    def duplicate(self) -> SingleProcess:
        """A second channel of the single process."""
        return SingleProcess()

    def reduce_max(self, numbers: Sequence[int], what: str) -> list[int]:
        """The same numbers."""
        return list(numbers)
