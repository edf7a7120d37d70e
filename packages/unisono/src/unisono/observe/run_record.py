"""What rank 0 records of a run: console lines, `events.jsonl` and trackers, from one call per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.config.schema.run import Observe
from unisono.engines.observers import StepResult
from unisono.observe import trackers
from unisono.observe.events import Events
from unisono.observe.progress import Progress, Speed
from unisono.observe.samples import prepare_sample
from unisono.runtime.communication.communicator import ProcessInfo

_MASKED_STEPS_SHOWN = 3  # steps with missing samples that are reported on the console


class RunRecord:
    """Distributes the results of steps. On ranks other than 0 every method does nothing.

    Args:
        folder: The run's directory.
        config: The `observe` group.
        place: This process.
        first_step: Steps done by an earlier process.
        total: Steps in the run.
        about: `config` and `facts` of the run, for trackers.
    """

    def __init__(
        self,
        folder: Path,
        config: Observe,
        place: ProcessInfo,
        first_step: int,
        total: int,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        mine, self._folder = place.is_first, folder
        shown, plain = mine and config.progress is not False, config.progress == "plain"
        self._progress = Progress(total, config.log_every, shown=shown, plain=plain)
        self._trackers: trackers.Trackers | None = None
        if mine and config.trackers:
            run, facts = ((about or {}).get(name, {}) for name in ("config", "facts"))
            self._trackers = trackers.open_trackers(
                config.trackers, folder, config.project, first_step, run, facts, config.tracker_timeout, config.group
            )
        self._events = Events(folder / "events.jsonl", first_step) if mine else None
        self._masked = 0

    def __enter__(self) -> RunRecord:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._progress.__exit__()
        if self._events is not None:
            self._events.close()
        if self._trackers is not None:
            self._trackers.close(failed=kind is not None)

    def say(self, line: str) -> None:
        """Print a line on the console."""
        self._progress.say(line)

    def step(
        self,
        step: int,
        result: StepResult,
        scalars: Mapping[str, float],
        speed: Speed,
        skipped_rows: Sequence[int] = (),
        unsaved_since: int | None = None,
    ) -> None:
        """Record a finished step; `step` counts from 1.

        `skipped_rows` are the source rows of the batch if its update was skipped. `unsaved_since` is the step of the
        last checkpoint if saves have failed since then.
        """
        values: dict[str, Any] = {**result.values, "grad_norm": result.grad_norm}
        values |= scalars
        values |= {"seconds": speed.seconds, f"{speed.unit}_per_second": speed.rate, "data_wait": speed.wait}
        if speed.mfu is not None:
            values["mfu"] = speed.mfu
        if speed.flops is not None:
            values["flops"] = speed.flops
        if speed.memory is not None:
            values["memory_gb"] = round(speed.memory / 1e9, 3)
        if result.skipped:
            values |= {"skipped": result.skipped, "skipped_rows": list(skipped_rows)}
            rows = ", ".join(map(str, skipped_rows[:8])) + (", …" if len(skipped_rows) > 8 else "")
            self.say(f"step {step}: update skipped: {result.skipped}; source rows {rows}")
        if masked := int(result.work.get("masked", 0)):
            values["masked"] = masked
            self._report_masked(step, masked)
        if result.recompiled:
            values["recompiled"] = result.recompiled
        if unsaved_since is not None:
            values["unsaved_since"] = unsaved_since
        self._write(step, {**values, **result.norms})
        terms = result.terms if len(result.terms) > 1 else {}
        shown = {**terms, **result.metrics, **({"lr": scalars["lr"]} if "lr" in scalars else {})}
        self._progress.step(step, result.loss, speed, unsaved_since, shown)

    def evaluation_progress(self, step: int) -> Callable[[int, int], None]:
        """Where to report how far an evaluation after `step` steps is: rows that are done, of how many."""
        return lambda done, total: self._progress.evaluating(step, done, total)

    def evaluation(self, step: int, values: Mapping[str, float], rows: int, seconds: float) -> None:
        """Record a finished evaluation after `step` steps."""
        self._write(step, {"eval": True, **values, "rows": rows, "seconds": seconds}, prefix="eval/")
        self._progress.evaluation(step, values, rows, seconds)

    def note(self, step: int, values: Mapping[str, Any]) -> None:
        """Note in `events.jsonl` only what happened to a checkpoint, or how a run resumed, after `step` steps."""
        if self._events is not None:
            self._events.note({"step": step, **values})

    def publish(self, step: int, name: str, value: Any) -> None:
        """Record a picture, a sound, a text or a table; see `samples.prepare_sample`.

        Raises:
            ConfigError: For what cannot be shown.
        """
        if self._events is None:
            return
        sample = prepare_sample(self._folder, step, name, value)
        if sample.event is not None:
            self._events.write({"step": step, "sample": name, **sample.event})
        if self._trackers is not None:
            self._trackers.publish(step, name, sample)

    def _report_masked(self, step: int, masked: int) -> None:
        """Report for the first few such steps how many samples they lack, over all processes."""
        self._masked += 1
        if self._masked <= _MASKED_STEPS_SHOWN:
            several = masked > 1
            what = f"{masked} sample{'s' * several} could not be built and {'were' if several else 'was'} left out"
            more = "; further such steps are listed in events.jsonl only" if self._masked == _MASKED_STEPS_SHOWN else ""
            self.say(f"step {step}: {what} (`unisono data audit` lists them){more}")

    def _write(self, step: int, values: Mapping[str, Any], prefix: str = "") -> None:
        if self._events is not None:
            self._events.write({"step": step, **values})
        if self._trackers is not None:
            numbers = {name: value for name, value in values.items() if not isinstance(value, bool | str | list)}
            self._trackers.write(step, {prefix + name: float(value) for name, value in numbers.items()})
