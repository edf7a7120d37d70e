"""Attention: which kernel is chosen, what is refused, and that kernels compute the same to their measured floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.language.tests.corpora import WIDE, WIDE_MODELS, corpus, sentences, task_of, write_jsonl
from recipes.language.tests.kernels import distance, gradients, perturbed
from unisono.runtime.errors import ConfigError, KernelError
from unisono_language import kernels
from unisono_language.settings import Corpus
from unisono_language.task import Language

MODELS: dict[str, dict[str, Any]] = {
    **WIDE_MODELS,
    "gemma2": {**WIDE, "head_dim": 16, "query_pre_attn_scalar": 16},
    "olmoe": {**WIDE, "num_experts": 4, "num_experts_per_tok": 2},
}


def task(data: Corpus, name: str = "llama", attention: str = "auto", **settings: Any) -> Language:
    return task_of(data, name, {**MODELS[name], **settings}, attention=attention)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if flash attention were installed."""
    monkeypatch.setattr(kernels, "_find_flash", lambda: "flash_attention_2")


# the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device", "precision", "chosen"),
    [
        ("llama", "cpu", "fp64", "sdpa"),
        ("llama", "cpu", "bf16", "sdpa"),
        ("llama", "cuda", "fp32", "sdpa"),
        ("llama", "cuda", "bf16", "flash"),
        ("llama", "xpu", "bf16", "sdpa"),
        ("gemma2", "cpu", "fp32", "eager (sdpa: transformers has no attention of this kind for gemma2)"),
        ("gemma2", "cuda", "fp32", "flex (sdpa: transformers has no attention of this kind for gemma2)"),
        ("gemma2", "cuda", "fp64", "eager (sdpa: transformers has no attention of this kind for gemma2)"),
    ],
)
def test_auto_takes_what_device_precision_and_model_allow(
    data: Corpus, installed: None, name: str, device: str, precision: str, chosen: str
) -> None:
    assert task(data, name).kernels(device, precision)["attention"] == chosen


def test_without_the_package_auto_takes_sdpa_and_flash_is_refused(data: Corpus) -> None:
    assert not kernels._find_flash(), "flash-attn is installed here: take this test to where it is not"
    assert task(data).kernels("cuda", "bf16") == {"attention": "sdpa"}
    with pytest.raises(KernelError, match=r"flash-attn is not installed; set model\.attention=sdpa, or auto"):
        task(data, "llama", "flash").kernels("cuda", "bf16")


@pytest.mark.parametrize(
    ("name", "asked", "device", "precision", "settings", "reason"),
    [
        ("llama", "flex", "cpu", "fp32", {}, "no backward pass on a CPU; set model.attention=sdpa"),
        ("llama", "flex", "cuda", "fp64", {}, "no fp64 kernel"),
        ("llama", "flex", "cuda", "bf16", {"attention_dropout": 0.1}, "but this model's is 0.1"),
        ("llama", "flex", "cuda", "bf16", {"num_attention_heads": 8}, "at least 16 features, but this model's have 8"),
        ("olmoe", "flex", "cuda", "bf16", {}, "transformers has no attention of this kind for olmoe"),
        ("llama", "flash", "cpu", "bf16", {}, "needs a CUDA or ROCm device, but this run is on cpu"),
        ("llama", "flash", "cuda", "fp32", {}, r"only half precision \(train.precision=bf16\)"),
        ("gemma2", "sdpa", "cpu", "fp32", {}, "no attention of this kind for gemma2; set model.attention=eager"),
    ],
)
def test_what_cannot_be_had_is_refused_with_reason_and_remedy(
    data: Corpus, installed: None, name: str, asked: str, device: str, precision: str, settings: Any, reason: str
) -> None:
    with pytest.raises(KernelError, match=rf"model\.attention={asked} cannot be used: .*{reason}"):
        task(data, name, asked, **settings).kernels(device, precision)


def test_a_refusal_is_a_config_error_that_build_makes_too(data: Corpus) -> None:
    with pytest.raises(ConfigError, match="no backward pass on a CPU"):
        task(data, "llama", "flex").build()


def test_the_reason_against_flex_on_a_cpu_is_torchs() -> None:
    """Should torch learn it, this test says so."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 128, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward"):
        flex_attention(q, q, q).sum().backward()


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_with_what_was_chosen(data: Corpus, name: str) -> None:
    language = task(data, name)
    chosen = language.kernels("cpu", "fp32")["attention"].split()[0]
    assert language.build().config._attn_implementation == chosen


# the same gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])
def test_gradients_of_sdpa_are_those_of_eager_attention(data: Corpus, name: str, precision: str) -> None:
    """To what a change of the weights in their last bit makes of them."""
    made = {kernel: gradients(task(data, name, kernel), precision) for kernel in ("eager", "sdpa")}
    floor = distance(gradients(task(data, name, "eager"), precision, perturbed), made["eager"])
    assert all(np.any(gradient) for gradient in made["eager"].values())
    assert 0 < distance(made["sdpa"], made["eager"]) < 8 * floor < 0.5


def _without(kernel: str) -> str:
    """Why a kernel cannot be tried here, empty if it can."""
    if not torch.cuda.is_available():
        return f"{kernel} attention has a backward pass on a GPU only, and there is none"
    return "" if kernel == "flex" or kernels._find_flash() else "the package flash-attn is not installed"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["flex", "flash"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_gradients_on_a_gpu_are_those_of_eager_attention(data: Corpus, name: str, kernel: str, precision: str) -> None:
    if why := _without(kernel):
        pytest.skip(why)
    if kernel == "flash" and precision == "fp32":
        pytest.skip("flash attention has no fp32 kernel")
    made = {k: gradients(task(data, name, k), precision, device="cuda") for k in ("eager", kernel)}
    floor = distance(gradients(task(data, name, "eager"), precision, perturbed, device="cuda"), made["eager"])
    assert 0 < distance(made[kernel], made["eager"]) < 8 * floor < 0.5


def test_gradients_of_grouped_experts_on_a_gpu_are_those_of_the_loop(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU; on a CPU test_experts.py compares them")
    from recipes.language.tests import test_experts

    write_jsonl(tmp_path / "a.jsonl", sentences(40))
    made = {
        how: gradients(test_experts.task(corpus(tmp_path), experts=how), "bf16", device="cuda")
        for how in ("loop", "grouped")
    }
    looped = test_experts.task(corpus(tmp_path), experts="loop")
    floor = distance(gradients(looped, "bf16", perturbed, device="cuda"), made["loop"])
    assert 0 < distance(made["grouped"], made["loop"]) < 8 * floor < 0.5
