"""A small model of the same architecture, for proofs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unisono_language import model as models
from unisono_language.settings import FromConfig, Pretrained
from unisono_language.shrink import shrink_config

VOCABULARY = 512
LIMIT = 2_000_000


def large(architecture: str, **settings: Any) -> FromConfig:
    return FromConfig(kind="config", architecture=architecture, settings={"vocab_size": VOCABULARY, **settings})


LLAMA = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def size(config: FromConfig) -> int:
    return sum(parameter.numel() for parameter in models.build_untrained(config, VOCABULARY).parameters())


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", LLAMA),
        ("qwen3", {**LLAMA, "head_dim": 64, "tie_word_embeddings": False}),
        ("gpt2", {"n_embd": 384, "n_layer": 6, "n_head": 6}),
        ("gemma3_text", {**LLAMA, "head_dim": 64}),
        ("qwen3_moe", {**LLAMA, "num_experts": 16, "moe_intermediate_size": 128}),
    ],
)
def test_a_large_model_becomes_small_and_stays_of_its_kind(architecture: str, settings: dict[str, Any]) -> None:
    before = large(architecture, **settings)
    after = shrink_config(before, VOCABULARY, LIMIT)
    assert after is not None
    assert size(before) > LIMIT
    assert size(after) < size(before) / 3
    a, b = (models.check_model(config, VOCABULARY) for config in (before, after))
    for key in ("model_type", "vocab_size", "tie_word_embeddings", "head_dim", "hidden_act", "num_experts_per_tok"):
        assert getattr(a, key, None) == getattr(b, key, None), key
    assert b.num_hidden_layers >= 2
    if getattr(a, "layer_types", None):
        assert {*b.layer_types} == {*a.layer_types}
    if getattr(a, "num_key_value_heads", a.num_attention_heads) < a.num_attention_heads:
        assert b.num_key_value_heads < b.num_attention_heads


def test_a_small_model_stays_as_it_is() -> None:
    assert shrink_config(large("llama", **{**LLAMA, "hidden_size": 64}), VOCABULARY, 10**9) is None


def test_a_model_from_a_directory_is_made_small_with_random_weights(tmp_path: Path) -> None:
    models.build_untrained(large("llama", **LLAMA), VOCABULARY).save_pretrained(tmp_path)
    after = shrink_config(Pretrained(kind="pretrained", path=tmp_path), VOCABULARY, LIMIT)
    assert isinstance(after, FromConfig)
    assert after.settings["num_hidden_layers"] == 2
    assert models.build_untrained(after, VOCABULARY).config.tie_word_embeddings


def test_what_cannot_be_made_smaller_stays_as_it_is() -> None:
    assert (
        shrink_config(large("llama", **LLAMA, rope_parameters={"rope_type": "none of these"}), VOCABULARY, LIMIT)
        is None
    )
