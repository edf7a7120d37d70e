"""A sweep of eight tiny runs, for tests of launchers that are broken off in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pyarrow as pa

from unisono.supervise.run_facts import read_run_facts
from unisono_sweeps.compare.table import compare_runs, find_runs

from .written import TASK

STEPS = 400
WORDS = (
    "optim=adamw", "optim.lr=0.1,0.01", "task.features=3,4", "seeds=2", "name=s", "train.global_batch=8",
    "layout.device=cpu", "trial=false",
)  # fmt: skip


def sweep_process(
    folder: Path,
    *words: str,
    steps: int = STEPS,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """The command, by default two runs at a time on this host; a run saves twenty times."""
    length = (f"train.steps={steps}", f"checkpoint.every={steps // 20}", f"eval.every={steps // 10}")
    command = [sys.executable, "-m", "unisono", "sweep", TASK, *WORDS, *length, *(words or ["jobs=2"])]
    own = {**os.environ, **(environment or {})}
    return subprocess.Popen(command, cwd=folder, env=own, stdout=output, stderr=output)


def half_done(folder: Path, steps: int = STEPS) -> list[Path]:
    """The runs that have a checkpoint, and are not nearly finished."""
    runs = {path.parents[1] for path in folder.glob("runs/s/*/checkpoints/step-*")}
    return [run for run in sorted(runs) if steps // 20 < read_run_facts(run).steps_done < steps * 0.6]


def measured_table(sweep: Path) -> pa.Table:
    """What the runs of a sweep reached, without what depends on the time and the host."""
    table = compare_runs(find_runs([sweep])[0])
    kept = [name for name in table.column_names if not name.startswith(("seconds", "run.dir", "memory_gb"))]
    return table.select([name for name in kept if not name.endswith("_per_second")])
