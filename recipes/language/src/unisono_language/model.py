"""Causal language models of the transformers library, from settings or from a local directory; never downloaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono import ConfigError
from unisono.recipe_tools import has_content, hf_config, nearest, pickle_hint
from unisono_language import experts
from unisono_language.settings import FromConfig, ModelGroup, Pretrained

_PLAIN: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}


def check_model(config: ModelGroup, vocab_size: int, saved: Path | None = None) -> Any:
    """The transformers configuration of a model, with every setting known.

    `saved` are assets of a run, whose configuration stands in for that of a pretrained model which is gone.

    Raises:
        ConfigError: for an unknown architecture or setting, a missing directory, a vocabulary that is too small, or too
            few experts.
    """
    if isinstance(config, Pretrained):
        if saved and not config.path.is_dir():
            found = hf_config.open_folder(saved, "model.path")
        else:
            found = _config_from_directory(config.path)
    else:
        assert isinstance(config, FromConfig)
        found = _config_from_settings(config, vocab_size)
    text = found.get_text_config()
    if text.vocab_size < vocab_size:
        raise ConfigError(
            f"the model has {text.vocab_size} token embeddings, but the tokenizer has ids up to {vocab_size - 1}"
        )
    experts.check_experts_per_token(text)
    text.use_cache = False
    return found


def build_model(config: ModelGroup, vocab_size: int, saved: Path | None = None) -> nn.Module:
    """A model in fp32 on the CPU, with plain kernels: random weights from torch's generator, or those of the directory.

    Arguments as of `check_model`; a pretrained model that is gone has random weights, in place of which a run's are
    read. A model that is not causal is refused, as are weights that do not fit.
    """
    there = isinstance(config, Pretrained) and not (saved and not config.path.is_dir())
    model = _load_pretrained(config, vocab_size) if there else build_untrained(config, vocab_size, saved)
    computes = has_content(model)  # else only shapes, for `unisono check`, `describe` and `plan`
    if computes:
        _check_causal(model)
    if config.balance_weight or config.router_z_weight:
        experts.check_router(model)
        if computes:
            _check_router_scores(model)
    return model


def build_untrained(config: ModelGroup, vocab_size: int, saved: Path | None = None) -> nn.Module:
    """The model with the weights that torch's generator gives it, on the current default device, with plain kernels.

    Arguments and errors as of `check_model`, and for settings that the architecture itself refuses.
    """
    from transformers import AutoModelForCausalLM

    settings = check_model(config, vocab_size, saved)
    try:
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False, **_PLAIN)
    except Exception as error:  # each architecture validates in its own way
        raise ConfigError(
            f"a {settings.model_type} model cannot be built with these model.settings: {error}"
        ) from error
    assert isinstance(model, nn.Module)
    return model


def head_is_linear(model: Any) -> bool:
    """Whether the logits are the head's matrix times the base model's last hidden state and nothing else.

    Some models scale or soften their logits. Asking the model itself, on a few tokens, is surer than a list of names.
    It is asked again with hidden states so large that the logits reach 1000: a soft cap at 30 leaves those of a new
    model, near zero, as good as unchanged, and would only be noticed once the model has learned something.
    """
    head = model.get_output_embeddings()
    base = getattr(model, "base_model", model)
    if base is model or not isinstance(head, nn.Linear):
        return False
    ids, grown = torch.arange(4)[None] + 1, 1.0
    hook = head.register_forward_pre_hook(lambda head, inputs: (inputs[0] * grown,))
    try:
        with evaluation_mode(model):
            for least in (1e-5, 1e-2):
                logits = model(input_ids=ids, use_cache=False).logits
                hidden = base(input_ids=ids, use_cache=False).last_hidden_state
                direct = nn.functional.linear(hidden * grown, head.weight, head.bias)
                largest = float(direct.abs().max())
                if largest == 0 or not torch.allclose(logits, direct, rtol=1e-4, atol=least):
                    return False
                grown = 1000 / largest
    finally:
        hook.remove()
    return True


def flops_per_token(model: Any) -> tuple[float, float]:
    """FLOPs of a token's forward and backward pass: a constant part, and a part to be multiplied with its row's length.

    The constant is 6 per weight that is multiplied with the token (matrices of linear layers, of the experts that it
    is sent to, and the head, once where it is tied; not embeddings, which are looked up). The other is attention's
    12 · layers · heads · head size, for scores and values, without a discount for causality (Chowdhery et al., "PaLM",
    2022, appendix B).
    """
    matrices = {
        id(m.weight): m.weight.numel()
        for m in model.modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D" or type(m).__name__.endswith("Router")
    }
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)  # state-space models have none, and their scans are not counted
    size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return 6.0 * (sum(matrices.values()) + experts.active_elements(model)), 12.0 * text.num_hidden_layers * heads * size


def _check_causal(model: Any) -> None:
    """Refuse models in which a later token changes earlier predictions: some of the list are encoders by default."""
    ids = torch.arange(4)[None] + 1
    other = torch.cat([ids[:, :-1], ids[:, -1:] + 1], dim=1)
    with evaluation_mode(model):
        change = (model(input_ids=other, use_cache=False).logits - model(input_ids=ids, use_cache=False).logits).abs()
    if change[:, :-1].max() > 1e-5 * change[:, -1].max():
        raise ConfigError(
            f"{type(model).__name__} lets tokens attend to later ones, so it would learn to copy what it should "
            "predict; use a causal model (bert and its relatives are causal with model.settings.is_decoder=true)"
        )


def _check_router_scores(model: Any) -> None:
    """Refuse mixtures of experts that do not return a score for every token and expert of each layer."""
    ids = torch.arange(4)[None] + 1
    with evaluation_mode(model):
        made = model.base_model(input_ids=ids, use_cache=False, output_router_logits=True)
    found = getattr(made, "router_logits", None) or ()
    if not found or {tuple(logits.shape) for logits in found} != {(ids.numel(), found[0].shape[-1])}:
        raise ConfigError(
            f"{type(model).__name__} does not return a score for every token and expert of each layer, which router "
            "losses need; set model.balance_weight and model.router_z_weight to 0"
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _load_pretrained(config: Any, vocab_size: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    settings = check_model(config, vocab_size)
    more = {"trust_remote_code": False, **_PLAIN}
    model: nn.Module = hf_config.load_pretrained(AutoModelForCausalLM, config.path, settings, **more)
    return model


def _config_from_settings(config: FromConfig, vocab_size: int) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = nearest(config.architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        hint = hint if hint.startswith("did") else "e.g. llama, gpt2, qwen3"
        raise ConfigError(
            f"model.architecture={config.architecture} is not a causal language model of transformers, {hint}"
        )
    kind = CONFIG_MAPPING[config.architecture]
    known = set(kind().to_dict()) | set(kind.attribute_map)
    for name in config.settings:
        if name not in known and not _reads_setting(kind, name):  # the library would keep it and ignore it
            hint = nearest(name, known)
            remedy = (
                hint.replace("'", "'model.settings.", 1) if hint.startswith("did") else "see its configuration class"
            )
            raise ConfigError(f"unknown key 'model.settings.{name}' for {config.architecture}, {remedy}")
    settings = {"vocab_size": vocab_size, **config.settings}
    try:
        return AutoConfig.for_model(config.architecture, **settings)
    except Exception as error:  # each architecture validates in its own way
        raise ConfigError(f"model.settings do not fit {config.architecture}: {error}") from error


def _reads_setting(kind: Any, name: str) -> bool:
    """Whether a model reads a setting that its configuration class does not declare, e.g. head_dim of qwen3_moe."""
    from transformers import AutoModelForCausalLM

    source = inspect.getsource(inspect.getmodule(AutoModelForCausalLM._model_mapping[kind]) or object)
    return f'getattr(config, "{name}",' in source


def _config_from_directory(path: Path) -> Any:
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: {path} has no *.safetensors files; other formats are not read, since they can run code"
            + pickle_hint(path)
        )
    return hf_config.open_folder(path, "model.path")
