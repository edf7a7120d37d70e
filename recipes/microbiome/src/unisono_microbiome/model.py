"""From nucleotides to one vector per sample: an encoder of sequences, one of a sample's taxa, one with their counts.

A sequence is encoded once per micro-batch, however many of its samples have it, chunk by chunk, and chunks are
computed again in the backward pass: memory grows with the vectors of the sequences, never with their nucleotides. The
nucleotides themselves are a table in the model; a batch names taxa by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unisono_microbiome.nucleotides import MASK, PAD, VOCABULARY
from unisono_microbiome.settings import DIVERSITIES, ModelSettings

_EPS = 1e-6


@dataclass(frozen=True)
class ModelShape:
    """Model sizes that depend on the data, saved with a run so that the model can be rebuilt without them.

    Attributes:
        taxa: how many there are.
        longest: taxa that a sample can have.
        length: tokens of a sequence; 0 without DNA.
        outputs: numbers that the target head gives; 0 without.
        covariates: numbers that the target head is given besides a sample's vector.
    """

    taxa: int
    longest: int
    length: int
    outputs: int
    covariates: int = 0


class Attention(nn.Module):
    """Self-attention that ignores padding."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.inputs = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # (rows, length, features), (rows, length)
        """What each place gathers from those that are seen."""
        rows, length, features = x.shape
        query, key, value = self._project(x)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None, None, :])
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, features))
        return result

    def weights(self, x: Tensor, seen: Tensor) -> Tensor:  # -> (rows, heads, length, length)
        """How much each place (third axis) gathers from each other."""
        query, key, _ = self._project(x)
        scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5
        result: Tensor = scores.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(-1)
        return result

    def _project(self, x: Tensor) -> Tensor:  # -> (3, rows, heads, length, features of a head)
        projected: Tensor = self.inputs(x).view(*x.shape[:2], 3, self._heads, -1)
        return projected.permute(2, 0, 3, 1, 4)


class Convolution(nn.Module):
    """A convolution that treats padding as zero."""

    def __init__(self, features: int, kernel: int) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(features, features, kernel, padding=kernel // 2)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # (rows, length, features), (rows, length)
        """What each place gathers from its neighbours."""
        result: Tensor = self.kernel((x * seen[..., None]).transpose(1, 2)).transpose(1, 2)
        return result


class Block(nn.Module):
    """A pre-norm block: a mixer over positions, then a network per position."""

    def __init__(self, mixer: nn.Module, features: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(features, eps=_EPS) for name in ("mixer", "inner")})
        self.mixer = mixer
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # (rows, length, features), (rows, length)
        """The same shape."""
        x = x + self.dropout(self.mixer(self.norms["mixer"](x), seen))
        inner = self.dropout(F.gelu(self.up(self.norms["inner"](x))))
        result: Tensor = x + self.dropout(self.down(inner))
        return result


class Pooling(nn.Module):
    """Attention pooling: softmax(w·x / √features) over the places that are real, then a norm; without bias."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.score = nn.Linear(features, 1, bias=False)
        self.norm = nn.LayerNorm(features, eps=_EPS)

    def weights(self, x: Tensor, real: Tensor) -> Tensor:  # (rows, length, features), (rows, length) -> (rows, length)
        """The share of each place, 0 for padding; all 0 where nothing is real."""
        scores: Tensor = self.score(x)[..., 0] / x.shape[-1] ** 0.5
        return scores.masked_fill(~_attention_mask(real), float("-inf")).softmax(-1) * real

    def forward(self, x: Tensor, real: Tensor) -> Tensor:  # -> (rows, features)
        """One vector per row."""
        result: Tensor = self.norm((self.weights(x, real)[:, None] @ x)[:, 0])
        return result


class SequenceEncoder(nn.Module):
    """Taxa by their DNA, (taxa, length) tokens, and predictions of masked nucleotides where they are wanted.

    Its blocks are no `ModuleList`: FSDP would make units of them, which every process has to call equally often, and
    how many chunks there are depends on the rows. The encoder as a whole is called equally often, so it is a unit.
    """

    fsdp_unit = True
    tokens: Tensor

    def __init__(self, config: ModelSettings, tokens: Tensor, nucleotides: bool) -> None:
        super().__init__()
        features = config.features
        self.register_buffer("tokens", tokens, persistent=False)  # they belong to the data
        self.token = nn.Embedding(VOCABULARY, features)
        self.position = nn.Embedding(tokens.shape[1], features)
        self._layers = config.sequence_layers
        for number in range(self._layers):
            mixer = (
                Attention(features, config.heads)
                if config.encoder == "transformer"
                else Convolution(features, config.kernel)
            )
            self.add_module(f"block_{number}", Block(mixer, features, config.dropout))
        self.norm = nn.LayerNorm(features, eps=_EPS)
        self.pool = Pooling(features)
        self.nucleotides = nn.Linear(features, VOCABULARY) if nucleotides else None
        self._chunk, self._recompute = config.chunk, config.recompute

    @property
    def last_mixer(self) -> nn.Module:
        """What mixes positions in the last layer."""
        return self.get_submodule(f"block_{self._layers - 1}.mixer")

    def forward(self, taxa: Tensor, masked: Tensor | None = None) -> Tensor:  # (sequences,) -> (sequences, features)
        """A vector for each taxon.

        With `masked`, (sequences, length), instead of each sequence with these nucleotides hidden: their cross-entropy
        in nats, and how many were right, (sequences, 2).
        """
        if masked is None:
            return torch.cat([self._part(self._vectors, part) for part in taxa.split(self._chunk)])
        parts = zip(taxa.split(self._chunk), masked.split(self._chunk), strict=True)
        return torch.cat([self._part(self._masked, *part) for part in parts])

    def _part(self, act: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        if not (self._recompute and torch.is_grad_enabled()):
            return act(*arguments)
        result: Tensor = checkpoint(act, *arguments, use_reentrant=False)
        return result

    def _vectors(self, taxa: Tensor) -> Tensor:
        return self.encode(self.tokens[taxa].long())

    def encode(self, tokens: Tensor) -> Tensor:  # (sequences, length) -> (sequences, features)
        """A vector for each sequence, all at once."""
        result: Tensor = self.pool(self._hidden(tokens), tokens != PAD)
        return result

    def _masked(self, taxa: Tensor, masked: Tensor) -> Tensor:
        assert self.nucleotides is not None
        tokens = self.tokens[taxa].long()
        logits = self.nucleotides(self._hidden(tokens.masked_fill(masked, MASK)))  # (sequences, length, vocabulary)
        nats = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
        right = logits.argmax(-1) == tokens
        return torch.stack([(value * masked).sum(1) for value in (nats, right.to(nats.dtype))], dim=1)

    def _hidden(self, tokens: Tensor) -> Tensor:  # (sequences, length) -> (sequences, length, features)
        real = tokens != PAD  # an unknown nucleotide is seen by nobody, as padding is
        x = self.token(tokens) + self.position.weight
        seen = _attention_mask(real)
        for number in range(self._layers):
            x = self.get_submodule(f"block_{number}")(x, seen)
        result: Tensor = self.norm(x)
        return result


class Fusion(nn.Module):
    """Combines the count of a taxon with its vector."""

    def __init__(self, kind: str, features: int) -> None:
        super().__init__()
        self._kind = kind
        self.count = nn.Linear(1, 2 * features if kind == "film" else features)
        self.both = nn.Linear(2 * features, features) if kind == "concat" else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:  # (rows, taxa, features), (rows, taxa)
        """The same shape as the vectors."""
        result: Tensor = self.count(counts.log1p()[..., None])
        if self._kind == "film":
            scale, shift = result.chunk(2, dim=-1)
            return x * (1 + scale) + shift
        if self.both is None:
            return x + result
        joined: Tensor = self.both(torch.cat([x, result], dim=-1))
        return joined


class CovariateFusion(nn.Module):
    """Combines a sample's covariates with its vector."""

    def __init__(self, kind: str, features: int, covariates: int) -> None:
        super().__init__()
        self.covariates = nn.Linear(covariates, features)
        self.both = None if kind == "add" else nn.Linear(2 * features, features)
        self._gated = kind == "gated"

    def forward(self, x: Tensor, covariates: Tensor) -> Tensor:  # (rows, features), (rows, covariates)
        """The same shape as the vectors."""
        own: Tensor = self.covariates(covariates.to(x.dtype))
        if self.both is None:
            return x + own
        joined: Tensor = self.both(torch.cat([x, own], dim=-1))
        return x + joined.sigmoid() * own if self._gated else joined


class Body(nn.Module):
    """Everything but the target heads: the part that a run can take over from another.

    `tokens` is the taxa's DNA, (taxa, length) integers, or None; `wanted` are the losses that have a weight.
    """

    def __init__(
        self, config: ModelSettings, taxa: int, longest: int, tokens: Tensor | None, wanted: frozenset[str]
    ) -> None:
        super().__init__()
        features = config.features
        if config.encoder == "taxon":
            self.encoder: nn.Module = nn.Embedding(taxa, features)
        else:
            assert tokens is not None
            self.encoder = SequenceEncoder(config, tokens, "nucleotides" in wanted)
        samples = bool(wanted & {"distance", "target", *DIVERSITIES})
        self.position = nn.Embedding(longest, features) if config.positions == "learned" else None
        self.taxa = self._blocks(config, config.taxon_layers) if samples or "counts" in wanted else None
        self.taxa_norm = nn.LayerNorm(features, eps=_EPS) if self.taxa is not None else None
        self.share = nn.Linear(features, 1) if "counts" in wanted else None
        self.fusion = Fusion(config.counts, features) if samples and config.counts != "none" else None
        self.samples = self._blocks(config, config.sample_layers) if samples else None
        self.samples_norm = nn.LayerNorm(features, eps=_EPS) if samples else None
        self.pool = Pooling(features) if samples else None

    @staticmethod
    def _blocks(config: ModelSettings, layers: int) -> nn.ModuleList:
        features = config.features
        return nn.ModuleList(
            [Block(Attention(features, config.heads), features, config.dropout) for _ in range(layers)]
        )

    def vectors(self, taxa: Tensor) -> Tensor:  # (rows, taxa) -> (rows, taxa, features)
        """The vector of each taxon, 0 where there is none (-1); each is computed once."""
        found, places = torch.unique(taxa.clamp(min=0), return_inverse=True)
        return self.look_up(self.encoder(found), places, taxa >= 0)

    @staticmethod
    def look_up(vectors: Tensor, places: Tensor, real: Tensor) -> Tensor:  # (taxa, features), (rows, taxa) twice
        """The vector of each place, 0 where nothing is real, (rows, taxa, features)."""
        # A look-up, whose gradient is added up in one order whatever the number of threads; indexing's is not.
        return F.embedding(places, vectors) * real[..., None]

    def forward(self, taxa: Tensor, counts: Tensor) -> dict[str, Tensor]:  # (rows, taxa), (rows, taxa)
        """What is made of samples, by name: `shares` (rows, taxa), `embedding` (rows, features)."""
        return self.pool_vectors(self.vectors(taxa), counts, taxa >= 0)

    def pool_vectors(self, x: Tensor, counts: Tensor, real: Tensor) -> dict[str, Tensor]:
        """The same from the vectors of taxa, (rows, taxa, features)."""
        assert self.taxa is not None and self.taxa_norm is not None
        if self.position is not None:
            x = x + self.position.weight[: x.shape[1]]
        x = self.taxa_norm(_apply_blocks(self.taxa, x, real))
        result = {} if self.share is None else {"shares": self.share(x)[..., 0].sigmoid()}
        if self.pool is not None:
            result["embedding"] = self.pool(self.mix(x, counts, real), real)
        return result

    def mix(self, x: Tensor, counts: Tensor, real: Tensor) -> Tensor:
        """Vectors of taxa and their counts, before they are pooled."""
        assert self.samples is not None and self.samples_norm is not None
        x = x if self.fusion is None else self.fusion(x, counts)
        result: Tensor = self.samples_norm(_apply_blocks(self.samples, x, real))
        return result


class Network(nn.Module):
    """The body and its heads; arguments are those of `Body`."""

    def __init__(self, config: ModelSettings, wanted: frozenset[str], shape: ModelShape, tokens: Tensor | None) -> None:
        super().__init__()
        self.body = Body(config, shape.taxa, shape.longest, tokens, wanted)
        for name in DIVERSITIES:
            self.add_module(name, nn.Linear(config.features, 1) if name in wanted else None)
        fused = bool(shape.outputs and shape.covariates)
        self.fusion = CovariateFusion(config.covariates, config.features, shape.covariates) if fused else None
        self.target = nn.Linear(config.features, shape.outputs) if shape.outputs else None
        self._frozen = config.freeze
        if self._frozen:
            self.body.requires_grad_(False)

    def train(self, mode: bool = True) -> Network:
        """Set training mode; frozen parts never have dropout."""
        super().train(mode)
        if self._frozen:
            self.body.eval()
        return self

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The outputs for a micro-batch, by name, each with rows as first axis.

        Args:
            batch: `taxa` and `counts`, both (rows, taxa), -1 and 0 where there is none; `covariates` (rows, numbers)
                where there are any; and, for masked nucleotides, `masked_taxa` (rows, sequences), -1 where there is
                none, and `masked` (rows, sequences, length).
        """
        result: dict[str, Tensor] = {}
        if self.body.taxa is not None:
            result |= self.body(batch["taxa"], batch["counts"])
        result |= self.heads(result, batch)
        if "masked" in batch:
            chosen = batch["masked_taxa"] >= 0
            encoder = self.body.encoder
            assert isinstance(encoder, SequenceEncoder)
            found = encoder(batch["masked_taxa"][chosen], batch["masked"][chosen])
            result["masked"] = found.new_zeros(*chosen.shape, 2).masked_scatter(chosen[..., None], found).sum(1)
        return result

    def heads(self, of_samples: dict[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is predicted of samples from their `embedding`, where they have one, (rows, numbers) each."""
        if "embedding" not in of_samples:
            return {}
        embedding = of_samples["embedding"]
        found = {name: head(embedding) for name in DIVERSITIES if (head := getattr(self, name)) is not None}
        return found if self.target is None else {**found, "target": self.predict_target(embedding, batch)}

    def predict_target(self, embedding: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The target head's numbers, (rows, outputs), of vectors of samples, (rows, features), and of a batch."""
        assert self.target is not None
        fused = embedding if self.fusion is None else self.fusion(embedding, batch["covariates"])
        result: Tensor = self.target(fused)
        return result


def _attention_mask(real: Tensor) -> Tensor:
    """Attention mask: real positions, or all positions of an empty row, so that no softmax is empty."""
    return real | ~real.any(-1, keepdim=True)


def _apply_blocks(blocks: nn.ModuleList, x: Tensor, real: Tensor) -> Tensor:
    seen = _attention_mask(real)
    for block in blocks:
        x = block(x, seen)
    return x
