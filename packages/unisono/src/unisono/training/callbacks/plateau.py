"""The learning rate that falls once an evaluation metric has stopped improving (`schedules.lr` of kind `plateau`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.callback import RunInfo
from unisono.config.schema.run import RunConfig
from unisono.config.schema.schedules import Plateau
from unisono.training.callbacks.early_stopping import EarlyStopping


class FallOnPlateau(EarlyStopping):
    """Counts how often the metric has stopped improving; all ranks count the same, since evaluations are all ranks'.

    Attributes:
        say: shows a line on the console; the loop sets it.
    """

    _key, title = "schedules.lr.metric", "schedules.lr=plateau"

    def __init__(self, config: Plateau) -> None:
        shared = {name: getattr(config, name) for name in self.Config.model_fields}
        super().__init__(self.Config(**shared))
        self._factor, self._floor, self._falls = config.factor, config.floor, 0
        self.say: Callable[[str], None] = lambda line: None

    @classmethod
    def from_config(cls, config: RunConfig) -> list[FallOnPlateau]:
        """The callback that the configuration asks for; none without such a schedule."""
        return [] if config.plateau is None else [cls(config.plateau)]

    def count(self) -> int:
        """How often the rate has fallen."""
        return self._falls

    def on_start(self, run: RunInfo) -> None:
        """Refuse a run that has nothing to evaluate."""
        self.refuse_no_rows(run.held_out, run.config)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Compare with the best evaluation so far, and fall if there was none better for long enough."""
        if (why := super().on_evaluation(step, values)) is None:
            return
        before, now = (max(self._floor, self._factor**falls) for falls in (self._falls, self._falls + 1))
        self._falls, self.waited = self._falls + 1, 0
        if now < before:
            reason = why.reason.partition(";")[0]  # without what to do about it
            self.say(f"step {step}: the learning rate falls to {now:.3g} of its peak: {reason}")

    def _least_change(self, best: float) -> float:
        return self.config.min_delta * abs(best)

    def state(self) -> dict[str, Any]:
        """That of `EarlyStopping`, and how often the rate has fallen."""
        return {**super().state(), "falls": self._falls}

    def load_state(self, state: Any) -> None:
        """Resume where the checkpoint was written."""
        super().load_state(state)
        self._falls = state["falls"]
