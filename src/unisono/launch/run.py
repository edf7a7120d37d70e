"""A run's folder, opened for using what was trained: its configuration, its task, its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import assets, commit
from unisono.checkpoint.exchange.export import find_checkpoint
from unisono.config.schema.run import RunConfig
from unisono.runtime import safe_paths
from unisono.runtime.errors import RunError
from unisono.task import Task
from unisono.task_config import build_task, read_run

ASSETS = "assets"


@dataclass(frozen=True)
class Run:
    """An opened run, for evaluation, prediction or export.

    Attributes:
        folder: The run's directory.
        config: Its configuration, with overrides applied.
        task: Its task, which has loaded the run's assets. It builds the run's model without the run's data.
    """

    folder: Path
    config: RunConfig
    task: Task

    def load_model(self, *, ema: bool = False, step: int | None = None) -> Any:
        """Return the model with the weights of the newest checkpoint: a torch module on the CPU, or a JAX pytree.

        The module is in evaluation mode, and adapters are merged.

        Args:
            ema: Whether to use the exponential moving average of the weights; buffers are always the model's.
            step: Step of the checkpoint; None for the newest.

        Raises:
            UnisonoError: As for `unisono.load_weights`, and if the model or its base cannot be built.
        """
        from unisono.launch.load import load_weights

        find_checkpoint(self.folder, step)
        if self.task.engine == "jax":
            from unisono.engines.jax import weights

            return load_weights(self.folder, weights.build_model(self.task, self.config.run.seed), ema=ema, step=step)
        from unisono.engines.torch.train_state import build_model

        model = build_model(self.task.build, self.config.run.seed)
        load_weights(self.folder, model, ema=ema, step=step)
        return model.eval()

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint."""
        return int(find_checkpoint(self.folder).name.rpartition("-")[2])

    def show(self, figures: Mapping[str, Path]) -> None:
        """Show image files in the run's trackers, if it has any, under the given names."""
        from unisono.observe import trackers as shown

        shown.show_figures(self.folder, figures)


def open_run(
    folder: Path | str, overrides: Sequence[str] = (), *, task: str | type[Task] | None = None, trust: bool = False
) -> Run:
    """Open a run.

    Args:
        folder: The run's directory.
        overrides: Settings that replace those of the run, e.g. `data.path=FILE`.
        task: Of the run: a class, `path/to/file.py:Class`, or a recipe's name. None uses the task that the run names,
            if it is a recipe or this process has already imported it.
        trust: Import the task that the run names, wherever it is. That runs its author's code.

    Raises:
        RunError: If the folder is not a run directory.
        TrustError: If the run names a task that is not trusted.
        ConfigError: For an invalid override.
    """
    folder = Path(folder)
    config = read_run(folder, task, overrides, trust=trust)
    opened = build_task(config)
    if found := commit.find_checkpoints(folder / "checkpoints"):
        assets.check(commit.read_manifest(found[-1]), folder)
    if (folder / ASSETS).is_dir():
        opened.load_assets(folder / ASSETS)
    return Run(folder, config, opened)


def read_asset(directory: Path, name: str) -> Any:
    """Read a JSON file that `Task.save_assets` wrote.

    Args:
        directory: The assets of a run.
        name: Of the file.

    Raises:
        RunError: If it is missing or damaged, or not a regular file in that folder.
    """
    try:
        return safe_paths.read_json(directory, name)
    except FileNotFoundError as error:
        raise RunError(f"{directory} has no {name}: these are not the assets of a run of this task") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{directory / name} cannot be read: {error}") from error
