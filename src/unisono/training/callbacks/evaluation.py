"""Evaluation on the held-out rows: when it is due, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from unisono.callback import Evaluate, RunInfo
from unisono.checkpoint.core import retention
from unisono.config.schema.run import RunConfig
from unisono.evaluation.best import Best
from unisono.observe import events
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Communicator
from unisono.training.callbacks.dispatch import LoopCallback
from unisono.training.callbacks.telemetry import Telemetry
from unisono.training.parts import TrainingParts


class Evaluation(LoopCallback):
    """Requests evaluations when they are due, and runs the requested ones.

    Args:
        config: of the run.
        parts: of the run.
        communicator: of all processes.
        telemetry: shows and records the results.
        best: the best values so far.

    Attributes:
        values: loss and metrics of the newest evaluation of this start; empty before.
        step: updates made before it; None before.
        best: the best values so far.
    """

    def __init__(
        self, config: RunConfig, parts: TrainingParts, communicator: Communicator, telemetry: Telemetry, best: Best
    ) -> None:
        super().__init__()
        self._settings, self._checkpoint, self._parts = config.eval, config.checkpoint, parts
        self._communicator, self._telemetry = communicator, telemetry
        self.values: dict[str, float] = {}
        self.step: int | None = None
        self.best = best

    def on_start(self, run: RunInfo) -> Evaluate | None:
        """Reject an unknown metric in `checkpoint.keep_best`; request an evaluation that was missed."""
        held_out, scalars = self._parts.held_out, self._parts.scalars(run.first)
        if self._checkpoint.keep_best is not None:
            names = held_out.names(self._parts.engine, run.first, scalars) if held_out else []
            retention.check_metric(self._checkpoint, names)
        missed = run.first and self._is_due(run.first) and not self._is_recorded(run)
        return Evaluate() if missed else None  # a preempted run may have had no time for it

    def on_step(self, step: int, values: Mapping[str, float]) -> Evaluate | None:
        """Request an evaluation if one is due."""
        return Evaluate() if self._is_due(step) else None

    def evaluate(self, step: int) -> bool:
        """Evaluate after `step` updates if there are held-out rows; returns whether there are."""
        held_out = self._parts.held_out
        if held_out is None:
            return False
        start = perf_counter()
        with heartbeat.phase("evaluate"):
            self.values = held_out.evaluate(self._parts.engine, step, self._parts.scalars(step))
        self.step = step
        self.best.update(step, self.values)
        self._telemetry.record_evaluation(step, self.values, held_out.rows, perf_counter() - start)
        return True

    def _is_due(self, step: int) -> bool:
        every, last = self._settings.every, step == self._parts.plan.steps
        return (every is not None and step % every == 0) or (last and self._settings.at_end)

    def _is_recorded(self, run: RunInfo) -> bool:
        """Whether rank 0 has recorded an evaluation after this many updates; collective."""
        seen = events.read_events(run.directory / "events.jsonl") if run.is_first else []
        known = any(event.get("eval") and event["step"] == run.first for event in seen)
        return bool(self._communicator.gather(known, "whether the newest checkpoint was evaluated")[0])
