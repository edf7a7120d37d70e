"""A run's folder, opened to use what was trained: its configuration, its task, its model."""

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
    """A run that is used: evaluated, asked for predictions, exported.

    Attributes:
        folder: of the run.
        config: its configuration, with the settings that were replaced.
        task: its task, which has taken over the run's assets. It builds the run's model without the run's data.
    """

    folder: Path
    config: RunConfig
    task: Task

    def load_model(self, *, ema: bool = False, step: int | None = None) -> Any:
        """The model with the weights of the newest checkpoint: a torch module on the CPU, or a pytree of JAX.

        The module is in evaluation mode, and adapters are merged.

        Args:
            ema: whether to take the moving average of the weights; buffers are always the model's.
            step: updates that made the weights; None for the newest checkpoint.

        Raises:
            UnisonoError: as `unisono.load_weights`, and where the model or its base cannot be built.
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
        """Updates that made the weights of the newest checkpoint."""
        return int(find_checkpoint(self.folder).name.rpartition("-")[2])

    def show(self, figures: Mapping[str, Path]) -> None:
        """Show image files in the run's trackers, where it has any, by the names they are to have there."""
        from unisono.observe import figures as shown

        shown.show_figures(self.folder, figures)


def open_run(
    folder: Path | str, overrides: Sequence[str] = (), *, task: str | type[Task] | None = None, trust: bool = False
) -> Run:
    """Open a run.

    Args:
        folder: of the run.
        overrides: settings that replace those of the run, e.g. `data.path=FILE`.
        task: of the run: a class, `path/to/file.py:Class`, or a recipe's name. None uses the task that the run names,
            if it is a recipe or this process has already imported it.
        trust: import the task that the run names, wherever it lies. That runs its author's code.

    Raises:
        RunError: for a folder that is not a run's.
        TrustError: if the run names a task that nobody has vouched for.
        ConfigError: for an override that does not fit.
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
    """A JSON file that `Task.save_assets` wrote.

    Args:
        directory: the assets of a run.
        name: of the file.

    Raises:
        RunError: where it is missing or damaged, or a link or anything else than a file of that folder.
    """
    try:
        return safe_paths.read_json(directory, name)
    except FileNotFoundError as error:
        raise RunError(f"{directory} has no {name}: these are not the assets of a run of this task") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{directory / name} cannot be read: {error}") from error
