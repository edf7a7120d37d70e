"""What a run shows and records: console, `events.jsonl`, trackers, log, and the heartbeat for the monitor."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from unisono.checkpoint.core.resume import Resumption
from unisono.config import fingerprint
from unisono.config.resolved_run import ResolvedRun
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import WEIGHT_FLOPS, StepResult
from unisono.engines.protocol import ModelFacts
from unisono.observe.peak_rates import peak_flops
from unisono.observe.progress import Speed, Stopwatch, format_count
from unisono.observe.run_record import RunRecord
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.text import format_value
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object
from unisono.training.parts import TrainingParts, gather_rows

log = logging.getLogger(__name__)


class Telemetry:
    """Shows and records every step; `about` are facts of the data and the task, `first` is the updates made before.

    Attributes:
        record: where everything is recorded and shown; to be entered and left by the caller.
        stopwatch: measures steps, and the time spent waiting for data.
    """

    def __init__(
        self,
        run: ResolvedRun,
        parts: TrainingParts,
        process: ProcessInfo,
        communicator: Communicator,
        facts: ModelFacts,
        about: Mapping[str, Any],
        first: int,
    ) -> None:
        self._run, self._parts, self._process, self._communicator = run, parts, process, communicator
        self._facts, self._data_facts = facts, about
        self.stopwatch = Stopwatch()
        described = {"config": fingerprint.to_json(run.config), "facts": self._describe_run()}
        self.record = RunRecord(run.directory, run.config.observe, process, first, parts.plan.steps, about=described)

    def introduce(self, resumption: Resumption, first: int) -> None:
        """Show what will be trained, on which devices, and where it resumes from; the rest goes into the log."""
        facts, layout, split = self._facts, self._run.layout, self._run.split
        devices = self._process.world_size * facts.devices
        where = f"{devices} × {facts.device}, {layout.strategy}, {self._run.config.train.precision}"
        mean = "about " if self._run.config.data.group_by_length == "balanced" else ""
        batch = f"{split.global_batch} = {split.world_size} × {split.passes} × {mean}{split.micro_batch} rows"
        name, steps = self._run.config.recipe.rpartition(":")[2], self._parts.plan.steps
        say = self.record.say
        for note in resumption.build_events(steps):
            self.record.note(first, note)
        size = f"{format_count(facts.parameters + facts.frozen)} parameters"
        size += f" ({format_count(facts.parameters)} of them trained)" if facts.frozen else ""
        say(f"{name}: {size}, {where}, {steps} step{'s' * (steps != 1)}, global batch {batch}")
        more = [f"{key}: {format_value(value)}" for key, value in {**facts.kernels, **self._data_facts}.items()]
        for line in [*facts.updates, *more, f"loading: {self._parts.loader.facts()}"]:
            log.info("%s", line)
        others = len(facts.updates) - 1
        groups = f"; {others} more group{'s' * (others > 1)} in the log" if others > 0 else ""
        say(f"  {facts.updates[0] if facts.updates else 'nothing is updated'}{groups}")
        if facts.moments:
            say(f"  {facts.moments}")
        for line in resumption.format_lines():
            say(line)

    def record_step(
        self, step: int, result: StepResult, micro_batches: list[MicroBatch], unsaved_since: int | None
    ) -> None:
        """Show and record a step.

        Args:
            step: updates made.
            result: of the step.
            micro_batches: of this process.
            unsaved_since: the step of the last checkpoint, if a save has failed since.
        """
        rows = gather_rows(micro_batches, self._communicator) if result.skipped else []
        speed = self._speed(result, *self.stopwatch.lap())
        heartbeat.record_step(step, speed.seconds)
        self.record.step(step, result, self._parts.scalars(step - 1), speed, rows, unsaved_since)
        for line in self._parts.loader.messages(speed.wait, speed.seconds):
            log.info("%s", line)
            self.record.say(line)
        log.info("step %d loss %.6f grad_norm %.6f", step, result.loss, result.grad_norm)

    def _describe_run(self) -> dict[str, Any]:
        """Facts of the run and its system, for trackers."""
        known = self._run.directory / "fingerprint.json"
        start = safe_paths.read_json(self._run.directory, known.name, Object) if known.is_file() else {}
        device = {"device": self._facts.device, "parameters": self._facts.parameters, "frozen": self._facts.frozen}
        return {**start, **device, "world_size": self._process.world_size, "data": self._data_facts}

    def _speed(self, result: StepResult, seconds: float, wait: float) -> Speed:
        config = self._run.config
        beside = ("rows", "flops", "masked", WEIGHT_FLOPS)
        unit = next((name for name in result.work if name not in beside), "rows")
        peak = peak_flops(self._facts.device, config.train.precision)
        flops = result.flops(adapters=config.adapter is not None)
        devices = self._process.world_size * self._facts.devices
        mfu = flops / seconds / (peak * devices) if peak and flops else None
        memory = self._parts.engine.peak_memory() if self._process.is_first else None
        return Speed(unit, result.work.get(unit, 0.0) / seconds, mfu, wait, seconds, flops or None, memory)
