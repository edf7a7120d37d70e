"""Evaluation on held-out rows: sums and counts over all of them, on all processes, exact at any world size."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice

from unisono.config.batch_split import BatchSplit, divisors
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import Loader, check_draws
from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.grouped import plan_evaluation
from unisono.engines.protocol import Engine
from unisono.protocols import resolve_features
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import DataError
from unisono.task import Source, Task


class HeldOut:
    """The held-out rows of a task, ready to be evaluated any number of times.

    No row is dropped or counted twice: the last batch may be short, and a process without rows in it repeats one with
    weight zero, so that all run equally many passes. If `eval.rows` limits the number of rows, they are a random
    subset, the same in every run: neighbouring rows are often similar, so the first ones would not be representative.

    Args:
        task: whose rows they are.
        source: the rows.
        config: its `eval` group sets the number of rows and the micro-batch.
        place: this process.
        micro_batch: of training, used if `eval.micro_batch` is null.
        global_batch: of training, if it is not the configuration's. A loss across samples is evaluated on this many
            rows at a time on every layout; the micro-batch is then the largest that divides them.
    """

    def __init__(
        self,
        task: Task,
        source: Source,
        config: RunConfig,
        place: ProcessInfo,
        micro_batch: int,
        global_batch: int | None = None,
    ) -> None:
        if len(source) == 0:
            raise DataError(f"{type(task).__name__}.held_out() has no rows; return None for no evaluation")
        check_draws(task, source, mask=config.data.on_error == "mask", training=False)
        rows = min(len(source), config.eval.rows or len(source))
        micro = min(config.eval.micro_batch or micro_batch, rows)
        devices = config.layout.devices_each
        parts = place.world_size * devices
        whole = micro * parts
        if resolve_features(task).cross_sample is not None:
            whole = global_batch or config.train.global_batch
            micro = max(size for size in divisors(whole // parts) if size <= micro)
        self._split = BatchSplit.create(whole, place.world_size, micro, devices)
        plan = plan_evaluation(source, config, self._split.global_batch, rows)
        self._loader = Loader.from_config(task, source, plan, self._split, place, config, purpose="eval")
        self._weight_sets = [
            average for average, one in ((False, "model"), (True, "ema"))
            if config.eval.weights in ("both", one) and (config.ema.decay is not None or not average)
        ]  # fmt: skip
        self.rows, self.source, self._task = rows, source, task

    def batches(self) -> Generator[list[MicroBatch]]:
        """This process's micro-batches of one evaluation."""
        try:
            yield from self._loader.steps()
        finally:
            self._loader.stop_threads()

    def close(self) -> None:
        """Stop the workers."""
        self._loader.close()

    def evaluate(
        self,
        engine: Engine,
        step: int,
        scalars: Mapping[str, float],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, float]:
        """Loss and metrics after `step` updates, with the weights of `eval.weights`; the average's are `ema/…`.

        Args:
            engine: with the model.
            step: updates made.
            scalars: scheduled values.
            progress: is given the rows that were evaluated, and those in all, before each batch.
        """
        values: dict[str, float] = {}
        for number, average in enumerate(self._weight_sets):
            batches = self._report_progress(self.batches(), number, progress)
            values |= self._evaluate_weights(engine, batches, step, scalars, average)
        return values

    def _report_progress(
        self, batches: Iterable[list[MicroBatch]], number: int, progress: Callable[[int, int], None]
    ) -> Iterator[list[MicroBatch]]:
        """The batches of one set of weights, the first of which has the number 0."""
        before, total = number * self.rows, len(self._weight_sets) * self.rows
        for index, batch in enumerate(batches):
            progress(before + min(self.rows, index * self._split.global_batch), total)
            yield batch

    def names(self, engine: Engine, step: int, scalars: Mapping[str, float]) -> list[str]:
        """The names that `evaluate` would return, found with the first batch only; same arguments."""
        names: list[str] = []
        for average in self._weight_sets:
            with closing(self.batches()) as batches:
                names += self._evaluate_weights(engine, islice(batches, 1), step, scalars, average)
        return names

    def _evaluate_weights(
        self,
        engine: Engine,
        batches: Iterable[list[MicroBatch]],
        step: int,
        scalars: Mapping[str, float],
        average: bool,
    ) -> dict[str, float]:
        summary = self._task.summary(engine.evaluate(batches, step, scalars, average).values)
        return {f"{'ema/' if average else ''}{name}": value for name, value in summary.items()}
