"""Clean runs of many small architectures: a proof passes them, or abstains for a reason that is true.

All runs on one process are made by one call, and all runs on two processes by another.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests import processes
from tests.recipes.language import corpora
from tests.runs import ADAMW, SGD, configuration
from tests.tasks import TransformerTask
from unisono.config.base import Settings
from unisono.config.schema import RunConfig
from unisono.place import Group, Place
from unisono.proof import comparison, prove, record
from unisono.proof.cases import Case, Proof
from unisono.proof.comparison import Compared
from unisono.proof.trace import QUANTITIES, Trace, folder_of, write_tensors
from unisono.proof.verdict import Verdict
from unisono.recipes.language.settings import FromConfig, LanguageConfig
from unisono.recipes.language.task import Language
from unisono.task import Context, Loss, Task

pytestmark = pytest.mark.slow

PROOF = Proof(global_batch=8)
LENGTH, WIDTH, VOCABULARY, CLASSES = 6, 8, 13, 4
ALWAYS = ("sample ids", "raw gradients", "parameters")

# architectures: a batch to logits -------------------------------------------------------------------------------------

BUILDERS: dict[str, Callable[[], nn.Module]] = {}


def architecture(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        BUILDERS[name] = build
        return build

    return add


class Of(nn.Module):
    """A body on one array of the batch, and a head on the mean over what it returns."""

    def __init__(self, key: str, body: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.key, self.body = key, body
        self.head = nn.Linear(WIDTH, CLASSES) if head is None else head

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.body(batch[self.key])
        result: Tensor = self.head(x.mean(dim=1) if x.dim() == 3 else x)
        return result


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)[0]
        return result


class Swapped(nn.Module):
    """A module with the features as channels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return result


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.inner(x))
        return result


@architecture("mlp with gelu")
def mlp() -> nn.Module:
    return Of("x", nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.GELU()))


@architecture("conv 1d")
def convolution_1d() -> nn.Module:
    inner = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 3))
    return Of("x", Swapped(nn.Sequential(*inner)))


class Image(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), norm
        self.deep, self.head = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, groups=2), nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = F.relu(self.norm(self.stem(batch["x"][:, None])))
        result: Tensor = self.head(self.deep(x).mean(dim=(2, 3)))
        return result


@architecture("conv 2d")
def convolution_2d() -> nn.Module:
    return Image(nn.GroupNorm(4, WIDTH))


@architecture("batch norm")
def batch_norm() -> nn.Module:
    return Image(nn.BatchNorm2d(WIDTH))


@architecture("lstm")
def lstm() -> nn.Module:
    return Of("x", First(nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)))


@architecture("gru")
def gru() -> nn.Module:
    return Of("x", First(nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)))


def encoder_layer(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True, norm_first=True)


@architecture("encoder layers")
def encoder() -> nn.Module:
    return Of("x", nn.Sequential(encoder_layer(0.2), encoder_layer(0.2)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


@architecture("attention with key bias")
def attention() -> nn.Module:
    return Of("x", Residual(Attending()))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", padding_idx=0)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.bag(tokens)
        return result


@architecture("embedding bag")
def embedding_bag() -> nn.Module:
    return Of("tokens", Bag())


@architecture("rms norm")
def rms_norm() -> nn.Module:
    return Of("x", Residual(nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU())))


@architecture("layer norm over two axes")
def layer_norm() -> nn.Module:
    return Of("x", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm((LENGTH, WIDTH)), nn.GELU()))


class Experts(nn.Module):
    """A mixture of experts; `top` of 1 sends every row to one of them, and calls no other."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
        self.top = top
        with torch.no_grad():
            self.router.weight *= 20

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(dim=1)
        shares = self.router(x).softmax(dim=-1)
        if not self.top:
            return torch.stack([expert(x) for expert in self.experts], dim=1).mul(shares[..., None]).sum(dim=1)
        share, chosen = shares.max(dim=-1)
        result = x
        for number, expert in enumerate(self.experts):
            (rows,) = torch.nonzero(chosen == number, as_tuple=True)
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return result


@architecture("dense mixture")
def dense_mixture() -> nn.Module:
    return Of("x", Experts(top=0))


@architecture("routed mixture")
def routed_mixture() -> nn.Module:
    return Of("x", Experts(top=1))


@architecture("layers of routed mixtures")
def layers_of_mixtures() -> nn.Module:
    """FSDP gathers each layer as a whole, so it need not be told."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixture = nn.LayerNorm(WIDTH), Experts(top=1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.mixture(self.norm(x))[:, None]
            return result

    return Of("x", nn.Sequential(Layer(), Layer()))


@architecture("unused parameter")
def unused_parameter() -> nn.Module:
    model = mlp()
    model.forgotten = nn.Linear(3, 3, bias=False)
    return model


@architecture("frozen layer")
def frozen_layer() -> nn.Module:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    body[0].requires_grad_(False)
    return Of("x", body)


class LowRank(nn.Module):
    """A frozen layer and a change of low rank, which is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


@architecture("low rank")
def low_rank() -> nn.Module:
    return Of("x", LowRank())


class Rotary(nn.Module):
    """Queries and keys turned by a complex buffer, and scaled by a real one; neither ever changes."""

    turn: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        angles = torch.outer(torch.arange(LENGTH).float(), 10.0 ** -torch.arange(WIDTH // 2))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("scale", torch.full((), 1 / math.sqrt(WIDTH)))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turn).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.turned(self.query(x)) @ self.turned(self.key(x)).transpose(1, 2)
        result: Tensor = (scores * self.scale).softmax(dim=-1) @ self.value(x)
        return result


@architecture("complex rotary buffer")
def rotary() -> nn.Module:
    return Of("x", Residual(Rotary()))


class Filter(nn.Module):
    """A fixed filter, and complex weights that are trained."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.polar(torch.ones(LENGTH // 2 + 1, WIDTH), torch.randn(LENGTH // 2 + 1, WIDTH)))
        self.register_buffer("window", torch.hann_window(LENGTH)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.rfft(x * self.window, dim=1) * self.gains
        result: Tensor = torch.fft.irfft(filtered, n=LENGTH, dim=1)
        return result


@architecture("complex parameter")
def complex_parameter() -> nn.Module:
    return Of("x", Residual(Filter()))


class Scalars(nn.Module):
    """A learnt temperature and a learnt shift, each without an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.temperature, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.temperature.exp() + self.shift)


@architecture("scalar parameter")
def scalar_parameter() -> nn.Module:
    return Of("x", Scalars())


@architecture("residual dropout")
def residual_dropout() -> nn.Module:
    inner = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
    return Of("x", nn.Sequential(*(Residual(part, dropout=0.3) for part in inner)))


@architecture("weight norm")
def weight_normed() -> nn.Module:
    return Of("x", nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), weight_norm(nn.Linear(WIDTH, WIDTH))))


@architecture("prelu and bilinear")
def bilinear() -> nn.Module:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.act = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.PReLU()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.act(self.bilinear(x, x))
            return result

    return Of("x", Squared())


@architecture("shared layer")
def shared_layer() -> nn.Module:
    """One layer that the forward pass calls three times."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return Of("x", nn.Sequential(layer, layer, layer))


# tasks ----------------------------------------------------------------------------------------------------------------


class Sequences(Task):
    """Short sequences of vectors and of tokens, in one of a few classes."""

    class Config(Settings):
        architecture: str = "mlp with gelu"

    config: Config

    def data(self) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(5)
        return [self._row(rng) for _ in range(40)]

    def held_out(self) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(6)
        return [self._row(rng) for _ in range(9)]

    def _row(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        x = (rng.normal(size=(LENGTH, WIDTH)) + rng.normal(size=WIDTH)).astype(np.float32)
        tokens = rng.integers(1, VOCABULARY, size=LENGTH)
        tokens[rng.integers(1, LENGTH + 1) :] = 0
        return {"x": x, "tokens": tokens, "label": np.array(np.argmax(x.mean(axis=0)[:CLASSES]))}

    def build(self) -> nn.Module:
        return BUILDERS[self.config.architecture]()

    def counts(self, batch: Any) -> dict[str, float]:
        return {"class": float(len(batch["label"]))}

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return model(batch)

    def loss(self, outputs: Tensor, batch: Any, context: Context) -> Loss:
        losses = F.cross_entropy(outputs, batch["label"], reduction="sum")
        hits = (outputs.argmax(-1) == batch["label"]).sum()
        return Loss({"class": losses}, metrics={"accuracy": (hits, len(batch["label"]))})


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.common, self.rare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(batch["x"].mean(dim=1)))
        return self.common(x), self.rare(x)


class TwoTerms(Sequences):
    """The second term counts a few rows only: none in most micro-batches, and none at all in some global batches."""

    RARE = 5

    def _rare(self, batch: Any) -> Any:
        return batch["tokens"][:, 0] == self.RARE

    def build(self) -> nn.Module:
        return Heads()

    def counts(self, batch: Any) -> dict[str, float]:
        return {**super().counts(batch), "rare": float(self._rare(batch).sum())}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        common, rare = outputs
        loss = super().loss(common, batch, context)
        of_rare = (rare[:, 0] - batch["x"].mean(dim=(1, 2))).square() * self._rare(batch)
        return Loss({**loss.sums, "rare": of_rare.sum()}, weights={"rare": 0.5}, metrics=loss.metrics)


HUGGING_FACE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": corpora.GROUPED,
    "qwen3": {**corpora.GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "mixtral": {**corpora.GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def language(name: str, data: Path) -> Task:
    """The language recipe with a tiny model of the transformers library."""
    settings = {"bos_token_id": None, "eos_token_id": None, **HUGGING_FACE[name]}
    guided = {"balance_weight": 0.1, "router_z_weight": 0.01} if name == "mixtral" else {}
    return Language(
        LanguageConfig(sequence=12, pad_to_multiple=4),
        model=FromConfig(kind="config", architecture=name, settings=settings, **guided),
        data=corpora.corpus(data),
    )


def task_of(name: str, root: Path) -> Task:
    if name in HUGGING_FACE:
        return language(name, root / "corpus.jsonl")
    if name == "two terms":
        return TwoTerms()
    if name.startswith("tied head"):
        return TransformerTask(TransformerTask.Config(dropout=0.1))
    return Sequences(Sequences.Config(architecture=name))


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


def run(place: Place, group: Group, root: Path) -> None:
    """Record every run that has as many processes as there are."""
    for name, clean in CLEAN.items():
        task = task_of(name, root)
        for case in cases_of(name):
            if case.world_size == place.world_size:
                record.record(task, config_of(case, clean), place, group, case, PROOF, root)


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
        traces = {case.name: Trace(folder_of(root, case.name)) for case in every}
        verdicts, alone = prove.judged(every, traces, clean.adaptive)
        result += [Found(name, verdict, root) for verdict in (*alone, *verdicts)]
    return result


def on_two(found: list[Found]) -> list[Found]:
    return [one for one in found if " single " not in one.verdict.case]


def abstentions(verdict: Verdict) -> dict[str, str]:
    every: list[Compared] = [*verdict.compared, *verdict.invariants]
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
    folder = shutil.copytree(folder_of(root, mine), tmp_path / "changed")
    last = len(Trace(folder).facts.steps) - 1
    tensors = Trace(folder).tensors("parameters", last)
    tensors["body.inner.attention.in_proj_bias"][element] += 1e-9
    write_tensors(folder, "parameters", last, tensors)
    tolerance = dict.fromkeys(QUANTITIES, 1e-12)
    told = comparison.compare(Trace(folder), Trace(folder_of(root, alone)), tolerance, adaptive=True)
    assert {c.mark for c in told if c.quantity == "parameters"} == {mark}
