"""Checkpoints: when one is due, what it contains, and whether it succeeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unisono.checkpoint.core import placement
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.core.resume import Resumption
from unisono.checkpoint.core.resume_point import WEIGHT_PREFIXES
from unisono.checkpoint.core.saver import Saver
from unisono.checkpoint.remote.description import ASSETS
from unisono.checkpoint.remote.node_parts import StoredParts
from unisono.config.resolved_run import ResolvedRun
from unisono.data.ledger import Ledger, merge_marks
from unisono.observe import trackers
from unisono.runtime import heartbeat
from unisono.runtime.code.entry_points import require_extra
from unisono.runtime.communication.communicator import Communicator, Json
from unisono.runtime.communication.consensus import raise_everywhere
from unisono.runtime.errors import CallbackError, ConfigError, Preempted, UnisonoError
from unisono.supervise import disk_space
from unisono.supervise.step_sync import StepSync
from unisono.training.evaluation import Evaluation
from unisono.training.parts import TrainingParts


class Saving:
    """Says when checkpoints are due, and writes them in the background.

    Args:
        run: resolved.
        parts: of the run.
        communicator: of all processes.
        sync: protects the directory against a concurrent start.
        resumption: what this start resumed from.
        evaluation: provides the metrics of the saved state.
        until: updates after which this start ends.
        finished: called on every rank with the directory of every finished checkpoint.
        callbacks: the state of the user's callbacks.
        say: shows a line on the console.
    """

    def __init__(
        self,
        run: ResolvedRun,
        parts: TrainingParts,
        communicator: Communicator,
        sync: StepSync,
        resumption: Resumption,
        evaluation: Evaluation,
        until: int,
        *,
        finished: Callable[[Path], None],
        callbacks: Callable[[], dict[str, Json]],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._parts, self._communicator, self._sync = run, parts, communicator, sync
        self._resumption, self._evaluation, self._last_step, self._callbacks = resumption, evaluation, until, callbacks
        self._settings = run.config.checkpoint
        self.saver = Saver(
            placement.find_target(run.config) or run.directory / placement.NAME, communicator, self._settings,
            first=resumption.step, finished=finished,
            say=say, allowed=sync.check_lease, deadline=run.config.launch.deadlines.save,
            parts=StoredParts.of_run(run, communicator.rank),
        )  # fmt: skip

    def check_disk_space(self, parameters: int) -> None:
        """Reject on every rank a run whose checkpoints, of so many trained parameters, would not fit on the disk."""
        folder, config, first = self._run.directory, self._run.config, self._resumption.step

        def check() -> None:
            size = disk_space.newest_size(folder) or disk_space.estimate_size(config, parameters)
            disk_space.check_disk_space(
                folder, config, size, disk_space.count_checkpoints(config, first, self._parts.plan.steps)
            )

        work = check if self._communicator.rank == 0 else None
        raise_everywhere(self._communicator, work, "disk space for the checkpoints")

    def check(self, step: int) -> bool:
        """Check the save in flight; returns whether another is due after `step` updates."""
        self.saver.check()
        every, total = self._settings.every, self._parts.plan.steps
        if step == self._resumption.step + 1 and every is not None:
            self.saver.prepare(self._parts.engine.state())
        at_end = step == self._last_step and (self._last_step < total or self._settings.at_end)
        return at_end or (every is not None and step % every == 0)

    def save(self, step: int, ledger: Ledger, at_once: bool) -> None:
        """Save the state after `step` updates.

        Args:
            step: updates made.
            ledger: of this process; flushed before, and its position is saved.
            at_once: wait until it is finished, without retries, since the run must end.

        Raises:
            DataError: on every rank, if the data files that the state was trained on have changed since.
        """
        self._sync.refuse_if_lost()
        self._parts.check_files()
        ledger.flush()
        if at_once:
            self.saver.stop_retrying()
        with heartbeat.phase("save"), self._sync.saving():
            self._commit(step, ledger)
            if at_once:
                self.saver.finish()

    def check_export(self) -> None:
        """Refuse `checkpoint.final=hf` for a task that has saved no configuration of its model; collective."""
        if self._settings.final != "hf":
            return
        from unisono.checkpoint.exchange import collective_export, hf_config  # import torch, which JAX does not need

        if not (self._run.directory / ASSETS / hf_config.CONFIG).is_file():
            raise ConfigError(
                "checkpoint.final=hf: this task saves no config.json of a transformers model (save_assets), so the run "
                "could not be exported; use checkpoint.final=resumable"
            )
        require_extra("transformers", "export", "checkpoint.final=hf")
        try:
            collective_export.check_together(self._run.directory, self._parts.engine.state(), self._communicator)
        except UnisonoError as error:
            raise ConfigError(
                f"checkpoint.final=hf: {error}. With checkpoint.final=resumable, a run ends without an export"
            ) from error

    def export(self, seconds_left: float, is_leaving: bool) -> str | None:
        """Export the newest checkpoint if the settings ask for it, all ranks together; returns what to say of it.

        Args:
            seconds_left: until the run has to be gone; it is not exported if saving took longer than that.
            is_leaving: whether the run is preempted: an export that fails is told then, since the run must end as one.
        """
        if self._settings.final != "hf" or not self.saver.saved:
            return None
        step = self.saver.saved
        command = f"unisono export {self._run.directory} step={step}"
        is_late = int(seconds_left < self.saver.seconds)  # each process has measured its own
        if self._communicator.reduce_max([is_late], "the time for an export")[0]:
            return f"not exported, since the run has to end: {command}"
        with heartbeat.phase("save", "the export"):
            from unisono.checkpoint.exchange import collective_export

            try:
                return collective_export.export_together(self._run.directory, step, self._communicator)
            except UnisonoError as error:
                if not is_leaving:
                    raise
                return f"not exported: {error}; later: {command}"

    def close(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the save in flight; only briefly if the run has failed."""
        failed = kind is not None and not issubclass(kind, Preempted)
        self.saver.__exit__(kind if failed else None, None, None)

    def _commit(self, step: int, ledger: Ledger) -> None:
        engine = self._parts.engine
        engine.check_replicas(step)  # a checkpoint combines pieces of replicas from different ranks
        state = self._collect_state(step, ledger)
        holds = "model" if self._settings.final == "model" and step == self._parts.plan.steps else "everything"
        shards = engine.state()
        if holds == "model":
            shards = [shard for shard in shards if shard.name.startswith(WEIGHT_PREFIXES)]
        metric = self._evaluation.values if self._evaluation.step == step else None
        self.saver.save(Snapshot(step, shards, state, self._parts.provenance, metric, holds=holds))

    def _collect_state(self, step: int, ledger: Ledger) -> dict[str, Json]:
        """What a checkpoint saves besides arrays, as JSON, on rank 0, which writes it; collective."""
        engine, plan, split, rank = self._parts.engine, self._parts.plan, self._run.split, self._communicator.rank
        ids = trackers.read_ids(self._run.directory)
        mine = [engine.random, plan.state(step, split.rows_of(rank)), ledger.mark(), ids]
        everyone, callbacks = self._communicator.gather_to_first(mine, "what every rank saves"), self._callback_state()
        if rank != 0:
            return {}
        randoms, plans, marks, ids_by_rank = zip(*everyone, strict=True)
        before = self._resumption.saved_value("ledger")
        if before:
            kept = {name: at for name, at in before["files"].items() if name not in self._resumption.missing_files}
            before = {**before, "files": kept}
        return {
            "step": step,
            "total": plan.steps,
            "random": any(randoms),
            "micro_batch": split.micro_batch,
            "plan": None if all(part is None for part in plans) else list(plans),
            "ledger": None if None in marks else merge_marks(before, marks),
            "best": self._evaluation.best.state(),
            "trackers": ids_by_rank[0],
            "callbacks": callbacks,
        }

    def _callback_state(self) -> dict[str, Json]:
        """The state of the user's callbacks, which is the same on every rank."""
        first, *others = raise_everywhere(
            self._communicator, self._callbacks, "the state of the callbacks of all ranks"
        )
        for rank, theirs in enumerate(others, start=1):
            for name in {*first, *theirs}:
                if theirs.get(name) != first.get(name):
                    raise CallbackError(
                        f"callback {name}: state() differs between rank 0 and rank {rank}, so a resumed run could "
                        "not be the same; return only what follows from values that are the same on all ranks"
                    )
        return dict(first)
