"""The recursive models in torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono_puzzles.model import sparse_attention
from unisono_puzzles.model.act import StepOutput
from unisono_puzzles.model.shape import CUT_STD, EPS, ROPE_BASE, Kind, Kinds, inner_width, places
from unisono_puzzles.settings import Model


class PuzzleModel(nn.Module):
    """One network, or two, applied to an answer state and a latent state in cycles.

    Each kind of puzzle has its own tokens, head, places and embeddings.
    """

    def __init__(self, config: Model, kinds: Kinds) -> None:
        super().__init__()
        self.config = config
        self.kinds = nn.ModuleDict({name: KindParts(config, kind) for name, kind in kinds.items()})
        self.nets = nn.ModuleList([Network(config, kinds) for _ in range(config.nets)])
        self.q_head = nn.Linear(config.width, 2)
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.bias, -5.0)  # almost never halt at first
        for name in ("answer_start", "latent_start"):
            self.register_buffer(name, _truncated_normal(torch.empty(config.width), std=1.0))

    @property
    def starts(self) -> dict[str, Tensor]:
        """The first value of each state, (width,)."""
        return {"answer_state": self.get_buffer("answer_start"), "latent_state": self.get_buffer("latent_start")}

    def forward(self, kind: str, rows: Mapping[str, Tensor], h_cycles: int, l_cycles: int) -> StepOutput:
        """One supervision step on `question`, `identifier` and the states of the rows.

        `h_cycles` are updates of the answer state, with `l_cycles` updates of the latent state in each.
        """
        parts, config = self.kinds[kind], self.config
        assert isinstance(parts, KindParts)
        shown = parts.shown(rows["question"], rows["identifier"])
        turns = parts.turns()
        latent_net, answer_net = (partial(net, kind=kind, turns=turns) for net in (self.nets[0], self.nets[-1]))
        answer, latent = rows["answer_state"].to(shown.dtype), rows["latent_state"].to(shown.dtype)
        before = answer
        for cycle in range(h_cycles):
            last = cycle == h_cycles - 1
            before, frame = answer, answer + shown
            for turn in range(l_cycles):
                learns = config.gradient == "all" or (last and (config.gradient == "cycle" or turn == l_cycles - 1))
                with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
                    latent = latent_net(latent + (frame if learns else frame.detach()))
            with torch.set_grad_enabled(torch.is_grad_enabled() and (last or config.gradient == "all")):
                answer = answer_net(answer + latent)
        change = (answer - before.detach()).square().mean((1, 2))
        return StepOutput(answer, latent, parts.head(answer[:, config.prefix :]), self.q_head(answer[:, 0]), change)


class KindParts(nn.Module):
    """What a model has for one kind of puzzle: from its tokens to features, and back."""

    def __init__(self, config: Model, kind: Kind) -> None:
        super().__init__()
        self.config, self.kind = config, kind
        scale = config.width**-0.5
        self.tokens = nn.Embedding(kind.format.vocabulary, config.width)
        _truncated_normal(self.tokens.weight, std=scale)
        self.head = _linear(config.width, kind.format.vocabulary)
        self.puzzles = nn.Embedding(kind.embeddings, config.embedding) if config.embedding else None
        if self.puzzles is not None:
            nn.init.zeros_(self.puzzles.weight)
        self.places = nn.Embedding(places(kind, config), config.width) if config.positions == "learned" else None
        if self.places is not None:
            _truncated_normal(self.places.weight, std=scale)

    def shown(self, question: Tensor, identifier: Tensor) -> Tensor:
        """The question as the network sees it, (rows, places, width): the puzzle embedding, and the cells."""
        config = self.config
        cells = self.tokens(question.int())
        front = cells.new_zeros(len(cells), config.prefix * config.width)
        if self.puzzles is not None:
            front = F.pad(self.puzzles(identifier).to(cells.dtype), (0, front.shape[1] - config.embedding))
        shown = torch.cat([front.view(-1, config.prefix, config.width), cells], dim=1)
        if self.places is not None:
            shown = (shown + self.places.weight) * 0.5**0.5
        scaled: Tensor = shown * config.width**0.5
        return scaled

    def turns(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of RoPE, (places, half the features of a head); None where places are not turned."""
        if self.config.positions != "rope":
            return None
        like = self.tokens.weight
        half = self.config.width // self.config.heads // 2
        rates = ROPE_BASE ** (-torch.arange(half, device=like.device, dtype=torch.float64) / half)
        angles = torch.arange(places(self.kind, self.config), device=like.device, dtype=torch.float64)[:, None] * rates
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Network(nn.Module):
    """The layers of one network."""

    def __init__(self, config: Model, kinds: Kinds) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, kinds) for _ in range(config.layers)])

    def forward(self, x: Tensor, kind: str, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """(rows, places, width) -> the same."""
        for layer in self.layers:
            x = layer(x, kind, turns)
        return x


class Layer(nn.Module):
    """Cells see each other, then each is changed by itself; RMSNorm without parameters after each sum."""

    def __init__(self, config: Model, kinds: Kinds) -> None:
        super().__init__()
        self.attention = Attention(config, kinds) if config.mixer != "mlp" else None
        lengths = {name: places(kind, config) for name, kind in kinds.items()}
        mixers = {name: SwiGLU(length, config) for name, length in lengths.items()}
        self.mixers = nn.ModuleDict(mixers) if config.mixer == "mlp" else None
        self.swiglu = SwiGLU(config.width, config)

    def forward(self, x: Tensor, kind: str, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """(rows, places, width) -> the same."""
        if self.mixers is not None:
            # The norm is over the places, too. Copied, since what torch.compile makes of a product with a transposed
            # batch is a slow one of many small matrices; without it torch copies within the product anyway.
            turned = x.transpose(1, 2).contiguous()
            x = _norm(turned + self.mixers[kind](turned)).transpose(1, 2).contiguous()
        else:
            assert self.attention is not None
            x = _norm(x + self.attention(x, kind, turns))
        return _norm(x + self.swiglu(x))


class Attention(nn.Module):
    """Multi-head attention without a mask, dense or to the neighbours in the grid."""

    def __init__(self, config: Model, kinds: Kinds) -> None:
        super().__init__()
        self.config = config
        self.formats = {name: kind.format for name, kind in kinds.items()}
        self.qkv, self.out = _linear(config.width, 3 * config.width), _linear(config.width, config.width)
        if config.mixer == "sparse":
            for name, format_ in self.formats.items():
                seen = torch.from_numpy(sparse_attention.counted_once(format_, config.prefix))
                self.register_buffer(f"seen_{name}", seen, persistent=False)

    def forward(self, x: Tensor, kind: str, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """(rows, places, width) -> the same."""
        rows, length, width = x.shape
        query, key, value = self.qkv(x).view(rows, length, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
        if turns is not None:
            query, key = _turn(query, turns), _turn(key, turns)
        if self.config.mixer == "sparse":
            seen = self.get_buffer(f"seen_{kind}")
            softmax = partial(torch.softmax, dim=-1)
            mixed = sparse_attention.attend(query, key, value, self.formats[kind], self.config.prefix, seen, softmax)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return attended


class SwiGLU(nn.Module):
    """`down(silu(gate) · up)` over the last axis, without biases."""

    def __init__(self, features: int, config: Model) -> None:
        super().__init__()
        inner = inner_width(features, config)
        self.gate_up, self.down = _linear(features, 2 * inner), _linear(inner, features)

    def forward(self, x: Tensor) -> Tensor:
        """(…, features) -> the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def _turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE: the first half of the features of each head with the second."""
    cosines, sines = (part.to(x.dtype) for part in turns)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cosines - other * sines, other * cosines + one * sines], dim=-1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    _truncated_normal(layer.weight, std=1 / math.sqrt(inputs))
    return layer


@torch.no_grad()
def _truncated_normal(weight: Tensor, std: float) -> Tensor:
    """Normal, cut off at two standard deviations, and widened so that `std` is that of what is left."""
    wide = std / CUT_STD
    return nn.init.trunc_normal_(weight, std=wide, a=-2 * wide, b=2 * wide)
