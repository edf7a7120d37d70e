"""Pictures of a run while it trains (`task.pictures=true`): learning curves, embeddings, a reconstruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from unisono import Callback, ConfigError, RunConfig, RunInfo, Task, open_run
from unisono.recipe_tools import atomic_file, safe_paths, safe_writing
from unisono_audio import CENTRE
from unisono_birdsong.data.augment import mask_order
from unisono_birdsong.data.library import TaskOfRecordings
from unisono_birdsong.evaluation.embeddings import Embedded, embed
from unisono_birdsong.model.encoder import patches_of
from unisono_birdsong.objectives.pixio import Masked, masked_patches

_ROWS = 500  # embeddings in a picture, at most


class Pictures(Callback):
    """Draws each checkpoint once it is whole, on rank 0, into RUN/pictures; the others wait meanwhile.

    The recordings drawn are the held-out ones, or those of the training if there are none.
    """

    def __init__(self, task: TaskOfRecordings) -> None:
        super().__init__()
        self._task = task
        self._draws = False  # and it stays so where another callback fails before the start
        self._run: RunInfo

    def check(self, config: RunConfig) -> None:
        """Refuse to start without matplotlib."""
        if find_spec("matplotlib") is None:
            raise ConfigError("task.pictures=true needs matplotlib: pip install 'unisono[birdsong]'")

    def on_start(self, run: RunInfo) -> None:
        """Only the first process draws."""
        self._draws, self._run = run.is_first, run

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Draw the model of the checkpoint that was written."""
        if not self._draws:
            return
        task, library = self._task, self._task.library
        model = open_run(self._run.directory, task=cast("type[Task]", type(task))).load_model(step=step)
        source = library.training if library.held_out is None else library.held_out
        if len((embedded := embed(model.encoder, source, most=_ROWS)).embeddings) > 1:
            self._draw(step, "embeddings", (1, 1), lambda axes: plot_embeddings(axes[0], embedded))
        if isinstance(model.objective, Masked):
            clip = model.encoder.settings.pipeline()([source[0]["audio"]], [source[0].get("window", CENTRE)]).values[0]
            self._draw(step, "reconstruction", (3, 1), lambda axes: plot_reconstruction(axes, model, clip))

    def on_end(self, step: int, reason: str) -> None:
        """Draw the curves of the whole run."""
        if not self._draws:
            return
        figure, axes = _figure((1, 1))
        plot_losses(axes[0], self._run.directory, self._run.directory.name)
        axes[0].legend()
        self._save(figure, "learning_curves")

    def _draw(self, step: int, name: str, shape: tuple[int, int], plot: Callable[[Sequence[Any]], None]) -> None:
        figure, axes = _figure(shape)
        plot(axes)
        self._run.publish(step, f"pictures/{name}", self._save(figure, f"step-{step:08d}-{name}"))

    def _save(self, figure: Any, name: str) -> Path:
        path = safe_writing.make_folder(self._run.directory, "pictures") / f"{name}.png"
        with atomic_file(path) as temporary:
            figure.savefig(temporary, dpi=90, format="png")
        return path


class _Loss(TypedDict):
    step: int
    loss: float | None


def plot_losses(axis: Any, run: Path, label: str) -> None:
    """The loss of every step of a run, and of its evaluations."""
    rows: list[dict[str, Any]] = []
    for line in safe_paths.read_text(run, "events.jsonl", 8 << 30).splitlines():
        with suppress(ValueError):  # other events, and a line that was cut off
            rows.append(safe_paths.parse_json(line, _Loss))
    for evaluated, style, name in ((False, "-", label), (True, "o", f"{label}, held out")):
        chosen = {row["step"]: row["loss"] for row in rows if bool(row.get("eval")) is evaluated}  # the last of each
        if chosen:
            axis.plot(list(chosen), list(chosen.values()), style, label=name, markersize=4)
    axis.set(xlabel="step", ylabel="loss")


def plot_embeddings(axis: Any, embedded: Embedded) -> None:
    """Embeddings by their two largest principal components, a colour for each class."""
    centred = embedded.embeddings - embedded.embeddings.mean(0)
    x, y = (centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T).T
    axis.scatter(x, y, c=embedded.truth.argmax(1), cmap="tab10", s=16)
    axis.set(xlabel="largest component", ylabel="second")


def plot_reconstruction(axes: Sequence[Any], model: Any, clip: NDArray[np.float32]) -> None:
    """A clip (frames, mels), what of it Pixio is shown, and what its decoder tells of the rest.

    The decoder's patches are normalised, so each has the mean and deviation of the true one.
    """
    assert isinstance(model.objective, Masked)
    settings = model.encoder.settings
    hidden = masked_patches(settings, model.objective.settings)
    order = mask_order(settings.grid, hidden, np.random.default_rng(0))
    encoded = model.encoder(jnp.asarray(clip), jnp.asarray(order[:-hidden]))
    predicted = np.asarray(model.objective.decode(settings, encoded, jnp.asarray(order)))
    patches = np.asarray(patches_of(jnp.asarray(clip), settings.patch))
    mean, deviation = patches.mean(1, keepdims=True), patches.std(1, keepdims=True)
    shown, filled = patches.copy(), patches.copy()
    shown[order[-hidden:]] = patches.min()
    filled[order[-hidden:]] = (predicted * deviation + mean)[order[-hidden:]]
    for axis, picture, title in zip(axes, (patches, shown, filled), ("clip", "shown", "reconstructed"), strict=True):
        whole = picture.reshape(*settings.grid, *settings.patch).swapaxes(1, 2).reshape(settings.frames, settings.mels)
        axis.imshow(whole.T, origin="lower", aspect="auto", vmin=patches.min(), vmax=patches.max())
        axis.set(title=title, ylabel="band")


def _figure(shape: tuple[int, int]) -> tuple[Any, list[Any]]:
    """A figure that needs no display, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * shape[1], max(4.0, 2.0 * shape[0])), layout="constrained")
    return figure, list(figure.subplots(*shape, squeeze=False).flat)
