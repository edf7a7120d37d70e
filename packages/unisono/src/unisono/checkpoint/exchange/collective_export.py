"""An export at the end of a run, written by its processes: each writes files of its own from the checkpoint on disk.

There are at least as many files as processes, if there are as many tensors, so that each has one to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.resume_point import WEIGHT_PREFIXES
from unisono.checkpoint.exchange import export
from unisono.config.schema.verbs import Export
from unisono.engines import host_arrays
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import Communicator
from unisono.runtime.communication.consensus import raise_everywhere, share_first
from unisono.runtime.errors import RunError
from unisono.runtime.files import atomic_folder, remove_folder
from unisono.runtime.text import format_bytes


def export_together(folder: Path, step: int, communicator: Communicator) -> str:
    """Write the checkpoint of a step for transformers (or PEFT), as `unisono export` does; collective.

    Its bytes are not verified before, since these processes have just written them.

    Returns:
        What was written, for the console.

    Raises:
        UnisonoError: on every rank, as `export.export` raises it; the partial export is removed.
    """
    rank, world = communicator.rank, communicator.size
    out = export.default_folder(folder, step, Export())
    plans: list[export.Plan] = []

    def prepare() -> int:
        checkpoint = commit.read_manifest(export.find_checkpoint(folder, step))
        words = Export()
        plan = export.plan_checkpoint(checkpoint, folder, words)
        size = sum(file.size for file in plan.files)
        if world > 1:
            words = Export(shard_mb=min(words.shard_mb, max(1, ceil(size / world)) / 1e6))
            plan = export.plan_checkpoint(checkpoint, folder, words)
        plans.append(plan)
        return size

    total = int(raise_everywhere(communicator, prepare, "the plan of the export")[0])
    plan = plans[0]
    with ExitStack() as opened:

        def begin() -> str | None:
            if out.exists():
                return None
            export.check_room(out, total, "or leave out checkpoint.final=hf")
            return str(opened.enter_context(atomic_folder(out)))

        where = share_first(communicator, begin, "the folder of the export")
        if where is None:
            return f"{out} exists already: the step was exported before"
        temporary = Path(str(where))
        mine = export.assign_files(plan.files, world)[rank]
        raise_everywhere(communicator, lambda: _write(plan, temporary, set(mine), out), "the files of the export")

        def end() -> None:
            export.finish(plan, temporary)
            opened.close()

        share_first(communicator, end, "the end of the export")  # it waits for the disk, of all files
    return f"exported: {out} ({len(plan.files)} files, {format_bytes(total)})"


def write_weights(run: Path, folder: Path, step: int, shards: Sequence[ArrayShard], communicator: Communicator) -> Path:
    """Write the weights that a model has now, as `unisono export` writes those of a checkpoint; collective.

    Args:
        run: folder of the run, which has its assets.
        folder: empty; it is shared by all processes.
        step: updates made.
        shards: of this process.
        communicator: of all processes.

    Returns:
        Where in `folder` they are.

    Raises:
        UnisonoError: on every rank, as `export.export` raises it.
    """
    made = folder / "model"
    weights = [shard for shard in shards if shard.name.startswith(WEIGHT_PREFIXES)]
    # Through a checkpoint: it has every piece of every layout, and may be larger than the memory of one process.
    saved = commit.save_checkpoint(
        folder / placement.NAME, commit.Snapshot(step, weights, {}, holds="model"), communicator, keep=1
    )

    def convert() -> None:
        plan = export.plan_checkpoint(commit.read_manifest(saved), run, Export())
        export.check_room(made, sum(file.size for file in plan.files), "or leave out eval.environment")
        made.mkdir()
        _write(plan, made, {file.name for file in plan.files}, made)
        export.finish(plan, made)
        remove_folder(saved.parent)

    share_first(communicator, convert, "the weights as a folder")
    return made


def check_together(folder: Path, shards: Sequence[ArrayShard], communicator: Communicator) -> None:
    """Refuse a run whose arrays could not be exported at its end; collective.

    Raises:
        UnisonoError: on every rank, as `export.export` raises it.
    """
    own = {one.name: {"shape": list(one.shape), "dtype": host_arrays.dtype_name(one.data)} for one in shards}
    arrays: dict[str, Any] = {}
    for part in communicator.gather_to_first(own, "the arrays of the export"):
        arrays |= part
    share_first(communicator, lambda: export.choose_format(arrays, folder, Export()).description, "the export")


def _write(plan: export.Plan, temporary: Path, names: set[str], out: Path) -> None:
    try:
        export.write(plan, temporary, names)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}; the partial export was removed") from error
