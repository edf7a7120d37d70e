"""A run's folder, opened for using what was trained: its configuration, its task, its model; and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from unisono.checkpoint.core import assets, commit, placement
from unisono.checkpoint.core.manifest import parse_step
from unisono.checkpoint.exchange.export import find_checkpoint, read_adapter_settings
from unisono.checkpoint.remote.description import ASSETS
from unisono.config import CONFIG_FILE
from unisono.config.code import recipes
from unisono.config.schema.run import RunConfig
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import RunError
from unisono.runtime.untrusted import safe_paths
from unisono.task import Task
from unisono.task_config import build_task, load_config, read_run

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """An opened run, for evaluation, prediction or export; or the folder of a model that no run has written.

    Attributes:
        folder: The run's directory, or the model's.
        config: Its configuration, with overrides applied.
        task: Its task, which has loaded the run's assets. It builds the run's model without the run's data.
    """

    folder: Path
    config: RunConfig
    task: Task

    @property
    def is_trained(self) -> bool:
        """Whether the folder is a run's; else the model has the weights with which its recipe begins."""
        return (self.folder / CONFIG_FILE).is_file()

    def load_model(
        self, *, ema: bool = False, step: int | None = None, precision: str | None = None, device: str = "cpu"
    ) -> Any:
        """Return the model with the weights of the newest checkpoint: a torch module, or a JAX pytree.

        The module is in evaluation mode, and adapters are merged.

        Args:
            ema: Whether to use the exponential moving average of the weights; buffers are always the model's.
            step: Step of the checkpoint; None for the newest.
            precision: `train.precision` in whose dtype the weights are kept; None for the dtypes that the task builds.
            device: Where a torch module is: cpu, cuda, …; auto for an accelerator if there is one. JAX has its own.

        Raises:
            UnisonoError: As for `unisono.load_weights`, and if the model or its base cannot be built.
        """
        if self.is_trained:
            find_checkpoint(self.folder, step)
        elif ema or step is not None:
            raise RunError(f"{self.folder} is not a run (no config.yaml): it has no checkpoint or average to choose")
        if self.task.engine == "jax":
            from unisono.engines.jax import weights

            built = weights.build_model(self.task, self.config.run.seed, precision)
            return load_weights(self.folder, built, ema=ema, step=step) if self.is_trained else built
        from unisono.engines.torch.devices import find_device
        from unisono.engines.torch.numerics.precision import to_master
        from unisono.engines.torch.state.train_state import build_model

        model = build_model(self.task.build, self.config.run.seed)
        if precision is not None:
            to_master(model, precision)
        if self.is_trained:
            load_weights(self.folder, model, ema=ema, step=step)
        return model.eval().to(find_device(device, precision or "fp32"))

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint."""
        return parse_step(find_checkpoint(self.folder).name)

    def show(self, samples: Mapping[str, Any]) -> None:
        """Show what was found out about a run in its trackers, if it has any, and in its events, for its report.

        Args:
            samples: By name: the path of a PNG file (of which the report has those in the run's folder), a text, a
                picture as an array, or a table as a list of dictionaries.
        """
        from unisono.observe import trackers

        trackers.show_samples(self.folder, samples)


def open_run(
    folder: Path | str, overrides: Sequence[str] = (), *, task: str | type[Task] | None = None, trust: bool = False
) -> Run:
    """Open a run, or the folder of a model that a recipe opens without one, such as a local one of Hugging Face.

    Args:
        folder: The run's directory, or the model's.
        overrides: Settings that replace those of the run, e.g. `data.path=FILE`.
        task: Of the run: a class, `path/to/file.py:Class`, or a recipe's name. None uses the task that the run names,
            if it is a recipe or this process has already imported it.
        trust: Import the task that the run names, wherever it is. That runs its author's code.

    Raises:
        RunError: If the folder is neither.
        TrustError: If the run names a task that is not trusted.
        ConfigError: For an invalid override.
    """
    folder = Path(folder)
    model = None if (folder / CONFIG_FILE).is_file() else recipes.find_folder_recipe(folder)
    if model is not None:
        name, words = model
        config = load_config(name, [*words, *overrides])[0]
        return Run(folder, config, build_task(config))
    if not (folder / CONFIG_FILE).is_file():
        raise RunError(
            f"{folder} is not a run directory (no {CONFIG_FILE}), nor a model that a recipe opens (by its config.json)"
        )
    config = read_run(folder, task, overrides, trust=trust)
    opened = build_task(config)
    if found := commit.find_checkpoints(folder / placement.NAME):
        assets.check(commit.read_manifest(found[-1]), folder)
    if (folder / ASSETS).is_dir():
        opened.load_assets(folder / ASSETS)
    return Run(folder, config, opened)


def read_asset(directory: Path, name: str, shape: Any) -> Any:
    """Read a JSON file that `Task.save_assets` wrote into the assets of a run, which may be anybody's.

    Args:
        directory: Of the assets.
        name: Of the file.
        shape: The type of its content, e.g. `dict[str, list[str]]` or a `TypedDict` of `typing_extensions`.

    Raises:
        RunError: If it is missing or damaged, has another shape, or is not a regular file in that folder.
    """
    try:
        return safe_paths.read_json(directory, name, shape)
    except FileNotFoundError as error:
        raise RunError(f"{directory} has no {name}: these are not the assets of a run of this task") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{directory / name} cannot be read: {error}") from error


@overload
def load_weights(folder: Path | str, model: nn.Module, *, ema: bool = False, step: int | None = None) -> int: ...
@overload
def load_weights(folder: Path | str, model: T, *, ema: bool = False, step: int | None = None) -> T: ...
def load_weights(folder: Path | str, model: Any, *, ema: bool = False, step: int | None = None) -> Any:
    """Fill a model with the weights of a run's newest checkpoint, whatever layout it was trained with.

    A torch module is filled in place, and adapters (`adapter=lora`) are merged into the weights of their layers. A JAX
    pytree stays unchanged, and one with the weights is returned.

    Args:
        folder: The run's directory.
        model: As returned by the task's `build`; for a run with adapters, with the weights of its base.
        ema: Whether to use the exponential moving average of the weights; buffers are always the model's.
        step: Step of the checkpoint; None for the newest.

    Returns:
        For a torch module, the step of the checkpoint; for a pytree, the pytree with the weights.

    Raises:
        RunError: If there is no run, no checkpoint, or no moving average to use.
        CheckpointError: If the checkpoint is damaged, does not fit the model, or has adapters of another base.
    """
    checkpoint = commit.open_checkpoint(find_checkpoint(Path(folder), step))
    reader = checkpoint.reader()
    if not hasattr(model, "named_parameters"):
        from unisono.engines.jax import weights

        return weights.load_arrays(model, reader, ema, str(folder))
    from unisono.engines.torch import lora
    from unisono.engines.torch.numerics.ema import NAME_PREFIX
    from unisono.engines.torch.state import sharded_tensors

    chosen = read_adapter_settings(Path(folder))
    if chosen is not None:
        lora.check_same_base(model, reader)
    adapters = lora.Adapter(chosen, model, seed=0)
    sharded_tensors.load(adapters.select_saved(sharded_tensors.model_tensors(model)), reader, kinds=("model/",))
    if ema:
        averaged = {name: p for n, p in model.named_parameters() if (name := NAME_PREFIX + n) in reader.shapes}
        if not averaged:
            raise RunError(f"{folder} keeps no moving average of its weights; it was trained without ema.decay")
        sharded_tensors.load(averaged, reader, kinds=(NAME_PREFIX,))
    adapters.merge()
    return checkpoint.step


def load_model(
    folder: Path | str,
    *,
    ema: bool = False,
    step: int | None = None,
    task: str | type[Task] | None = None,
    trust: bool = False,
) -> Any:
    """Return the model of a run with the weights of its newest checkpoint: a torch module on the CPU, or a JAX pytree.

    The task builds the model from the assets saved with the run, without its data if possible.

    Args:
        folder: The run's directory.
        ema: As for `load_weights`.
        step: As for `load_weights`.
        task: Of the run: a class, `path/to/file.py:Class`, or a recipe's name. None uses the task that the run names,
            if it is a recipe or this process has already imported it.
        trust: Import the task that the run names, wherever it is. That runs its author's code.

    Raises:
        TrustError: If the run names a task that is not trusted.
        UnisonoError: As for `load_weights`, and if the task or its base cannot be rebuilt.
    """
    return open_run(folder, task=task, trust=trust).load_model(ema=ema, step=step)


def evaluate(
    folder: Path, overrides: Sequence[str] = (), *, task: str | type[Task] | None = None, trust: bool = False
) -> dict[str, float]:
    """Return loss and metrics on the held-out rows, of a run's newest checkpoint or of a model; on one process.

    Benchmarks run if the overrides name them (`eval.harness=[…]`, `eval.environment=NAME`), not those of the run's
    file: that may come from somebody else, and a benchmark's file can name code.

    Args:
        folder: As for `open_run`.
        overrides: Settings that replace those of the run, e.g. `data.path=DIR` for the held-out rows of other data.
        task: As for `open_run`.
        trust: As for `open_run`.

    Raises:
        UnisonoError: As for `open_run`, for a run without a checkpoint, and for a task without held-out rows.
    """
    from unisono.launch.processes import rank_process
    from unisono.launch.resolving import resolve
    from unisono.training import loop

    opened = open_run(folder, overrides, task=task, trust=trust)
    if opened.is_trained:
        find_checkpoint(folder)
    config = opened.config
    benchmarks: dict[str, Any] = {"harness": [], "environment": None}
    for key, nothing in benchmarks.items():
        if not any(word.startswith(f"eval.{key}=") for word in overrides):
            config = config.model_copy(update={"eval": config.eval.model_copy(update={key: nothing})})
    run = resolve.resolve_for_reading(config, folder)
    process = ProcessInfo()
    communicator = rank_process.join_processes(run.config, process)
    return loop.evaluate(opened.task, run, process, communicator, is_trained=opened.is_trained)
