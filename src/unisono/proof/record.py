"""Runs a case with the engine, and writes down everything that layouts have to agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono import keys, trainer
from unisono.checkpoint import commit
from unisono.checkpoint.arrays import ArrayReader
from unisono.config.schema import RunConfig
from unisono.config.split import Split
from unisono.data.loader import Loader, MicroBatch
from unisono.data.order import Order, Plan
from unisono.engines.base import StepResult
from unisono.engines.torch import guards, tensors
from unisono.engines.torch.engine import TorchEngine
from unisono.errors import GuardError, NonFiniteError, UnisonoError
from unisono.place import Group, Place
from unisono.proof.cases import Case, Proof
from unisono.proof.trace import Array, Facts, StepFacts, write_facts, write_tensors
from unisono.task import Task


class RecordingEngine(TorchEngine):
    """The engine, with a look at its tensors where a step begins, before it clips, and after its update.

    It goes on where the engine's own guards would stop it: what they would notice is written down, and compared.
    """

    folder: Path
    clean = True
    differing: list[str]
    _raw: dict[str, Array]

    def _accumulate(self, *arguments: Any) -> Any:
        self.clean = all(parameter.grad is None for parameter in self._step.model.parameters())
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
        self.differing = self._replicas_that_differ()
        self._write("optimizer state", step, self._whole(tensors.of_optimizer(self._step.model, self._optimizer)))
        self._write("parameters", step, self._whole(dict(self._step.model.named_parameters())))
        self._write("buffers", step, self._whole(dict(self._step.model.named_buffers())))

    def _replicas_that_differ(self) -> list[str]:
        parameters = dict(self._step.model.named_parameters())
        everyone = self.group.gather(guards.digests(parameters), "the digests of parameters")
        return [n for n in parameters if any(len({everyone[r][n] for r in ranks}) > 1 for ranks in self._replicas())]

    def _gradients_by_name(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._step.model.named_parameters() if p.grad is not None}

    def _whole(self, values: Mapping[str, Tensor]) -> dict[str, Array]:
        """Gather whole tensors, which is collective; rank 0 gets them, and the others none."""
        whole = {name: _whole(value, keep=self._place.is_first) for name, value in values.items()}
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
                    rng = keys.generator(self._config.run.seed, "perturb", name)
                    change = torch.from_numpy(rng.uniform(-perturbed, perturbed, parameter.shape)).to(parameter)
                    parameter.mul_(1 + change)
        self._write("initial parameters", None, self._whole(dict(model.named_parameters())))
        parameters = dict(model.named_parameters())
        return Facts(
            trainable=[name for name, parameter in parameters.items() if parameter.requires_grad],
            frozen=[name for name, parameter in parameters.items() if not parameter.requires_grad],
            per_process=sorted(self._local_buffers),
        )

    def learning_rates(self) -> list[float]:
        """Of every group, as the optimizer has them."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def what_evaluation_could_change(self) -> dict[str, Any]:
        """Mode of every module, and digests of tensors and of the random state."""
        model = self._step.model
        named = [*model.named_parameters(), *model.named_buffers()]
        return {
            "training mode": [module.training for module in model.modules()],
            "parameters and buffers": [guards.digest(value) for _, value in named],
            "random state": [guards.digest(state) for state in self._randomness.state()],
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
        facts = _run(task, config, place, group, case, proof, root, facts)
    except Exception as error:
        # Every rank raises guards, numbers that are not finite, and what is refused before the first step; anything
        # else may be one rank's alone, and only a single process can go on after it.
        refused = isinstance(error, UnisonoError) and not (facts.trainable or facts.frozen)
        if place.world_size > 1 and not (refused or isinstance(error, GuardError | NonFiniteError)):
            raise
        facts.fault = f"{type(error).__name__}: {error}"
    if place.is_first:
        write_facts(folder, facts)
    group.barrier("a trace")


def folder_of(root: Path, case: str) -> Path:
    """Where the trace of a case lies."""
    return root / case.replace(" ", "_").replace(":", "-")


def _run(
    task: Task, config: RunConfig, place: Place, group: Group, case: Case, proof: Proof, root: Path, facts: Facts
) -> Facts:
    source = trainer.rows_of(task)
    order = Order(len(source), config.run.seed)
    plan = Plan(order, proof.global_batch, proof.rows)
    scalars = trainer.Scalars(config, max(plan.steps, _steps(config, order)))
    split = Split.of(proof.global_batch, place.world_size, case.micro_batch)
    held_out = trainer.held_out_of(task, config, place, split)

    def opened() -> tuple[RecordingEngine, Loader]:
        loader = Loader(
            task, source, plan, split, place.rank, workers=config.data.workers, prefetch=config.data.prefetch
        )
        engine = RecordingEngine(task, config, place, group, split)
        engine.folder = folder_of(root, case.name)
        try:
            engine.setup(next(iter(loader.steps())), scalars(0))
        except BaseException:  # what an engine changes for all of the process must not outlive it
            loader.close()
            engine.close()
            raise
        return engine, loader

    engine, loader = opened()
    try:
        begun = engine.start(case.perturbed)
        facts.trainable, facts.frozen, facts.per_process = begun.trainable, begun.frozen, begun.per_process
        first = 0
        if case.starts_from and case.starts_from != case.name:
            first = _continue(engine, folder_of(root, case.starts_from))
            facts.steps = [StepFacts([], [], 0.0, {}, None, [], [])] * first
        batches = loader.steps(first)
        for step in range(first, plan.steps):
            micro_batches = next(batches)
            result = engine.step(micro_batches, step, scalars(step))
            facts.steps.append(_facts(engine, group, micro_batches, result))
            if step == 0:
                checkpoints = engine.folder / "checkpoints"
                commit.save(checkpoints, 1, engine.state(), {"step": 1}, group, keep=1)
                if case.starts_from == case.name:
                    loader.close()
                    engine.close()
                    engine, loader = opened()
                    _continue(engine, engine.folder)
                    batches = loader.steps(1)
        facts.random = any(group.gather(engine.random, "whether random numbers were drawn"))
        if held_out is not None:
            before = engine.what_evaluation_could_change()
            told = [engine.evaluate(held_out.batches(), plan.steps, scalars(plan.steps - 1)).values for _ in range(2)]
            left = [what for what, value in engine.what_evaluation_could_change().items() if value != before[what]]
            everyone = group.gather([*told, left], "the evaluation of all ranks")
            facts.evaluation, facts.evaluation_again = [e[0] for e in everyone], [e[1] for e in everyone]
            facts.evaluation_left = sorted({what for e in everyone for what in e[2]})
        return facts
    finally:
        loader.close()
        engine.close()


def _steps(config: RunConfig, order: Order) -> int:
    return Plan.of(order, config.train.global_batch, config.train.steps, config.train.epochs).steps


def _continue(engine: RecordingEngine, folder: Path) -> int:
    (newest,) = commit.find(folder / "checkpoints")
    checkpoint = commit.open_(newest)
    engine.load(ArrayReader(checkpoint.path, checkpoint.arrays))
    return checkpoint.step


def _facts(engine: RecordingEngine, group: Group, batches: list[MicroBatch], result: StepResult) -> StepFacts:
    own = [[micro.number, micro.rows.tolist(), _content(micro)] for micro in batches if not micro.idle]
    mine = [own, engine.learning_rates(), dict(result.metrics), engine.clean]
    everyone = group.gather(mine, "the facts of a step")
    numbered = sorted(entry for rank in everyone for entry in rank[0])
    return StepFacts(
        rows=[row for _, rows, _ in numbered for row in rows],
        by_rank=[[row for _, rows, _ in rank[0] for row in rows] for rank in everyone],
        samples=[content for _, _, content in numbered],
        replicas=engine.differing,
        loss=result.loss,
        terms=dict(result.terms),
        grad_norm=result.grad_norm,
        lr=[rank[1] for rank in everyone],
        metrics=[rank[2] for rank in everyone],
        clean=all(rank[3] for rank in everyone),
    )


def _content(micro: MicroBatch) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(micro.arrays.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _whole(tensor: Tensor, keep: bool) -> Array | None:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not keep:
        return None
    tensor = tensor.cpu()
    result: Array = (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()
    return np.atleast_1d(result)
