"""Runs a case with the engine, and writes down everything that layouts have to agree on."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unisono.checkpoint.core import commit
from unisono.config.batch_split import Split
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import Loader, MicroBatch
from unisono.data.order.plan import Plan, StreamPlan
from unisono.data.order.planning import plan_of, source_of
from unisono.engines.protocol import StepResult
from unisono.engines.torch import sharded_tensors
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.recurrent_state import Carry
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.transfer import leaves
from unisono.evaluation.held_out import HeldOut
from unisono.optim import schedules
from unisono.proof.cases import Case, Proof
from unisono.proof.recording.lower_precision import Lower
from unisono.proof.recording.output_digest import Sketch, Watched, distance, row_differs, sketch
from unisono.proof.recording.output_digest import tensors as tensors_of
from unisono.proof.recording.trace import Array, Facts, StepFacts, Trace, folder_of, write_facts, write_tensors
from unisono.protocols import cross_sample
from unisono.runtime import rng
from unisono.runtime.communicator import Group, Place
from unisono.runtime.errors import CheckpointError, ConfigError, GuardError, NonFiniteError, UnisonoError
from unisono.task import Batch, Context, Task
from unisono.training import loop


class RecordingEngine(TorchEngine):
    """The engine, with a look at its tensors where a step begins, before it clips, and after its update.

    It goes on where the engine's own guards would stop it: what they would notice is written down, and compared.
    """

    folder: Path
    clean = True
    differing: list[str]
    lower: Lower | None = None
    _raw: dict[str, Array]

    def watch(self, case: Case) -> Watched:
        """From now on, keep sketches of what the model returns; of a reference, find what it lowers inside."""
        if not case.reference:
            self.lower = Lower(self._step.model, case.precision, self._config.run.seed, case.perturbed > 0)
        watched = Watched(self._task)
        self._step.task = watched  # type: ignore[assignment]
        return watched

    def look(self, micro: MicroBatch, scalars: Mapping[str, float]) -> tuple[str, bool]:
        """Make a forward pass twice, and once for each of the first rows with copies of it in place of the others.

        Returns:
            Why the pass cannot be repeated, empty if it can; and whether a row depends on those beside it.
        """
        count = micro.size

        def made(arrays: Batch) -> Any:
            self._randomness.begin("look", micro.number)
            batch = self._transfer.now(arrays)
            _, context = self._here(micro, Context(0, training=True, scalars=scalars), batch)
            with precision.casting(self._precision, self._device):
                return self._task.outputs(self._step.model, batch, context)

        def copies(row: int) -> Batch:
            return {n: a[[row] * count] if _by_row(a, count) else a for n, a in micro.arrays.items()}

        with self._buffers.restored(), self._randomness.kept(), precision.promoting(self._precision), torch.no_grad():
            once, again = made(micro.arrays), made(micro.arrays)
            alike = [(row, made(copies(row))) for row in range(min(count, 4)) if count > 1]
        floor = 1e-9 if self._precision == "fp64" else 1e-3
        size, name = distance(*({n: sketch(t) for n, t in tensors_of(outputs)} for outputs in (once, again)))
        why = f"the same weights, rows and seeds gave another {name} in a second forward pass" if size > floor else ""
        return why, any(row_differs(once, others, row, count, floor) for row, others in alike)

    def update_from(self, given: Mapping[str, Array], step: int, scalars: Mapping[str, float]) -> None:
        """Make one update from whole gradients, and write what it made."""
        for name, parameter in self._step.model.named_parameters():
            parameter.grad = None
            if name in given:
                whole = torch.from_numpy(given[name])  # in a trace, complex numbers are pairs of real ones
                whole = torch.view_as_complex(whole) if parameter.is_complex() else whole
                whole = whole.to(parameter.dtype).reshape(parameter.shape)
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                else:
                    parameter.grad = whole.to(parameter.device)
        super()._update(step, scalars)
        state = sharded_tensors.of_optimizer(self._step.model, self._optimizer)
        self._write("update", step, self._whole({**dict(self._step.model.named_parameters()), **state}))

    def _accumulate(self, *arguments: Any) -> Any:
        self.clean = all(parameter.grad is None for parameter in self._step.model.parameters())
        with self.lower or nullcontext():
            sums = super()._accumulate(*arguments)
        self._raw = self._whole(self._gradients_by_name())
        return sums

    def _update(self, step: int, scalars: Mapping[str, float]) -> None:
        clipped = self._whole(self._gradients_by_name())
        # FSDP has zeros where no process had a gradient; the engine has taken them away by now.
        self._write("raw gradients", step, {name: value for name, value in self._raw.items() if name in clipped})
        self._write("clipped gradients", step, clipped)
        self._steps_made += 1  # the first step would be guarded whatever the settings say
        super()._update(step, scalars)
        parameters = dict(self._step.model.named_parameters())
        what = "the digests of parameters"
        alike = wrap.replicas(self._layout, self._place.world_size)
        self.differing = replicas.replicas_that_differ(self.group, parameters | self._average.named, alike, what)
        self._write(
            "optimizer state", step, self._whole(sharded_tensors.of_optimizer(self._step.model, self._optimizer))
        )
        self._write("parameters", step, self._whole(parameters))
        self._write("buffers", step, self._whole(dict(self._step.model.named_buffers())))
        if self._average.tensors:
            self._write("EMA", step, self._whole(self._average.tensors))

    def _gradients_by_name(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._step.model.named_parameters() if p.grad is not None}

    def _whole(self, values: Mapping[str, Tensor]) -> dict[str, Array]:
        """Gather whole tensors, which is collective; rank 0 gets them, and the others none."""
        whole = {name: sharded_tensors.whole(value, keep=self._place.is_first) for name, value in values.items()}
        return {name: value for name, value in whole.items() if value is not None}

    def _write(self, moment: str, step: int | None, values: Mapping[str, Array]) -> None:
        if self._place.is_first:
            write_tensors(self.folder, moment, step, values)

    def start(self, perturbed: float) -> Facts:
        """Write the initial parameters, changed a little where that is asked for."""
        model = self._step.model
        if perturbed:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    generator = rng.generator(self._config.run.seed, "perturb", name)
                    change = torch.from_numpy(generator.uniform(-perturbed, perturbed, parameter.shape)).to(parameter)
                    parameter.mul_(1 + change)
        self._write("initial parameters", None, self._whole(dict(model.named_parameters())))
        parameters = dict(model.named_parameters())
        return Facts(
            trainable=[name for name, parameter in parameters.items() if parameter.requires_grad],
            frozen=[name for name, parameter in parameters.items() if not parameter.requires_grad],
            per_process=sorted(self._buffers.local),
        )

    def learning_rates(self) -> list[float]:
        """Of every group, as the optimizer has them."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def what_evaluation_could_change(self) -> dict[str, Any]:
        """Mode of every module, and digests of tensors and of the random state."""
        model = self._step.model
        named = [*model.named_parameters(), *model.named_buffers(), *self._average.tensors.items()]
        return {
            "training mode": [module.training for module in model.modules()],
            "parameters and buffers": [replicas.digest(value) for _, value in named],
            "random state": [replicas.digest(state) for state in self._randomness.state()],
        }


def record(task: Task, config: RunConfig, place: Place, group: Group, case: Case, proof: Proof, root: Path) -> None:
    """Run a case and write its trace; an error of the run is part of it.

    Args:
        task: what is proved.
        config: concrete, with the layout of the case.
        place: of this process.
        group: all processes.
        case: to run.
        proof: its settings.
        root: a folder per case lies in it.
    """
    folder = folder_of(root, case.name)
    if place.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    group.barrier("the folder of a trace")
    facts = Facts()
    try:
        run = _Run(task, config, place, group, case, proof, root)
        with _kernel(case.attention), closing(run):
            run.make(facts)
    except Exception as error:
        # Every rank raises guards, numbers that are not finite, and what is refused before the first step; anything
        # else may be one rank's alone, and only a single process can go on after it.
        refused = isinstance(error, UnisonoError) and not (facts.trainable or facts.frozen)
        told = isinstance(error, GuardError | NonFiniteError) or getattr(error, "agreed", False)
        if place.world_size > 1 and not (refused or told):
            raise
        facts.fault = f"{type(error).__name__}: {error}"
        facts.called = getattr(error, "fault", "")
    if place.is_first:
        write_facts(folder, facts)
    group.barrier("a trace")


class _Run:
    """One case on one process, from its first step to its evaluation."""

    def __init__(
        self, task: Task, config: RunConfig, place: Place, group: Group, case: Case, proof: Proof, root: Path
    ) -> None:
        self.task, self.config, self.place, self.group = task, config, place, group
        self.case, self.proof, self.root = case, proof, root
        short = {"global_batch": proof.global_batch, "steps": proof.steps, "epochs": None}
        proved = config.model_copy(update={"train": config.train.model_copy(update=short)})
        self.source = source_of(task, proved, place.world_size)
        plan = plan_of(task, self.source, proved, place.world_size)
        self.plan: Plan = replace(plan, length=proof.rows) if isinstance(plan, StreamPlan) else plan
        whole = config.train.steps or plan_of(task, self.source, config, world_size=1).steps
        self.scalars = schedules.Scalars(config, max(self.plan.steps, whole))
        self.split = Split.of(proof.global_batch, place.world_size, case.micro_batch)
        # Which rows a process has, by the number of the rank that usually has them.
        self.slot = replace(place, rank=place.world_size - 1 - place.rank) if case.reversed else place
        self.held_out = loop.held_out_of(task, config, self.slot, self.split)
        self.first_samples: list[str] | None = None

    def open(self, facts: Facts) -> None:
        """Make engine and loader."""
        self.loader = Loader.of(self.task, self.source, self.plan, self.split, self.slot, self.config)
        self.engine = RecordingEngine(self.task, self.config, self.place, self.group, self.split)
        self.engine._carry = Carry(self.split, self.slot.rank, self.engine._device)
        self.engine.folder = folder_of(self.root, self.case.name)
        first = next(iter(self.loader.steps()))
        samples = [_content(micro) for micro in first]
        if self.first_samples not in (None, samples):
            facts.unrepeatable = "the first rows came out otherwise when they were read again"
        self.first_samples = samples
        made = self.engine.setup(first, self.scalars(0))
        facts.kernels, facts.devices = dict(made.kernels), made.devices
        self.watched = self.engine.watch(self.case)
        if self.place.world_size == 1:
            why, facts.neighbours = self.engine.look(first[0], self.scalars(0))
            facts.unrepeatable = facts.unrepeatable or why

    def close(self) -> None:
        """Let go of both."""
        if hasattr(self, "loader"):
            self.loader.close()
        if self.held_out is not None:
            self.held_out.close()
        if hasattr(self, "engine"):
            self.engine.close()

    def make(self, facts: Facts) -> None:
        """Every step, with its interruptions; then the evaluation."""
        case, group = self.case, self.group
        self.open(facts)
        self._find_room()
        begun = self.engine.start(case.perturbed)
        facts.crosses = cross_sample(self.task) or ""
        facts.trainable, facts.frozen, facts.per_process = begun.trainable, begun.frozen, begun.per_process
        first = case.starts_after
        if case.starts_from:
            self._continue(case.starts_from, first)
            facts.steps = [StepFacts([], [], 0.0, {}, None, [], [])] * first
        batches = self.loader.steps(first)
        for step in range(first, self.plan.steps):
            micro_batches = next(batches)
            if step == 0 and [_content(micro) for micro in micro_batches] != self.first_samples:
                facts.unrepeatable = "the first rows came out otherwise when they were read again"
            self.watched.seen.clear()
            result = self.engine.step(micro_batches, step, self.scalars(step))
            facts.steps.append(_facts(self.engine, group, micro_batches, self.watched.seen, result))
            made = step + 1
            if made == 1 or made in self.proof.stops:
                commit.save(
                    self.engine.folder / "checkpoints", made, self.engine.state(), {"step": made}, group,
                    keep=self.plan.steps,
                )  # fmt: skip
            if made in case.interrupted:
                self.close()
                self.open(facts)
                self._continue(case.name, made)
                batches = self.loader.steps(made)
        facts.random = any(group.gather(self.engine.random, "whether random numbers were drawn"))
        told = group.gather(facts.unrepeatable, "whether the data can be read again")
        facts.unrepeatable = next(filter(None, told), "")
        if self.engine.lower:
            facts.lower = [f"{name}: {dtype}" for name, dtype in self.engine.lower.found.items()]
            facts.attention = self.engine.lower.attention
        if self.held_out is not None:
            self._evaluate(self.held_out, facts)
        resumed = case.starts_from or case.interrupted
        if case.reference and not (case.bitwise or resumed or case.other_micro_batch):
            self._update_as_reference()

    def _find_room(self) -> None:
        """Refuse a model whose traces the disk has no room for, on all ranks, before the first is written."""
        count = sum(parameter.numel() for parameter in self.engine._step.parameters())
        averages = self.config.ema.decay is not None
        copies = (6 + averages) * self.proof.steps  # of a trace
        copies += (3 + averages) * (len(self.proof.stops) + 1)  # and of its checkpoints
        needed, free = 8 * count * copies, shutil.disk_usage(self.root).free
        if any(self.group.gather(needed > free, "whether there is room for the traces")):
            raise ConfigError(
                f"a run of a model with {count:,} parameters leaves about {needed / 1e9:.1f} GB in {self.root}, which "
                f"has {free / 1e9:.1f} GB; prove a smaller model (overrides, or Task.shrunk), or set TMPDIR"
            )

    def _continue(self, name: str, made: int) -> None:
        checkpoint = commit.open_(
            next(
                path
                for path in commit.find(folder_of(self.root, name) / "checkpoints")
                if commit.read(path).step == made
            )
        )
        self.engine.load(checkpoint.reader())

    def _evaluate(self, held_out: HeldOut, facts: Facts) -> None:
        engine, steps = self.engine, self.plan.steps
        before = engine.what_evaluation_could_change()
        told = [held_out.evaluate(engine, steps, self.scalars(steps - 1)) for _ in range(2)]
        left = [what for what, value in engine.what_evaluation_could_change().items() if value != before[what]]
        everyone = self.group.gather([*told, left], "the evaluation of all ranks")
        facts.evaluation, facts.evaluation_again = [e[0] for e in everyone], [e[1] for e in everyone]
        facts.evaluation_left = sorted({what for e in everyone for what in e[2]})

    def _update_as_reference(self) -> None:
        """The reference's second update, from its state and its gradients: what is left is the optimizer alone."""
        reference = self.case.reference
        given = Trace(folder_of(self.root, reference)).tensors("clipped gradients", 1)
        try:
            self._continue(reference, 1)
            fits = True
        except CheckpointError:  # another model, which its initial parameters have told already
            fits = False
        if all(self.group.gather(fits, "whether the reference's state fits")):
            self.engine.update_from(given, 1, self.scalars(1))


def _facts(
    engine: RecordingEngine, group: Group, batches: list[MicroBatch], seen: list[dict[str, Sketch]], result: StepResult
) -> StepFacts:
    seen = seen if len(seen) == len(batches) else [{} for _ in batches]  # blocks can be computed again
    own = [
        [micro.number, micro.rows.tolist(), _content(micro), sketches]
        for micro, sketches in zip(batches, seen, strict=True)
        if not micro.idle
    ]
    mine = [own, engine.learning_rates(), dict(result.metrics), engine.clean]
    everyone = group.gather(mine, "the facts of a step")
    numbered = sorted((entry for rank in everyone for entry in rank[0]), key=lambda entry: entry[0])
    return StepFacts(
        rows=[row for entry in numbered for row in entry[1]],
        by_rank=[[row for entry in rank[0] for row in entry[1]] for rank in everyone],
        samples=[entry[2] for entry in numbered],
        outputs=[entry[3] for entry in numbered],
        replicas=engine.differing,
        loss=result.loss,
        terms=dict(result.terms),
        grad_norm=result.grad_norm,
        lr=[rank[1] for rank in everyone],
        metrics=[rank[2] for rank in everyone],
        clean=all(rank[3] for rank in everyone),
    )


@contextmanager
def _kernel(name: str) -> Iterator[None]:
    """Attention by one kernel only, or as torch chooses."""
    with sdpa_kernel(SDPBackend.__members__[name]) if name else nullcontext():
        yield


def _by_row(array: Any, rows: int) -> bool:
    return getattr(array, "ndim", 0) > 0 and len(array) == rows


def _content(micro: MicroBatch) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(leaves(micro.arrays)):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
