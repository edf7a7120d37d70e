"""Evaluation on the held-out rows: when it is due, and its results."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from unisono.config.schema.run import RunConfig
from unisono.evaluation.benchmarks import EvaluationInterruptedError
from unisono.evaluation.best import Best, require_metric
from unisono.observe import events
from unisono.observe.run_record import RunRecord
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import Communicator
from unisono.training.parts import TrainingParts


class Evaluation:
    """Says when evaluations are due, and runs them.

    Attributes:
        values: loss and metrics of the newest evaluation of this start; empty before.
        step: updates made before it; None before.
        interrupted: whether the newest was given up, since the run has to end; the next start makes up for it.
        best: the best values so far.
    """

    def __init__(self, config: RunConfig, parts: TrainingParts, communicator: Communicator, best: Best) -> None:
        self._settings, self._checkpoint, self._parts = config.eval, config.checkpoint, parts
        self._plateau = config.plateau
        self._communicator = communicator
        self.values: dict[str, float] = {}
        self.step: int | None = None
        self.interrupted = False
        self.best = best

    def check_metric(self, first: int) -> None:
        """Reject an unknown metric in `checkpoint.keep_best`, `eval` or a plateau; `first` updates have been made."""
        best, held_out, metrics = self._checkpoint.keep_best, self._parts.held_out, dict[str, str]()
        if best is not None:
            metrics["checkpoint.keep_best.metric"] = best.metric
        if self._settings.patience is not None and self._parts.can_evaluate:  # else it is refused as such
            metrics["eval.metric"] = self._settings.metric
        if self._plateau is not None and self._parts.can_evaluate:
            metrics["schedules.lr.metric"] = self._plateau.metric
        prefixes = self._parts.benchmark_prefixes  # their values are known once they have run
        metrics = {key: metric for key, metric in metrics.items() if not metric.startswith(prefixes)}
        if metrics:
            names = held_out.names(self._parts.engine, first, self._parts.scalars(first)) if held_out else []
            for key, metric in metrics.items():
                require_metric(key, metric, names)

    def is_due(self, step: int) -> bool:
        """Whether the settings ask for an evaluation after `step` updates."""
        every, last = self._settings.every, step == self._parts.plan.steps
        return (every is not None and step % every == 0) or (last and self._settings.at_end)

    def was_missed(self, folder: Path, first: int) -> bool:
        """Whether an evaluation was due after `first` updates, but a preempted run had no time for it; collective."""
        if not first or not self.is_due(first):
            return False
        seen = events.read_events(folder / "events.jsonl") if self._communicator.rank == 0 else []
        known = any(event.get("eval") and event["step"] == first for event in seen)
        return not self._communicator.gather(known, "whether the newest checkpoint was evaluated")[0]

    def evaluate(self, step: int, record: RunRecord) -> bool:
        """Evaluate after `step` updates if there is anything to evaluate; returns whether there are new values."""
        if not self._parts.can_evaluate:
            return False
        start = perf_counter()
        try:
            with heartbeat.phase("evaluate"):
                self.values = self._parts.evaluate(step, record.evaluation_progress(step))
        except EvaluationInterruptedError:
            self.interrupted = True
            return False
        self.step = step
        self.best.update(step, self.values)
        rows = self._parts.held_out.rows if self._parts.held_out is not None else 0
        record.evaluation(step, self.values, rows, perf_counter() - start)
        return True
