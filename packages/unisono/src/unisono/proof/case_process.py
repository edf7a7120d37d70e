"""One process of a proof: joins the others once, and runs every case of its world size.

Cases of one process are run side by side, where there are cores for it: each process has cases of its own then.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter

from unisono.config import CONFIG_FILE
from unisono.config.batch_split import rows_of_sources
from unisono.config.code import code_digest
from unisono.config.schema.run import RunConfig
from unisono.launch import cluster
from unisono.launch.processes import rank_process
from unisono.launch.resolving import layout as layouts
from unisono.observe import logs
from unisono.proof.cases import Case, ProofSettings
from unisono.proof.hangs import HangWatch
from unisono.proof.recording.trace import count_recorded, read_trace
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.console import say
from unisono.task_config import build_task, read_config

_LONGEST = 600.0  # seconds of a case, where nothing is known
_WORK = "proof.json"


def build_case_config(config: RunConfig, case: Case, proof: ProofSettings, place: ProcessInfo | None) -> RunConfig:
    """The configuration of a case: its layout, and a small global batch."""
    layout = {
        **config.layout.model_dump(),
        "shards": None, "reduction": "fast", "compile": False, "activation_checkpointing": 0, "defer_reduction": False,
        "offload": False,
        "devices": 1, **case.layout, "world_size": case.world_size,
    }  # fmt: skip
    if layout["strategy"] != "ddp":
        layout["bucket_mb"] = None
    settings = {"precision": case.precision, "global_batch": proof.global_batch, "guard_every": 10**9}
    rows: dict[str, Any] = {
        "rows": proof.global_batch + 3, "micro_batch": None, "harness": [], "harness_limit": None, "environment": None,
        "environment_limit": None,
    }  # fmt: skip
    # No layout changes a frozen matrix, and products in 4 bits cannot be computed in fp64.
    adapter = config.adapter
    if adapter is not None and adapter.base_dtype == "nf4":
        adapter = adapter.model_copy(update={"base_dtype": "kept"})
    averaged = {"start": 0, "every": 1} if config.ema.decay is not None else {}  # within so few steps
    changed = config.model_copy(
        update={
            "layout": type(config.layout).model_validate(layout),
            "train": config.train.model_copy(update=settings),
            "eval": config.eval.model_copy(update=rows),
            "adapter": adapter,
            "ema": config.ema.model_copy(update=averaged),
            "data": config.data.model_copy(update=case.data),
            "optim": config.optim.model_copy(update=case.optim),
            "launch": config.launch.model_copy(
                update={"nodes": 1, "node_rank": None}
            ),  # its processes are on this host
        }
    )
    return layouts.resolve_layout(changed, place)


@dataclass(frozen=True)
class Progress:
    """What is known of a proof when processes start for some of its cases.

    Attributes:
        total: cases of the proof.
        began: when the proof began, in seconds since the epoch.
        seconds: that its first case took, if that was run; no other one may take very much longer.
    """

    total: int
    began: float = field(default_factory=time.time)
    seconds: float | None = None

    def format_case(self, name: str, seconds: float, done: int, now: float) -> str:
        """The line about a case that has ended, as one of so many, and how long the rest may take."""
        left = (now - self.began) / done * (self.total - done)
        rest = f", about {left:.0f} s left" if done < self.total else ""
        return f"  {name}: {seconds:.1f} s ({done} of {self.total}{rest})"


@dataclass(frozen=True)
class Work:
    """What the processes of a phase have to do.

    Attributes:
        proof: its settings.
        progress: of the proof.
        code: the digests of what is proved.
        lanes: the cases, all on as many processes; if there are several lanes, each is one process's alone.
    """

    proof: ProofSettings
    progress: Progress
    code: dict[str, str]
    lanes: list[list[Case]]

    def write(self, folder: Path) -> None:
        """Leave it in the folder of the processes."""
        (folder / _WORK).write_bytes(TypeAdapter(Work).dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> Work:
        """What was written there."""
        return TypeAdapter(Work).validate_json((folder / _WORK).read_bytes())


def _stand_alone() -> ProcessInfo:
    """Make this process of several one that was started by itself, to the task too, which may ask for its rank."""
    alone = {f"{kind}RANK": "0" for kind in ("", "LOCAL_", "ROLE_")}
    os.environ |= alone | {f"{kind}WORLD_SIZE": "1" for kind in ("", "LOCAL_", "ROLE_")}
    place = cluster.process_info()
    assert place is not None
    return place


def needs_whole_batches(folder: Path, first: Case, config: RunConfig) -> bool:
    """Whether the first case has shown that a forward pass reads buffers that it changes.

    Then every layout has to make as many passes as one process does: one micro-batch each. Not between engines, where
    both are one process, nor where rows of a global batch may not be in one micro-batch, nor in JAX, whose probes
    change no buffers.
    """
    if first.whole or first.engine or rows_of_sources(config, config.train.global_batch):
        return False
    trace = read_trace(folder, first.name)
    return trace is not None and bool(trace.facts.carried)


def _has_failed(root: Path, case: str) -> bool:
    """Whether a case that another needs has failed; the other need not be run."""
    trace = read_trace(root, case) if case else None
    return bool(case) and (trace is None or bool(trace.facts.fault))


def deadline(case: Case, seconds: float | None) -> float:
    """After how many seconds a case is taken for one that hangs.

    Args:
        case: that is run; compiling takes much longer than what is compiled.
        seconds: that the first case of the proof took, if it is known.
    """
    if seconds is None:
        return _LONGEST
    return min(_LONGEST, (20 + 10 * seconds) * (5 if case.layout.get("compile") else 1))


def _has_changed(before: Mapping[str, str], config: RunConfig) -> bool:
    """Whether the task's code is no longer what it was."""
    now = code_digest.digest_task_sources(config.recipe, config.layout.engine)
    return any(before.get(name) != digest for name, digest in now.items())


def main(folder: Path, task: str) -> NoReturn:
    """Entry of a process that `unisono.launch.processes.local_processes` started for a proof."""
    rank_process.die_with_parent()
    started_as = cluster.process_info()
    assert started_as is not None

    def work() -> None:
        from unisono.proof.recording import case_recorder

        todo = Work.read(folder)
        several, proof, progress = len(todo.lanes) > 1, todo.proof, todo.progress
        place = _stand_alone() if several else started_as
        config = read_config(folder / CONFIG_FILE, task)
        cases = todo.lanes[started_as.rank if several else 0]
        elsewhere = {case.name for lane in todo.lanes for case in lane} - {case.name for case in cases}
        first = build_case_config(config, cases[0], proof, place)
        rank_process.redirect_native_output(first, folder, place)
        logs.warn_once(started_as)
        group = rank_process.join_processes(first, place)
        watch = HangWatch(folder, started_as.rank)
        for case in cases:
            if any(group.gather(_has_changed(todo.code, config), "whether the code has changed")):
                break  # it is told by the process that started this one
            needed = {case.reference, case.starts_from, case.weights_from} - elsewhere
            if any(_has_failed(folder, other) for other in needed):
                continue
            began, left = time.perf_counter(), progress.total - count_recorded(folder)
            settled = build_case_config(config, case, proof, place)
            with watch.limit(deadline(case, progress.seconds)):
                case_recorder.record_case(build_task(settled), settled, place, group, case, proof, folder, left)
            if place.is_first:
                done = count_recorded(folder)
                say(progress.format_case(case.name, time.perf_counter() - began, done, time.time()), error=True)
            if progress.seconds is None and not case.reference and needs_whole_batches(folder, case, config):
                break  # other cases take the place of the rest
        rank_process.leave_group(group)

    report = folder / "logs" / f"rank-{started_as.rank:05d}.fault.json"
    rank_process.run_and_exit(work, started_as, report=report)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
