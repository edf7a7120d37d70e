"""Causal language models of the transformers library, from settings or from a local directory; never downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.errors import ConfigError, nearest
from unisono.recipes.language.settings import FromConfig, ModelGroup, Pretrained


def check(config: ModelGroup, vocab_size: int) -> Any:
    """The transformers configuration of a model, with every setting known.

    Args:
        config: the `model` group.
        vocab_size: of the tokenizer.

    Raises:
        ConfigError: for an unknown architecture or setting, a missing directory, or a vocabulary that is too small.
    """
    if isinstance(config, Pretrained):
        found = _from_directory(config.path)
    else:
        assert isinstance(config, FromConfig)
        found = _from_settings(config, vocab_size)
    text = found.get_text_config()
    if text.vocab_size < vocab_size:
        raise ConfigError(
            f"the model has {text.vocab_size} token embeddings, but the tokenizer makes ids up to {vocab_size - 1}"
        )
    text.use_cache = False
    return found


def build(config: ModelGroup, vocab_size: int) -> nn.Module:
    """A model in fp32 on the CPU: random weights from torch's generator, or those of the directory."""
    if not isinstance(config, Pretrained):
        return untrained(config, vocab_size)
    from transformers import AutoModelForCausalLM

    settings = check(config, vocab_size)
    model = AutoModelForCausalLM.from_pretrained(
        config.path, config=settings, dtype=torch.float32, attn_implementation=config.attention, local_files_only=True
    )
    assert isinstance(model, nn.Module)
    return model


def untrained(config: ModelGroup, vocab_size: int) -> nn.Module:
    """The model with the weights that torch's generator gives it, on the current default device."""
    from transformers import AutoModelForCausalLM

    settings = check(config, vocab_size)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=config.attention)
    assert isinstance(model, nn.Module)
    return model


def head_is_linear(model: Any) -> bool:
    """Whether the logits are the head's matrix times the base model's last hidden state and nothing else.

    Some models scale or soften their logits. Asking the model itself, on a few tokens, is surer than a list of names.
    """
    head = model.get_output_embeddings()
    base = getattr(model, "base_model", model)
    if base is model or not isinstance(head, nn.Linear):
        return False
    ids = torch.arange(4)[None] + 1
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        direct = nn.functional.linear(base(input_ids=ids, use_cache=False).last_hidden_state, head.weight, head.bias)
    model.train(training)
    return bool(torch.allclose(logits, direct, rtol=1e-4, atol=1e-5))


def flops_per_token(model: Any) -> tuple[float, float]:
    """FLOPs of a token's forward and backward pass: a constant part, and a part to be multiplied with its row's length.

    The constant is 6 per weight that is multiplied with the token (matrices of linear layers and the head, once where
    it is tied; not embeddings, which are looked up). The other is attention's 12 · layers · heads · head size, for
    scores and values, without a discount for causality (Chowdhery et al., "PaLM", 2022, appendix B).
    """
    matrices = {
        id(m.weight): m.weight.numel()
        for m in model.modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    }
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 6.0 * sum(matrices.values()), 12.0 * text.num_hidden_layers * heads * size


def _from_settings(config: FromConfig, vocab_size: int) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = nearest(config.architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        hint = hint if hint.startswith("did") else "e.g. llama, gpt2, qwen3"
        raise ConfigError(
            f"model.architecture={config.architecture} is no causal language model of transformers, {hint}"
        )
    kind = CONFIG_MAPPING[config.architecture]
    known = set(kind().to_dict()) | set(kind.attribute_map)
    for name in config.settings:
        if name not in known:  # the library would keep it and ignore it
            hint = nearest(name, known)
            told = hint.replace("'", "'model.settings.", 1) if hint.startswith("did") else "see its configuration class"
            raise ConfigError(f"unknown key 'model.settings.{name}' for {config.architecture}, {told}")
    settings = {"vocab_size": vocab_size, **config.settings}
    try:
        return AutoConfig.for_model(config.architecture, **settings)
    except Exception as error:  # each architecture validates in its own way
        raise ConfigError(f"model.settings do not fit {config.architecture}: {error}") from error


def _from_directory(path: Path) -> Any:
    from transformers import AutoConfig

    if not path.is_dir():
        raise ConfigError(
            f"model.path: {path} is not a directory; a local model with config.json and safetensors is needed"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {path} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: {path} has no *.safetensors; other formats are not read, since they can run code"
        )
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path / 'config.json'} cannot be read: {error}") from error
