"""A finished or interrupted run, used again: its weights, and its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unisono.checkpoint import commit
from unisono.checkpoint.arrays import ArrayReader
from unisono.config import resolve
from unisono.errors import RunError
from unisono.place import Alone, Place

if TYPE_CHECKING:
    from torch import nn


def load_weights(folder: Path | str, model: nn.Module) -> int:
    """Fill a torch module with the weights of a run's newest checkpoint, whatever layout it was trained on.

    Args:
        folder: of the run.
        model: as the task's `build` makes it.

    Returns:
        The number of updates that made these weights.

    Raises:
        RunError: if there is no run or no checkpoint.
        CheckpointError: if it is damaged, or does not fit the model.
    """
    from unisono.engines.torch import tensors

    checkpoint = commit.open_(newest(Path(folder)))
    tensors.load(tensors.of_model(model), ArrayReader(checkpoint.path, checkpoint.arrays), kinds=("model/",))
    return checkpoint.step


def newest(folder: Path) -> Path:
    """The newest checkpoint of a run, not yet verified."""
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run: it has no config.yaml")
    found = commit.find(folder / "checkpoints")
    if not found:
        raise RunError(f"{folder} has no checkpoint yet")
    return found[-1]


def evaluate(folder: Path) -> dict[str, float]:
    """Loss and metrics of a run's newest checkpoint on its held-out rows, on one process."""
    from unisono import trainer
    from unisono.launch import start, worker

    newest(folder)
    config = resolve.read(folder / "config.yaml")
    alone = {
        "world_size": 1,
        "strategy": "single",
        "shards": None,
        "device": "auto",
        "defer_reduction": False,
        "bucket_mb": None,
    }
    here = {"layout": config.layout.model_copy(update=alone), "launch": type(config.launch)()}
    config = config.model_copy(update=here)
    config = start.concrete(config, None)
    return trainer.evaluate(worker.task_of(config), config, Place(), Alone(), folder)
