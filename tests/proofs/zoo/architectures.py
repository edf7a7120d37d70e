"""Small architectures of every kind, and the tasks that train them: what proofs of clean runs are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from packages.unisono.tests.tasks import TransformerTask
from recipes.language.tests import corpora
from unisono.config.schema import Settings
from unisono.task import Context, Loss, Task
from unisono_language.settings import FromConfig, LanguageConfig
from unisono_language.task import Language

LENGTH, WIDTH, VOCABULARY, CLASSES = 6, 8, 13, 4

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
