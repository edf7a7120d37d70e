"""Everything one process needs to train or evaluate: rows, plan, loader, engine. Built the same way for both."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from unisono.checkpoint.core import provenance, resume
from unisono.checkpoint.core.leftovers import EVALUATED
from unisono.checkpoint.core.resume import Resumption
from unisono.checkpoint.remote import restore
from unisono.checkpoint.remote.upload import open_store
from unisono.config.batch_split import BatchSplit
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import Loader
from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.planning import build_plan, build_source, checkable_sources, source_facts
from unisono.engines import create_engine
from unisono.engines.protocol import EngineJob, ModelFacts
from unisono.evaluation.benchmarks import run_benchmark, run_on_weights
from unisono.evaluation.held_out import HeldOut
from unisono.optim.groups import given_moments
from unisono.optim.schedules import ScheduledScalars
from unisono.protocols import Benchmark, WeightsBenchmark, require_benchmarks, require_environments
from unisono.runtime import heartbeat, secrets
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.communication.consensus import raise_everywhere, share_first
from unisono.runtime.errors import ConfigError, DataError
from unisono.supervise import preemption
from unisono.task import Batch, Task, run_setup


def gather_facts(rows: Mapping[str, Any], scalars: ScheduledScalars, task: Task) -> dict[str, Any]:
    """Facts of the rows, the schedules and the task, by name; without secrets, since a line of the log has no names."""
    facts: dict[str, Any] = secrets.hidden({**rows, **scalars.step_programs(task.static_scalars), **task.facts()})
    return facts


class TrainingParts:
    """Rows, plan, loader and engine of a process. A context manager that closes them; entering it builds nothing yet.

    With `writing=False` the run does not continue, and is only read.

    Attributes:
        source: the rows to train on.
        plan: which rows each step takes.
        scalars: scheduled values by step.
        loader: of micro-batches.
        held_out: the rows to evaluate on; None if there are none.
        engine: chosen by the layout.
        data: facts of the rows.
    """

    def __init__(
        self,
        task: Task,
        run: ResolvedRun,
        process: ProcessInfo,
        communicator: Communicator,
        writing: bool = True,
    ) -> None:
        config = run.config
        self._task = task
        self._run, self._process, self._communicator, self._writing = run, process, communicator, writing
        self.source = build_source(task, config, process.world_size)
        self.plan = build_plan(task, self.source, config, process.world_size)
        self.scalars = ScheduledScalars(config, self.plan.steps)
        self.held_out = build_held_out(task, config, process, run.split)
        self.loader = Loader.from_config(task, self.source, self.plan, run.split, process, config, contents=writing)
        self.engine = create_engine(EngineJob(task, config, process, communicator, run.split))
        self.data = source_facts(self.source)
        self._benchmark = build_benchmark(task, config)
        self._environment = build_environment(task, config)

    def __enter__(self) -> TrainingParts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def resume(self) -> Resumption:
        """The checkpoint to resume from, after checking that all processes have the same data; collective."""
        provenance.check_agreement(self._communicator, {"the data": self.data})
        store_url = self._run.config.checkpoint.upload.url
        self.provenance = provenance.describe_run(self._run.config, self.data, self._process)
        refetch = None if store_url is None else self._refetch
        return resume.open_newest(self._run, self.provenance, self._communicator, self._writing, refetch)

    def setup(self, resumption: Resumption) -> tuple[ModelFacts, int]:
        """Build the model and load its state; returns facts about the model, and the updates made."""
        self.loader.start()  # loads the first batches while the model is built
        with heartbeat.phase("setup"):
            facts = self.engine.setup(next(iter(self.loader.steps(0))), self.scalars(0))
            given = given_moments(self._run.config.optim)
            if given is not None and resumption.checkpoint is None:
                load = partial(self.engine.load_moments, given)  # of a file that a node may lack
                taken = raise_everywhere(self._communicator, load, "the moments to begin with")
                facts = replace(facts, moments=f"{taken[self._process.rank]}")
            return facts, resumption.load(self.engine, self.plan)

    def read_outputs(self, samples: Sequence[Any], read: Callable[[Any, Batch], Any], step: int) -> Any:
        """What `read` makes of the task's outputs for samples after `step` updates; collective."""
        arrays, rows = self._task.collate(samples), np.arange(len(samples), dtype=np.int64)
        micro = MicroBatch(0, rows, arrays, counts={}, work={})
        return self.engine.read_outputs(micro, step, self.scalars(step), read)

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate."""
        return self.held_out is not None or self._run.config.eval.has_benchmarks

    @property
    def benchmark_prefixes(self) -> tuple[str, ...]:
        """With which the values of the benchmarks begin."""
        return tuple(one.prefix for one in (self._benchmark, self._environment) if one is not None)

    def evaluate(self, step: int, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Loss and metrics on the held-out rows after `step` updates, and the values of benchmarks; collective.

        Raises:
            EvaluationInterruptedError: on every rank, if the run has to end before a benchmark has.
        """
        values: dict[str, float] = {}
        if self.held_out is not None:
            values = self.held_out.evaluate(self.engine, step, self.scalars(step), progress)
        if self._benchmark is not None:
            settings, split = self._run.config, self._run.split
            values |= run_benchmark(
                self._benchmark,
                self._communicator,
                lambda samples, read: self.read_outputs(samples, read, step),
                batch=settings.eval.micro_batch or split.micro_batch,
                deadline=settings.launch.deadlines.evaluate,
                progress=progress,
                leaving=_is_leaving,
            )
        if self._environment is not None:
            values |= run_on_weights(
                self._environment,
                self._communicator,
                lambda folder: self._write_weights(folder, step),
                self._weights_folder(),
                deadline=self._run.config.launch.deadlines.evaluate,
                leaving=_is_leaving,
            )
        return values

    def _weights_folder(self) -> Path:
        """Where an environment loads the weights; a command that only reads the run has a folder of its own."""
        if self._writing:
            return self._run.directory / EVALUATED
        name = share_first(self._communicator, lambda: f"{EVALUATED}-{uuid.uuid4().hex[:12]}", "a name for the weights")
        return self._run.directory / str(name)

    def _write_weights(self, folder: Path, step: int) -> Path:
        from unisono.checkpoint.exchange import collective_export  # imports torch

        shards = self.engine.state()
        return collective_export.write_weights(self._run.directory, folder, step, shards, self._communicator)

    def check_files(self) -> None:
        """Check that the data files are unchanged, each process of a host its share of them; collective.

        Raises:
            DataError: on every rank, naming a file.
        """
        sources = [self.source, *([self.held_out.source] if self.held_out is not None else [])]

        def check() -> None:
            for source in (one for some in sources for one in checkable_sources(some)):
                try:
                    source.check_files(self._process.local_rank, self._process.local_world_size)
                except DataError as error:
                    raise DataError(f"{error}. Training since the newest checkpoint was not saved") from error

        raise_everywhere(self._communicator, check, "whether the data are unchanged")

    def close(self) -> None:
        """Stop workers and release memory and processes."""
        self.loader.close()
        if self.held_out is not None:
            self.held_out.close()
        self.engine.close()

    def _refetch(self, path: Path) -> tuple[Path | None, str]:
        """Fetch a damaged checkpoint again; the store is opened only if one is damaged."""
        store = open_store(self._run.config)
        assert store is not None
        return restore.refetch(store, path)


def _is_leaving() -> bool:
    return preemption.seconds_since_signal() is not None


def build_held_out(task: Task, config: RunConfig, process: ProcessInfo, split: BatchSplit) -> HeldOut | None:
    """The task's held-out rows, if it has any."""
    run_setup(task)
    source = task.held_out()
    if source is None:
        return None
    return HeldOut(task, source, config, process, split.micro_batch, split.global_batch)


def build_benchmark(task: Task, config: RunConfig) -> Benchmark | None:
    """The benchmarks that the settings ask for; None if they ask for none."""
    settings = config.eval
    return require_benchmarks(task).harness(settings.harness, settings.harness_limit) if settings.harness else None


def build_environment(task: Task, config: RunConfig) -> WeightsBenchmark | None:
    """The environment that the settings ask for; None if they ask for none.

    Raises:
        ConfigError: for a task without environments, and for adapters, which servers do not load by themselves.
    """
    settings = config.eval
    if settings.environment is None:
        return None
    if config.adapter is not None:
        raise ConfigError(
            "eval.environment: a server loads whole models, and this run trains adapters; play the environment "
            "afterwards, with the model that `unisono export RUN merge=true` writes"
        )
    return require_environments(task).environment(settings.environment, settings.environment_limit)


def gather_rows(batches: Sequence[MicroBatch], communicator: Communicator) -> list[int]:
    """The source rows of a step over all processes, in the order of the global batch; collective."""
    own = [row for micro in batches if not micro.idle for row in micro.rows.tolist()]
    return [row for rows in communicator.gather(own, "the rows of an update left out") for row in rows]
