"""One process of a proof: joins the others once, and runs every case of its world size."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from unisono.config.schema.run import RunConfig
from unisono.launch import cluster
from unisono.launch import layout as layouts
from unisono.launch.processes import rank_process
from unisono.proof.cases import Case, Proof
from unisono.proof.recording.trace import Trace, folder_of
from unisono.runtime.communicator import Place
from unisono.task_config import build_task, read_config


def configured(config: RunConfig, case: Case, proof: Proof, place: Place | None) -> RunConfig:
    """The configuration of a case: its layout, and a small global batch."""
    layout = {
        **config.layout.model_dump(),
        "shards": None, "reduction": "fast", "compile": False, "activation_checkpointing": 0, "defer_reduction": False,
        **case.layout, "world_size": case.world_size,
    }  # fmt: skip
    if layout["strategy"] != "ddp":
        layout["bucket_mb"] = None
    settings = {"precision": case.precision, "global_batch": proof.global_batch, "guard_every": 10**9}
    rows = {"rows": proof.global_batch + 3, "micro_batch": None}
    averaged = {"start": 0, "every": 1} if config.ema.decay is not None else {}  # within so few steps
    changed = config.model_copy(
        update={
            "layout": type(config.layout).model_validate(layout),
            "train": config.train.model_copy(update=settings),
            "eval": config.eval.model_copy(update=rows),
            "ema": config.ema.model_copy(update=averaged),
            "data": config.data.model_copy(update=case.data),
            "optim": config.optim.model_copy(update=case.optim),
            "launch": config.launch.model_copy(
                update={"nodes": 1, "node_rank": None}
            ),  # its processes are on this host
        }
    )
    return layouts.concrete(changed, place)


def write(folder: Path, cases: list[Case], proof: Proof) -> None:
    """Write what the processes have to run, all cases on as many."""
    described = {"proof": proof.model_dump(), "cases": [asdict(case) for case in cases]}
    (folder / "proof.json").write_text(json.dumps(described), encoding="utf-8")


def is_recorded(root: Path, case: str) -> bool:
    """Whether a case was run to its end."""
    return (folder_of(root, case) / "facts.json").is_file()


def _cannot_be_used(root: Path, case: str) -> bool:
    """Whether a case that another needs has failed; the other need not be run."""
    return bool(case) and (not is_recorded(root, case) or bool(Trace(folder_of(root, case)).facts.fault))


def main(folder: Path, task: str) -> NoReturn:
    """Entry of a process that `unisono.launch.processes.local_processes` started for a proof."""
    rank_process.die_with_parent()
    place = cluster.process_info()
    assert place is not None

    def work() -> None:
        from unisono.proof.recording import case_recorder

        config = read_config(folder / "config.yaml", task)
        described = json.loads((folder / "proof.json").read_text(encoding="utf-8"))
        proof = Proof.model_validate(described["proof"])
        cases = [Case(**{**case, "interrupted": tuple(case["interrupted"])}) for case in described["cases"]]
        group = rank_process.join(configured(config, cases[0], proof, place), place)
        for case in cases:
            if _cannot_be_used(folder, case.reference) or _cannot_be_used(folder, case.starts_from):
                continue
            began = time.perf_counter()
            settled = configured(config, case, proof, place)
            case_recorder.record(build_task(settled), settled, place, group, case, proof, folder)
            if place.is_first:
                print(f"  {case.name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        rank_process.part(group)

    rank_process.guarded(work, place, report=folder / "logs" / f"rank-{place.rank:05d}.fault.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
