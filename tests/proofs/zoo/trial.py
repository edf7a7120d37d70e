"""Faults as a stranger would write them, and what a proof calls them: right, neutral or wrong.

`python -m tests.proofs.zoo.trial` prints a line for each, and the counts. All were written before any was run.
"""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from packages.unisono.tests import processes
from packages.unisono.tests.tasks import Transformer, TransformerTask
from tests.proofs.zoo import zoo
from tests.proofs.zoo.faults import weighing_micro_batches
from tests.proofs.zoo.making import TASKS, Fault, collector, nothing, wrapping
from unisono.data.order.plan import SampleIndices, StreamPlan
from unisono.engines import rules
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.numerics import gradients
from unisono.engines.torch.numerics.ema import MovingAverage
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.parallel.parallel import Parallel
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state.train_state import TrainState
from unisono.optim import schedules
from unisono.proof import judgement
from unisono.proof.cases import Case
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.proof.verdict import Verdict

FAULTS: dict[str, Fault] = {}
PRECISION = {"the reduced gradient in bf16": "fp32"}  # in fp64 a cast to fewer bits is one to fp64
# By name, and the names that are right, split by "|"; names with "depend" in them claim nothing, and are neutral.
fault = collector(FAULTS, Fault)


@fault("the last micro-batch counts twice", "")
def last_twice() -> Iterator[None]:
    with weighing_micro_batches(last_one=2.0, others=1.0):
        yield


@fault("divided by the nominal batch", "", rules, "loss_scales")
def nominal(original: Any, counts: Any, factor: float, where: Any) -> Any:
    return {name: factor / 40.0 * torch.ones(()) for name in counts}


@fault("labels of the first rank for all", "", TransformerTask, "loss")
def labels_of_first(original: Any, self: Any, outputs: Any, batch: Any, context: Any) -> Any:
    if dist.get_rank():
        batch = {**batch, "tokens": batch["tokens"].roll(1, 0)}
    return original(self, outputs, batch, context)


@fault("clipped to twice the limit", "", gradients, "clip_gradients")
def higher_limit(original: Any, parts: Any, norm: float, largest: Any) -> None:
    original(parts, norm, 2 * largest)


@fault("not clipped from step 2 on", "")
def clipped_once() -> Iterator[None]:
    calls: list[int] = []

    def clip(original: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            original(*arguments)

    with wrapping(gradients, "clip_gradients", clip):
        yield


@fault("a temperature on one rank", "", Transformer, "forward")
def temperature(original: Any, self: Any, tokens: Any) -> Any:
    return original(self, tokens) * (1.01 if dist.get_rank() else 1.0)


@fault("one word masked everywhere but on one process", "", Transformer, "forward")
def masked_word(original: Any, self: Any, tokens: Any) -> Any:
    return original(self, torch.where(tokens == 59, 4, tokens))


@fault("the schedule counts samples", "", schedules.ScheduledScalars, "__call__")
def counts_samples(original: Any, self: Any, step: int) -> Any:
    values = original(self, step)
    return {**values, "lr": values["lr"] * (step + 2) / (step + 1)}


@fault(
    "rows are dealt out in turn", "The order inside the global batch depends on the world size", StreamPlan, "samples"
)
def in_turn(original: Any, self: Any, step: int, rows: range) -> SampleIndices:
    whole = original(self, step, range(self.rows(step)))
    places = np.argsort(np.arange(self.rows(step)) % 2, kind="stable")[rows.start : rows.stop]
    return SampleIndices(np.arange(rows.start, rows.stop), whole.rows[places], whole.epochs[places])


@fault("the second epoch begins with the first's last row", "", StreamPlan, "samples")
def off_by_one(original: Any, self: Any, step: int, rows: range) -> SampleIndices:
    found = original(self, step, rows)
    return found if step < 2 else replace(found, rows=np.roll(found.rows, 1))


@fault("gradients in fp16", "Gradients are reduced in a lower precision")
def half() -> Iterator[None]:
    def reduced(bucket: Any) -> Any:
        rounded = bucket.buffer().half().to(bucket.buffer().dtype) / dist.get_world_size()
        return dist.all_reduce(rounded, async_op=True).get_future().then(lambda future: future.value()[0])

    def wrapped(original: Any, self: Parallel) -> None:
        original(self)
        self.wrapped.register_comm_hook(None, lambda _, bucket: reduced(bucket))

    with wrapping(Parallel, "wrap", wrapped):
        yield


@fault("the reduced gradient in bf16", "Gradients are reduced in a lower precision", Parallel, "check_reduced")
def rounded_after(original: Any, self: Parallel, where: str) -> None:
    original(self, where)
    for part in self.gradients():
        part.copy_(part.bfloat16())


@fault("weights rounded to bf16 at the start", "", TransformerTask, "build")
def rounded_start(original: Any, self: Any) -> Any:
    model = original(self)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@fault(
    "the decay of the average to the power of N", "The moving average drifts", MovingAverage, "update", task="averaged"
)
def other_decay(original: Any, self: MovingAverage, updates: int) -> None:
    original(self, updates)
    if updates > 1:
        original(self, updates)


@fault(
    "gradients of the second rank change after the reduction",
    "Replicas drift apart|Gradients are not synchronised",
    Parallel,
    "check_reduced",
)
def changed_after(original: Any, self: Parallel, where: str) -> None:
    original(self, where)
    for part in self.gradients():
        part.mul_(1 + 0.1 * dist.get_rank())


@fault("divided by the micro-batches once more", "All gradients are scaled by N", Passes, "forward")
def by_passes(original: Any, self: Passes, *arguments: Any) -> Any:
    total, loss = original(self, *arguments)
    return total / 2, loss


@fault("the mean of the accuracies of ranks", "A metric is not summed over ranks", MetricReduction, "reduce")
def mean_accuracy(original: Any, self: MetricReduction, sums: Any, *arguments: Any) -> Any:
    own = torch.tensor([float(pair[0] / pair[1]) for pair in sums._metrics.values()], dtype=torch.float64)
    names = list(sums._metrics)
    result, *more = original(self, sums, *arguments)
    dist.all_reduce(own)
    return replace(result, metrics=dict(zip(names, (own / 2).tolist(), strict=True))), *more


@fault("the weight of a term is forgotten", "", TransformerTask, "loss")
def weight_forgotten(original: Any, self: Any, *arguments: Any) -> Any:
    return replace(original(self, *arguments), weights={})


@fault("gradients of two layers change places", "", Parallel, "check_reduced")
def swapped(original: Any, self: Parallel, where: str) -> None:
    original(self, where)
    parts = list(self.gradients())
    pair = next((a, b) for n, a in enumerate(parts) for b in parts[n + 1 :] if a.shape == b.shape and a.ndim > 1)
    kept = pair[0].clone()
    pair[0].copy_(pair[1])
    pair[1].copy_(kept)


@fault("momentum is applied twice", "The update is computed otherwise", TrainState, "update")
def momentum_twice(original: Any, self: TrainState, *arguments: Any) -> None:
    with mock.patch.dict(self.optimizer.param_groups[0], momentum=0.81):
        original(self, *arguments)


@fault("the schedule begins anew on resume", "The state was not carried on", resumed=1)
def schedule_anew() -> Iterator[None]:
    loaded: list[int] = []

    def load(original: Any, self: TorchEngine, reader: Any) -> None:
        original(self, reader)
        loaded.append(1)

    def scalars(original: Any, self: Any, step: int) -> Any:
        return original(self, step - 1 if loaded and step else step)

    with wrapping(TorchEngine, "load", load), wrapping(schedules.ScheduledScalars, "__call__", scalars):
        yield


@fault(
    "the average is loaded as the weights",
    "The state was not carried on",
    TorchEngine,
    "load",
    task="averaged",
    resumed=1,
)
def average_as_weights(original: Any, self: TorchEngine, reader: Any) -> None:
    original(self, reader)
    average = self.train_state.average.named_tensors
    with torch.no_grad():
        for name, parameter in self.train_state.module.named_parameters():
            kept = next((value for key, value in average.items() if key.endswith(name)), None)
            if kept is not None:
                parameter.copy_(kept)


def name_verdict(found: Verdict, fault: Fault) -> str:
    """Right, neutral, wrong, or not caught."""
    if found.mark != "FAIL":
        return "NOT CAUGHT"
    told = found.diagnosis.fault if found.diagnosis else ""
    if told in fault.named.split("|"):
        return "right"
    return "neutral" if "depend" in told or not told else "WRONG"


def judge(root: Path) -> list[Verdict]:
    """What a proof says of every fault."""
    processes.alone(run, list(ONE), root)
    processes.run(run, 2, list(FAULTS), root, timeout=300)
    every = [*ONE.values(), *(case_of(name) for name in FAULTS)]
    traces = {case.name: Trace(trace_folder(root, case.name)) for case in every}
    return judgement.judge_cases(every, traces, adaptive=False)[0]


def main() -> None:
    from tests.proofs.zoo import trial  # processes look functions up by the name of their module

    with tempfile.TemporaryDirectory() as folder:
        verdicts = trial.judge(Path(folder))
    for found in verdicts:
        told = f"{found.diagnosis.fault} ({found.diagnosis.because})" if found.diagnosis else found.mark
        print(f"{name_verdict(found, trial.FAULTS[found.case]):10} {found.case}: {told[:200]}")
    counts = collections.Counter(name_verdict(found, trial.FAULTS[found.case]) for found in verdicts)
    print(f"of {len(verdicts)}: {', '.join(f'{number} {kind}' for kind, number in counts.items())}")


ONE = {
    name: Case(name, 1, {"micro_batch": 2}, precision)
    for name, precision in (("single transformer", "fp64"), ("single averaged", "fp64"), ("single fp32", "fp32"))
}


def case_of(name: str) -> Case:
    """The case of a fault, in fp32 where only that shows it."""
    case = zoo.case_of(name, FAULTS[name], PRECISION.get(name, "fp64"))
    return replace(case, reference="single fp32") if name in PRECISION else case


def run(place: Any, group: Any, names: list[str], root: Path) -> None:
    """Record runs, of one process or of faults."""
    for name in names:
        case, fault = (ONE[name], None) if name in ONE else (case_of(name), FAULTS[name])
        task = TASKS["averaged" if "averaged" in name or (fault and fault.task == "averaged") else "transformer"]()
        with fault.made() if fault else nothing():
            case_recorder.record_case(task, zoo.configured(case), place, group, case, zoo.PROOF, root)


if __name__ == "__main__":
    main()
