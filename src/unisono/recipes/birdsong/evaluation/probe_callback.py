"""Probes of every checkpoint while a run trains (`task.probe_saves=true`), beside the online probe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from unisono import Callback, RunInfo, open_run
from unisono.recipes.birdsong.evaluation import probe_verb, results
from unisono.recipes.birdsong.evaluation.probes import Kind

if TYPE_CHECKING:
    from unisono.recipes.birdsong.task import Birdsong

log = logging.getLogger(__name__)
FILE, _RESAMPLES = "probes.parquet", 200
_KINDS: tuple[Kind, ...] = ("linear", "centroid")


class ProbeSaves(Callback):
    """Measures each checkpoint once it is whole, on rank 0, and adds to RUN/probes.parquet; the others wait meanwhile.

    Args:
        task: of the run, whose recordings are measured on.
    """

    def __init__(self, task: Birdsong) -> None:
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
        encoder = open_run(folder, task=type(self._task)).load_model(step=step).encoder
        measured = probe_verb.measure_encoder(
            encoder, library, _KINDS, [0], task=probe_verb.name_of(self._task.data_config), resamples=_RESAMPLES,
            run=str(folder), step=step, weights="model",
        )  # fmt: skip
        results.append(folder / FILE, measured)
        for one in measured:
            log.info(
                "step %d: %s probe: cmAP %.3f, AUROC %.3f, top-1 %.3f", step, one.probe, one.cmap, one.auroc, one.top1
            )
