"""What one process trains and evaluates with: rows, plan, loader, engine. Built the same way for either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from unisono.checkpoint.core import provenance, resume
from unisono.checkpoint.core.resume import Resumption
from unisono.checkpoint.remote import restore
from unisono.checkpoint.remote.upload import store_of
from unisono.config.batch_split import Split
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import Loader, MicroBatch
from unisono.data.order.planning import facts_of, plan_of, source_of
from unisono.engines import create_engine
from unisono.engines.protocol import Facts, Job
from unisono.evaluation.held_out import HeldOut
from unisono.optim.schedules import Scalars
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Communicator, ProcessInfo
from unisono.task import Task, set_up


class Parts:
    """Everything that a process computes with. A context that closes it; entering it builds nothing yet.

    Args:
        task: what is trained.
        run: as it was resolved.
        process: this one.
        communicator: of all processes.
        writing: whether the run is continued, and not only read.

    Attributes:
        source: the rows to train on.
        plan: which rows each step takes.
        scalars: scheduled values by step.
        loader: of micro-batches.
        held_out: the rows to evaluate on; None if there are none.
        engine: that the layout names.
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
        self._run, self._process, self._communicator, self._writing = run, process, communicator, writing
        self.source = source_of(task, config, process.world_size)
        self.plan = plan_of(task, self.source, config, process.world_size)
        self.scalars = Scalars(config, self.plan.steps)
        self.held_out = held_out_of(task, config, process, run.split)
        self.loader = Loader.of(task, self.source, self.plan, run.split, process, config, contents=writing)
        self.engine = create_engine(Job(task, config, process, communicator, run.split))
        self.data = facts_of(self.source)

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def resume(self) -> Resumption:
        """The checkpoint to resume from, once all processes have the same data; collective."""
        provenance.agree(self._communicator, {"the data": self.data})
        store_url = self._run.config.checkpoint.upload.url
        self.provenance = provenance.of(self._run.config, self.data, self._process)
        refetch = None if store_url is None else self._refetch
        return resume.open_newest(self._run, self.provenance, self._communicator, self._writing, refetch)

    def setup(self, resumption: Resumption) -> tuple[Facts, int]:
        """Build the model and give it its state; returns what the engine knows of it, and the updates made."""
        self.loader.start()  # beside the building of the model
        with heartbeat.phase("setup"):
            facts = self.engine.setup(next(iter(self.loader.steps(0))), self.scalars(0))
            return facts, resumption.load(self.engine, self.plan)

    def close(self) -> None:
        """End workers, and let go of memory and processes."""
        self.loader.close()
        if self.held_out is not None:
            self.held_out.close()
        self.engine.close()

    def _refetch(self, path: Path) -> tuple[Path | None, str]:
        """Fetch a damaged checkpoint again; the store is opened only where one is damaged."""
        store = store_of(self._run.config)
        assert store is not None
        return restore.again(store, path)


def held_out_of(task: Task, config: RunConfig, process: ProcessInfo, split: Split) -> HeldOut | None:
    """The task's held-out rows, if it has any."""
    set_up(task)
    source = task.held_out()
    if source is None:
        return None
    return HeldOut(task, source, config, process, split.micro_batch, split.global_batch)


def rows_of(batches: Sequence[MicroBatch], communicator: Communicator) -> list[int]:
    """The source rows of a step, of all processes in the order of the global batch; collective."""
    own = [row for micro in batches if not micro.idle for row in micro.rows.tolist()]
    return [row for rows in communicator.gather(own, "the rows of an update left out") for row in rows]
