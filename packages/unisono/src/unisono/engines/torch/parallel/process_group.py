"""Communication between processes: every wait is named and has a deadline, and nothing is pickled.

Control messages are JSON over gloo, whatever the device; tensors go by the device's own backend.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from unisono.engines.torch.parallel import gloo_threads
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import STORE_VARIABLE, Json, ProcessInfo, format_address
from unisono.runtime.communication.listening import listen
from unisono.runtime.errors import DeadlineError

# As gloo and NCCL say it; a task may fail with a connection of its own, and that is another matter.
_PEER_FAULT = re.compile(
    r"gloo/|gloo::|Gloo |\[[^\]]*:\d+\]|NCCL|Timed out waiting|Timeout waiting|timeout caused|monitoredBarrier|by peer"
)

_start_counter = itertools.count()
_stores: dict[tuple[str, int], Store] = {}
_STORE_WAIT = 25.0  # seconds for what depends on no other process


def start(process: ProcessInfo, device: torch.device, timeout: float, start_timeout: float) -> TorchCommunicator:
    """Join the process group, with gloo beside the device's own backend, and return the control channel.

    Args:
        process: this one.
        device: of this process; its type chooses the backend.
        timeout: seconds that any later wait may take.
        start_timeout: seconds for all processes to appear.

    Raises:
        DeadlineError: naming the ranks that did not appear.
    """
    own = dist.get_default_backend_for_device(device)
    deadline = time.monotonic() + start_timeout
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    file = os.environ.get(STORE_VARIABLE) if process.launcher == "unisono" else None
    where = file or format_address(host, port)
    try:
        # Not torch's own rendezvous, which counts arrivals but cannot name the missing ranks.
        hosts = process.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if file is not None:
            whole = _file_store(file, process.world_size)
        else:
            _check_host_name(host, port)
            # Whoever hosts the store finds it at once, unless the address is not this host's.
            until = min(deadline, time.monotonic() + _STORE_WAIT) if hosts else deadline
            whole = _tcp_store(host, port, process, hosts, until)
        whole.set_timeout(timedelta(seconds=start_timeout))
    except (RuntimeError, OSError) as error:  # DistNetworkError, …: the address is wrong, taken, or nobody is there
        reason = str(error).splitlines()[0]
        if isinstance(error, dist.DistNetworkError) and not hosts:
            reason = f"no response within {start_timeout:g} s (launch.start_timeout)"
        if hosts and process.launcher == "slurm":
            reason += (
                "; if another process has that port, set MASTER_PORT, or UNISONO_TOKEN to have another port chosen"
            )
        raise DeadlineError(f"rank {process.rank} could not reach the other processes at {where}: {reason}") from error
    # The keys of an earlier attempt (torchrun --max-restarts) and of an earlier run of this process are still there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store: Store = PrefixStore(f"unisono/{attempt}/{next(_start_counter)}", whole)
    store.set(f"here/{process.rank}", "1")
    with translate_peer_errors(process, "the other processes to appear", start_timeout):
        absent = [rank for rank in range(process.world_size) if not _wait_for_rank(store, rank, deadline)]
    if absent:
        raise DeadlineError(
            f"rank {process.rank}: of {process.world_size} processes, rank{'s' if len(absent) > 1 else ''} "
            f"{', '.join(map(str, absent))} did not start, or could not reach {where}, within "
            f"{start_timeout:g} s (launch.start_timeout)"
        )
    store.set_timeout(timedelta(seconds=timeout))
    gloo_threads.use_one_thread()
    with translate_peer_errors(process, "the processes to connect", timeout):
        dist.init_process_group(
            "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}",
            store=store,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=None if device.type == "cpu" else device,
        )
    return TorchCommunicator(process, timeout)


@cache
def _file_store(file: str, world_size: int) -> Store:
    """The store of processes of one host: a file in a folder that this user alone may enter.

    A TCPStore has no authentication: any user of the host can connect to it, make it allocate any amount of memory, and
    change what processes exchange.
    """
    store: Store = dist.FileStore(file, world_size)  # type: ignore[attr-defined]
    return store


def _tcp_store(host: str, port: int, process: ProcessInfo, hosts: bool, deadline: float) -> Store:
    """The store of all processes, kept as long as this process lives: another may still be on its way to it."""
    if (host, port) in _stores:
        return _stores[host, port]
    listener = listen(host, port, process.launcher == "unisono") if hosts else None
    while True:
        try:
            _stores[host, port] = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                process.world_size,
                is_master=hosts,
                timeout=timedelta(seconds=max(1.0, (deadline - time.monotonic()) / 2)),  # torch tries twice
                wait_for_workers=False,
                multi_tenant=listener is None,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            return _stores[host, port]
        except dist.DistNetworkError:
            if hosts or time.monotonic() >= deadline:
                raise


def _check_host_name(host: str, port: int) -> None:
    """See that a host's name leads somewhere, or raise an OSError; torch would try until its deadline.

    A name may be new, as in a cluster that has just been made, so it is asked for more than once.
    """
    deadline = time.monotonic() + _STORE_WAIT / 2
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise OSError(f"the host name '{host}' cannot be resolved ({error.strerror})") from error
        time.sleep(1.0)


def stop() -> None:
    """Leave the process group. Everything that was reduced in it must be gone before."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_rank(store: Store, rank: int, deadline: float) -> bool:
    """Whether a rank announces itself before the deadline."""
    try:
        store.wait([f"here/{rank}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except RuntimeError as error:
        if isinstance(error, dist.DistStoreError) or str(error) == "Wait timeout":  # a FileStore's
            return False
        raise
    return True


@contextmanager
def translate_peer_errors(process: ProcessInfo, what: str, timeout: float, blocking: bool = True) -> Iterator[None]:
    """Turn a backend's error about a peer into a sentence about what this process waited for.

    Args:
        process: this one.
        what: it waits for.
        timeout: seconds that it may take.
        blocking: it does nothing else meanwhile, so that a monitor is to see it wait.
    """
    try:
        with heartbeat.phase("wait", what) if blocking and process.world_size > 1 else nullcontext():
            yield
    except RuntimeError as error:
        if process.world_size == 1 or not (isinstance(error, dist.DistError) or _PEER_FAULT.search(str(error))):
            raise
        reason = str(error).strip().splitlines()[0]
        raise DeadlineError(
            f"rank {process.rank} waited for {what}, but not all arrived: one is gone, stuck, or slower than the "
            f"deadline of {timeout:g} s (launch.timeout). Look at the logs of the other ranks. Backend: {reason}"
        ) from error


class TorchCommunicator:
    """The control channel of a job with several processes."""

    def __init__(self, process: ProcessInfo, timeout: float, channel: dist.ProcessGroup | None = None) -> None:
        self.process = process
        self.channel = channel  # torch's own group of all processes, unless another one is given
        self.rank = process.rank
        self.size = process.world_size
        self.timeout = timeout

    def gather(self, value: Json, what: str) -> list[Json]:
        """Every rank's value, as JSON.

        Most gathers ask whether all are well or have the same, so digests are compared first: one small reduction then
        is all, whatever the number of ranks.
        """
        text = json.dumps(value).encode()
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with translate_peer_errors(self.process, what, self.timeout):
            if self._is_same_everywhere(text):
                return [json.loads(text) for _ in range(self.size)]
            sizes, padded = self._pad(message)
            everyone = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(everyone, padded, group=self.channel)
        return _parse(everyone, sizes)

    def gather_to_first(self, value: Json, what: str) -> list[Json]:
        """Every rank's value on rank 0, as JSON; nothing elsewhere."""
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with translate_peer_errors(self.process, what, self.timeout):
            sizes, padded = self._pad(message)
            everyone = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(padded, everyone, dst=0, group=self.channel)
        return _parse(everyone or [], sizes)

    def _pad(self, message: Tensor) -> tuple[list[int], Tensor]:
        """The number of bytes of every rank's message, and this one's, as long as the longest."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = message.numel()
        dist.all_reduce(sizes, group=self.channel)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: message.numel()] = message
        return sizes.tolist(), padded

    def _is_same_everywhere(self, text: bytes) -> bool:
        """Whether all ranks have this text, by 126 bits of its digest, whose smallest and largest are compared."""
        digest = hashlib.sha256(text).digest()
        parts = torch.tensor([int.from_bytes(digest[at : at + 8], "little") >> 1 for at in (0, 8)])
        both = torch.cat([parts, -parts])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.channel)
        return torch.equal(both[:2], -both[2:])

    def barrier(self, what: str) -> None:
        """Wait for all ranks: a gather of what all have."""
        self.gather(None, what)

    def duplicate(self) -> TorchCommunicator:
        """A communicator of the same processes with separate connections, for another thread."""
        with translate_peer_errors(self.process, "the processes to connect once more", self.timeout):
            channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        return TorchCommunicator(self.process, self.timeout, channel)

    def reduce_max(self, numbers: Sequence[int], what: str) -> list[int]:
        """The largest of every rank's numbers, place by place."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        with translate_peer_errors(self.process, what, self.timeout):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.channel)
        return [int(number) for number in tensor]


def _parse(messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Json]:
    return [json.loads(part[:size].numpy().tobytes()) for part, size in zip(messages, sizes, strict=False)]
