"""A small model of the same architecture, for proofs: the same code with fewer layers, heads and features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono import ConfigError, count_parameters
from unisono_language import experts
from unisono_language import model as models
from unisono_language.settings import FromConfig, ModelGroup

_LAYERS = 2
_EXPERTS = 8
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner")


def shrink_config(config: ModelGroup, vocab_size: int, limit: int) -> FromConfig | None:
    """Settings of a model with random weights and fewer parameters.

    Whatever determines which code runs is unchanged: the architecture, the head size, whether query heads share
    those of keys and values, kinds of layers, tied or untied heads, dropout, the vocabulary.

    Args:
        config: of the large model.
        vocab_size: of the tokenizer.
        limit: models with at most this many parameters are not shrunk.

    Returns:
        The settings, or None if the model is small enough, or if its architecture takes none of the smaller ones.
    """
    large = models.check_model(config, vocab_size)
    whole = _count_parameters(_with_settings(large.to_diff_dict(), config, large.model_type), vocab_size)
    if whole is None or whole <= limit:
        return None
    for smaller in _candidate_settings(large):
        made = _with_settings({**large.to_diff_dict(), **smaller}, config, large.model_type)
        size = _count_parameters(made, vocab_size)
        if size is not None and size < whole:
            return made
    return None


def _candidate_settings(large: Any) -> Iterator[dict[str, Any]]:
    """Settings to try, the smallest first: fewer layers and features, then fewer layers."""
    text = large.get_text_config()
    name = {
        key: text.attribute_map.get(key, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    }
    layers: dict[str, Any] = {name["num_hidden_layers"]: min(_LAYERS, text.num_hidden_layers)}
    if isinstance(kinds := getattr(text, "layer_types", None), list):  # one of each kind, where there are several
        kept = list(dict.fromkeys(kinds))
        kept += kinds[len(kept) : _LAYERS]
        layers = {name["num_hidden_layers"]: len(kept), "layer_types": kept}
    heads = getattr(text, "num_attention_heads", None)
    if heads:
        shared = getattr(text, "num_key_value_heads", None) or heads
        few = min(heads, 4 if shared < heads else 2)
        features = few * (getattr(text, "head_dim", None) or text.hidden_size // heads)
        width = {name["num_attention_heads"]: few, name["hidden_size"]: features}
        least = max(_EXPERTS, getattr(text, "num_experts_per_tok", None) or 0)
        width |= {key: min(least, text.to_dict()[key]) for key in experts.EXPERT_COUNT_KEYS if text.to_dict().get(key)}
        width |= {key: 2 * features for key in _INNER if text.to_dict().get(key)}
        if text.to_dict().get("num_key_value_heads"):
            width["num_key_value_heads"] = min(shared, 2)
        yield {**layers, **width}
    yield layers


def _with_settings(settings: dict[str, Any], config: ModelGroup, architecture: str) -> FromConfig:
    left_out = ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
    kept = {key: value for key, value in settings.items() if key not in left_out and not key.startswith("_")}
    common = {name: getattr(config, name) for name in ModelGroup.model_fields}
    return FromConfig(kind="config", architecture=architecture, settings=kept, **common)


def _count_parameters(config: FromConfig, vocab_size: int) -> int | None:
    """Of a model; None if its architecture refuses the settings."""
    try:
        return count_parameters(lambda: models.build_untrained(config, vocab_size))
    except ConfigError:
        return None
