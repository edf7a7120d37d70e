"""Whether a run's checkpoints fit on its disk: asked before the first step, and not found out at the first save."""

from __future__ import annotations

import shutil
from pathlib import Path

from unisono.checkpoint.core import commit
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import RunError

_OVERHEAD = 1.02  # a manifest, logs, and the blocks of a file system
_OPTIMIZER_SLOTS = {
    "adamw": 2,
    "adam_atan2": 2,
    "muon": 2,
    "sgd": 1,
    "lion": 1,
    "adafactor": 0,
}  # arrays of a parameter's size


def newest_size(folder: Path) -> int:
    """Bytes of a run's newest checkpoint, by its manifest; 0 if there is none that can be read."""
    found = commit.find_checkpoints(folder / "checkpoints")
    return sum(path.stat().st_size for path in found[-1].iterdir()) if found else 0


def estimate_size(config: RunConfig, parameters: int) -> int:
    """Bytes of a checkpoint of a model before its first step, when the optimizer has no state yet.

    Args:
        config: of the run.
        parameters: that are trained, over all processes.
    """
    slots = _OPTIMIZER_SLOTS.get(config.optim.kind, 2)
    if config.optim.kind == "sgd" and not getattr(config.optim, "momentum", 0):
        slots = 0
    average = config.ema.decay is not None
    return parameters * (8 if config.train.precision == "fp64" else 4) * (1 + slots + average)


def count_checkpoints(config: RunConfig, first: int, total: int) -> int:
    """Checkpoints that a run will write between two numbers of updates."""
    checkpoint = config.checkpoint
    every = total // checkpoint.every - first // checkpoint.every if checkpoint.every else 0
    last = checkpoint.at_end and first < total and not (checkpoint.every and total % checkpoint.every == 0)
    return every + last


def check_disk_space(folder: Path, config: RunConfig, size: int, count: int) -> None:
    """Refuse a run whose next checkpoints do not fit.

    Args:
        folder: of the run, or where it will be.
        config: of the run.
        size: bytes of a checkpoint.
        count: how many the run will write.

    Raises:
        RunError: with what is needed and what is free.
    """
    there = len(commit.find_checkpoints(folder / "checkpoints"))
    more = min(count, max(1, config.checkpoint.keep + 1 - there))  # an older one goes once the new one is whole
    if more <= 0:
        return
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    needed, free = int(more * size * _OVERHEAD), shutil.disk_usage(place).free
    if needed > free:
        raise RunError(
            f"{folder} needs {_format_gb(needed)} for {more} more checkpoint{'s' if more > 1 else ''} of "
            f"{_format_gb(size)} (checkpoint.keep={config.checkpoint.keep}, plus the one being written), but only "
            f"{_format_gb(free)} are free at {place}. Free some space, choose another run.dir, or lower checkpoint.keep"
        )


def _format_gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
