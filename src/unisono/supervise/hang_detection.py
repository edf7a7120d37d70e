"""What is concluded from what the ranks of a node told and are at: who is stuck, who only waits, and the sentence.

Pure functions, so that every case can be tested without processes. A rank in a wait is nobody's suspect, and as long as
any rank goes on within the time that its phase may take, so does the run: the others wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.runtime.errors import LostError, StuckError, ranges
from unisono.runtime.heartbeat import NEW_SHAPE, Record
from unisono.supervise.processes import STATES
from unisono.supervise.stacks import Stack


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a rank is past its time.

    Attributes:
        stuck_after: in a step, at least.
        stuck_factor: and at least as many times the median step.
        setup: until the first step, with the first compilation, and from the last one to the end of the process.
        shape: in the first step of a process, and in one with a new shape, where models are compiled.
        data: for the next micro-batch.
        save: writing a checkpoint, or records of a step.
        evaluate: between two batches of an evaluation.
    """

    stuck_after: float = 20.0
    stuck_factor: float = 5.0
    setup: float = 1800.0
    shape: float = 300.0
    data: float = 600.0
    save: float = 1800.0
    evaluate: float = 600.0

    def step(self, durations: Sequence[float]) -> float:
        """For a step, after steps of such durations."""
        return max(self.stuck_after, self.stuck_factor * statistics.median(durations or [0.0]))

    def of(self, record: Record) -> tuple[float, str]:
        """For what a rank is at, and the setting that says so."""
        phase = record.outer if record.phase == "wait" else record.phase
        around = ("start", "setup")
        if phase in around or (phase == "data" and record.outer in around):
            return self.setup, "launch.deadlines.setup"
        if phase == "compute":
            first = not record.durations and record.phase != "wait"
            if first or (record.phase == "compute" and record.detail == NEW_SHAPE):
                return max(self.shape, self.step(record.durations)), "launch.deadlines.shape"
            return self.step(record.durations), "launch.stuck_after"
        named = {"data": self.data, "save": self.save, "record": self.save, "evaluate": self.evaluate}
        if phase in named:
            limit = max(named[phase], self.step(record.durations))
            return limit, f"launch.deadlines.{'save' if phase == 'record' else phase}"
        return float("inf"), ""


@dataclass(frozen=True)
class Seen:
    """One rank as the monitor sees it.

    Attributes:
        record: what it told last.
        state: of its process, a letter of the kernel's; empty if it is gone.
        still: seconds since it told anything.
        stopped: seconds for which its process has been seen stopped.
    """

    record: Record
    state: str
    still: float
    stopped: float = 0.0

    @property
    def here(self) -> bool:
        """Whether it has not left the run."""
        return self.record.phase != "left"


@dataclass(frozen=True)
class Finding:
    """Why a run is ended.

    Attributes:
        kind: the name of the error.
        code: its exit code.
        text: the sentence.
        rank: the culprit; None where there is no single one.
        where: file, line and function, if they are known.
        ranks: what each rank was at, for the record.
    """

    kind: str
    code: int
    text: str
    rank: int | None = None
    where: str = ""
    ranks: dict[str, Any] = field(default_factory=dict)


def frozen(seen: Mapping[int, Seen], limits: Limits) -> list[int]:
    """Ranks whose processes have been stopped for too long."""
    return [r for r, one in seen.items() if one.here and one.stopped > limits.step(one.record.durations)]


def stalled(seen: Mapping[int, Seen], limits: Limits, others: bool = False) -> bool:
    """Whether no rank of this node goes on within its time.

    Args:
        seen: all ranks of this node.
        limits: what their phases may take.
        others: whether there are other nodes, whose monitors get the first word if all ranks of this one wait.
    """
    here = [one for one in seen.values() if one.here]
    if any(one.state == "t" for one in here):
        return False  # somebody looks at it with a debugger
    busy = [one for one in here if one.record.phase != "wait"]
    if not busy:
        more, times = (10.0, 2.0) if others else (0.0, 1.0)
        return bool(here) and all(one.still > more + times * limits.of(one.record)[0] for one in here)
    return all(one.still > limits.of(one.record)[0] for one in busy)


def suspects(seen: Mapping[int, Seen], stacks: Mapping[int, Stack]) -> list[int]:
    """Of ranks that do not go on, those who do not wait for another; none if all do."""
    here = {rank: one for rank, one in seen.items() if one.here}
    if stopped := [rank for rank, one in here.items() if one.state == "T"]:
        return stopped
    busy = [r for r, one in here.items() if one.record.phase != "wait" and not stacks.get(r, Stack()).waits]
    if kernel := [rank for rank in busy if here[rank].state == "D"]:
        return kernel
    # In a backward pass a rank computes or waits, and if another one is found elsewhere, it waits for that one.
    elsewhere = [rank for rank in busy if not stacks.get(rank, Stack()).backward]
    if not elsewhere and len(busy) == len(here) > 1:
        return []
    least = min((here[rank].record.made for rank in elsewhere or busy), default=0)
    return [rank for rank in elsewhere or busy if here[rank].record.made == least]


def stuck(seen: Mapping[int, Seen], stacks: Mapping[int, Stack], limits: Limits, host: str) -> Finding:
    """The sentence about ranks that do not go on.

    Args:
        seen: all ranks of this node.
        stacks: of those who answered.
        limits: that were passed.
        host: name of this node.
    """
    culprits = suspects(seen, stacks)
    here = {rank: one for rank, one in seen.items() if one.here}
    ranks = {str(rank): plain(one, stacks.get(rank)) for rank, one in sorted(seen.items())}
    if not culprits:
        everyone = "; ".join(_waiting(here, stacks))
        still = min(one.still for one in here.values())
        different = len({one.record.detail or one.record.phase for one in here.values()}) > 1
        why = (
            "they make different calls, and will never meet"
            if different
            else "none of them is late, so it is the network, the device, or a process of another node"
        )
        text = f"on {host} all processes have waited for each other for {still:.0f} s: {everyone}; {why}"
        return Finding(StuckError.__name__, StuckError.exit_code, text, None, "", ranks)
    first = culprits[0]
    one, stack = here[first], stacks.get(first, Stack())
    limit, key = limits.of(one.record)
    if one.state == "T":
        limit, key = limits.step(one.record.durations), "launch.stuck_after"
    how = f"is frozen ({STATES['T']})" if one.state == "T" else "is stuck"
    if one.state == "D":
        how += f" {STATES['D']}: it cannot be killed before that ends"
    where = str(stack.shown) if stack.shown else ""
    more = [f"ranks {ranges(culprits)} are stuck, the first of them"] if len(culprits) > 1 else []
    since = one.stopped if one.state == "T" else one.still
    parts = [
        f"rank {first} ({host}, process {one.record.pid}) {how} {at(one.record)}{f', at {where}' if where else ''}, "
        f"for {since:.0f} s (limit {limit:.0f} s, {key})",
        *_waiting({r: o for r, o in here.items() if r not in culprits}, stacks),
    ]
    text = (f"{more[0]}: " if more else "") + "; ".join(parts)
    return Finding(StuckError.__name__, StuckError.exit_code, text, first, where, ranks)


def lost(
    rank: int, record: Record | None, seen: Mapping[int, Seen], host: str, code: int | None, memory: bool = False
) -> Finding:
    """The sentence about a rank that is gone without a word.

    Args:
        rank: which.
        record: what it told last.
        seen: the other ranks of this node.
        host: name of this node.
        code: how it ended, as `subprocess` tells it, if that is known.
        memory: whether the kernel has killed a process for want of memory meanwhile.
    """
    who = f"rank {rank} ({host}" + (f", process {record.pid})" if record else ")")
    parts = [f"{who} died without a message, {at(record) if record else 'before it began'}: {death(code, memory)}"]
    groups: dict[str, list[int]] = {}
    for other, one in sorted(seen.items()):
        if other != rank and one.record.awaited:
            groups.setdefault(one.record.awaited, []).append(other)
    parts += [f"{_ranks(numbers)} waited for {what}" for what, numbers in groups.items()]
    ranks = {str(r): plain(one) for r, one in sorted(seen.items())}
    text = "; ".join(parts)
    return Finding(LostError.__name__, LostError.exit_code, text, rank, "", ranks)


def death(code: int | None, memory: bool = False) -> str:
    """How a process ended, in words."""
    if memory and code in (None, -9, 137):
        return (
            "killed by the kernel, because this host, or the group that limits this job, is out of memory; ask for "
            "more, or lower data.workers and data.prefetch_mb"
        )
    if code is None:
        return "its launcher knows how"
    if code == 0:
        return "exit code 0, before the run was over, as by os._exit in the task's code"
    if code == -9:
        return "killed by signal 9, as one that is out of memory may be"
    if code == -7:
        return "killed by signal 7 (SIGBUS), as one is that reads behind the end of a file that has become shorter"
    names = {-6: "SIGABRT", -8: "SIGFPE", -11: "SIGSEGV", -15: "SIGTERM"}
    if code < 0:
        return f"killed by signal {-code}" + (f" ({names[code]})" if code in names else "")
    return f"exit code {code}"


def at(record: Record) -> str:
    """What a rank is at, in words: `in step 4, compute`."""
    phase = record.outer if record.phase == "wait" else record.phase
    detail = f" ({record.detail})" if record.detail and record.phase != "wait" else ""
    wait = f", waiting for {record.detail}" if record.phase == "wait" else ""
    if record.made < 0 or phase in ("start", "setup"):
        return f"before the first step, {phase}{detail}{wait}"
    after = phase in ("record", "save", "evaluate") or record.outer in ("save", "evaluate")
    return f"{'after' if after else 'in'} step {record.step}, {phase}{detail}{wait}"


def plain(one: Seen, stack: Stack | None = None) -> dict[str, Any]:
    """What is recorded of a rank."""
    told = asdict(one.record)
    kept = {name: told[name] for name in ("pid", "made", "phase", "outer", "detail")}
    return {**kept, "at": at(one.record), "state": one.state, "still": round(one.still, 2)} | (
        {"where": str(stack.shown)} if stack and stack.shown else {}
    )


def _waiting(ranks: Mapping[int, Seen], stacks: Mapping[int, Stack]) -> list[str]:
    """Who waits where; ranks that wait for the same are told together."""
    groups: dict[str, list[int]] = {}
    for rank, one in sorted(ranks.items()):
        if one.record.phase == "wait":
            what = f"for {one.record.detail}"
        else:
            shown = stacks.get(rank, Stack()).shown
            what = at(one.record) + (f", at {shown}" if shown else "")
        groups.setdefault(what, []).append(rank)
    return [f"{_ranks(numbers)} wait{'s' if len(numbers) == 1 else ''} {what}" for what, numbers in groups.items()]


def _ranks(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
