"""`unisono find-lr`: a learning-rate range test (Smith, 2017), a short run whose rate grows by a factor a step.

The run is an ordinary one, on any layout, in a folder of its own that is removed: it neither reads nor writes a
checkpoint. What it suggests is a place to begin, not an optimum; where the curve shows none, it says so.
"""

from __future__ import annotations

import math
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.callback import Callback
from unisono.config import fingerprint
from unisono.config.schema.run import RunConfig
from unisono.config.schema.verbs import FindLr
from unisono.launch import cluster, start
from unisono.observe import events
from unisono.runtime.display.preparing import preparing
from unisono.runtime.errors import ConfigError, SpikeError, UnisonoError

RULE = "there the loss falls fastest per decade of the rate (Smith 2017, arXiv:1506.01186; so do fastai and Lightning)"
_DIVERGED = 3.0  # times its first value above its best, at which a loss is said to diverge
_ROWS, _BAR = 20, 24  # of the table
_FEWEST = 10  # steps before the loss diverges, without which there is no curve
_SIGNIFICANT = 5.0  # standard errors by which the loss has to fall


class StopDiverged(Callback):
    """Ends a range test once its loss has diverged; a `Stop` would write a checkpoint."""

    _first = _best = math.nan

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Compare with the first and the smallest loss; the same on every process."""
        loss = values["loss"]
        self._first = loss if math.isnan(self._first) else self._first
        self._best = loss if math.isnan(self._best) else min(self._best, loss)
        if loss > self._best + _DIVERGED * abs(self._first):
            raise SpikeError(f"the loss diverged: {loss:.4g}, after {self._best:.4g}")


@dataclass(frozen=True)
class RangeTest:
    """What a range test came to.

    Attributes:
        rates: learning rate of each step.
        losses: of each step, on its own batch.
        diverged: whether the loss diverged before the largest rate.
        smoothed: the losses without their noise.
        suggestion: a rate to begin with; None if the curve shows none.
        why: the reason for the suggestion, or for none.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    diverged: bool
    smoothed: Sequence[float]
    suggestion: float | None
    why: str

    def lines(self) -> Iterator[str]:
        """The curve as a table of at most 60 columns, and what it suggests."""
        yield f"{'lr':>10}  {'loss':>9}"
        low, high = min(self.smoothed), max(self.smoothed)
        parts = np.array_split(np.arange(len(self.rates)), min(_ROWS, len(self.rates)))
        best = min(range(len(self.smoothed)), key=lambda step: self.smoothed[step])
        for part in parts:
            middle = int(part[len(part) // 2])
            loss = self.smoothed[middle]
            bar = "━" * round(_BAR * (loss - low) / (high - low)) if high > low else ""
            marks = ["smallest"] if best in part else []
            if self.suggestion is not None and self.rates[part[0]] <= self.suggestion <= self.rates[part[-1]]:
                marks.append("suggested")
            mark = f"  ← {', '.join(marks)}" if marks else ""
            yield f"{self.rates[middle]:>10.2e}  {loss:>9.4g}  {bar}{mark}".rstrip()
        if self.diverged:
            yield f"the loss diverged at lr {self.rates[-1]:.2g}"
        if self.suggestion is not None:
            yield f"suggestion: optim.lr={self.suggestion:.2g}"
        yield from textwrap.wrap(self.why, 60)


def find_lr(config: RunConfig, settings: FindLr, origins: Mapping[str, str] | None = None) -> RangeTest:
    """Run a range test of a task, with its model, data, optimizer, batch and layout.

    Raises:
        ConfigError: if the range does not fit, or another launcher has started this process.
        UnisonoError: whatever else ends the run, except a loss that diverges.
    """
    if cluster.process_info() is not None or config.launch.nodes > 1:
        raise ConfigError(
            "find-lr starts the processes of one host itself: start it without torchrun or srun, and without "
            "launch.nodes. What it finds holds on any layout with the same train.global_batch"
        )
    with tempfile.TemporaryDirectory(prefix="unisono-find-lr-") as folder:
        short = _range_config(config, settings, Path(folder))
        diverged = False
        with preparing(f"trying learning rates, {settings.steps} steps", shown=config.observe.progress is True):
            try:
                start.start_run(short, origins=origins, callbacks=[StopDiverged])
            except UnisonoError as error:  # that of a process of its own is of another class, with the same code
                steps = _read_steps(short)
                if error.exit_code != SpikeError.exit_code or not steps:
                    raise
                diverged = True
        steps = _read_steps(short)
    return judge_curve([step["lr"] for step in steps], [step["loss"] for step in steps], settings, diverged=diverged)


def _read_steps(config: RunConfig) -> list[Mapping[str, Any]]:
    """The steps that were made; a step whose loss is not finite makes no update, and is none of them."""
    path = config.run.dir / "range" / "events.jsonl"
    return events.step_events(events.read_events(path)) if path.is_file() else []


def _range_config(config: RunConfig, settings: FindLr, folder: Path) -> RunConfig:
    """The run of a range test: no checkpoint, no evaluation, no tracker, and a rate that grows."""
    values: dict[str, Any] = fingerprint.to_json(config)
    rate = {"kind": "exponential", "rising": True, "floor": settings.min_lr / settings.max_lr}
    values |= {
        "run": {"dir": str(folder), "name": "range", "seed": config.run.seed, "resume": "never"},
        "train": {**values["train"], "steps": settings.steps, "epochs": None},
        "optim": {**values["optim"], "lr": settings.max_lr, "skip_spikes": None},
        "schedules": {**values["schedules"], "lr": rate},
        "eval": {"at_end": False},
        "checkpoint": {"at_end": False},
        "observe": {"progress": False},
        "launch": {**values["launch"], "max_restarts": 0},
        "callbacks": [],
    }
    typed = RunConfig.model_validate({**values, "task": {}, "model": {}, "data": {}})
    return typed.model_copy(update={"task": config.task, "model": config.model, "data": config.data})


def judge_curve(rates: Sequence[float], losses: Sequence[float], settings: FindLr, *, diverged: bool) -> RangeTest:
    """What a curve shows: the steepest fall before the smallest loss, if the loss falls by more than its noise.

    Args:
        rates: of the steps, growing by a constant factor.
        losses: of the steps.
        settings: the range, for advice.
        diverged: whether the run was ended by its loss.
    """
    raw = np.asarray(losses, dtype=float)
    if len(raw) < _FEWEST:
        lower = (
            f"the loss diverged after {len(raw)} steps, so there is no curve; try min_lr={settings.min_lr / 1000:.0e}"
        )
        return RangeTest(rates, losses, diverged, losses, None, f"no suggestion: {lower}")
    start = float(np.median(raw[: max(3, len(raw) // 10)]))
    capped = np.minimum(raw, start + abs(start - raw.min()))  # a divergence would hide what was before it
    width = max(1.0, settings.steps / 30)
    smoothed = _smooth(capped, width)
    lowest = int(smoothed.argmin())
    noise = float(np.std((capped - smoothed)[: lowest + 1])) / math.sqrt(2 * math.sqrt(math.pi) * width)
    fall = float(smoothed[0] - smoothed[lowest])
    steepest = int(np.gradient(smoothed)[: lowest + 1].argmin())
    suggestion: float | None = None
    if fall <= max(_SIGNIFICANT * noise, 0.01 * abs(start)):
        why = (
            f"no suggestion: the loss falls by {fall:.2g} at most, which is little beside its noise; try more steps "
            f"(steps={5 * settings.steps}), a larger train.global_batch, or another range (min_lr, max_lr)"
        )
    elif steepest < width:
        why = f"no suggestion: the loss falls fastest at the smallest rate; try min_lr={settings.min_lr / 1000:.0e}"
    elif not diverged and steepest > len(raw) - 1 - 2 * width:
        why = f"no suggestion: the loss falls fastest at the largest rate; try max_lr={settings.max_lr * 100:g}"
    else:
        suggestion = rates[steepest]
        why = f"{RULE}. It is smallest at {rates[lowest]:.2g}; a tenth of that is another common choice"
    return RangeTest(rates, losses, diverged, smoothed.tolist(), suggestion, why)


def _smooth(values: np.ndarray[Any, Any], width: float) -> np.ndarray[Any, Any]:
    """A Gaussian mean around every step; one over the steps before it alone would shift the curve to larger rates."""
    steps = np.arange(len(values))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / width) ** 2)
    smoothed: np.ndarray[Any, Any] = (weights @ values) / weights.sum(1)
    return smoothed
