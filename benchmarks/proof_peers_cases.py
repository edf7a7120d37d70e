"""What TrainParity is given for `proof_peers.py`: its three checks, each with the code or the runs that have a fault.

It starts no runs of several processes. Its resume check is given the recorded runs of two processes, through commands
that hand them over; its accumulation check makes its own update, on one process, with the loss and the optimizer that
have the fault; its audit of sample ids is given what each rank consumed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from tests.proofs.zoo import faults, making, state_faults, zoo
from tests.proofs.zoo.making import TASKS, Fault
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.loader import Loader
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.optim import optimizers
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.task import Context

ROOT = Path(__file__).parents[1]
RUN = "PROOF_PEERS_RUN"  # name of the run in `zoo.RUNS`, for the processes that TrainParity starts
PARTS = 4  # micro-batches that its accumulation check splits a batch into


@dataclass(frozen=True)
class Outcome:
    """What one check says of one run.

    Attributes:
        outcome: PASS, FAIL, ABSTAIN or ERROR.
        first: what it points at first, e.g. `cross_rank_overlap`.
    """

    outcome: str
    first: str = ""


# resume -----------------------------------------------------------------------------------------------------------


class Resume:
    """A run on two processes, whole, whole once more, and interrupted and resumed, as they were recorded."""

    name = "resume"
    split_step = 1
    total_step = 3

    def command(self, plan: Any) -> Sequence[str]:
        copy = "import os, pathlib, sys; pathlib.Path(sys.argv[2]).write_text(os.environ[sys.argv[1]])"
        return [sys.executable, "-c", copy, plan.phase, str(self.checkpoint_path(plan.run_dir))]

    def checkpoint_path(self, run_dir: Path) -> Path:
        return run_dir / "trace.txt"

    def observe_checkpoint(self, path: Path) -> Mapping[str, object]:
        trace = Trace(Path(path.read_text(encoding="utf-8")))
        steps = trace.facts.steps
        data = {"rows": [step.by_rank for step in steps], "learning_rate": [step.lr for step in steps]}
        return {**_end_of(trace), "data": data}


def resumed(name: str, roots: Mapping[str, Path]) -> Outcome:
    """The resume check of one run."""
    from trainparity import check_resume

    folders = {mode: str(trace_folder(root, name)) for mode, root in roots.items()}
    phases = {
        "baseline_a": folders["whole"],
        "baseline_b": folders["whole-again"],
        "candidate_split": folders["resumed"],
        "candidate_resume": folders["resumed"],
    }
    result = check_resume(f"{__name__}:{Resume.__name__}", cwd=ROOT, environment=phases)
    pointed = result.primary_difference.path if result.primary_difference else result.message
    return _outcome(result.outcome, pointed)


def across(mine: Trace, reference: Trace) -> Outcome:
    """What its resume check would find between the ends of two runs, which need not have the same layout.

    Its docs do not offer this, but its interface would take it: the commands of a case may start anything.
    """
    from trainparity import ToleranceComparison
    from trainparity.snapshot import Snapshot
    from trainparity.state import FullValueBackend

    def snapshot(trace: Trace) -> Any:
        steps = trace.facts.steps
        rates = [sorted({tuple(rank) for rank in step.lr}) for step in steps]
        data = {"rows": [step.rows for step in steps], "learning_rate": rates}
        return Snapshot(None, FullValueBackend().freeze({**_end_of(trace), "data": data}))

    comparison = ToleranceComparison(rtol=1e-6, atol=1e-12).compare_all(snapshot(reference), snapshot(mine))
    return Outcome("FAIL", comparison[0].path) if comparison else Outcome("PASS")


def _end_of(trace: Trace) -> dict[str, Any]:
    """What a checkpoint at the end of a run would hold."""
    names = {"buffers": "buffers", "model": "parameters", "optimizer": "optimizer state"}
    last = len(trace.facts.steps) - 1
    held = {key: trace.tensors(moment, last) for key, moment in names.items()}
    tensors = {key: {n: torch.from_numpy(v) for n, v in values.items()} for key, values in held.items()}
    return {**tensors, "error": trace.facts.fault}


# accumulation -----------------------------------------------------------------------------------------------------


class Accumulation:
    """The first global batch of a task, at once and in parts, with its fault in the loss and in the optimizer."""

    equivalence = "the loss over the counts of the whole batch, whatever the micro-batches"

    def build(self, seed: int, device: str) -> Any:
        from trainparity.protocols import TrainingState

        self.fault = zoo.RUNS[os.environ[RUN]]
        self.task = TASKS[self.fault.task]()
        self.rows = rows_of(self.fault)
        torch.manual_seed(seed)
        model = named_once(self.task.build().double().to(device))
        self.fault_context = self.fault.made()  # kept: it ends with the process
        self.fault_context.__enter__()
        return TrainingState(
            model, optimizers.build_optimizer(zoo.configured(zoo.case_of("", self.fault)).optim, model)
        )

    def batch(self, device: str) -> Any:
        return {name: value.to(device) for name, value in self.rows.items()}

    def split_batch(self, batch: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
        parts = {name: value.tensor_split(count) for name, value in batch.items()}
        result = [{name: pieces[number] for name, pieces in parts.items()} for number in range(count)]
        self.counts = _sum([self._counts(part) for part in result])
        self.size = _rows(batch)
        return result

    def loss(self, state: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        """The part of these rows in the whole loss, as a numerator over a number of rows."""
        from trainparity.protocols import LossAccounting

        context = Context(0, training=True)
        done = self.task.loss(self.task.outputs(state.model, batch, context), batch, context)
        terms = [done.weights.get(n, 1.0) * total / max(1.0, self.counts[n]) for n, total in done.sums.items()]
        share: torch.Tensor = torch.stack(terms).sum()
        return LossAccounting(share, share * self.size, _rows(batch))

    def _counts(self, batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return self.task.counts({name: value.numpy() for name, value in batch.items()})


@cache
def accumulated(name: str) -> Outcome:
    """The accumulation check of one run's task."""
    from trainparity import ToleranceComparison, check_accumulation
    from trainparity.api import AccumulationExecutionPlan

    result = check_accumulation(
        f"{__name__}:{Accumulation.__name__}",
        candidate=AccumulationExecutionPlan(PARTS),
        comparison=ToleranceComparison(rtol=1e-5, atol=1e-7),  # a cast to fp32 inside the model is not promoted here
        cwd=ROOT,
        environment={RUN: name},
    )
    return _outcome(result.outcome, result.first_observed_phase or result.message)


def is_reached(name: str) -> bool:
    """Whether the accumulation check runs code that a fault changes; where that cannot be seen, it may."""
    used: list[bool] = []
    original = making.wrapping

    def wrapping(owner: Any, attribute: str, around: Any) -> Any:
        used.append(False)

        def seen(*arguments: Any, **named: Any) -> Any:
            used.append(True)
            return around(*arguments, **named)

        return original(owner, attribute, seen)

    case = Accumulation()
    patched = (mock.patch.object(module, "wrapping", wrapping) for module in (making, faults, state_faults))
    with ExitStack() as patches:
        for patch in (*patched, mock.patch.dict(os.environ, {RUN: name})):
            patches.enter_context(patch)
        try:
            state = case.build(0, "cpu")
            for part in case.split_batch(case.batch("cpu"), PARTS):
                case.loss(state, part)
        except Exception:  # TrainParity will say what it makes of it
            used.append(True)
        finally:
            case.fault_context.__exit__(None, None, None)
    return any(used) or not used


def rows_of(fault: Fault) -> dict[str, torch.Tensor]:
    """The first global batch, without the fault."""
    task = TASKS[fault.task]()
    source = task.data()
    size = zoo.PROOF.global_batch
    order = Order(len(source), zoo.configured(zoo.case_of("", fault)).run.seed)
    loader = Loader(task, source, StreamPlan(order, size, size), BatchSplit.create(size, 1, size), 0)
    try:
        arrays = next(loader.steps())[0].arrays
    finally:
        loader.close()
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def named_once(model: nn.Module) -> nn.Module:
    """The model with each parameter under one name: TrainParity abstains from a tied one, which has two."""
    model.named_parameters = (  # type: ignore[method-assign]
        lambda prefix="", recurse=True, remove_duplicate=True: nn.Module.named_parameters(model, prefix, recurse)
    )
    return model


# sample ids -------------------------------------------------------------------------------------------------------


def audited(mine: Trace, reference: Trace, size: int) -> Outcome:
    """The audits of sample ids: every row that one process consumed exactly once, and no row on two ranks.

    An id is a row in an epoch, by its place in the run, since a row comes again in the next epoch.

    Args:
        mine: of several processes.
        reference: of one.
        size: rows of an epoch.
    """
    from trainparity.api import ExactlyOnce, NoCrossRankOverlap, SampleObservation, audit_sample_coverage

    seen = [SampleObservation(name, rank, 0, position) for position, (rank, name) in enumerate(ids(mine, size))]
    expected = [name for _, name in ids(reference, size)]
    for policy in (NoCrossRankOverlap(), ExactlyOnce(expected)):
        result = audit_sample_coverage(seen, policy)
        if str(result.outcome) != "PASS":
            return _outcome(result.outcome, result.first_violation.kind if result.first_violation else result.message)
    return Outcome("PASS")


def ids(trace: Trace, size: int) -> list[tuple[int, str]]:
    """Rank and id of every row that was consumed."""
    result = []
    for number, step in enumerate(trace.facts.steps):
        consumed = [(rank, row) for rank, rows in enumerate(step.by_rank) for row in rows]
        first = number * zoo.PROOF.global_batch
        result += [(rank, f"{(first + position) // size}:{row}") for position, (rank, row) in enumerate(consumed)]
    return result


def _outcome(outcome: Any, first: str) -> Outcome:
    return Outcome(str(outcome), "" if str(outcome) == "PASS" else first)


def _rows(batch: Mapping[str, torch.Tensor]) -> int:
    return len(next(iter(batch.values())))


def _sum(counts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}
