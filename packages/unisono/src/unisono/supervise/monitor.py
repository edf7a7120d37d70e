"""The monitor of a node: a separate process that notices when training processes die, freeze or hang.

It reads their heartbeats (`unisono.runtime.heartbeat`) and their kernel state five times a second. If needed, it ends
the run on its node: with one message, all stacks in the run's directory, and SIGKILL for every process and its
descendants. It imports very little, so it is ready before they are.

    python -m unisono.supervise.monitor SPECIFICATION

The specification is JSON, see `Specification`. The parent holds the monitor's standard input open and writes a line
when the run is over. If the input ends without a line, the launcher has died, and its processes must not outlive it.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.runtime import heartbeat, secrets
from unisono.runtime.console import say
from unisono.runtime.errors import DeadlineError, DesyncError, StuckError
from unisono.runtime.files import write_whole
from unisono.runtime.heartbeat import HeartbeatRecord
from unisono.runtime.untrusted import safe_writing
from unisono.supervise import processes
from unisono.supervise.hangs import collective_mismatch, hang_detection, stacks
from unisono.supervise.hangs.hang_detection import MonitorFinding, PhaseLimits, RankStatus
from unisono.supervise.hangs.stacks import Stack
from unisono.supervise.hangs.stragglers import Stragglers
from unisono.supervise.processes import Process

FINDING_FILE = "finding.json"  # in the directory of the heartbeats

_TICK = 0.2  # seconds between polls
_GRACE_LOST = 1.0  # seconds for the others to end by themselves after one has died
_GRACE_FAULT = 8.0  # the same after one has reported why it leaves
_PATIENCE = 5.0  # seconds to wait for a write to a file system
_SLEEP_GAP = 5.0  # a longer gap between two polls means that this host was suspended
# Seconds without a report from any rank of this node before nodes compare rings, and between comparisons.
_COMPARE_INTERVAL = 5.0
_QUIET_CODES = (0, 75, 130)  # exit codes that do not end the other ranks: finished, preempted, interrupted


@dataclass(frozen=True)
class Specification:
    """The arguments of a monitor.

    Attributes:
        directory: Of the heartbeats.
        folder: The run's directory.
        ranks: Of this node.
        node: Rank of this node.
        nodes: Number of nodes.
        limits: Fields of `PhaseLimits`.
        factor: Of `Stragglers`.
        held: Whether the end of standard input means the end of the launcher, which then also reports the finding.
        agent: Process id of a launcher other than ours, without which its processes must not live on.
    """

    directory: str
    folder: str
    ranks: list[int]
    node: int = 0
    nodes: int = 1
    limits: dict[str, float] = field(default_factory=dict)
    factor: float = 2.0
    held: bool = True
    agent: int | None = None


class Monitor:
    """Watches the ranks of one node until they are gone."""

    def __init__(self, specification: Specification) -> None:
        self._specification = specification
        self._directory, self._folder = Path(specification.directory), Path(specification.folder)
        self._limits = PhaseLimits(**specification.limits)
        self._stragglers = Stragglers(specification.factor)
        self._host = platform.node()
        self._roots: dict[int, Process] = {}
        self._records: dict[int, HeartbeatRecord] = {}
        self._stopped_since: dict[int, float] = {}  # when each rank's process was first seen stopped
        self._failed_since: dict[int, float] = {}  # when each rank was first known to be lost or failed
        self._agent = processes.find_process(specification.agent) if specification.agent else None
        self._survivors: dict[int, RankStatus] = {}  # the state of all ranks when the first one died
        self._last_look = self._last_comparison = time.monotonic()
        self._idle_from = 0.0  # idle time before this moment is ignored, because the host was suspended

    def run(self) -> int:
        """Watch to the end; return 0, or the exit code of the error for which the run was ended."""
        descriptors: dict[int, int] = {}
        poll = select.poll()
        if self._specification.held:
            poll.register(0, select.POLLIN)
        while True:
            for rank, root in self._roots.items():
                if rank not in descriptors and hasattr(os, "pidfd_open"):
                    with suppress(OSError):
                        descriptors[rank] = os.pidfd_open(root.pid)
                        poll.register(descriptors[rank], select.POLLIN)
            for descriptor, _ in poll.poll(1000 * _TICK):
                if descriptor == 0:
                    return self._on_input_closed()
                poll.unregister(descriptor)
            if not self._directory.is_dir():
                return 0
            seen = self._read_ranks()
            if self._agent is not None and processes.refresh(self._agent) is None:
                time.sleep(_GRACE_LOST)
                self._kill_processes()
                return 0
            if (code := self._judge(seen)) is not None:
                return code
            alive = any(one.is_active and one.state for one in seen.values())
            if not alive and len(seen) == len(self._specification.ranks) and not self._specification.held:
                shutil.rmtree(self._directory, ignore_errors=True)
                return 0
            self._report_stragglers(seen)

    def _on_input_closed(self) -> int:
        if not os.read(0, 1):
            time.sleep(_GRACE_LOST / 2)  # the kernel kills the processes together with their parent
            self._read_ranks()  # including those started since the last look
            self._kill_processes()
            shutil.rmtree(self._directory, ignore_errors=True)
        return 0

    def _read_ranks(self) -> dict[int, RankStatus]:
        now = time.monotonic()
        if now - self._last_look > _SLEEP_GAP:
            self._idle_from = now
        self._last_look = now
        seen = {}
        for rank in self._specification.ranks:
            path = heartbeat.heartbeat_path(self._directory, rank)
            record = heartbeat.read_record(path) or self._records.get(rank)
            if record is None:
                continue
            self._records[rank] = record
            if rank not in self._roots and (process := processes.find_process(record.pid)):
                self._roots[rank] = process
            root = self._roots.get(rank)
            process = processes.refresh(root) if root else None
            state = process.state if process else ""
            if not state:  # it may have reported its exit and left after its record was read
                record = self._records[rank] = heartbeat.read_record(path) or record
            if state != "T":
                self._stopped_since.pop(rank, None)
            stopped = now - max(self._stopped_since.setdefault(rank, now), self._idle_from) if state == "T" else 0.0
            still = now - max(record.since / 1e9, self._idle_from)
            seen[rank] = RankStatus(record, state, still, stopped)
        return seen

    def _judge(self, seen: Mapping[int, RankStatus]) -> int | None:
        """End the run if necessary; return the error's exit code, or None to continue."""
        now = time.monotonic()
        failed = [rank for rank, one in seen.items() if not one.is_active and one.record.code not in _QUIET_CODES]
        gone = [rank for rank, one in seen.items() if one.is_active and not one.state]
        for rank in sorted({*failed, *gone}, key=lambda rank: _blame_order(seen[rank])):
            self._failed_since.setdefault(rank, now)
        if self._failed_since and not self._survivors:
            self._survivors = dict(seen)
        if self._failed_since:
            alive = any(one.state for one in seen.values())
            started, since = next(iter(self._failed_since)), now - min(self._failed_since.values())
            lost = started in gone
            if since < (_GRACE_LOST if lost else _GRACE_FAULT):
                return None
            if lost and (alive or not self._specification.held):
                dead = hang_detection.describe_lost(started, self._records[started], self._survivors, self._host, None)
                return self._conclude(dead)
            if alive:  # a process that reported its fault may live on, e.g. a script that continues with other work
                self._kill_processes([rank for rank, one in seen.items() if one.is_active])
            return None
        if self._limits.stuck_after and self._has_stopped_or_stalled(seen):
            return self._check_stuck(seen)
        idle = min((one.idle_seconds for one in seen.values() if one.is_active), default=0.0)
        if self._specification.nodes > 1 and min(idle, now - self._last_comparison) > _COMPARE_INTERVAL:
            self._last_comparison = now
            # What rings prove holds whenever they were written, so nothing needs to wait here.
            found: list[str | None] = [None]
            compare = partial(collective_mismatch.describe_mismatch_across_nodes, self._directory, patience=0.0)
            _run_with_timeout(lambda: found.append(compare(self._folder / "logs")))
            if found[-1]:
                return self._conclude(MonitorFinding(DesyncError.__name__, DesyncError.exit_code, found[-1]))
        return None

    def _has_stopped_or_stalled(self, seen: Mapping[int, RankStatus]) -> bool:
        others = self._specification.nodes > 1
        frozen = hang_detection.find_frozen(seen, self._limits)
        return bool(frozen) or hang_detection.is_stalled(seen, self._limits, others)

    def _check_stuck(self, seen: Mapping[int, RankStatus]) -> int | None:
        """Collect all stacks, and end the run unless some rank made progress meanwhile; stopped ranks answer last."""
        running = {rank: one.record.pid for rank, one in seen.items() if one.state != "T"}
        answers = stacks.collect_stacks(self._directory, running)
        again = self._read_ranks()
        if not self._has_stopped_or_stalled(again):
            return None
        described = {rank: processes.describe_kernel_state(one.record.pid) for rank, one in seen.items()}
        if stopped := {rank: one.record.pid for rank, one in again.items() if one.state == "T"}:
            for rank in again.keys() - stopped.keys():  # or they would continue the run with the ranks woken below
                with suppress(OSError):
                    os.kill(again[rank].record.pid, signal.SIGSTOP)
            answers |= stacks.collect_stacks(self._directory, stopped, patience=1.0, stopped=True)
        stuck = hang_detection.describe_stuck(again, answers, self._limits, self._host)
        return self._conclude(stuck, answers, described)

    def _conclude(
        self,
        finding: MonitorFinding,
        answers: Mapping[int, Stack] | None = None,
        described: Mapping[int, str] | None = None,
    ) -> int:
        """Save the finding for the launcher and for people, and end the processes."""
        if finding.kind == StuckError.__name__ and (differ := collective_mismatch.describe_mismatch(self._directory)):
            finding = replace(finding, kind=DesyncError.__name__, code=DesyncError.exit_code, text=differ)
        where = self._folder / "logs" / "stacks" / time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime())
        texts = {}
        for rank, root in self._roots.items():
            answer = answers[rank].text if answers and rank in answers else "" if answers is None else "no answer\n"
            if text := "\n".join(filter(None, [answer, (described or {}).get(rank, "")])):
                state = finding.ranks.get(str(rank), {})
                texts[f"rank-{rank:05d}.txt"] = f"rank {rank}, process {root.pid}, {state.get('at', '')}\n\n{text}\n"
        stored = str(where.relative_to(self._folder)) if texts else ""
        if stored:
            finding = replace(finding, text=f"{finding.text} All stacks: {where}")
        node = self._specification.node
        _run_with_timeout(lambda: write_finding(self._directory / FINDING_FILE, finding, node, stored))
        if not self._specification.held:
            _print_line(f"unisono: error: {finding.text}")

        def keep() -> None:
            if texts:
                safe_writing.make_folder(safe_writing.make_folder(where.parents[1], where.parent.name), where.name)
            for name, text in texts.items():
                write_whole(where / name, text)
            write_finding(finding_path(self._folder, node), finding, node, stored)

        _run_with_timeout(keep)
        self._kill_processes()
        if not self._specification.held:
            shutil.rmtree(self._directory, ignore_errors=True)
        return finding.code

    def _kill_processes(self, ranks: Iterable[int] | None = None) -> None:
        """Kill the processes of this node, or those of some ranks, with all their descendants."""
        ranks = self._roots if ranks is None else ranks
        if left := processes.kill_all([self._roots[rank] for rank in ranks if rank in self._roots]):
            found = ", ".join(f"{process.pid} (state {process.state})" for process in left)
            why = f"they are {processes.STATES['D']}"
            _print_line(f"unisono: WARNING: these processes cannot be killed: {found}; {why}")

    def _report_stragglers(self, seen: Mapping[int, RankStatus]) -> None:
        for line in self._stragglers.update({rank: one.record for rank, one in seen.items()}):
            _print_line(f"unisono: WARNING: {line}")
            name = f"logs/monitor-node-{self._specification.node}.log"
            with suppress(OSError), safe_writing.open_to_append(self._folder, name) as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def _blame_order(one: RankStatus) -> int:
    """Rank causes found at the same time: a rank with its own error, one that died, one that waited for another."""
    if one.is_active:
        return 1
    return 2 if one.record.code == DeadlineError.exit_code else 0


def finding_path(folder: Path, node: int) -> Path:
    """Return where a run's directory keeps the finding of a node's monitor."""
    return folder / "logs" / f"monitor-node-{node}.json"


def write_finding(path: Path, finding: MonitorFinding, node: int, stored: str = "") -> None:
    """Write the finding of a node's monitor; `stored` is the folder of the stacks, relative to the run's directory."""
    about: dict[str, Any] = {**asdict(finding), "node": node, "host": platform.node(), "time": time.time()}
    write_whole(path, json.dumps(secrets.hidden({**about, "stacks": stored}), indent=1) + "\n")


def _run_with_timeout(act: Any) -> None:
    """Do something that may hang, such as writing to a network file system, and stop waiting after a few seconds."""

    def careful() -> None:
        try:
            act()
        except OSError as error:
            _print_line(f"unisono: WARNING: the monitor cannot write its finding: {error}")

    thread = threading.Thread(target=careful, daemon=True)
    thread.start()
    thread.join(_PATIENCE)


def _print_line(line: str) -> None:
    with suppress(OSError):
        say(line, error=True)


def main() -> None:
    """Run the monitor process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its launcher does, not before
    code = Monitor(Specification(**json.loads(sys.argv[1]))).run()
    sys.stderr.flush()
    os._exit(code)  # a thread may be blocked in a file system


if __name__ == "__main__":
    main()
