"""Detects hangs from the heartbeats and process states of a node: who is stuck, who only waits, and the message.

Pure functions, so that every case can be tested without processes. A waiting rank is never blamed, and while any rank
makes progress within the time limit of its phase, the run continues: the others are waiting for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unisono.runtime.errors import LostError, StuckError, format_ranges
from unisono.runtime.heartbeat import NEW_SHAPE, HeartbeatRecord
from unisono.runtime.untrusted.resource_limits import explain_sigbus
from unisono.supervise.hangs.stacks import Stack
from unisono.supervise.processes import STATES


@dataclass(frozen=True)
class PhaseLimits:
    """Seconds without progress after which a rank counts as stuck.

    Attributes:
        stuck_after: Minimum limit for a step.
        stuck_factor: The limit is at least this many times the median step.
        setup: Until the first step, including the first compilation, and from the last step to the end of the process.
        shape: For the first step of a process and for steps with a new shape, where models are compiled.
        data: For the next micro-batch.
        save: For writing a checkpoint or the records of a step.
        evaluate: Between two batches of an evaluation.
    """

    stuck_after: float = 20.0
    stuck_factor: float = 5.0
    setup: float = 1800.0
    shape: float = 300.0
    data: float = 600.0
    save: float = 1800.0
    evaluate: float = 600.0

    def step(self, durations: Sequence[float]) -> float:
        """Return the limit of a step, given the durations of previous steps."""
        return max(self.stuck_after, self.stuck_factor * statistics.median(durations or [0.0]))

    def limit_for(self, record: HeartbeatRecord) -> tuple[float, str]:
        """Return the limit for a rank's current phase, and the setting that defines it."""
        phase = record.outer if record.phase == "wait" else record.phase
        around = ("start", "setup", "end")
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
class RankStatus:
    """One rank as seen by the monitor.

    Attributes:
        record: Its last report.
        state: Kernel state letter of its process; empty if it is gone.
        idle_seconds: Seconds since its last report.
        stopped_seconds: Seconds for which its process has been stopped.
    """

    record: HeartbeatRecord
    state: str
    idle_seconds: float
    stopped_seconds: float = 0.0

    @property
    def is_active(self) -> bool:
        """Whether it has not yet left the run."""
        return self.record.phase != "left"


@dataclass(frozen=True)
class MonitorFinding:
    """Why a run was ended.

    Attributes:
        kind: Name of the error class.
        code: Its exit code.
        text: The message.
        rank: The culprit; None if there is no single one.
        where: File, line and function, if known.
        ranks: What each rank was doing, for the record.
    """

    kind: str
    code: int
    text: str
    rank: int | None = None
    where: str = ""
    ranks: dict[str, Any] = field(default_factory=dict)


def find_frozen(seen: Mapping[int, RankStatus], limits: PhaseLimits) -> list[int]:
    """Return the ranks whose processes have been stopped for too long."""
    return [r for r, one in seen.items() if one.is_active and one.stopped_seconds > limits.step(one.record.durations)]


def is_stalled(seen: Mapping[int, RankStatus], limits: PhaseLimits, others: bool = False) -> bool:
    """Whether no rank of this node makes progress within its limit.

    Args:
        seen: All ranks of this node.
        limits: Time limits of the phases.
        others: Whether there are other nodes; if all ranks of this node wait, their monitors may act first.
    """
    here = [one for one in seen.values() if one.is_active]
    if any(one.state == "t" for one in here):
        return False  # under a debugger
    busy = [one for one in here if one.record.phase != "wait"]
    if not busy:
        more, times = (10.0, 2.0) if others else (0.0, 1.0)
        return bool(here) and all(one.idle_seconds > more + times * limits.limit_for(one.record)[0] for one in here)
    return all(one.idle_seconds > limits.limit_for(one.record)[0] for one in busy)


def find_suspects(seen: Mapping[int, RankStatus], stacks: Mapping[int, Stack]) -> list[int]:
    """Return the stalled ranks that do not wait for another; empty if all of them wait."""
    here = {rank: one for rank, one in seen.items() if one.is_active}
    if stopped := [rank for rank, one in here.items() if one.state == "T"]:
        return stopped
    busy = [r for r, one in here.items() if one.record.phase != "wait" and not stacks.get(r, Stack()).is_waiting]
    if kernel := [rank for rank in busy if here[rank].state == "D"]:
        return kernel
    # A backward pass either computes or waits. If another rank is found elsewhere, the backward ones wait for that one.
    elsewhere = [rank for rank in busy if not stacks.get(rank, Stack()).is_in_backward]
    if not elsewhere and len(busy) == len(here) > 1:
        return []
    least = min((here[rank].record.steps_done for rank in elsewhere or busy), default=0)
    return [rank for rank in elsewhere or busy if here[rank].record.steps_done == least]


def describe_stuck(
    seen: Mapping[int, RankStatus], stacks: Mapping[int, Stack], limits: PhaseLimits, host: str
) -> MonitorFinding:
    """Build the message about stalled ranks of this node, `host`, from the stacks of those that answered."""
    culprits = find_suspects(seen, stacks)
    here = {rank: one for rank, one in seen.items() if one.is_active}
    ranks = {str(rank): to_json(one, stacks.get(rank)) for rank, one in sorted(seen.items())}
    if not culprits:
        everyone = "; ".join(_describe_waits(here, stacks))
        still = min(one.idle_seconds for one in here.values())
        different = len({one.record.detail or one.record.phase for one in here.values()}) > 1
        alike = "none of them is late, so the cause is the network, the device, or a process on another node"
        why = "they make different calls that cannot complete" if different else alike
        text = f"on {host} all processes have waited for each other for {still:.0f} s: {everyone}; {why}"
        return MonitorFinding(StuckError.__name__, StuckError.exit_code, text, None, "", ranks)
    first = culprits[0]
    one, stack = here[first], stacks.get(first, Stack())
    limit, key = limits.limit_for(one.record)
    if one.state == "T":
        limit, key = limits.step(one.record.durations), "launch.stuck_after"
    how = f"is frozen ({STATES['T']})" if one.state == "T" else "is stuck"
    if one.state == "D":
        how += f" {STATES['D']}: it cannot be killed before that ends"
    where = str(stack.relevant_frame) if stack.relevant_frame else ""
    more = f"ranks {format_ranges(culprits)} are stuck, the first of them: " if len(culprits) > 1 else ""
    since = one.stopped_seconds if one.state == "T" else one.idle_seconds
    parts = [
        f"rank {first} ({host}, process {one.record.pid}) {how} "
        f"{describe_phase(one.record)}{f', at {where}' if where else ''}, for {since:.0f} s (limit {limit:.0f} s, "
        f"{key})",
        *_describe_waits({r: o for r, o in here.items() if r not in culprits}, stacks),
    ]
    return MonitorFinding(StuckError.__name__, StuckError.exit_code, more + "; ".join(parts), first, where, ranks)


def describe_lost(
    rank: int,
    record: HeartbeatRecord | None,
    seen: Mapping[int, RankStatus],
    host: str,
    code: int | None,
    memory: bool = False,
) -> MonitorFinding:
    """Build the message about a rank that died without a message.

    Args:
        rank: Which rank.
        record: Its last report.
        seen: All ranks of this node.
        host: Name of this node.
        code: Its return code as in `subprocess`, if known.
        memory: Whether the kernel has killed a process for lack of memory meanwhile.
    """
    who = f"rank {rank} ({host}" + (f", process {record.pid})" if record else ")")
    when = describe_phase(record) if record else "before it started"
    parts = [f"{who} died without a message, {when}: {describe_death(code, memory)}"]
    groups: dict[str, list[int]] = {}
    for other, one in sorted(seen.items()):
        if other != rank and one.record.wait_detail:
            groups.setdefault(one.record.wait_detail, []).append(other)
    parts += [f"{_format_ranks(numbers)} waited for {what}" for what, numbers in groups.items()]
    ranks = {str(r): to_json(one) for r, one in sorted(seen.items())}
    return MonitorFinding(LostError.__name__, LostError.exit_code, "; ".join(parts), rank, "", ranks)


def describe_death(code: int | None, memory: bool = False) -> str:
    """Describe how a process ended."""
    if memory and code in (None, -9, 137):
        return (
            "killed by the kernel because this host, or the control group of this job, ran out of memory; request "
            "more memory, or lower data.workers and data.prefetch_mb"
        )
    if code is None:
        return "see its launcher's output for the exit code"
    if code >= 0:
        return f"exit code {code}" + " before the run was complete, e.g. by os._exit in the task's code" * (code == 0)
    names = {
        -6: " (SIGABRT)", -7: f" (SIGBUS), {explain_sigbus()}", -8: " (SIGFPE)",
        -9: " (SIGKILL), possibly by the OOM killer", -11: " (SIGSEGV)", -15: " (SIGTERM)",
    }  # fmt: skip
    return f"killed by signal {-code}{names.get(code, '')}"


def describe_phase(record: HeartbeatRecord) -> str:
    """Describe what a rank is doing, as in `in step 4, compute`."""
    if record.code == 0:
        return "while leaving, after all of its work was done"
    if record.code is not None:
        last = replace(record, phase=record.outer, detail=record.wait_detail)
        return f"while leaving with exit code {record.code}, {describe_phase(last)}"
    phase = record.outer if record.phase == "wait" else record.phase
    detail = f" ({record.detail})" if record.detail and record.phase != "wait" else ""
    wait = f", waiting for {record.detail}" if record.phase == "wait" else ""
    if record.steps_done < 0 or phase in ("start", "setup"):
        return f"before the first step, {phase}{detail}{wait}"
    if phase == "end":
        return f"after step {record.step}, which was its last, while ending{wait}"
    after = phase in ("record", "save", "evaluate") or record.outer in ("save", "evaluate")
    return f"{'after' if after else 'in'} step {record.step}, {phase}{detail}{wait}"


def to_json(one: RankStatus, stack: Stack | None = None) -> dict[str, Any]:
    """Return what is recorded about a rank."""
    record = asdict(one.record)
    fields = {name: record[name] for name in ("pid", "steps_done", "phase", "outer", "detail")}
    return {**fields, "at": describe_phase(one.record), "state": one.state, "still": round(one.idle_seconds, 2)} | (
        {"where": str(stack.relevant_frame)} if stack and stack.relevant_frame else {}
    )


def _describe_waits(ranks: Mapping[int, RankStatus], stacks: Mapping[int, Stack]) -> list[str]:
    """Describe which ranks wait where; ranks that wait for the same thing are grouped."""
    groups: dict[str, list[int]] = {}
    for rank, one in sorted(ranks.items()):
        if one.record.phase == "wait":
            what = f"for {one.record.detail}"
        else:
            shown = stacks.get(rank, Stack()).relevant_frame
            what = describe_phase(one.record) + (f", at {shown}" if shown else "")
        groups.setdefault(what, []).append(rank)
    return [
        f"{_format_ranks(numbers)} wait{'s' if len(numbers) == 1 else ''} {what}" for what, numbers in groups.items()
    ]


def _format_ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {format_ranges(numbers)}"
