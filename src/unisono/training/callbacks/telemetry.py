"""What a run shows and records: console, `events.jsonl`, trackers, log, and the heartbeat for the monitor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.callback import RunInfo
from unisono.checkpoint.core.resume import Resumption
from unisono.config import fingerprint
from unisono.config.resolved_run import ResolvedRun
from unisono.data.loading.loader import MicroBatch
from unisono.engines.protocol import ModelFacts, StepResult
from unisono.observe.peak_rates import peak_flops
from unisono.observe.progress import Speed, Stopwatch, format_count
from unisono.observe.run_record import RunRecord
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Communicator, ProcessInfo
from unisono.runtime.text import format_value
from unisono.training.callbacks.dispatch import LoopCallback
from unisono.training.parts import TrainingParts, gather_rows

log = logging.getLogger(__name__)


class Telemetry(LoopCallback):
    """Shows and records every step, and the messages of other callbacks.

    Args:
        run: resolved.
        parts: of the run.
        process: this process.
        communicator: of all processes.
        facts: of the model.
        about: facts about the data and the task.
        unsaved_since: the step of the last checkpoint, if a save has failed since.
    """

    def __init__(
        self,
        run: ResolvedRun,
        parts: TrainingParts,
        process: ProcessInfo,
        communicator: Communicator,
        facts: ModelFacts,
        about: Mapping[str, Any],
        unsaved_since: Callable[[], int | None],
    ) -> None:
        super().__init__()
        self._run, self._parts, self._process, self._communicator = run, parts, process, communicator
        self._facts, self._data_facts, self._unsaved_since = facts, about, unsaved_since
        self._stopwatch = Stopwatch()
        self._last_result: tuple[StepResult, list[MicroBatch]]
        self._record: RunRecord | None = None

    def on_start(self, run: RunInfo) -> None:
        """Open the record."""
        described = {"config": fingerprint.to_json(run.config), "facts": self._describe_run()}
        observe = run.config.observe
        record = RunRecord(run.directory, observe, self._process, run.first, run.steps, about=described)
        self._record = record.__enter__()

    def introduce(self, resumption: Resumption, first: int) -> None:
        """Show what will be trained, on which devices, and where it resumes from."""
        facts, layout, split = self._facts, self._run.layout, self._run.split
        devices = self._process.world_size * facts.devices
        where = f"{devices} × {facts.device}, {layout.strategy}, {self._run.config.train.precision}"
        batch = f"{split.global_batch} = {split.world_size} × {split.passes} × {split.micro_batch} rows"
        name, steps = self._run.config.recipe.rpartition(":")[2], self._parts.plan.steps
        for note in resumption.build_events(steps):
            self.note(first, note)
        self.say(f"{name}: {format_count(facts.parameters)} parameters, {where}, {steps} steps, global batch {batch}")
        for key, value in {**facts.kernels, **self._data_facts}.items():
            self.say(f"  {key}: {format_value(value)}")
        for line in facts.updates:
            self.say(f"  {line}")
        self.say(f"  loading: {self._parts.loader.facts()}")
        for line in resumption.format_lines():
            self.say(line)

    def before_step(self, step: int) -> None:
        """Exclude time between steps from step times."""
        self._stopwatch.lap()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context for waiting for data."""
        with self._stopwatch.waiting():
            yield

    def set_result(self, result: StepResult, micro_batches: list[MicroBatch]) -> None:
        """Keep the result of a step for `on_step`."""
        self._last_result = result, micro_batches

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Show and record a step."""
        result, micro_batches = self._last_result
        rows = gather_rows(micro_batches, self._communicator) if result.skipped else []
        speed = self._speed(result, *self._stopwatch.lap())
        heartbeat.record_step(step, speed.seconds)
        assert self._record is not None
        self._record.step(step, result, self._parts.scalars(step - 1), speed, rows, self._unsaved_since())
        for line in self._parts.loader.news(speed.wait):
            log.warning("%s", line)
            self.say(line)
        log.info("step %d loss %.6f grad_norm %.6f", step, result.loss, result.grad_norm)

    def record_evaluation(self, step: int, values: Mapping[str, float], rows: int, seconds: float) -> None:
        """Show and record an evaluation."""
        assert self._record is not None
        self._record.evaluation(step, values, rows, seconds)

    def say(self, line: str) -> None:
        """Show a line on the console of rank 0."""
        assert self._record is not None
        self._record.say(line)

    def note(self, step: int, values: Mapping[str, Any]) -> None:
        """Record an entry other than a step, after `step` updates."""
        assert self._record is not None
        self._record.note(step, values)

    def publish(self, step: int, name: str, path: Path) -> None:
        """Send a PNG or WAV file to the trackers, after `step` updates."""
        assert self._record is not None
        self._record.publish(step, name, path)

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the record, after everything that may still write to it."""
        if self._record is not None:
            self._record.__exit__(kind, error, trace)

    def _describe_run(self) -> dict[str, Any]:
        """Facts of the run and its system, for trackers."""
        known = self._run.directory / "fingerprint.json"
        start = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
        device = {"device": self._facts.device, "parameters": self._facts.parameters}
        return {**start, **device, "world_size": self._process.world_size, "data": self._data_facts}

    def _speed(self, result: StepResult, seconds: float, wait: float) -> Speed:
        config = self._run.config
        unit = next((name for name in result.work if name not in ("rows", "flops", "masked")), "rows")
        peak = peak_flops(self._facts.device, config.train.precision)
        # With adapters, frozen matrices need no weight gradients, so the task's count is too high.

        flops = 0.0 if config.adapter else result.work.get("flops", 0.0)
        devices = self._process.world_size * self._facts.devices
        mfu = flops / seconds / (peak * devices) if peak and flops else None
        return Speed(unit, result.work.get(unit, 0.0) / seconds, mfu, wait, seconds)
