"""Checks that a run's checkpoints fit on its disk before the first step, so that the first save does not fail."""

from __future__ import annotations

import shutil
from pathlib import Path

from unisono.checkpoint.core import commit, placement
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import RunError

_OVERHEAD = 1.02  # manifest, logs, and file system blocks
_OPTIMIZER_SLOTS = {"sgd": 1, "lion": 1, "adafactor": 0}  # optimizer arrays per parameter, if they are not two


def newest_size(folder: Path) -> int:
    """Return the size of a run's newest checkpoint in bytes; 0 if there is none."""
    found = commit.find_checkpoints(folder / placement.NAME)
    return sum(path.stat().st_size for path in found[-1].iterdir()) if found else 0


def estimate_size(config: RunConfig, parameters: int) -> int:
    """Estimate the size of a checkpoint in bytes before the first step, by the trained parameters of all processes."""
    slots = _OPTIMIZER_SLOTS.get(config.optim.kind, 2)
    if config.optim.kind == "sgd" and not getattr(config.optim, "momentum", 0):
        slots = 0
    average = config.ema.decay is not None
    return parameters * (8 if config.train.precision == "fp64" else 4) * (1 + slots + average)


def count_checkpoints(config: RunConfig, first: int, total: int) -> int:
    """Return how many checkpoints a run will write between two step numbers."""
    checkpoint = config.checkpoint
    every = total // checkpoint.every - first // checkpoint.every if checkpoint.every else 0
    last = checkpoint.at_end and first < total and not (checkpoint.every and total % checkpoint.every == 0)
    return every + last


def check_disk_space(folder: Path, config: RunConfig, size: int, count: int) -> None:
    """Refuse a run that will write `count` checkpoints of `size` bytes if the next ones do not fit.

    Raises:
        RunError: Saying how much space is needed and how much is free.
    """
    there = len(commit.find_checkpoints(folder / placement.NAME))
    more = min(count, max(1, config.checkpoint.keep + 1 - there))  # an old one is deleted once the new one is complete
    if more <= 0:
        return
    saved = placement.find_target(config) or folder
    place = next(parent for parent in (saved, *saved.absolute().parents) if parent.exists())
    needed, free = int(more * size * _OVERHEAD), shutil.disk_usage(place).free
    if needed > free:
        raise RunError(
            f"{folder} needs {needed / 1e9:.3g} GB for {more} more checkpoint{'s' if more > 1 else ''} of "
            f"{size / 1e9:.3g} GB (checkpoint.keep={config.checkpoint.keep}, plus the one being written), but only "
            f"{free / 1e9:.3g} GB are free at {place}. Free some space, choose another run.dir or "
            "checkpoint.folder, or lower checkpoint.keep"
        )
