"""The runs that have to be the same: two models, with dropout and without, on every layout; shared with the benchmark.

Target counts are uneven, one row has none, and the last batch does not divide.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from packages.unisono.tests import processes
from packages.unisono.tests.layouts import LAYOUTS
from packages.unisono.tests.runs import SGD, Trace, configuration, traces
from packages.unisono.tests.tasks import TransformerTask
from unisono.config.schema.run import RunConfig
from unisono.task import Task
from unisono_language.settings import Corpus, FromConfig, LanguageConfig
from unisono_language.task import Language

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
ROWS = 9 * 12 + 5  # ten batches of 12 rows, the last one short
MODELS = ("transformer", "language")
DROPOUTS = (0.0, 0.25)
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Case:
    """One run of the matrix."""

    model: str
    dropout: float
    precision: str
    layout: str

    @property
    def reference(self) -> Case:
        """The run on one process that this one must equal.

        Dropout is drawn per micro-batch, which is then part of the mathematics; without it, any split will do.
        """
        micro = self.layout.split(" m")[1].split()[0] if " m" in self.layout else ""
        return Case(self.model, self.dropout, self.precision, f"single m{micro}" if self.dropout else "single")

    def __str__(self) -> str:
        return f"{self.model}, dropout {self.dropout}, {self.precision}: {self.layout}"


CASES = [
    Case(model, dropout, precision, layout)
    for model in MODELS
    for dropout in DROPOUTS
    for precision in TOLERANCE
    for layout in LAYOUTS
    if not dropout or " m" in layout
]


def run(folder: Path, cases: list[Case] = CASES, timeout: float = 900) -> dict[Case, Trace]:
    """Make the runs.

    Args:
        folder: for the corpus of the language model.
        cases: which of `CASES`; their references are not added.
        timeout: seconds for all runs of one world size.
    """
    made = {kind: _task(*kind, folder) for kind in dict.fromkeys((case.model, case.dropout) for case in cases)}
    tasks = {case: made[case.model, case.dropout] for case in cases}
    return run_all({case: (task, _config(case, task)) for case, task in tasks.items()}, timeout)


def run_all(cases: Mapping[Name, tuple[Task, RunConfig]], timeout: float = 900) -> dict[Name, Trace]:
    """Make runs, those of one world size in the same processes; all ranks have to report the same losses."""
    results: dict[Name, Trace] = {}
    for world in sorted({config.layout.world_size for _, config in cases.values()}):
        chosen = {name: case for name, case in cases.items() if case[1].layout.world_size == world}
        asked = list(chosen.values())
        ranks = [processes.alone(traces, asked)] if world == 1 else processes.run(traces, world, asked, timeout=timeout)
        for name, *everyone in zip(chosen, *ranks, strict=True):
            assert all(other.losses == everyone[0].losses for other in everyone), f"{name}: ranks report other losses"
            results[name] = everyone[0]
    return results


def _config(case: Case, task: Task) -> RunConfig:
    world, layout = LAYOUTS[case.layout]
    return configuration(
        layout={"world_size": world, **layout},
        train={"epochs": ROWS / len(task.data()), "precision": case.precision, "guard_every": 3, "clip_norm": 0.5},
        optim=SGD,
        eval={"micro_batch": 4},
    )


def _task(model: str, dropout: float, folder: Path) -> Task:
    if model == "transformer":
        return TransformerTask(TransformerTask.Config(dropout=dropout))
    if not (folder / "documents.txt").exists():
        rng = np.random.default_rng(3)
        words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(1, 6))) for _ in range(50)]
        documents = [" ".join(rng.choice(words, size=rng.integers(2, 40))) for _ in range(40)]
        (folder / "documents.txt").write_text("\n\n".join(documents))
    settings = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_dropout": dropout,
    }
    return Language(
        LanguageConfig(sequence=16, pad_to_multiple=4, loss_chunk=7),
        model=FromConfig(kind="config", architecture="llama", settings=settings),
        data=Corpus(kind="corpus", path=folder, separator="\n\n", vocab_size=280, cache=folder / "cache", held_out=0.2),
    )
