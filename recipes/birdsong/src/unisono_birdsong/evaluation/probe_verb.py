"""The verb `probe`: a run's encoder, frozen, measured on any recordings by probes of its embeddings.

`ProbeSaves` (`task.probe_saves=true`) does the same with each checkpoint of a run while it trains.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np

from unisono import Callback, ConfigError, DataError, Run, RunInfo, Task, open_run
from unisono.recipe_tools import nearest
from unisono_birdsong.data.library import Library, TaskOfRecordings
from unisono_birdsong.evaluation import metrics, probes, results
from unisono_birdsong.evaluation.embeddings import Embedded, embed
from unisono_birdsong.evaluation.results import Result
from unisono_birdsong.export import digest
from unisono_birdsong.model.encoder import Encoder

log = logging.getLogger(__name__)
FILE, _RESAMPLES = "probes.parquet", 200  # of a run's saves
_KINDS: tuple[probes.Kind, ...] = ("linear", "centroid")


def probe(
    run: Run,
    out: Path = Path("probes.parquet"),
    kinds: str = "linear,mlp,centroid",
    seeds: int = 1,
    name: str | None = None,
    resamples: int = 1000,
    ema: bool = False,
    step: int | None = None,
    micro_batch: int = 32,
) -> Iterator[str]:
    """Fit probes to embeddings of the training rows by the run's frozen encoder, and measure them on the held-out rows.

    For recordings other than the run's, set them as in training: data=recordings data.path=DIR data.group=recordist.
    Scores have 95 % bootstrap intervals, resampling whole recordings (or recordists).

    Args:
        run: its folder.
        out: Parquet file to add results to; a row with the same checkpoint, task, seed and probe is replaced.
        kinds: probes, separated by commas: linear, mlp, centroid.
        seeds: number of seeds, from 0, for the MLP's initial weights and the rows that select a probe's weight decay.
        name: name of the task in the results; by default that of the data.
        resamples: number of bootstrap resamples.
        ema: use the moving average of the weights.
        step: use the checkpoint after this step instead of the newest.
        micro_batch: number of recordings per forward pass.
    """
    chosen = _parse_kinds(kinds)
    if seeds < 1 or micro_batch < 1 or resamples < 0:
        raise ConfigError(
            f"seeds={seeds}, micro_batch={micro_batch}, resamples={resamples}: the first two must be at least 1, "
            "the last at least 0"
        )
    results.check(out)
    library = cast("TaskOfRecordings", run.task).library
    if library.held_out is None:
        raise DataError(
            "a probe is measured on held-out recordings, and there are none; set data.held_out, or data.test"
        )
    encoder = run.load_model(ema=ema, step=step).encoder
    measured = measure_encoder(
        encoder, library, chosen, range(seeds), task=name or _name_of(run.task.data_config), resamples=resamples,
        micro_batch=micro_batch, run=str(run.folder), step=run.newest_step if step is None else step,
        weights="ema" if ema else "model",
    )  # fmt: skip
    one = measured[0]
    yield f"{one.task}: {one.train_rows} rows to fit, {one.test_rows} held out in {one.test_groups} groups"
    yield from _table(measured)
    rows = results.append(out, measured)
    yield f"{out}: {rows} results"


class ProbeSaves(Callback):
    """Measures each checkpoint once it is whole, on rank 0, into RUN/probes.parquet; the others wait meanwhile."""

    def __init__(self, task: TaskOfRecordings) -> None:
        super().__init__()
        self._task = task

    def on_start(self, run: RunInfo) -> None:
        """Remember the run."""
        self._run = run

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Measure the encoder of the checkpoint that was written."""
        library = self._task.library
        if not self._run.is_first or library.held_out is None:
            return
        folder = self._run.directory
        encoder = open_run(folder, task=cast("type[Task]", type(self._task))).load_model(step=step).encoder
        measured = measure_encoder(
            encoder, library, _KINDS, [0], task=_name_of(self._task.data_config), resamples=_RESAMPLES,
            run=str(folder), step=step, weights="model",
        )  # fmt: skip
        results.append(folder / FILE, measured)
        for one in measured:
            log.info(
                "step %d: %s probe: cmAP %.3f, AUROC %.3f, top-1 %.3f", step, one.probe, one.cmap, one.auroc, one.top1
            )


def measure_encoder(
    encoder: Encoder,
    library: Library,
    kinds: Sequence[probes.Kind],
    seeds: Iterable[int],
    *,
    task: str,
    resamples: int,
    micro_batch: int = 32,
    **about: Any,
) -> list[Result]:
    """Fit probes to embeddings of the training rows, and measure them on the held-out rows.

    A digest of the rows of both sides is added to the name of the task; `about` is `run`, `step` and `weights`.

    Raises:
        DataError: for recordings that a probe cannot be fitted to or measured on.
    """
    assert library.held_out is not None
    training, test = (embed(encoder, part, micro_batch=micro_batch) for part in (library.training, library.held_out))
    check_sides(training, test)
    about |= {"checkpoint": digest(encoder), "task": f"{task}@{_fingerprint(library)}"}
    return [_measure(kind, training, test, seed=seed, resamples=resamples, **about) for seed in seeds for kind in kinds]


def _measure(
    kind: probes.Kind, training: Embedded, test: Embedded, *, seed: int, resamples: int = 1000, **about: Any
) -> Result:
    """Fit one probe and measure it; classes without training rows are left out, and rows that have no other class."""
    single = bool((training.truth.sum(axis=1) == 1).all())
    fitted = probes.fit(kind, training.embeddings, training.truth, training.groups, seed=seed)
    own = test.truth[:, fitted.classes]
    counted = np.asarray(own.any(axis=1) | ~test.truth.any(axis=1))
    if not own.any():
        raise DataError(
            "no held-out row has a class that training rows have; hold out others by data.group or data.fold"
        )
    groups = [group for group, kept in zip(test.groups, counted.tolist(), strict=True) if kept]
    scores = fitted.scores(test.embeddings[counted])
    found = metrics.evaluate(scores, own[counted], groups, resamples=resamples, seed=seed)
    scored: dict[str, Any] = {
        f"{metric}{end}": value
        for metric, score in found.items()
        for end, value in zip(metrics.ENDS, astuple(score), strict=True)
    }
    return Result(
        seed=seed,
        probe=kind,
        train_rows=len(training.truth),
        test_rows=int(counted.sum()),
        test_groups=len(set(groups)),
        classes=len(fitted.classes),
        objective="cosine" if kind == "centroid" else "cross_entropy" if single else "asymmetric",
        decay=fitted.decay,
        **scored,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
    )


def _table(measured: Sequence[Result]) -> Iterator[str]:
    yield f"{'probe':<9} {'seed':>4}  {'cmAP':<21} {'AUROC':<21} {'top-1':<21} {'L2':>6}"
    for one in measured:
        scores = [str(metrics.Score(*(getattr(one, name + end) for end in metrics.ENDS))) for name in metrics.NAMES]
        decay = "" if one.decay is None else f"{one.decay:g}"
        yield f"{one.probe:<9} {one.seed:>4}  {' '.join(f'{score:<21}' for score in scores)} {decay:>6}"


def check_sides(training: Embedded, test: Embedded) -> None:
    """Refuse a side that has no row with known classes, and sides that share a group."""
    for side, what in ((training, "to fit a probe to"), (test, "to measure one on")):
        if not side.truth.any():
            raise DataError(
                f"there is no row with labels {what}; name their column by data.label, or use other recordings"
            )
    if shared := sorted(set(training.groups) & set(test.groups)):
        raise DataError(f"the group '{shared[0]}' is on both sides; choose data.group so that none is")


def _parse_kinds(text: str) -> list[probes.Kind]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in probes.KINDS:
            raise ConfigError(f"kinds={text}: '{word}' is not a probe, {nearest(word, probes.KINDS)}")
    if not found:
        raise ConfigError(f"kinds={text} names no probe; choose from {', '.join(probes.KINDS)}")
    return [kind for kind in probes.KINDS if kind in found]


def _name_of(config: Any) -> str:
    """What data are called in results: the last part of their path."""
    path = getattr(config, "path", None)
    if path is None:
        return str(config.kind)
    first = Path(path if isinstance(path, str) else path[0])
    return first.stem or str(config.kind)


def _fingerprint(library: Library) -> str:
    """A short digest of both sides of the split."""
    said = " ".join(str(getattr(part, "fingerprint", None)) for part in (library.training, library.held_out))
    return hashlib.sha256(said.encode()).hexdigest()[:8]
