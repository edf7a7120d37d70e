"""Which process of the job this is, and the control messages that processes exchange outside the step.

`ProcessInfo` is a plain value, passed as an argument; no other module reads `RANK` from the environment. `Communicator`
is the control channel for small JSON messages; every wait has a name, so that a timeout can say what was waited for.
Nothing is ever pickled.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unisono.runtime.cpu_quota import cpu_quota

# Set only on the sockets of a launcher and its rank 0.
REUSE_PORT_OPTION = getattr(socket, "SO_REUSEPORT", socket.SO_REUSEADDR)
# Set by our launcher on a single host: the file by which its processes meet, private to the user.
STORE_VARIABLE = "UNISONO_STORE"
Json = Any  # anything that `json.dumps` accepts: dict, list, str, int, float, bool, None


def format_address(host: str, port: int) -> str:
    """Format `host:port`, with brackets around an IPv6 address.

    >>> format_address("10.0.0.1", 29400), format_address("fd00::1", 29400)
    ('10.0.0.1:29400', '[fd00::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class ProcessInfo:
    """Which process of the job this is.

    Attributes:
        rank: Rank of this process in the job.
        world_size: Number of processes.
        local_rank: Rank of this process on its host; it selects the device.
        local_world_size: Number of processes on this host.
        launcher: What started the processes: `unisono`, `torchrun`, `slurm`, or `none` for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the rank that prints and writes shared files."""
        return self.rank == 0

    def own_cores(self) -> int:
        """Return how many of its host's cores this process has: its share, or what srun has given to its task alone."""
        if self.launcher == "slurm" and (given := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
            return max(1, min(usable_cores(), int(given)))
        return max(1, usable_cores() // self.local_world_size)


@dataclass(frozen=True)
class Node:
    """One of the hosts of a job that was started with `unisono train` on each.

    Attributes:
        rank: Rank of this node.
        count: Number of nodes.
        host: Address of node 0, where the processes of all nodes meet.
        port: A free port on node 0.
        interface: Network interface of this node that reaches the others.
    """

    rank: int
    count: int
    host: str
    port: int
    interface: str


def usable_cores() -> int:
    """Return the number of cores that this process may use, or as many as it may use the time of."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota >= cores else math.ceil(quota)


class Channel(Protocol):
    """A control channel between all processes, or all nodes, of the job.

    All of its methods, and of a `Communicator`'s, are collective: all members call them, in the same order.
    """

    rank: int
    size: int

    def gather(self, value: Json, what: str) -> list[Json]:
        """Return the value of every rank, in rank order, on every rank. `what` names the wait in errors."""
        ...


class Communicator(Channel, Protocol):
    """The control channel of all processes of the job."""

    def barrier(self, what: str) -> None:
        """Return once every rank has called it."""
        ...

    def gather_to_first(self, value: Json, what: str) -> list[Json]:
        """Return the value of every rank, in rank order, on rank 0, and nothing elsewhere.

        For values that are large, or differ by nature: what is sent grows with the number of ranks, not its square.
        """
        ...

    def duplicate(self) -> Communicator:
        """Return a second channel of the same processes for use by other threads; messages never mix."""
        ...

    def reduce_max(self, numbers: Sequence[int], what: str) -> list[int]:
        """Return the elementwise maximum over all ranks, on every rank, in a single reduction."""
        ...


class SingleProcess:
    """The control channel of a single process."""

    rank = 0
    size = 1

    def gather(self, value: Json, what: str) -> list[Json]:
        """Return a list with the one value."""
        return [value]

    def gather_to_first(self, value: Json, what: str) -> list[Json]:
        """Return a list with the one value."""
        return self.gather(value, what)

    def barrier(self, what: str) -> None:
        """Return at once."""

    def duplicate(self) -> SingleProcess:
        """Return a second channel."""
        return SingleProcess()

    def reduce_max(self, numbers: Sequence[int], what: str) -> list[int]:
        """Return the same numbers."""
        return list(numbers)
