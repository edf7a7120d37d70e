"""One piece of work of `benchmarks/before.py`, under whichever code PYTHONPATH names.

    python -P benchmarks/before_work.py PIECE FOLDER BEGAN

PIECE is `rows`, `steps`, `save` or `resume`, which goes on from what `save` left in FOLDER; BEGAN is when the command
was given (`time.time()`). Uses only names that earlier commits export, too, and says in one line of JSON what it found.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import unisono

PIECE, FOLDER, BEGAN = (sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])) if len(sys.argv) == 4 else ("", Path(), 0.0)
FILES = {
    "Parquet, groups of 1.2 kB": "small.parquet",
    "Parquet, usual groups": "usual.parquet",
    "JSON Lines": "rows.jsonl",
    "NumPy": "rows.npy",
}
REPEATS = 3  # readings of a file, of which the fastest counts
SETTINGS = {"layout.device": "cpu", "layout.world_size": 1, "checkpoint.background": False}
STEPS = {"steps": 1_500, "save": 8, "resume": 8}
WARM_UP, STOP_AT = 100, 4


def read_rows() -> dict[str, float]:
    """Time of a row, read in order from an opened file, and time to open each file."""
    found = {}
    for title, name in FILES.items():
        opened, read = [], []
        for _ in range(REPEATS):
            began = time.perf_counter()
            source: Any = unisono.open_source(FOLDER / name)
            opened.append(time.perf_counter() - began)
            began = time.perf_counter()
            count = sum(1 for _ in source)
            read.append((time.perf_counter() - began) / count)
        found[f"a row of {title}, µs"] = 1e6 * min(read)
        found[f"to open {title}, ms"] = 1e3 * min(opened)
    return found


class Digits(unisono.Task):
    """A small classifier; one of 100 MB, with the optimizer's state, where a save is measured."""

    def data(self) -> Any:
        rng = np.random.default_rng(0)
        pixels, labels = rng.normal(size=(2000, 64)).astype(np.float32), rng.integers(0, 10, 2000)
        return [{"pixels": row, "label": label} for row, label in zip(pixels, labels, strict=True)]

    def build(self) -> Any:
        from torch import nn

        width = 64 if PIECE == "steps" else 2_850
        return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))

    def counts(self, batch: Any) -> Any:
        return {"label": len(batch["label"])}

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        return model(batch["pixels"])

    def loss(self, outputs: Any, batch: Any, context: Any) -> Any:
        import torch.nn.functional as F

        return unisono.Loss({"label": F.cross_entropy(outputs, batch["label"], reduction="sum")})


class Watch(unisono.Callback):
    """Keeps when a step was over, and a save."""

    steps: ClassVar[dict[int, float]] = {}
    saves: ClassVar[dict[int, float]] = {}

    def on_step(self, step: int, values: Mapping[str, float]) -> Any:
        self.steps[step] = time.time()
        return unisono.Stop("measured") if PIECE == "save" and step == STOP_AT else None

    def on_save(self, step: int, checkpoint: Path) -> Any:
        self.saves[step] = time.time()
        return None


def train() -> dict[str, float]:
    """Seconds of a training run, from moments that its callbacks see."""
    folder = "steps" if PIECE == "steps" else "saved"
    overrides = {**SETTINGS, "train.steps": STEPS[PIECE], "run.dir": str(FOLDER), "run.name": folder}
    unisono.train(Digits, overrides | ({} if PIECE == "steps" else {"checkpoint.every": 2}), callbacks=[Watch])
    first = min(Watch.steps)
    assert first == (STOP_AT + 1 if PIECE == "resume" else 1), f"the first step was {first}"
    until_first = Watch.steps[first] - BEGAN
    if PIECE == "resume":
        return {"command to the first step, after a resume of 100 MB, s": until_first}
    if PIECE == "save":
        return {"a save of 100 MB, s": Watch.saves[2] - Watch.steps[2]}
    spent = Watch.steps[STEPS[PIECE]] - Watch.steps[WARM_UP]
    return {"command to the first step, s": until_first, "a step, ms": 1e3 * spent / (STEPS[PIECE] - WARM_UP)}


if __name__ == "__main__":
    print("FOUND", json.dumps(read_rows() if PIECE == "rows" else train()), flush=True)
