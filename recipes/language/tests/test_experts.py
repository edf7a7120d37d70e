"""Mixtures of experts: what routers lose is what transformers' own formula says, and kernels agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import unisono
from recipes.language.tests.corpora import GROUPED, QUIET, overrides, task_of
from recipes.language.tests.kernels import distance, gradients, perturbed
from unisono.config.schema.optimizers import AdamW
from unisono.optim.optimizers import parameter_groups
from unisono.runtime.errors import ConfigError, KernelError
from unisono.task import Context
from unisono_language import experts
from unisono_language import model as models
from unisono_language.settings import Corpus, FromConfig, LanguageConfig
from unisono_language.shrink import shrink_config
from unisono_language.task import Language

TRAINING, EVALUATION = Context(0, training=True), Context(0, training=False)
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**GROUPED, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {**GROUPED, "num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {**GROUPED, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
}


def config(name: str, **changed: Any) -> FromConfig:
    settings = {**QUIET, **MIXTURES[name], **changed.pop("settings", {})}
    return FromConfig.model_validate({"kind": "config", "architecture": name, "settings": settings, **changed})


def task(data: Corpus, name: str = "qwen3_moe", **changed: Any) -> Language:
    settings = {**MIXTURES[name], **changed.pop("settings", {})}
    return task_of(data, name, settings, **{"balance_weight": 0.5, "router_z_weight": 0.1, **changed})


def built(language: Language) -> Any:
    torch.manual_seed(0)
    model = language.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # routers that have made up their minds
            if name.endswith(("gate.weight", "router.weight")):
                parameter.mul_(20)
    return model


def batch_of(language: Language, rows: int, pad_to: int = 0) -> dict[str, Tensor]:
    made = language.collate([language.data()[row] for row in range(rows)])
    batch = {name: torch.from_numpy(array) for name, array in made.items()}
    assert bool((batch["targets"] == -100).any()), "no padding"
    return {n: nn.functional.pad(a, (0, pad_to), value=-100 if n == "targets" else 0) for n, a in batch.items()}


def with_totals(language: Language, outputs: Any, batch: dict[str, Tensor]) -> Context:
    totals = language.totals(outputs, batch, TRAINING) if language.needs_totals else {}
    return Context(0, training=True, totals=totals)


# losses of routers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_the_balance_over_a_batch_is_what_transformers_computes_layer_by_layer(data: Corpus, name: str) -> None:
    language = task(data, name)
    model, batch = built(language), batch_of(language, 5)
    outputs = language.outputs(model, batch, TRAINING)
    loss = language.loss(outputs, batch, with_totals(language, outputs, batch))
    real = batch["targets"] != -100
    counts = language.counts({n: a.numpy() for n, a in batch.items()})
    assert set(counts) == set(loss.sums) == {"next_token", "balance", "router_z"}
    assert set(counts.values()) == {float(real.sum())}
    best = MIXTURES[name]["num_experts_per_tok"]
    layers = [outputs["router"][:, :, layer].reshape(-1, 8) for layer in range(2)]
    theirs = [load_balancing_loss_func((layer,), 8, best, real.long()) for layer in layers]
    expected = float(torch.stack(theirs).detach().mean())
    assert float(loss.sums["balance"].detach()) / counts["balance"] == pytest.approx(expected, rel=1e-5)
    assert expected > 1.02 * best, "experts are balanced already"
    square = torch.stack([layer.logsumexp(-1).square() for layer in layers]).mean(0)[real.reshape(-1)].mean()
    assert float(loss.sums["router_z"].detach()) / counts["router_z"] == pytest.approx(float(square.detach()), rel=1e-5)


def test_the_router_is_what_the_model_routes_by(data: Corpus) -> None:
    """The counted choices are those that the experts are called with."""
    language = task(data)
    model, batch = built(language), batch_of(language, 5)
    called = []
    stacks = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for stack in stacks:
        stack.register_forward_pre_hook(lambda _, inputs: called.append(inputs[1]))
    outputs = language.outputs(model, batch, TRAINING)
    real = (batch["targets"] != -100).reshape(-1)
    theirs = torch.stack([torch.bincount(chosen[real].reshape(-1), minlength=8) for chosen in called])
    assert torch.equal(language.totals(outputs, batch, TRAINING)["routed"], theirs.float())


@pytest.mark.parametrize("over", ["global_batch", "row"])
def test_padding_counts_for_nothing(data: Corpus, over: str) -> None:
    language = task(data, balance_over=over)
    language.kernels("cpu", "fp64")
    model = built(language).double()
    found = []
    for pad_to in (0, 16):
        batch = batch_of(language, 5, pad_to)
        outputs = language.outputs(model, batch, TRAINING)
        loss = language.loss(outputs, batch, with_totals(language, outputs, batch))
        load, tokens = loss.metrics["expert_load"]
        found.append([*(float(term.detach()) for term in loss.sums.values()), float(load), float(tokens)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # HF's rotary angles are made in fp32
    assert found[0][-2] / found[0][-1] > 1.2


def test_over_rows_the_balance_is_the_one_of_each_row_alone(data: Corpus) -> None:
    language = task(data, balance_over="row")
    assert not language.needs_totals
    model = built(language)

    def balance(batch: dict[str, Tensor]) -> float:
        outputs = language.outputs(model, batch, TRAINING)
        return float(language.loss(outputs, batch, TRAINING).sums["balance"].detach())

    batch = batch_of(language, 4)
    rows = [{name: array[row : row + 1] for name, array in batch.items()} for row in range(4)]
    assert balance(batch) == pytest.approx(sum(map(balance, rows)), rel=1e-5)


def test_the_balance_evens_out_what_experts_get(data: Corpus) -> None:
    language = task(data)
    model, batch = built(language), batch_of(language, 24)
    routers = [p for n, p in model.named_parameters() if n.endswith("gate.weight")]
    optimizer, loads = torch.optim.Adam(routers, lr=0.02), []
    for _ in range(60):
        outputs = language.outputs(model, batch, TRAINING)
        loss = language.loss(outputs, batch, with_totals(language, outputs, batch))
        load, tokens = loss.metrics["expert_load"]
        loads.append(float(load / tokens))
        optimizer.zero_grad()
        loss.sums["balance"].backward()
        optimizer.step()
    assert loads[-1] - 1 < 0.5 * (loads[0] - 1), loads


def test_an_evaluation_has_the_loss_of_tokens_alone(data: Corpus) -> None:
    language = task(data)
    batch = batch_of(language, 3)
    outputs = language.outputs(built(language).eval(), batch, EVALUATION)
    assert "router" not in outputs
    assert set(language.loss(outputs, batch, EVALUATION).sums) == {"next_token"}


OTHER_RULE = {
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("llama", {}, "llama is not a mixture of experts"),
        ("deepseek_v3", OTHER_RULE, "deepseek_v3 chooses its experts by another rule"),
    ],
)
def test_a_router_that_has_no_such_loss_is_refused(
    data: Corpus, architecture: str, settings: dict[str, Any], why: str
) -> None:
    model = FromConfig(
        kind="config", architecture=architecture, settings={**QUIET, **GROUPED, **settings}, balance_weight=0.1
    )
    with pytest.raises(ConfigError, match=why):
        Language(LanguageConfig(), model=model, data=data).check()


def test_without_weights_routers_are_not_asked(data: Corpus) -> None:
    language = task(data, balance_weight=0.0, router_z_weight=0.0)
    batch = batch_of(language, 3)
    outputs = language.outputs(built(language), batch, TRAINING)
    assert "router" not in outputs
    assert not language.needs_totals
    assert set(language.counts({n: a.numpy() for n, a in batch.items()})) == {"next_token"}


# kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_of_the_grouped_product_are_those_of_the_loop(
    data: Corpus, name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what a change of the weights in their last bit makes of them; on some processors they are the same bits."""
    made, products = {}, []
    whole = torch.nn.functional.grouped_mm

    def watched(*given: Any, **more: Any) -> Tensor:
        products.append(how)
        return whole(*given, **more)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    for how in ("loop", "grouped"):
        made[how] = gradients(task(data, name, experts=how), precision)
    assert set(products) == {"grouped"}
    floor = distance(gradients(task(data, name, experts="loop"), precision, perturbed), made["loop"])
    assert all(np.any(gradient) for gradient in made["loop"].values())
    assert distance(made["grouped"], made["loop"]) < 8 * floor < 0.5


def test_under_autocast_experts_are_multiplied_in_its_precision(data: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes the dtype of the weights: fp32 masters would be multiplied in fp32."""
    seen = set()
    whole = torch.nn.functional.grouped_mm

    def watched(rows: Tensor, matrices: Tensor, **more: Any) -> Tensor:
        seen.add((rows.dtype, matrices.dtype))
        return whole(rows, matrices, **more)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    made = gradients(task(data, experts="grouped"), "bf16")
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert {gradient.dtype for gradient in made.values()} == {np.dtype("float32")}


@pytest.mark.parametrize(
    ("changed", "device", "precision", "chosen"),
    [
        ({}, "cpu", "fp32", "grouped"),
        ({}, "cpu", "bf16", "grouped"),
        ({}, "cuda", "bf16", "grouped"),
        ({}, "cpu", "fp64", r"loop \(grouped: torch has no fp64 kernel for grouped matrix products\)"),
        ({}, "mps", "fp32", r"loop \(grouped: torch's grouped matrix product is not known to work on mps\)"),
        ({"moe_intermediate_size": 20}, "cpu", "fp32", "grouped"),
        ({"moe_intermediate_size": 20}, "cpu", "bf16", r"loop \(grouped: in bf16 .* of 8, but some are \[20\]\)"),
        ({"moe_intermediate_size": 17}, "cpu", "fp32", r"loop \(grouped: in fp32 .* of 4, but some are \[17, 34\]\)"),
    ],
)
def test_the_product_of_experts_is_chosen_by_capability(
    data: Corpus, changed: dict[str, Any], device: str, precision: str, chosen: str
) -> None:
    language = task(data, settings=changed)
    assert re.fullmatch(chosen, language.kernels(device, precision)["experts"])


def test_widths_that_are_said_not_to_fit_do_not(data: Corpus) -> None:
    """The rule is torch's: asked against it, torch refuses; by it, the loop trains."""
    language = task(data, settings={"moe_intermediate_size": 17})
    language.kernels("cpu", "fp32")
    assert np.any(gradients(language, "fp32")["model.layers.0.mlp.experts.down_proj"])
    model = built(language)
    experts.register_grouped()
    model.set_experts_implementation(experts.GROUPED)
    with pytest.raises(RuntimeError, match="16"):
        language.outputs(model, batch_of(language, 3), TRAINING)


def test_a_grouped_product_that_is_not_there_is_refused_with_reason_and_remedy(data: Corpus) -> None:
    with pytest.raises(KernelError, match=r"model\.experts=grouped cannot be used: .*fp64.*set model\.experts=loop"):
        task(data, experts="grouped").kernels("cpu", "fp64")
    dense = FromConfig(kind="config", architecture="llama", settings={**QUIET, **GROUPED}, experts="loop")
    with pytest.raises(KernelError, match="llama has no stacked experts"):
        Language(LanguageConfig(), model=dense, data=data).kernels("cpu", "fp32")


# around it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_matrices_of_experts_decay_and_their_biases_do_not(data: Corpus, name: str) -> None:
    with torch.device("meta"):
        model = models.build_untrained(config(name), 300)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    groups = parameter_groups(AdamW(kind="adamw", weight_decay=0.1), model)
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    of_experts = {key for key in names.values() if ".experts." in key}
    assert {key for key in of_experts if not key.endswith("bias")} <= decayed
    assert not {key for key in of_experts if key.endswith("bias")} & decayed


def test_a_smaller_copy_keeps_losses_kernels_and_experts_enough_for_a_token() -> None:
    large = {"num_experts": 64, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    small = shrink_config(config("qwen3_moe", balance_weight=0.3, experts="loop", settings=large), 300, 10_000)
    assert small is not None
    assert (small.balance_weight, small.experts) == (0.3, "loop")
    assert models.check_model(small, 300).num_experts == 10


def test_what_a_mixture_has_learnt_is_written_with_any_width(data: Corpus, tmp_path: Path) -> None:
    """transformers would generate by the grouped product, which refuses such widths."""
    from unisono.launch import train
    from unisono_language.generate import generate

    settings = {**QUIET, **MIXTURES["qwen3_moe"], "moe_intermediate_size": 17}
    asked = {"model.architecture": "qwen3_moe", "model.settings": settings, "model.balance_weight": 0.1}
    result = train.train("language", overrides(Path(str(data.path)), tmp_path, **asked))
    assert result.loss is not None
    assert generate(unisono.open_run(result.folder), "ab", tokens=3).startswith("ab")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_more_experts_per_token_than_experts_are_refused(data: Corpus, name: str) -> None:
    settings = {**QUIET, **MIXTURES[name], "num_experts_per_tok": 9}
    model = FromConfig(kind="config", architecture=name, settings=settings)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok=9 is more than num_(local_)?experts=8; use at most 8"):
        Language(LanguageConfig(), model=model, data=data).check()
