"""A run's folder, opened to use what was trained: its configuration, its task, its model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.exchange.export import newest
from unisono.config import resolve
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import RunError
from unisono.task import Task

if TYPE_CHECKING:
    from torch import nn

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

    def load_model(self, *, ema: bool = False, step: int | None = None) -> nn.Module:
        """The model with the weights of the newest checkpoint, on the CPU, in evaluation mode; adapters are merged.

        Args:
            ema: whether to take the moving average of the weights; buffers are always the model's.
            step: updates that made the weights; None for the newest checkpoint.

        Raises:
            UnisonoError: as `unisono.load_weights`, and where the model or its base cannot be built.
        """
        from unisono.engines.torch.init_model import built
        from unisono.launch.load import load_weights

        newest(self.folder, step)
        model = built(self.task.build, self.config.run.seed)
        load_weights(self.folder, model, ema=ema, step=step)
        return model.eval()

    def show(self, figures: Mapping[str, Path]) -> None:
        """Show image files in the run's trackers, where it has any, by the names they are to have there."""
        from unisono.observe import figures as shown

        shown.show(self.folder, figures)


def open_run(folder: Path | str, overrides: Sequence[str] = ()) -> Run:
    """Open a run.

    Args:
        folder: of the run.
        overrides: settings that replace those of the run, e.g. `data.path=FILE`.

    Raises:
        RunError: for a folder that is not a run's.
        ConfigError: for an override that does not fit.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run directory (no config.yaml)")
    config = resolve.read(folder / "config.yaml", overrides=overrides)
    task = resolve.task_class(config.recipe)(config.task, model=config.model, data=config.data)
    if (folder / ASSETS).is_dir():
        task.load_assets(folder / ASSETS)
    return Run(folder, config, task)


def read_asset(directory: Path, name: str) -> Any:
    """A JSON file that `Task.save_assets` wrote.

    Args:
        directory: the assets of a run.
        name: of the file.

    Raises:
        RunError: where it is missing or damaged.
    """
    path = directory / name
    if not path.is_file():
        raise RunError(f"{directory} has no {name}: it does not hold the assets of a run of this task")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
