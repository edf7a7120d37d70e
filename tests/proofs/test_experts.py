"""Mixtures of experts on every layout: stacked experts of which most passes use few, and losses of their routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests.layouts import LAYOUTS
from packages.unisono.tests.runs import SGD, Trace, assert_same, configuration
from recipes.language.tests import corpora
from tests.proofs.matrix import TOLERANCE, run_all
from unisono.config.schema.run import RunConfig
from unisono.task import Context
from unisono_language.settings import FromConfig, LanguageConfig
from unisono_language.task import Language

pytestmark = pytest.mark.slow

EXPERTS = 32  # with two for each of at most 12 tokens, one row leaves most of them without work
SETTINGS = {
    "hidden_size": 16, "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts": EXPERTS, "num_experts_per_tok": 2, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CHOSEN = (
    "single", "single m3", "single m1", "ddp×2", "ddp×2 m3", "fsdp×2", "fsdp×2 m3", "fsdp×2 m3 deferred",
    "fsdp×2 m3 recomputed", "hsdp 2×2 m3", "ddp×4 m1",
)  # fmt: skip
OVER = ("global_batch", "row")
BY_ROWS = ("single", "single m1", "ddp×2 m3", "fsdp×2 m3")
IN_FP32 = ("single", "single m1", "ddp×2 m3", "fsdp×2", "hsdp 2×2 m3")  # there experts are one grouped product
CASES = [
    (over, precision, layout)
    for over, layouts in zip(OVER, (CHOSEN, BY_ROWS), strict=True)
    for precision in TOLERANCE
    for layout in layouts
    if precision == "fp64" or layout in IN_FP32
]
Case = tuple[str, str, str]


def task(folder: Path, over: str, **changed: Any) -> Language:
    guided = {"balance_weight": 0.5, "balance_over": over, "router_z_weight": 0.1, **changed}
    return Language(
        LanguageConfig(sequence=12, pad_to_multiple=4, loss_chunk=7),
        model=FromConfig.model_validate(
            {"kind": "config", "architecture": "qwen3_moe", "settings": SETTINGS, **guided}
        ),
        data=corpora.corpus(folder),
    )


def config(language: Language, precision: str, layout: str) -> RunConfig:
    world, keys = LAYOUTS[layout]
    rows = 4 * 12 + 5  # five batches, the last one short
    return configuration(
        layout={"world_size": world, **keys},
        train={"epochs": rows / len(language.data()), "precision": precision, "guard_every": 2, "clip_norm": 0.5},
        optim=SGD,
        eval={"micro_batch": 4},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    corpora.write_jsonl(path / "data" / "a.jsonl", corpora.sentences(80))
    return path / "data"


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[Case, Trace]:
    made = {over: task(folder, over) for over in OVER}
    return run_all(
        {
            (over, precision, layout): (made[over], config(made[over], precision, layout))
            for over, precision, layout in CASES
        }
    )


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_mixture_of_experts_is_trained_as_on_one_process(runs: dict[Case, Trace], case: Case) -> None:
    over, precision, _ = case
    reference = runs[over, precision, "single"]
    assert len(set(reference.losses)) == 5
    assert all(np.any(gradient) for gradient in reference.gradients.values())
    assert all(np.any(reference.parameters[name] != before) for name, before in reference.before.items())
    assert all({"next_token", "balance", "router_z", "expert_load"} <= set(step) for step in reference.metrics)
    assert_same(runs[case], reference, TOLERANCE[precision])


def test_the_losses_of_routers_are_no_part_of_an_evaluation(runs: dict[Case, Trace]) -> None:
    found = runs["global_batch", "fp64", "fsdp×2"].evaluation
    assert found.keys() == {"loss", "next_token", "accuracy", "bits_per_byte"}
    assert found["loss"] == found["next_token"]


def test_single_rows_leave_experts_without_a_token_that_others_use(runs: dict[Case, Trace], folder: Path) -> None:
    """Else the equality would say nothing of experts that a process does not use."""
    language = task(folder, "row")
    torch.manual_seed(0)
    model = language.build()
    context, used = Context(0, training=True), []
    for row in runs["global_batch", "fp64", "single"].rows[0]:
        batch = {name: torch.from_numpy(array) for name, array in language.collate([language.data()[row]]).items()}
        with torch.no_grad():
            outputs = language.outputs(model, batch, context)
        used.append(language.totals(outputs, batch, context)["routed"] > 0)
    assert all(int((~each).sum()) > EXPERTS // 2 for each in used), "a row uses nearly all experts"
    assert int(torch.stack(used).any(0).sum()) > 1.5 * EXPERTS, "the batch uses few experts of its two layers"


def test_a_balance_over_the_global_batch_is_not_one_over_rows(runs: dict[Case, Trace]) -> None:
    over_batch, over_row = (runs[over, "fp64", "single"].metrics[0]["balance"] for over in OVER)
    assert over_row > over_batch + 0.01
