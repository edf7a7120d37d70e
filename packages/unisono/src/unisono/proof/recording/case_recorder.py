"""Runs a case with the engine of its task, and leaves a trace of it."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.checkpoint.core import commit, placement
from unisono.config.batch_split import BatchSplit, rows_of_sources
from unisono.config.schema.run import RunConfig
from unisono.data.loading.draws import restore_global_generators
from unisono.data.loading.loader import Loader
from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.plan import Plan, StreamPlan, rows_of_micro_batches
from unisono.data.order.planning import build_plan, build_source
from unisono.engines import create_engine
from unisono.engines.protocol import EngineJob
from unisono.evaluation.held_out import HeldOut
from unisono.optim import schedules
from unisono.optim.groups import given_moments
from unisono.proof import engines
from unisono.proof.cases import MAX_PARAMETERS, Case, ProofSettings
from unisono.proof.probes import task_probes
from unisono.proof.probes.build_probe import find_overlapping, probe_build
from unisono.proof.probes.evaluation_probe import find_kept_number, read_numbers
from unisono.proof.probes.late_probe import LATER, probe_late, probe_later
from unisono.proof.probes.model_probe import probe_model
from unisono.proof.probes.pass_probe import PassProbe, changed_parameters, digest_parameters
from unisono.proof.probes.sample_probe import digest_samples
from unisono.proof.probes.state import describe_state, restore_state
from unisono.proof.probes.trial import Trial
from unisono.proof.probes.update_probe import probe_update
from unisono.proof.recording.optimizer_settings import read_settings
from unisono.proof.recording.recorder import Recorder, content_digest
from unisono.proof.recording.trace import (
    INITIAL_BUFFERS,
    RunFacts,
    StepFacts,
    Trace,
    is_recorded,
    read_tensors,
    trace_folder,
    write_facts,
)
from unisono.proof.user_errors import find_functions
from unisono.protocols import resolve_features
from unisono.runtime.code.user_code import format_user_error
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.console import say
from unisono.runtime.errors import CheckpointError, ConfigError, GuardError, NonFiniteError, RunError, UnisonoError
from unisono.task import Task
from unisono.training.callbacks.build import name_user_callbacks
from unisono.training.parts import build_held_out

if TYPE_CHECKING:
    from unisono.proof.recording.lower_precision import LowerPrecision

_LATER_SECONDS = 1.0  # of the processor, after which no more steps are tried that no run reaches
_OTHER_WEIGHTS = 1e-2  # relative, of what an evaluation of other weights may leave


def record_case(
    task: Task,
    config: RunConfig,
    process: ProcessInfo,
    communicator: Communicator,
    case: Case,
    proof: ProofSettings,
    root: Path,
    cases_left: int = 1,
) -> None:
    """Run a case and write its trace; an error of the run is part of it.

    Args:
        task: what is proved.
        config: concrete, with the layout of the case.
        process: this one.
        communicator: of all processes.
        case: to run.
        proof: its settings.
        root: a folder per case lies in it.
        cases_left: of the proof, this one too: the disk has to have room for them all.
    """
    folder = trace_folder(root, case.name)
    if process.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    communicator.barrier("the folder of a trace")
    facts, began = RunFacts(), time.perf_counter()
    try:
        run = _CaseRun(task, config, process, communicator, case, proof, root, cases_left)
        with _attention_kernel(case.attention), closing(run):
            run.run(facts)
    except Exception as error:
        # Every rank raises guards, numbers that are not finite, and what is refused before the first step; anything
        # else may be one rank's alone, and only a single process can continue after it.
        refused = isinstance(error, UnisonoError) and not (facts.trainable or facts.frozen)
        agreed = isinstance(error, GuardError | NonFiniteError) or getattr(error, "agreed", False)
        text = format_user_error(error)
        if process.world_size > 1 and not (refused or agreed):
            if text:
                raise RunError(f"rank {process.rank}: {text}") from error
            raise
        facts.fault, facts.user_error = f"{type(error).__name__}: {error}", text
        facts.called = getattr(error, "fault", "")
    facts.seconds = time.perf_counter() - began
    if process.is_first:
        write_facts(folder, facts)
    communicator.barrier("a trace")


class _CaseRun:
    """One case on one process, from its first step to its evaluation."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        process: ProcessInfo,
        communicator: Communicator,
        case: Case,
        proof: ProofSettings,
        root: Path,
        cases_left: int,
    ) -> None:
        self.cases_left = cases_left
        self.task, self.config, self.process, self.communicator = task, config, process, communicator
        self.case, self.proof, self.root = case, proof, root
        self.fresh = copy.copy(task)
        self.folder = trace_folder(root, case.name)
        short = {"global_batch": proof.global_batch, "steps": proof.steps, "epochs": None}
        proved = config.model_copy(update={"train": config.train.model_copy(update=short)})
        self.source = build_source(task, proved, process.world_size)
        plan = build_plan(task, self.source, proved, process.world_size)
        self.plan: Plan = replace(plan, length=proof.rows) if isinstance(plan, StreamPlan) else plan
        whole = config.train.steps or build_plan(task, self.source, config, world_size=1).steps
        self.scalars = schedules.ScheduledScalars(config, max(self.plan.steps, whole))
        self.split = BatchSplit.create(
            proof.global_batch, process.world_size, case.micro_batch, config.layout.devices_each,
            rows_of_sources(config, proof.global_batch),
        )  # fmt: skip
        # Which rows a process has, by the number of the rank that usually has them.
        last = process.world_size - 1
        self.rows_of_rank = replace(process, rank=last - process.rank) if case.reversed else process
        self.held_out = build_held_out(task, config, self.rows_of_rank, self.split)
        self.first_samples: list[str] | None = None
        self.mask = config.data.on_error == "mask"
        # What comes first in the run, whichever rank has it, so that all make the same.
        _, first, _ = next(rows_of_micro_batches(self.plan, self.split, 0, rank=0))
        self.first_rows = self.plan.samples(0, first)
        self.digests = digest_samples(task, self.source, self.plan.seed, self.first_rows, self.mask)
        self.lower: LowerPrecision | None = None
        self.steps: list[StepFacts] = []

    def open(self, facts: RunFacts) -> None:
        """Create engine and loader."""
        self.loader = Loader.from_config(self.task, self.source, self.plan, self.split, self.rows_of_rank, self.config)
        job = EngineJob(
            self.task,
            self.config,
            self.process,
            self.communicator,
            self.split,
            self.rows_of_rank.rank,
            check_updates=False,
        )
        self.engine = create_engine(job)
        first = next(iter(self.loader.steps()))
        samples = [content_digest(micro) for micro in first]
        if self.first_samples not in (None, samples):
            facts.unrepeatable = "the first rows came out otherwise when they were read again"
        self.first_samples = samples
        known = self.engine.setup(first, self.scalars(0))
        if given := given_moments(self.config.optim):
            self.engine.load_moments(given)
        facts.kernels, facts.devices = dict(known.kernels), known.devices
        if not self.case.reference:
            facts.callbacks, facts.places = name_user_callbacks(self.config, self.task), find_functions(type(self.task))
        view = self.engine.view
        if not self.case.reference and self.config.layout.engine == "torch":  # JAX's refuses fewer bits by itself
            from unisono.proof.recording.lower_precision import LowerPrecision

            self.lower = LowerPrecision(
                view.module, self.case.precision, self.config.run.seed, perturbing=self.case.perturbed > 0
            )
            self.engine.observe(self.lower)
        case = self.case
        of_terms = self.process.world_size == 1 and case.precision == "fp64" and not (case.perturbed or case.starts)
        finished = case.reference and is_recorded(self.root, case.reference)
        reference = trace_folder(self.root, case.reference) if finished else None
        self.recorder = Recorder(view, self.communicator, self.folder, of_terms, reference)
        self.recorder.steps = self.steps
        self.engine.observe(self.recorder)
        if self.process.world_size == 1 and not (case.perturbed or case.starts):  # those have the same model
            with restore_state(self.task, getattr(view, "module", None)):
                self._probe(first[0], facts, of_terms)

    def _probe(self, micro: MicroBatch, facts: RunFacts, of_terms: bool) -> None:
        """Try the model, and in the run that all others are compared with the task's functions."""
        view, on_cpu = self.engine.view, self.config.layout.device == "cpu"
        trial = Trial(view, self.task, micro, self.scalars(0), 1e-9 if self.case.precision == "fp64" else 1e-3)
        before = digest_parameters(view) if of_terms else {}
        probe_model(facts, trial)
        if not self.case.reference:
            facts.accepted = list(self.proof.accept)
            if self.config.layout.sync_batch_norm:  # then these cases are compared with the whole global batch
                facts.normalised = ""
        if not on_cpu:  # an accelerator's kernels may add as they like
            facts.unstable_forward = ""
        if of_terms and not facts.changed_by_passes:
            facts.changed_by_passes = changed_parameters(view, before)
        if of_terms and not (self.case.reference or facts.probed):
            if self.config.layout.engine == "torch":
                probe_build(facts, view, self.task, self.config.run.seed)
            if on_cpu:
                self.engine.observe(PassProbe(view, self.task, facts))
            task_probes.probe_task(facts, trial, self.fresh, self.source, self.plan, self.held_out, self.mask)

    def close(self) -> None:
        """Release both."""
        if hasattr(self, "loader"):
            self.loader.close()
        if self.held_out is not None:
            self.held_out.close()
        if hasattr(self, "engine"):
            self.engine.close()

    def run(self, facts: RunFacts) -> None:
        """Every step, with its interruptions; then the evaluation."""
        case, communicator = self.case, self.communicator
        facts.steps = self.steps
        self.open(facts)
        self._check_room()
        view = self.engine.view
        if case.weights_from:
            from unisono.engines.jax.view import JaxModelView

            assert isinstance(view, JaxModelView)
            view.replace(engines.weights(self.root, case, self.config.recipe))
        if case.perturbed:
            view.perturb(case.perturbed)
        self.recorder.write(INITIAL_BUFFERS, None, view.whole("buffers"))
        self.recorder.write("initial parameters", None, view.whole("parameters"))
        facts.initial_buffers = view.find_differing_buffers()
        if self.config.layout.engine == "torch":
            from unisono.engines.torch.engine import TorchEngine

            assert isinstance(self.engine, TorchEngine)
            facts.overlapping = find_overlapping(view.module)
            facts.settings = read_settings(self.engine.train_state.optimizer)
        facts.crosses = resolve_features(self.task).cross_sample or ""
        facts.sharded = self.config.layout.strategy in ("fsdp", "hsdp")
        facts.trainable, facts.frozen, facts.per_process = view.trainable, view.frozen, view.local_buffers
        first = case.starts_after
        if case.starts_from:
            self._load(case.starts_from, first)
            self.steps += [StepFacts([], [], 0.0, {}, None, [], [])] * first
        batches = self.loader.steps(first)
        for step in range(first, self.plan.steps):
            micro_batches = next(batches)
            if step and case.perturbed_steps:
                view.perturb(case.perturbed, step)
            if step == 0 and [content_digest(micro) for micro in micro_batches] != self.first_samples:
                facts.unrepeatable = "the first rows came out otherwise when they were read again"
            self.engine.step(micro_batches, step, self.scalars(step))
            updates = step + 1
            if updates in (*case.saves, *case.interrupted):
                self._save(updates)
            if updates in case.interrupted:
                self.close()
                self.open(facts)
                self._load(case.name, updates)
                batches = self.loader.steps(updates)
        count = len(self.source) if hasattr(self.source, "__len__") else -1
        facts.source_rows = [rows for rows in communicator.gather(count, "the rows of the data") if rows >= 0]
        facts.first_samples = communicator.gather(self.digests, "digests of the first samples")
        drew = self.engine.random or self.engine.view.draws_backward
        facts.random = any(communicator.gather(drew, "whether random numbers were drawn"))
        reasons = communicator.gather(facts.unrepeatable, "whether the data can be read again")
        facts.unrepeatable = next(filter(None, reasons), "")
        if self.lower is not None:
            facts.lower = [f"{name}: {dtype}" for name, dtype in self.lower.found.items()]
            facts.attention = self.lower.attention
        if self.held_out is not None:
            self._evaluate(self.held_out, facts)
        if case.repeats_update:
            self._update_as_reference()
        elif facts.probed and self.config.layout.engine == "torch":
            self._probe_last_step(micro_batches[0], facts)
            if 1 in case.saves:
                self._probe_update(facts)

    def _check_room(self) -> None:
        """Refuse a model whose traces the disk has no room for, on all ranks, before the first is written."""
        case, count, averages = self.case, self.engine.view.size, self.config.ema.decay is not None
        copies = (6 + averages) * self.proof.steps  # of a trace
        copies += (3 + averages) * len({*case.saves, *case.interrupted})  # and of its checkpoints
        needed, free = 8 * count * copies * self.cases_left, shutil.disk_usage(self.root).free
        alone = self.process.is_first and not (case.reference or case.perturbed)
        if alone and self.proof.shrink == "auto" and count > MAX_PARAMETERS:
            say(
                f"a model with {count:,} parameters is proved as it is, slowly and on {needed / 1e9:.0f} GB of disk: "
                "with Task.shrink a smaller copy would be (docs/tasks.md)",
                error=True,
            )
        if any(self.communicator.gather(needed > free, "whether there is room for the traces")):
            raise ConfigError(
                f"proving a model with {count:,} parameters needs about {needed / 1e9:.1f} GB in {self.root} for "
                f"{self.cases_left} cases, which has {free / 1e9:.1f} GB free; prove a smaller model "
                "(overrides, or Task.shrink), or set TMPDIR"
            )

    def _save(self, updates: int) -> None:
        """Save a checkpoint after so many updates."""
        snapshot = commit.Snapshot(updates, self.engine.state(), {"step": updates})
        commit.save_checkpoint(self.folder / placement.NAME, snapshot, self.communicator, keep=self.plan.steps)

    def _load(self, case: str, updates: int) -> None:
        """Load the checkpoint that a case has saved after so many updates."""
        saved = commit.find_checkpoints(trace_folder(self.root, case) / placement.NAME)
        checkpoint = commit.open_checkpoint(next(path for path in saved if commit.read_manifest(path).step == updates))
        self.engine.load(checkpoint.reader())

    def _evaluate(self, held_out: HeldOut, facts: RunFacts) -> None:
        engine, steps = self.engine, self.plan.steps
        before = engine.view.digests()
        # What repeats in the run that they equal repeats in them.
        again = self.case.evaluates_again and not (self.case.bitwise or self.case.starts)

        def evaluate() -> dict[str, float]:
            return held_out.evaluate(engine, steps, self.scalars(steps - 1))

        numbers = read_numbers(self.task)
        values = [evaluate() for _ in range(1 + again)]
        digests = {
            str(micro.rows.tolist()): content_digest(micro)
            for batches in held_out.batches()
            for micro in batches
            if not micro.idle
        }
        left = [what for what, value in engine.view.digests().items() if value != before[what]]
        everyone = self.communicator.gather([values, left, digests], "the evaluation of all ranks")
        facts.evaluation, facts.evaluation_again = [e[0][0] for e in everyone], [e[0][1] for e in everyone if again]
        facts.evaluation_left = sorted({what for e in everyone for what in e[1]})
        if again and values[0] != values[1] and self.process.world_size == 1:
            module = getattr(engine.view, "module", None)
            facts.unstable_evaluation = describe_state(self.task, evaluate, {}, seeded=(), model=module)
        elif again and not self.case.reference:

            def evaluate_others(number: int) -> None:
                if number == 0 and steps not in (*self.case.saves, *self.case.interrupted):
                    self._save(steps)
                engine.view.perturb(_OTHER_WEIGHTS, number)
                try:
                    evaluate()
                finally:
                    self._load(self.case.name, steps)

            names, other = find_kept_number(self.task, evaluate, evaluate_others, numbers, values[0])
            if names:
                facts.evaluation_again = [other]
                facts.unstable_evaluation = (
                    f"it reads {names}, which no checkpoint has: after an evaluation of other weights it comes to "
                    "something else"
                )
        facts.held_out = {rows: digest for e in everyone for rows, digest in e[2].items()}

    def _update_as_reference(self) -> None:
        """The reference's second update, from its state and its gradients: what is left is the optimizer alone."""
        reference = self.case.reference
        gradients = Trace(trace_folder(self.root, reference)).tensors("clipped gradients", 1)
        try:
            self._load(reference, 1)
            fits = True
        except CheckpointError:  # another model, which its initial parameters have shown already
            fits = False
        if all(self.communicator.gather(fits, "whether the reference's state fits")):
            view = self.engine.view
            view.update_from(gradients, 1, self.scalars(1))
            self.recorder.write("update", 1, view.whole("parameters") | view.whole("optimizer state"))

    def _probe_last_step(self, micro: MicroBatch, facts: RunFacts) -> None:
        """Try the model in the last step, and in later ones, where states of rows do not stand in the way."""
        from unisono.engines.torch.view import TorchModelView

        view, step = self.engine.view, self.plan.steps - 1
        if self.plan.capacity is not None or resolve_features(self.task).recurrent is not None or not step:
            return
        assert isinstance(view, TorchModelView)

        def try_step(probe: Callable[[RunFacts, Trial, int], None], number: int) -> None:
            view.step = number - 1
            trial = Trial(view, self.task, micro, self.scalars(step), 1e-9)
            task_probes.try_probe(lambda: probe(facts, trial, number), f"step {number}")

        with restore_state(self.task, view.module):
            try_step(probe_late, step + 1)
        with restore_state(self.task, view.module):
            began = time.process_time()
            for later in LATER:
                if time.process_time() - began < _LATER_SECONDS:
                    try_step(probe_later, later)
        view.step = 0

    def _probe_update(self, facts: RunFacts) -> None:
        """Make the second update again, to see what decides it beside gradients and state."""
        from unisono.engines.torch.engine import TorchEngine

        assert isinstance(self.engine, TorchEngine)
        view, optimizer = self.engine.view, self.engine.train_state.optimizer
        gradients = read_tensors(self.folder, "clipped gradients", 1)
        with restore_global_generators(), view.without_side_effects():
            load = partial(self._load, self.case.name, 1)
            update = partial(view.update_from, step=1, scalars=self.scalars(1))
            probe_update(facts, view, optimizer, gradients, load, update)


@contextmanager
def _attention_kernel(name: str) -> Iterator[None]:
    """Attention by one of torch's kernels only, or as torch chooses."""
    if not name:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.__members__[name]):
        yield
