"""Where a model looks: attention between the taxa of a sample, and between the positions of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unisono_microbiome.evaluation.predict import Predictor
from unisono_microbiome.model import Attention, Body, Pooling, SequenceEncoder
from unisono_microbiome.nucleotides import A, C, G, T

Array = NDArray[np.float64]
_MAX_TAXA = 30  # that are drawn
_LETTERS = {A: "A", C: "C", G: "G", T: "T"}


@dataclass(frozen=True)
class AttentionMap:
    """Attention within one row.

    Attributes:
        labels: of the places, (n,).
        between: how much each place (row) attends to each other (column) in the last layer, mean over the heads,
            (n, n), rows adding up to 1; None for an encoder without attention.
        pooled: share of each place in the pooling, (n,), adding up to 1.
    """

    labels: list[str]
    between: Array | None
    pooled: Array


@torch.no_grad()
def map_taxa(predictor: Predictor, number: int) -> AttentionMap:
    """Attention between the taxa of a sample, as a rarefaction of it has them."""
    body: Body = predictor.model.body
    assert body.pool is not None and body.samples is not None
    batch = predictor.batch([number], 0)
    with _listen(body.pool, body.samples[-1].get_submodule("mixer")) as taken:
        predictor.model.body(batch["taxa"], batch["counts"])
    taxa = predictor.to_library_numbers(batch["taxa"][0].cpu().numpy())
    library = predictor.library
    labels = [library.taxa[taxon] for taxon in taxa]
    if library.taxonomy is not None:
        labels = [_shorten(library.taxonomy[taxon]) for taxon in taxa]
    return AttentionMap(labels, taken["between"], taken["pooled"])


@torch.no_grad()
def map_positions(predictor: Predictor, taxon: int) -> AttentionMap | None:
    """Attention between the positions of a taxon's sequence; None for a model that reads none."""
    encoder = predictor.model.body.encoder
    if not isinstance(encoder, SequenceEncoder):
        return None
    tokens = encoder.tokens[taxon]
    length = int((tokens != 0).nonzero().max()) + 1  # without padding
    with _listen(encoder.pool, encoder.last_mixer) as taken:
        encoder(torch.tensor([taxon], device=tokens.device))
    labels = [_LETTERS.get(token, "·") for token in tokens[:length].tolist()]
    between = None if taken["between"] is None else taken["between"][:length, :length]
    return AttentionMap(labels, between, taken["pooled"][:length])


def plot_attention(found: AttentionMap, title: str) -> Any:
    """The map of the places with the largest share, in their order, above the shares."""
    from matplotlib.figure import Figure

    most = len(found.labels) if found.labels and len(found.labels[0]) == 1 else _MAX_TAXA
    kept = np.sort(np.argsort(-found.pooled, kind="stable")[:most])
    figure = Figure(figsize=(8, 9), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[5, 1])
    if found.between is not None:
        drawn = upper.imshow(found.between[np.ix_(kept, kept)], cmap="viridis", aspect="auto", vmin=0)
        figure.colorbar(drawn, ax=upper, label="attention (last layer, mean over heads)")
        upper.set(ylabel="from", xlabel="to")
        if most == _MAX_TAXA:
            upper.set_yticks(range(len(kept)), [found.labels[place] for place in kept], fontsize="x-small")
    else:
        upper.set_axis_off()
    upper.set_title(title)
    lower.bar(range(len(kept)), found.pooled[kept], color="C0")
    lower.set(ylabel="share in pooling")
    small = "x-small" if len(kept) <= _MAX_TAXA else 4
    upright = 90 if most == _MAX_TAXA else 0
    lower.set_xticks(range(len(kept)), [found.labels[place] for place in kept], rotation=upright, fontsize=small)
    return figure


@contextmanager
def _listen(pool: Pooling, mixer: nn.Module) -> Iterator[dict[str, Any]]:
    """Collect the weights of a pooling and of a layer while they are computed, of the first row."""
    taken: dict[str, Any] = {"between": None}

    def pooled(module: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(module, Pooling)
        taken["pooled"] = module.weights(*given)[0].double().cpu().numpy()

    def between(module: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        if isinstance(module, Attention):
            taken["between"] = module.weights(*given)[0].mean(0).double().cpu().numpy()

    handles = [pool.register_forward_hook(pooled), mixer.register_forward_hook(between)]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _shorten(lineage: str) -> str:
    """The last rank of a lineage that has a name."""
    ranks = [rank.strip() for rank in lineage.split(";")]
    return next((rank for rank in reversed(ranks) if not rank.endswith("__")), lineage)
