"""Traces of scripts, for tests of what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unisono.proof.recording.trace import Array, RunFacts, StepFacts, write_facts
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace, write_rank_facts

DRAW = np.random.default_rng(0)
OWN = [{"a": DRAW.normal(size=(3, 4)), "b": DRAW.normal(size=4)} for _ in range(2)]  # gradients of two ranks


def combine(*weights: float) -> dict[str, Array]:
    """Their sum, weighted so."""
    return {name: sum(w * rank[name] for w, rank in zip(weights, OWN, strict=True)) for name in OWN[0]}  # type: ignore[misc]


def build_step(by_rank: Sequence[Sequence[int]], **facts: Any) -> StepFacts:
    """A step in which ranks computed rows of these numbers."""
    known = {"loss": None, "terms": {}, "grad_norm": 1.0, "lr": [[0.1] for _ in by_rank], "metrics": [], **facts}
    return StepFacts(
        rows=sorted(row for rank in by_rank for row in rank), by_rank=[[*rank] for rank in by_rank], **known
    )


def write_script_trace(
    folder: Path, ranks: Sequence[Sequence[RankFacts]], steps: Sequence[StepFacts] = (), **facts: Any
) -> ScriptTrace:
    """What ranks saw, step by step; where nothing else is known of the steps, they have no rows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rank_facts(folder, ranks)
    write_facts(folder, RunFacts(steps=[*steps] or [build_step([[] for _ in seen]) for seen in ranks], **facts))
    return ScriptTrace(folder, "fp64")
