"""Before each update: whether all processes have made the same collectives, in the same order, from the same lines.

A collective that differs between ranks is not an error to the backend: another ReduceOp, another order of equal shapes,
another dtype of equal size give wrong numbers and no message. So each rank's digest of its calls goes into one sum of
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
from unisono.engines.torch.parallel.process_group import TorchCommunicator, waiting
from unisono.runtime import collective_log
from unisono.runtime.communicator import Place
from unisono.runtime.errors import DeadlineError, DesyncError, page

_LOOK = 1.0  # seconds of waiting for the others until their rings are looked at
_REMEDY = (
    "Every rank has to make the same collectives in the same order, from the same lines: move them out of branches "
    "that not every rank takes (`if rank == 0`), and make a call that may come from several places in one function; "
    f"{page(DesyncError.fault)}"
)


class CollectiveComparison(Observer):
    """The comparison, and the log of this process's collectives that it compares; nothing for a single process.

    Args:
        process: this one.
        timeout: seconds to wait for the others.
        wanted: whether to compare at all (`launch.desync`).
        ddp: whether the backward pass reduces DDP's buckets.
    """

    def __init__(self, process: Place, timeout: float, wanted: bool, ddp: bool = False) -> None:
        self._process, self._timeout, self._ddp = process, timeout, ddp
        self._wanted = wanted and process.world_size > 1
        self._hooks: CollectiveHooks | None = None
        self._sum = torch.zeros(1, dtype=torch.int64)
        self._begun: dist.Work | None = None

    def start(self) -> None:
        """Log this process's collectives from now on; collective."""
        if not self._wanted or not dist.is_initialized():
            return
        # Before the group, which all make together: who is in it reads nobody's ring of an earlier engine.
        self._log = collective_log.Log(self._process.rank, collective_log.folder())
        channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        assert isinstance(channel, dist.ProcessGroup)
        self._communicator, self._channel = TorchCommunicator(self._process, self._timeout, channel), channel
        self._hooks = CollectiveHooks(self._log, "gradient bucket" if self._ddp else "collective of the backward pass")
        self._members = self._hooks.members(channel)

    def watch(self, model: nn.Module) -> None:
        """Log what FSDP sends for the units of a model, by their names."""
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
        """Begin to compare; the norm of the gradient is computed meanwhile."""
        self.begin_check()

    def votes(self) -> Sequence[float]:
        """No votes, but the answer, before the step's reduction uses what the collectives computed."""
        self.check(f"step {self._step + 1}")
        return ()

    def begin_check(self) -> None:
        """Begin to compare what was called until now, while other things are computed; collective."""
        if self._hooks is None:
            return
        value = self._log.check()
        self._sum.fill_(value - 2**64 if value >= 2**63 else value)
        self._hooks.note("allreduce_", self._channel, self._sum, collective_log.COMPARISON)
        with waiting(self._process, collective_log.COMPARISON, self._timeout):
            backend: Any = self._channel._get_backend(self._sum.device)
            self._begun = backend.allreduce([self._sum])

    def check(self, when: str) -> None:
        """End the comparison that was begun, or make one now; collective.

        Raises:
            DesyncError: if processes made different collectives; `when`, e.g. `step 3`, is part of it.
        """
        if self._hooks is None:
            return
        if self._begun is None:
            self.begin_check()
        assert self._begun is not None
        work, self._begun = self._begun, None
        self._wait(work, when)
        if int(self._sum):  # torch's sum of int64 wraps around
            raise self._error(when)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn a backend's error about a peer into a sentence, about their collectives if the rings know better."""
        try:
            with waiting(self._process, what, self._timeout, blocking=False):
                yield
        except DeadlineError as error:
            folder = self._log.path.parent if self._hooks is not None and self._log.path is not None else None
            found = folder and collective_log.explained(collective_log.read_all(folder))
            if not found:
                raise
            raise DesyncError(self._sentence(found, f"waiting for {what}")) from error

    def of_bucket(self, hook: Callable[[GradBucket], Any], bucket: GradBucket) -> Any:
        """Call DDP's communication hook for a bucket; its collectives are logged under the number of the bucket."""
        with nullcontext() if self._hooks is None else self._hooks.at(f"gradient bucket {bucket.index()}"):
            return hook(bucket)

    def close(self) -> None:
        """Log nothing any more."""
        if self._hooks is not None:
            self._hooks.close()
            self._log.close()
            self._hooks = None
            del (
                self._communicator,
                self._channel,
                self._members,
            )  # a process group must be free of its users before it is left

    def _wait(self, work: dist.Work, when: str) -> None:
        """Wait, and look meanwhile whether a rank of this node cannot come, since it waits for this process."""
        with waiting(self._process, f"{collective_log.COMPARISON} in {when}", self._timeout):
            while True:
                try:
                    work.wait(timedelta(seconds=_LOOK))
                    return
                except RuntimeError as error:  # the group's own deadline is another error
                    if "Operation timed out" not in str(error):
                        raise
                self._look_at_others(when)

    def _look_at_others(self, when: str) -> None:
        """Whether a rank of this node has made a call that this one has not, in place of coming to the comparison."""
        if self._log.path is None:
            return
        own = self._log.calls()
        for rank, theirs in collective_log.read_all(self._log.path.parent).items():
            if rank == self._process.rank:
                continue
            found = collective_log.difference(self._process.rank, own, rank, theirs) or self._find_ahead(rank, theirs)
            if found is not None:
                raise DesyncError(self._sentence(found, when))

    def _find_ahead(self, rank: int, theirs: list[collective_log.Call]) -> collective_log.Difference | None:
        """A call more than this rank has made, by one that has not come to the comparison this rank is in.

        Whoever has come to it may go on while this rank is still being told, so who is only ahead proves nothing.
        """
        came = max((call.turn for call in theirs if call.what.group == self._members.name), default=0)
        for call in theirs if came < self._members.turn else ():
            members = self._log.groups.get(call.what.group)
            if call.turn and members is not None and rank in members.ranks and call.turn > members.turn:
                return collective_log.Difference(call.turn, (self._process.rank, rank), (None, call))
        return None

    def _error(self, when: str) -> DesyncError:
        """The error, of all ranks: the first call in which two of them differ."""
        own = [[m.name, list(m.ranks), m.turn, m.digest] for m in self._log.groups.values() if m is not self._members]
        name, one, other = _apart(self._communicator.gather(own, "how the collectives of all ranks differ"))
        own_ring = self._log.calls() if self._process.rank in (one, other) else []
        ring = [asdict(call) for call in own_ring if call.turn and call.what.group == name]
        rings = self._communicator.gather(ring, "the collectives that differ")
        mine, theirs = (list(map(collective_log.Call.of, rings[rank])) for rank in (one, other))
        found = collective_log.difference(one, mine, other, theirs, ended=True)
        return DesyncError(
            self._sentence(found or f"It was more than {collective_log.LAST} calls ago", when), agreed=True
        )

    def _sentence(self, found: collective_log.Difference | str, when: str) -> str:
        return f"{when}: ranks made different collectives. {found}. No update was made from them. {_REMEDY}"


def _apart(everyone: list[Any]) -> tuple[str, int, int]:
    """A group whose members differ, and two of them: one of the many, and one of the few."""
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
