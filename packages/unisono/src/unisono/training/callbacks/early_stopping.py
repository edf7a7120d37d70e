"""Early stopping: saves and ends the run once an evaluation metric has stopped improving.

`EarlyStopping` is written like a user's callback and serves as the example in the docs; `Patience` is what
`eval.patience` adds to a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt

from unisono.callback import Callback, RunInfo, Stop
from unisono.config.schema import NonNegative, Settings
from unisono.config.schema.run import RunConfig
from unisono.evaluation.best import require_metric
from unisono.runtime.errors import ConfigError


class EarlyStopping(Callback):
    """Stops a run whose held-out metric has stopped improving."""

    class Config(Settings):
        """What counts as an improvement, and how long to wait for one."""

        metric: str = Field("loss", min_length=1, description="of the evaluations, as events name it")
        mode: Literal["min", "max"] = Field("min", description="whether less or more is better")
        patience: PositiveInt = Field(3, description="evaluations without an improvement after which the run ends")
        min_delta: NonNegative = Field(0.0, description="a smaller change is no improvement")

    config: Config
    _key = "metric"  # the setting, in errors

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0

    def check(self, config: RunConfig) -> None:
        """Reject a run without evaluations during training."""
        if config.eval.every is None:
            name = self.title or type(self).__name__
            raise ConfigError(f"{name} needs evaluations, but eval.every is null; set it, e.g. eval.every=100")

    def refuse_no_rows(self, held_out: int, config: RunConfig) -> None:
        """Reject a run that has nothing to evaluate: neither held-out rows nor benchmarks."""
        if not held_out and not config.eval.has_benchmarks:
            raise ConfigError(
                f"{self.title or type(self).__name__} has nothing to look at, since the task holds out no rows; "
                "define held_out() (a recipe has a setting for it), or leave it out"
            )

    def on_start(self, run: RunInfo) -> Stop | None:
        """Stop at once if the run had already stopped and patience was not increased since."""
        self.refuse_no_rows(run.held_out, run.config)
        return self._verdict()

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> Stop | None:
        """Compare with the best evaluation so far."""
        metric = self.config.metric
        require_metric(self._key, metric, values)
        value = values[metric] if self.config.mode == "min" else -values[metric]
        if math.isfinite(value) and (self.best is None or value < self.best - self._least_change(self.best)):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        return self._verdict()

    def state(self) -> dict[str, Any]:
        """The best value, its step, and the evaluations since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state(self, state: Any) -> None:
        """Resume where the checkpoint was written."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]

    def _least_change(self, best: float) -> float:
        """By how much the best value has to be beaten."""
        return self.config.min_delta

    def _verdict(self) -> Stop | None:
        if self.waited < self.config.patience:
            return None
        times = "1 evaluation" if self.waited == 1 else f"{self.waited} evaluations"
        if self.best is None:
            return Stop(f"{self.config.metric} was not finite in {times}")
        best = self.best if self.config.mode == "min" else -self.best
        return Stop(
            f"{self.config.metric} has not improved for {times}; the best was {best:.6g} after step {self.best_step}; "
            "to resume, raise the patience, or the run stops again at once"
        )


class Patience(EarlyStopping):
    """Early stopping as `eval.patience`, `eval.metric` and `eval.mode` ask for it."""

    _key, title = "eval.metric", "eval.patience"

    @classmethod
    def from_config(cls, config: RunConfig) -> list[Patience]:
        """The callback that the configuration asks for; none without `eval.patience`."""
        settings = config.eval
        if settings.patience is None:
            return []
        return [cls(cls.Config(metric=settings.metric, mode=settings.mode, patience=settings.patience))]
