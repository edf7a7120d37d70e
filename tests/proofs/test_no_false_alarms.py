"""Clean runs of many small architectures: a proof passes them, or abstains for a reason that is true.

All runs on one process are made by one call, and all runs on two processes by another.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import ADAMW, SGD, configuration
from recipes.language.tests import corpora
from tests.proofs.zoo.architectures import WIDTH, task_of
from unisono.config.schema.run import RunConfig
from unisono.proof import comparison, judgement
from unisono.proof.cases import Case, ProofSettings
from unisono.proof.comparison import ComparedQuantity
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import QUANTITIES, Trace, trace_folder, write_tensors
from unisono.proof.verdict import Verdict
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

pytestmark = pytest.mark.slow

PROOF = ProofSettings(global_batch=8)
ALWAYS = ("sample ids", "raw gradients", "parameters")

# runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clean:
    """How one architecture is run, and where a proof of it has to abstain.

    Attributes:
        adaptive: whether AdamW trains it, instead of SGD with momentum.
        micro: rows of a micro-batch; every run is compared with one process that has micro-batches of this size.
        resumed: whether it is also interrupted and goes on.
        leaving_out: strategies that have to be told that passes leave parameters out.
        abstains: quantity or invariant -> what the reason has to name.
        refused: strategy -> why it refuses to run the architecture, of which nothing can then be said.
        left_out: parameters that are, whole or in part, left out because their true gradient is zero.
    """

    adaptive: bool = False
    micro: tuple[int, ...] = (2,)
    resumed: bool = False
    leaving_out: tuple[str, ...] = ()
    abstains: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


_GRADIENT = "every trainable parameter got a gradient"
_BOTH = (2, 1)
CLEAN: dict[str, Clean] = {
    "mlp with gelu": Clean(micro=_BOTH, resumed=True),
    "conv 1d": Clean(micro=_BOTH),
    "conv 2d": Clean(adaptive=True),
    "batch norm": Clean(abstains={"buffers": "statistics of one process", "evaluation": "statistics of one process"}),
    "lstm": Clean(micro=_BOTH, resumed=True),
    "gru": Clean(adaptive=True),
    "encoder layers": Clean(micro=_BOTH, resumed=True),
    "attention with key bias": Clean(
        adaptive=True, micro=_BOTH, resumed=True, left_out=("body.inner.attention.in_proj_bias (8 of 24 elements)",)
    ),
    "embedding bag": Clean(adaptive=True),
    "rms norm": Clean(),
    "layer norm over two axes": Clean(),
    "dense mixture": Clean(micro=_BOTH),
    "routed mixture": Clean(micro=_BOTH, resumed=True, leaving_out=("ddp", "fsdp")),
    "layers of routed mixtures": Clean(micro=_BOTH, resumed=True, leaving_out=("ddp",)),
    "unused parameter": Clean(leaving_out=("ddp",), abstains={_GRADIENT: "forgotten.weight"}),
    "frozen layer": Clean(adaptive=True),
    "low rank": Clean(adaptive=True, resumed=True),
    "complex rotary buffer": Clean(),
    "complex parameter": Clean(adaptive=True, refused={"fsdp": "'body.inner.gains' is complex"}),
    "scalar parameter": Clean(
        micro=_BOTH, adaptive=True, resumed=True, refused={"fsdp": "'body.temperature' has no axis"}
    ),
    "residual dropout": Clean(micro=_BOTH, resumed=True, adaptive=True),
    "weight norm": Clean(resumed=True),
    "prelu and bilinear": Clean(),
    "shared layer": Clean(),
    "two terms": Clean(micro=_BOTH, adaptive=True),
    "tied head": Clean(micro=_BOTH, resumed=True, abstains={_GRADIENT: "blocks.0.attention.key.bias"}),
    "tied head with adamw": Clean(
        adaptive=True,
        abstains={_GRADIENT: "blocks.0.attention.key.bias"},
        left_out=tuple(f"blocks.{n}.attention.key.bias" for n in range(2)),
    ),
    "gpt2": Clean(
        adaptive=True,
        left_out=tuple(f"transformer.h.{n}.attn.c_attn.bias (32 of 96 elements)" for n in range(2)),
    ),
    "llama": Clean(adaptive=True),
    "qwen3": Clean(adaptive=True),
    "mixtral": Clean(micro=_BOTH, resumed=True),
}


def cases_of(name: str) -> list[Case]:
    """Every run of one architecture, the references first."""
    clean = CLEAN[name]
    result: list[Case] = []
    for micro in clean.micro:
        alone = f"{name} single m{micro}"
        first = f"{name} single m{clean.micro[0]}"
        other = first if micro != clean.micro[0] else ""
        result.append(Case(alone, 1, {"micro_batch": micro}, "fp64", other, other_micro_batch=True))
        for strategy in ("ddp", "fsdp"):
            told = {"find_unused_parameters": strategy in clean.leaving_out}
            layout = {"strategy": strategy, "micro_batch": micro, **told}
            result.append(Case(f"{name} {strategy} m{micro}", 2, layout, "fp64", alone))
            if clean.resumed and micro == clean.micro[0]:
                own = f"{name} {strategy} m{micro} resumed"
                straight = f"{name} {strategy} m{micro}"
                result.append(Case(own, 2, layout, "fp64", straight, bitwise=True, interrupted=(1,)))
    return result


def config_of(case: Case, clean: Clean) -> RunConfig:
    return configuration(
        layout={"world_size": case.world_size, "strategy": "single", **case.layout},
        train={"global_batch": PROOF.global_batch, "steps": 6, "precision": "fp64", "guard_every": 10**9},
        optim=ADAMW if clean.adaptive else SGD,
        eval={"rows": 9},
    )


def run(place: ProcessInfo, group: Communicator, root: Path) -> None:
    """Record every run that has as many processes as there are."""
    for name, clean in CLEAN.items():
        task = task_of(name, root)
        for case in cases_of(name):
            if case.world_size == place.world_size:
                case_recorder.record_case(task, config_of(case, clean), place, group, case, PROOF, root)


@dataclass(frozen=True)
class Found:
    """What was found for one run of an architecture."""

    architecture: str
    verdict: Verdict
    root: Path

    @property
    def clean(self) -> Clean:
        return CLEAN[self.architecture]

    @property
    def abstains(self) -> dict[str, str]:
        """Where it has to: all of a run that is refused, else what the architecture says."""
        for strategy, reason in self.clean.refused.items():
            if f" {strategy} " in self.verdict.case:
                return {"the run": reason}
        return self.clean.abstains


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    root = tmp_path_factory.mktemp("clean")
    corpora.write_jsonl(root / "corpus.jsonl", corpora.sentences(60))
    processes.alone(run, root)
    processes.run(run, 2, root, timeout=300)
    result = []
    for name, clean in CLEAN.items():
        every = cases_of(name)
        traces = {case.name: Trace(trace_folder(root, case.name)) for case in every}
        verdicts, alone = judgement.judge_cases(every, traces, clean.adaptive)
        result += [Found(name, verdict, root) for verdict in (*alone, *verdicts)]
    return result


def on_two(found: list[Found]) -> list[Found]:
    return [one for one in found if " single " not in one.verdict.case]


def abstentions(verdict: Verdict) -> dict[str, str]:
    every: list[ComparedQuantity] = [*verdict.compared, *verdict.invariants]
    return {c.quantity: c.why for c in every if c.mark == "ABSTAIN" and c.why != "there is none"}


def test_there_are_fifty_clean_runs(found: list[Found]) -> None:
    made = {one.verdict.case for one in on_two(found) if "the run" not in one.abstains}
    assert len(made) >= 50
    assert {one.architecture for one in found} == {*CLEAN}


def test_none_of_them_fails(found: list[Found]) -> None:
    wrong = [(v.case, v.fault or v.first, v.diagnosis) for v in (one.verdict for one in found) if v.mark == "FAIL"]
    assert not wrong, "\n".join(map(str, wrong))


def test_those_that_matter_most_pass_in_every_run(found: list[Found]) -> None:
    for one in on_two(found):
        if "the run" not in one.abstains:
            passed = {c.quantity for c in one.verdict.compared if c.mark == "PASS"}
            assert passed >= {*ALWAYS} - {*one.abstains}, one.verdict.case


def test_they_abstain_where_they_must_and_nowhere_else(found: list[Found]) -> None:
    for one in on_two(found):
        reasons = abstentions(one.verdict)
        assert reasons.keys() == one.abstains.keys(), (one.verdict.case, reasons)
        for quantity, reason in one.abstains.items():
            assert reason in reasons[quantity], one.verdict.case


def test_only_what_has_no_true_gradient_is_left_out(found: list[Found]) -> None:
    for one in on_two(found):
        if not one.verdict.bitwise and "the run" not in one.abstains:
            left_out = {name for c in one.verdict.compared for name in c.left_out}
            assert left_out == {*one.clean.left_out}, one.verdict.case


@pytest.mark.parametrize(("element", "mark"), [(0, "FAIL"), (WIDTH, "PASS"), (2 * WIDTH, "FAIL")])
def test_beside_the_elements_that_are_left_out_a_fault_is_seen(
    found: list[Found], tmp_path: Path, element: int, mark: str
) -> None:
    """A bias of query, key and value in one: only the key's third is without a true gradient."""
    name = "attention with key bias"
    root = next(one.root for one in found if one.architecture == name)
    mine, alone = (f"{name} {layout} m2" for layout in ("ddp", "single"))
    folder = shutil.copytree(trace_folder(root, mine), tmp_path / "changed")
    last = len(Trace(folder).facts.steps) - 1
    tensors = Trace(folder).tensors("parameters", last)
    tensors["body.inner.attention.in_proj_bias"][element] += 1e-9
    write_tensors(folder, "parameters", last, tensors)
    tolerance = dict.fromkeys(QUANTITIES, 1e-12)
    told = comparison.compare_traces(Trace(folder), Trace(trace_folder(root, alone)), tolerance, adaptive=True)
    assert {c.mark for c in told if c.quantity == "parameters"} == {mark}
