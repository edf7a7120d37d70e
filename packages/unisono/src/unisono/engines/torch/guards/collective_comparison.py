"""Checks before each update that all processes called the same collectives, in the same order, from the same lines.

A collective that differs between ranks is not an error to the backend: another ReduceOp, another order of equal shapes,
another dtype of equal size give wrong numbers without any error. So each rank's digest of its calls goes into a sum of
one number, before what they computed is used. That sum has a gloo group of its own, where it cannot be mistaken for
one of the calls that are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from unisono.engines.observers import Observer
from unisono.engines.torch.guards.collective_hooks import CollectiveHooks
from unisono.engines.torch.parallel import fsdp_communication
from unisono.engines.torch.parallel.process_group import TorchCommunicator, translate_peer_errors
from unisono.runtime.communication import collective_log
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import DeadlineError, DesyncError, explain_command

_POLL_SECONDS = 1.0  # seconds of waiting for the others before their call logs are read
_REMEDY = (
    "Every rank must call the same collectives in the same order, from the same lines: move them out of branches "
    "that not every rank takes (`if rank == 0`), and wrap a call that several places need in one function; "
    f"see `{explain_command(DesyncError.fault)}`"
)


class CollectiveComparison(Observer):
    """Compares this process's log of collectives with the others'; does nothing for a single process.

    Args:
        process: this one.
        timeout: seconds to wait for the others.
        wanted: whether comparison is on (`launch.desync`).
        ddp: whether the backward pass reduces DDP's buckets.
    """

    def __init__(self, process: ProcessInfo, timeout: float, wanted: bool, ddp: bool = False) -> None:
        self._process, self._timeout, self._ddp = process, timeout, ddp
        self._enabled = wanted and process.world_size > 1
        self._hooks: CollectiveHooks | None = None
        self._sum = torch.zeros(1, dtype=torch.int64)
        self._pending_work: dist.Work | None = None

    def start(self) -> None:
        """Log this process's collectives from now on; collective."""
        if not self._enabled or not dist.is_initialized():
            return
        # Before the group, which all make together: who is in it reads nobody's ring of an earlier engine.
        self._log = collective_log.CollectiveLog(self._process.rank, collective_log.ring_dir())
        channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        assert isinstance(channel, dist.ProcessGroup)
        self._communicator, self._channel = TorchCommunicator(self._process, self._timeout, channel), channel
        self._hooks = CollectiveHooks(self._log, "gradient bucket" if self._ddp else "collective of the backward pass")
        self._members = self._hooks.members(channel)

    def watch(self, model: nn.Module) -> None:
        """Log FSDP's collectives for the units of a model, by unit name."""
        if self._hooks is not None:
            fsdp_communication.log_units(model, self.note)

    def note(self, *call: Any) -> None:
        """Log a call that bypasses the dispatcher; see `CollectiveHooks.note`."""
        if self._hooks is not None:
            self._hooks.note(*call)

    def on_step_begin(self, step: int, batches: Sequence[object]) -> None:
        """See `Observer`."""
        self._step = step

    def on_gradients(self) -> None:
        """Start the comparison; the gradient norm is computed meanwhile."""
        self.begin_check()

    def votes(self) -> Sequence[float]:
        """No votes; finishes the comparison before the step's reduction uses the results of the collectives."""
        self.check(f"step {self._step + 1}")
        return ()

    def begin_check(self) -> None:
        """Start comparing the calls so far in the background; collective."""
        if self._hooks is None:
            return
        value = self._log.check()
        self._sum.fill_(value - 2**64 if value >= 2**63 else value)
        self._hooks.note("allreduce_", self._channel, self._sum, collective_log.COMPARISON)
        with translate_peer_errors(self._process, collective_log.COMPARISON, self._timeout):
            backend: Any = self._channel._get_backend(self._sum.device)
            self._pending_work = backend.allreduce([self._sum])

    def check(self, when: str) -> None:
        """Finish the comparison that was started, or do one now; collective.

        Raises:
            DesyncError: if processes called different collectives; `when`, e.g. `step 3`, is part of the message.
        """
        if self._hooks is None:
            return
        if self._pending_work is None:
            self.begin_check()
        assert self._pending_work is not None
        work, self._pending_work = self._pending_work, None
        self._wait(work, when)
        if int(self._sum):  # torch's sum of int64 wraps around
            raise self._build_error(when)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn a backend's error about a peer into a clear message, about differing collectives if logged."""
        try:
            with translate_peer_errors(self._process, what, self._timeout, blocking=False):
                yield
        except DeadlineError as error:
            folder = self._log.path.parent if self._hooks is not None and self._log.path is not None else None
            found = folder and collective_log.explain_hang(collective_log.read_rings(folder))
            if not found:
                raise
            raise DesyncError(self._format_message(found, f"waiting for {what}")) from error

    def call_bucket_hook(self, hook: Callable[[GradBucket], Any], bucket: GradBucket) -> Any:
        """Call DDP's communication hook for a bucket; its collectives are logged under the number of the bucket."""
        with nullcontext() if self._hooks is None else self._hooks.label_calls(f"gradient bucket {bucket.index()}"):
            return hook(bucket)

    def close(self) -> None:
        """Stop logging."""
        if self._hooks is not None:
            self._hooks.close()
            self._log.close()
            self._hooks = None
            del self._communicator, self._channel, self._members  # a group is left after its last user

    def _wait(self, work: dist.Work, when: str) -> None:
        """Wait, and check meanwhile whether a rank of this node cannot arrive because it waits for this process."""
        with translate_peer_errors(self._process, f"{collective_log.COMPARISON} in {when}", self._timeout):
            while True:
                try:
                    work.wait(timedelta(seconds=_POLL_SECONDS))
                    return
                except RuntimeError as error:  # the group's own deadline is another error
                    if "Operation timed out" not in str(error):
                        raise
                self._look_at_others(when)

    def _look_at_others(self, when: str) -> None:
        """Check whether a rank of this node made another call instead of joining the comparison."""
        if self._log.path is None:
            return
        own = self._log.calls()
        for rank, theirs in collective_log.read_rings(self._log.path.parent).items():
            if rank == self._process.rank:
                continue
            found = collective_log.find_mismatch(self._process.rank, own, rank, theirs) or self._find_ahead(
                rank, theirs
            )
            if found is not None:
                raise DesyncError(self._format_message(found, when))

    def _find_ahead(self, rank: int, theirs: list[collective_log.Call]) -> collective_log.CallMismatch | None:
        """An extra call by a rank that has not joined the comparison which this rank is in.

        A rank that has joined may be ahead while this one still waits for the result, so being ahead proves nothing.
        """
        came = max((call.turn for call in theirs if call.what.group == self._members.name), default=0)
        for call in theirs if came < self._members.turn else ():
            members = self._log.groups.get(call.what.group)
            if call.turn and members is not None and rank in members.ranks and call.turn > members.turn:
                return collective_log.CallMismatch(call.turn, (self._process.rank, rank), (None, call))
        return None

    def _build_error(self, when: str) -> DesyncError:
        """The error for all ranks: the first call in which two of them differ."""
        own = [[m.name, list(m.ranks), m.turn, m.digest] for m in self._log.groups.values() if m is not self._members]
        name, one, other = _find_differing_ranks(
            self._communicator.gather(own, "how the collectives of all ranks differ")
        )
        own_ring = self._log.calls() if self._process.rank in (one, other) else []
        ring = [asdict(call) for call in own_ring if call.turn and call.what.group == name]
        rings = self._communicator.gather(ring, "the collectives that differ")
        mine, theirs = (list(map(collective_log.Call.from_dict, rings[rank])) for rank in (one, other))
        found = collective_log.find_mismatch(one, mine, other, theirs, ended=True)
        return DesyncError(
            self._format_message(found or f"The difference is more than {collective_log.RING_SIZE} calls old", when),
            agreed=True,
        )

    def _format_message(self, found: collective_log.CallMismatch | str, when: str) -> str:
        return f"{when}: ranks made different collectives. {found}. No update was made from them. {_REMEDY}"


def _find_differing_ranks(everyone: list[Any]) -> tuple[str, int, int]:
    """A group whose members differ, and two of its ranks: one of the majority and one of the minority."""
    groups: dict[str, dict[int, Any]] = {}  # by rank: number of calls, digest
    for rank, own in enumerate(everyone):
        for name, ranks, turn, digest in own:
            groups.setdefault(name, dict.fromkeys(ranks, (0, 0)))[rank] = (turn, digest)
    for name, calls in groups.items():
        many = Counter(calls.values()).most_common(1)[0][0]
        few = [rank for rank, value in calls.items() if value != many]
        if few:
            return name, next(rank for rank, value in calls.items() if value == many), few[0]
    return "", 0, 1
