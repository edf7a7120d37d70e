"""The promise: whatever the layout, the run is the one that a single process makes.

For a small transformer and the language recipe's model, with uneven target counts, a row without targets, a last batch
that does not divide, and dropout. Raw gradients of the first step, norms, losses, metrics, consumed rows, evaluation,
and the parameters after ten updates are compared with those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import processes
from tests.runs import SGD, Trace, configuration, distance, traces
from tests.tasks import TransformerTask
from unisono.recipes.language.settings import Corpus, FromConfig, LanguageConfig
from unisono.recipes.language.task import Language

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
ROWS = 9 * 12 + 5  # ten batches of 12 rows, the last one short

# name -> (processes, layout). `m3`: three rows in a pass, and as many passes as a process's share of the batch needs.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "single m3": (1, {"micro_batch": 3}),
    "single m1": (1, {"micro_batch": 1}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "ddp×2 m3": (2, {"strategy": "ddp", "micro_batch": 3}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "fsdp×2 m3": (2, {"strategy": "fsdp", "micro_batch": 3}),
    "fsdp×2 m3 deferred": (2, {"strategy": "fsdp", "micro_batch": 3, "defer_reduction": True}),
    "fsdp×2 m3 recomputed": (2, {"strategy": "fsdp", "micro_batch": 3, "activation_checkpointing": 2}),
    "ddp×4 m3": (4, {"strategy": "ddp", "micro_batch": 3}),
    "ddp×4 m1": (4, {"strategy": "ddp", "micro_batch": 1}),
    "hsdp 2×2 m3": (4, {"strategy": "hsdp", "shards": 2, "micro_batch": 3}),
    "hsdp 2×2 m1": (4, {"strategy": "hsdp", "shards": 2, "micro_batch": 1}),
}  # fmt: skip


def _language(tmp: Path, dropout: float) -> Language:
    if not (tmp / "documents.txt").exists():
        rng = np.random.default_rng(3)
        words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(1, 6))) for _ in range(50)]
        documents = [" ".join(rng.choice(words, size=rng.integers(2, 40))) for _ in range(40)]
        (tmp / "documents.txt").write_text("\n\n".join(documents))
    return Language(
        LanguageConfig(sequence=16, pad_to_multiple=4, loss_chunk=7),
        model=FromConfig(
            kind="config",
            architecture="llama",
            settings={
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
                "attention_dropout": dropout,
            },
        ),
        data=Corpus(kind="corpus", path=tmp, separator="\n\n", vocab_size=280, cache=tmp / "cache", held_out=0.2),
    )


def _cases(tmp: Path) -> dict[str, tuple[Any, Any, str]]:
    """Every run of the matrix: name -> (task, config, name of the single-process run it must equal)."""
    cases: dict[str, tuple[Any, Any, str]] = {}
    for model in ("transformer", "language"):
        for dropout in (0.0, 0.25):
            task = (
                TransformerTask(TransformerTask.Config(dropout=dropout))
                if model == "transformer"
                else _language(tmp, dropout)
            )
            epochs = ROWS / len(task.data())
            for precision in ("fp64", "fp32"):
                for layout, (world, settings) in LAYOUTS.items():
                    micro = layout.split(" m")[1].split()[0] if " m" in layout else ""
                    if dropout and not micro:
                        continue  # drawn per micro-batch, which is then part of the mathematics
                    reference = f"single m{micro}" if dropout else "single"
                    config = configuration(
                        layout={"world_size": world, **settings},
                        train={"epochs": epochs, "precision": precision, "guard_every": 3, "clip_norm": 0.5},
                        optim=SGD,
                        eval={"micro_batch": 4},
                    )
                    prefix = f"{model}, dropout {dropout}, {precision}"
                    cases[f"{prefix}: {layout}"] = (task, config, f"{prefix}: {reference}")
    return cases


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, str]]:
    cases = _cases(tmp_path_factory.mktemp("matrix"))
    results: dict[str, tuple[Trace, str]] = {}
    for world in (1, 2, 4):
        names = [name for name, (_, config, _) in cases.items() if config.layout.world_size == world]
        runs = [cases[name][:2] for name in names]
        per_rank = [processes.alone(traces, runs)] if world == 1 else processes.run(traces, world, runs, timeout=900)
        for i, name in enumerate(names):
            for other in per_rank[1:]:
                assert other[i].losses == per_rank[0][i].losses, f"{name}: ranks report different losses"
            results[name] = (per_rank[0][i], cases[name][2])
    return results


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        names = [
            f"{model}, dropout {dropout}, {precision}: {layout}"
            for model in ("transformer", "language")
            for dropout in (0.0, 0.25)
            for precision in ("fp64", "fp32")
            for layout in LAYOUTS
            if not (dropout and " m" not in layout)
        ]
        metafunc.parametrize("case", names)


def test_layout_equals_one_process(matrix: dict[str, tuple[Trace, str]], case: str) -> None:
    mine, reference_name = matrix[case]
    reference = matrix[reference_name][0]
    tolerance = TOLERANCE[case.split(":")[0].rsplit(" ", 1)[1]]
    _is_not_vacuous(reference)
    assert mine.rows == reference.rows
    worst = distance(mine.before, reference.before)
    assert max(worst.values()) == 0.0, "initial parameters"
    worst = distance(mine.gradients, reference.gradients)
    assert max(worst.values()) < tolerance, f"raw gradients: {max(worst, key=worst.get)}"
    assert mine.norms == pytest.approx(reference.norms, rel=tolerance)
    assert mine.losses == pytest.approx(reference.losses, rel=tolerance)
    for mine_metrics, metrics in zip(mine.metrics, reference.metrics, strict=True):
        assert mine_metrics == pytest.approx(metrics, rel=tolerance)
    worst = distance(mine.parameters, reference.parameters)
    assert max(worst.values()) < tolerance, f"parameters after ten updates: {max(worst, key=worst.get)}"
    assert mine.evaluation == pytest.approx(reference.evaluation, rel=tolerance)


def _is_not_vacuous(reference: Trace) -> None:
    """Equality says something only if something happened."""
    assert len(reference.losses) == 10
    assert len(set(reference.losses)) == 10
    assert all(norm > 1e-3 for norm in reference.norms)
    assert any(norm > 0.5 for norm in reference.norms), "clipping was never needed"
    assert len(reference.rows[-1]) == 5
    assert sorted(reference.rows[0]) != reference.rows[0], "the order is not shuffled"
    assert all(np.any(gradient) for gradient in reference.gradients.values())
    still = {name for name, before in reference.before.items() if not np.any(reference.parameters[name] != before)}
    assert still <= without_gradient(reference)


def without_gradient(reference: Trace) -> set[str]:
    """Tensors whose true gradient is zero: a key bias adds one number to all scores of a query. They have rounding."""
    whole = np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in reference.gradients.values()))
    named = {name for name, gradient in reference.gradients.items() if np.linalg.norm(gradient) < 1e-7 * whole}
    assert named <= {"blocks.0.attention.key.bias", "blocks.1.attention.key.bias"}
    return named


def test_dropout_changes_the_run(matrix: dict[str, tuple[Trace, str]]) -> None:
    for model in ("transformer", "language"):
        without, with_dropout = (matrix[f"{model}, dropout {p}, fp64: single m3"][0] for p in (0.0, 0.25))
        assert without.losses[0] != pytest.approx(with_dropout.losses[0], rel=1e-6)
