"""Decides which of many faults ended a run, from the processes' reports, the monitor's finding, and exit codes."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.launch.processes import children
from unisono.launch.processes.monitor_client import MonitorClient
from unisono.runtime.communication.communicator import Node
from unisono.runtime.errors import DesyncError, LostError, StuckError, UnisonoError
from unisono.supervise import preemption, records
from unisono.supervise.hangs import collective_mismatch
from unisono.supervise.hangs.hang_detection import describe_death

_CONSEQUENCES = ("DeadlineError", "Preempted")  # errors that may be mere consequences of another rank's end


class WorkerError(UnisonoError):
    """A fault of one process, reported once on behalf of all.

    Attributes:
        memory: Whether it ran out of memory, or was killed in a way that suggests so.
        by_signal: Whether it was killed by a signal and reported nothing.
        random: Whether its forward passes draw random numbers; None if it did not say.
    """

    def __init__(
        self, text: str, code: int, fault: str = "", memory: bool = False, by_signal: bool = False,
        random: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(text, fault)
        self.exit_code, self.memory, self.by_signal, self.random = code, memory, by_signal, random


class LostWorkerError(WorkerError, LostError):
    """A process died without a message."""


class StuckWorkerError(WorkerError, StuckError):
    """A process made no progress."""


def select_fault(
    logs: Path, codes: Mapping[int, int], watch: MonitorClient | None = None, node: Node | None = None
) -> WorkerError:
    """Select the fault to show: a process that died or was stuck, or the first fault that is not a timed-out wait.

    Args:
        logs: Folder of the run's logs, with the faults and monitor findings of all nodes.
        codes: Exit codes of this node's ranks, as in `subprocess`.
        watch: The monitor of this node.
        node: This node, if there are several.
    """
    ended = time.time()
    folders = [logs] if watch is None else [logs, watch.directory]
    faults = [fault for each in folders for fault in records.read(each, "*.fault.json", records.Fault)]
    faults.sort(key=lambda fault: (fault["kind"] in _CONSEQUENCES, fault["time"]))
    found = _read_finding(logs, watch)
    reporting = {fault["rank"] for fault in faults}
    ended_with = {rank: code for rank, code in codes.items() if code}
    silent = {rank: code for rank, code in ended_with.items() if rank not in reporting}
    # The launcher kills what is left after a fault, at once or after its grace period; such a death is not a cause.
    late = bool(faults) and ended - min(fault["time"] for fault in faults) >= children.GRACE
    ended_others = {-signal.SIGTERM, preemption.ENDED_BY_SIGNAL + signal.SIGTERM}
    by_launcher = {*ended_others, *([-signal.SIGKILL] if late else [])} if faults else set()
    deaths = [(rank, code) for rank, code in silent.items() if code not in by_launcher]
    # Torch's launcher takes exit code 0 for success, however early it occurs.
    early = watch.unfinished_ranks() if watch is not None else []
    deaths += [(rank, 0) for rank in early if rank not in ended_with and rank not in reporting]
    # If a rank has died, a rank before its first step mistakes the launcher's SIGTERM for a preemption.
    if not faults or faults[0]["kind"] == "DeadlineError" or (faults[0]["kind"] == "Preempted" and deaths):
        if watch is not None and (differ := _describe_mismatch(logs, watch, node, codes)):
            return WorkerError(differ, DesyncError.exit_code, DesyncError.fault)
        if found is not None and found.get("kind") == StuckError.__name__:
            return StuckWorkerError(found["text"], StuckError.exit_code)
        # Processes that the monitor killed because another was gone did not die by themselves.
        own_death = min(deaths, key=lambda death: death[1] in ended_others, default=(None, 0))
        lost = found.get("rank") if found is not None else own_death[0]
        if lost is not None and watch is not None and lost in codes:
            code = ended_with.get(lost, 0)
            text = watch.record_lost_rank(lost, code).text
            return LostWorkerError(text, LostError.exit_code, memory=code == -9, by_signal=code < 0)
        if found is not None:
            return LostWorkerError(found["text"], LostError.exit_code)
        if lost is not None:
            code = dict(deaths)[lost]
            text = f"rank {lost} died without a message ({describe_death(code)}); see {logs}"
            return LostWorkerError(text, LostError.exit_code, memory=code == -9, by_signal=code < 0)
    if not faults:
        shown = ", ".join(f"{code} (rank {rank})" for rank, code in sorted(ended_with.items()))
        return WorkerError(f"the processes ended with exit codes {shown}; see {logs}", 1)
    fault, memory = faults[0], bool(faults[0].get("memory"))
    if fault.get("foreign"):
        more = len(faults) - 1
        others = f" ({more} other process{'es' * (more > 1)} failed, too; see {logs})" if more else ""
        return WorkerError(f"rank {fault['rank']} failed{others}\n{fault['text']}", fault["code"], memory=memory)
    ranks = ", ".join(map(str, sorted(silent)))
    stuck = f"\nRanks that did not respond until the launcher stopped them: {ranks}"
    text = fault["text"] + (stuck if ranks and fault["kind"] == "DeadlineError" else "")
    return WorkerError(text, fault["code"], fault["fault"], memory=memory, random=fault.get("random"))


def _describe_mismatch(logs: Path, watch: MonitorClient, node: Node | None, codes: Mapping[int, int]) -> str | None:
    """Describe different collectives issued by ranks of this node, or of two nodes."""
    if node is None:
        return collective_mismatch.describe_mismatch(watch.directory)
    ranks = watch.count * node.count
    # Gloo aborts at once where sizes differ; the other rank has to notice, raise and exit before its node has a part.
    aborted = -signal.SIGABRT in codes.values()
    patience = collective_mismatch.PATIENCE_AFTER_ABORT if aborted else collective_mismatch.PATIENCE
    return collective_mismatch.describe_mismatch_across_nodes(watch.directory, logs, ranks, patience)


def _read_finding(logs: Path, watch: MonitorClient | None) -> dict[str, Any] | None:
    found = watch.read_finding() if watch is not None else None
    return found or next(iter(records.read(logs, "monitor-node-*.json", records.Finding)), None)
