"""What these tests train: a few made-up samples, a small model, all losses at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono_microbiome.settings import (
    LossWeights,
    Masking,
    MicrobiomeConfig,
    ModelSettings,
    Simulated,
    TargetSettings,
)
from unisono_microbiome.task import Microbiome

ALL = {"nucleotides": 0.5, "counts": 2.0, "distance": 1.0, "faith_pd": 0.25, "target": 1.5}
TINY = {"features": 8, "heads": 2, "sequence_layers": 1, "taxon_layers": 2, "sample_layers": 1, "chunk": 5}


def data(cache: Path, **settings: Any) -> Simulated:
    """18 samples of 6 subjects, 12 to 18 of which are to train on."""
    sizes = {"subjects": 6, "visits": 3, "taxa": 24, "bases": 16, "reads": 300}
    known = {"group": "subject", "target": "share", "rarefy": 100, "held_out": 0.3, "cache": cache}
    return Simulated(**{"kind": "simulated", **sizes, **known, **settings})


def task(
    cache: Path,
    weights: dict[str, float] | None = None,
    model: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    masking: dict[str, Any] | None = None,
    **settings: Any,
) -> Microbiome:
    """The task with a tiny model without dropout; further settings are those of the data."""
    config = MicrobiomeConfig(
        weights=LossWeights(**(weights or ALL)),
        masking=Masking(**{"sequences": 4, **(masking or {})}),
        target=TargetSettings(**(target or {})),
    )
    return Microbiome(
        config, model=ModelSettings(**{**TINY, "dropout": 0.0, **(model or {})}), data=data(cache, **settings)
    )
