"""Before each update: whether all processes have made the same collectives, in the same order, from the same lines.

A collective that differs between ranks is not an error to the backend: another ReduceOp, another order of equal shapes,
another dtype of equal size give wrong numbers and no message. So each rank's digest of its calls goes into one sum of
one number, before what they computed is used. That sum has a gloo group of its own: in the task's group it could
itself be mistaken for one of the calls that are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from unisono.engines.torch.guards.collective_hooks import Interception
from unisono.engines.torch.parallel import fsdp_communication
from unisono.engines.torch.parallel.process_group import TorchGroup, waiting
from unisono.runtime import collective_log
from unisono.runtime.communicator import Place
from unisono.runtime.errors import DeadlineError, DesyncError, page

_LOOK = 1.0  # seconds of waiting for the others until their rings are looked at
_REMEDY = (
    "Every rank has to make the same collectives in the same order, from the same lines: move them out of branches "
    "that not every rank takes (`if rank == 0`), and make a call that may come from several places in one function; "
    f"{page(DesyncError.fault)}"
)


class Desync:
    """The comparison, and the log of this process's collectives that it compares; nothing for a single process.

    Args:
        place: of this process.
        timeout: seconds to wait for the others.
        wanted: whether to compare at all (`launch.desync`).
        ddp: whether the backward pass reduces DDP's buckets.
    """

    def __init__(self, place: Place, timeout: float, wanted: bool, ddp: bool = False) -> None:
        self._place, self._timeout, self._ddp = place, timeout, ddp
        self._wanted = wanted and place.world_size > 1
        self._seen: Interception | None = None
        self._sum = torch.zeros(1, dtype=torch.int64)
        self._asked: dist.Work | None = None

    def start(self) -> None:
        """From now on see this process's collectives; collective."""
        if not self._wanted or not dist.is_initialized():
            return
        # Before the group, which all make together: who is in it reads nobody's ring of an earlier engine.
        self._log = collective_log.Log(self._place.rank, collective_log.folder())
        channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        assert isinstance(channel, dist.ProcessGroup)
        self._group, self._channel = TorchGroup(self._place, self._timeout, channel), channel
        self._seen = Interception(self._log, "gradient bucket" if self._ddp else "collective of the backward pass")
        self._members = self._seen.members(channel)

    def watch(self, model: nn.Module) -> None:
        """See what FSDP sends for the units of a model, by their names."""
        if self._seen is not None:
            fsdp_communication.name(model, self.note)

    def note(self, *call: Any) -> None:
        """Note a call that is made round the dispatcher; see `Interception.note`."""
        if self._seen is not None:
            self._seen.note(*call)

    def ask(self) -> None:
        """Begin to compare what was called until now, beside whatever is computed before `check`; collective."""
        if self._seen is None:
            return
        value = self._log.check()
        self._sum.fill_(value - 2**64 if value >= 2**63 else value)
        self._seen.note("allreduce_", self._channel, self._sum, collective_log.COMPARISON)
        with waiting(self._place, collective_log.COMPARISON, self._timeout):
            backend: Any = self._channel._get_backend(self._sum.device)
            self._asked = backend.allreduce([self._sum])

    def check(self, when: str) -> None:
        """What was asked, or is now asked, answered; collective.

        Args:
            when: what the processes are about, e.g. `step 3`.

        Raises:
            DesyncError: if processes made different collectives.
        """
        if self._seen is None:
            return
        if self._asked is None:
            self.ask()
        assert self._asked is not None
        work, self._asked = self._asked, None
        self._wait(work, when)
        if int(self._sum):  # torch's sum of int64 wraps around
            raise self._differs(when)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn a backend's error about a peer into a sentence, about their collectives if the rings know better."""
        try:
            with waiting(self._place, what, self._timeout, blocking=False):
                yield
        except DeadlineError as error:
            folder = self._log.path.parent if self._seen is not None and self._log.path is not None else None
            found = folder and collective_log.explained(collective_log.read_all(folder))
            if not found:
                raise
            raise DesyncError(self._sentence(found, f"waiting for {what}")) from error

    def of_bucket(self, hook: Callable[[GradBucket], Any], bucket: GradBucket) -> Any:
        """What DDP's communication hook makes of a bucket; its collectives are known by the number of the bucket."""
        with nullcontext() if self._seen is None else self._seen.at(f"gradient bucket {bucket.index()}"):
            return hook(bucket)

    def close(self) -> None:
        """See nothing any more."""
        if self._seen is not None:
            self._seen.close()
            self._log.close()
            self._seen = None
            del self._group, self._channel, self._members  # a process group must be free of its users before it is left

    def _wait(self, work: dist.Work, when: str) -> None:
        """Wait, and look meanwhile whether somebody of this node cannot come, since it waits for this process."""
        with waiting(self._place, f"{collective_log.COMPARISON} in {when}", self._timeout):
            while True:
                try:
                    work.wait(timedelta(seconds=_LOOK))
                    return
                except RuntimeError as error:  # the group's own deadline is another error
                    if "Operation timed out" not in str(error):
                        raise
                self._look(when)

    def _look(self, when: str) -> None:
        """Whether a rank of this node has made a call that this one has not, in place of coming to the comparison."""
        if self._log.path is None:
            return
        own = self._log.calls()
        for rank, theirs in collective_log.read_all(self._log.path.parent).items():
            if rank == self._place.rank:
                continue
            found = collective_log.difference(self._place.rank, own, rank, theirs) or self._ahead(rank, theirs)
            if found is not None:
                raise DesyncError(self._sentence(found, when))

    def _ahead(self, rank: int, theirs: list[collective_log.Call]) -> collective_log.Difference | None:
        """A call more than this rank has made, by one that has not come to the comparison this rank is in.

        Whoever has come to it may go on while this rank is still being told, so who is only ahead proves nothing.
        """
        came = max((call.turn for call in theirs if call.what.group == self._members.name), default=0)
        for call in theirs if came < self._members.turn else ():
            members = self._log.groups.get(call.what.group)
            if call.turn and members is not None and rank in members.ranks and call.turn > members.turn:
                return collective_log.Difference(call.turn, (self._place.rank, rank), (None, call))
        return None

    def _differs(self, when: str) -> DesyncError:
        """What all ranks say: the first call in which two of them differ."""
        own = [[m.name, list(m.ranks), m.turn, m.digest] for m in self._log.groups.values() if m is not self._members]
        told = self._group.gather(own, "how the collectives of all ranks differ")
        name, one, other = _apart(told)
        own_ring = self._log.calls() if self._place.rank in (one, other) else []
        ring = [asdict(call) for call in own_ring if call.turn and call.what.group == name]
        rings = self._group.gather(ring, "the collectives that differ")
        mine, theirs = (list(map(collective_log.Call.of, rings[rank])) for rank in (one, other))
        found = collective_log.difference(one, mine, other, theirs, ended=True)
        return DesyncError(
            self._sentence(found or f"It was more than {collective_log.LAST} calls ago", when), agreed=True
        )

    def _sentence(self, found: collective_log.Difference | str, when: str) -> str:
        return f"{when}: ranks made different collectives. {found}. No update was made from them. {_REMEDY}"


def _apart(told: list[Any]) -> tuple[str, int, int]:
    """A group whose members differ, and two of them: one of the many, and one of the few.

    Args:
        told: by every rank, for each of its groups: name, members, number of calls, digest.
    """
    groups: dict[str, dict[int, Any]] = {}
    for rank, own in enumerate(told):
        for name, ranks, turn, digest in own:
            groups.setdefault(name, dict.fromkeys(ranks, (0, 0)))[rank] = (turn, digest)
    for name, did in groups.items():
        many = Counter(did.values()).most_common(1)[0][0]
        few = [rank for rank, value in did.items() if value != many]
        if few:
            return name, next(rank for rank, value in did.items() if value == many), few[0]
    return "", 0, 1
