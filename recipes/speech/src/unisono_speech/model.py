"""Higgs Audio v2 of the transformers library, from settings or from a local directory; never downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono import ConfigError
from unisono.recipe_tools import hf_config, nearest
from unisono_speech.codec import Codec, KMeansCodec
from unisono_speech.data import tokens as names
from unisono_speech.data.labels import Stream
from unisono_speech.data.tokens import Tokens
from unisono_speech.settings import FromConfig, ModelGroup, Pretrained

ARCHITECTURE = "HiggsAudioV2ForConditionalGeneration"
_IDS = {
    "audio_token_id": names.AUDIO, "audio_bos_token_id": names.AUDIO_BEGIN, "audio_delay_token_id": names.DELAY,
}  # fmt: skip
_OURS = ("vocab_size", "num_codebooks", "codebook_size", "audio_stream_bos_id", "audio_stream_eos_id", *_IDS)


def check(config: ModelGroup, tokens: Tokens, codec: Codec, saved: Path | None = None) -> Any:
    """The transformers configuration of a model, which fits tokenizer and codec.

    `saved` are assets of a run, whose configuration stands in for that of a pretrained model which is gone.

    Raises:
        ConfigError: for an unknown setting, a missing directory, or a codec or tokenizer that is another model's.
    """
    if isinstance(config, Pretrained):
        here = saved if saved is not None and not config.path.is_dir() else config.path
        made, where = _read(here), str(here)
    else:
        assert isinstance(config, FromConfig)
        made, where = _from_settings(config, tokens, codec), "model.settings"
    for key, name in _IDS.items():
        if getattr(made, key) != tokens.ids[name]:
            raise ConfigError(
                f"{where}: {key}={getattr(made, key)}, but the tokenizer has {name} at {tokens.ids[name]}"
            )
    if made.num_codebooks != codec.codebooks:
        raise ConfigError(
            f"{where}: the model has {made.num_codebooks} codebooks and the codec {codec.codebooks}; choose data.codec "
            "for the model"
        )
    _check_codec(made, where, codec, pretrained=isinstance(config, Pretrained))
    ends = (made.audio_stream_bos_id, made.audio_stream_eos_id)
    if codec.codes > min(ends) or max(ends) >= made.codebook_size:
        raise ConfigError(
            f"{where}: codes up to {codec.codes - 1}, begin {ends[0]} and end {ends[1]} do not fit codebook_size="
            f"{made.codebook_size}; it has to hold the codec's entries and both of these"
        )
    if made.vocab_size < tokens.size:
        raise ConfigError(
            f"{where}: {made.vocab_size} token embeddings, but the tokenizer has ids to {tokens.size - 1}"
        )
    made.architectures = [ARCHITECTURE]
    made.use_cache = False
    made.codec_digest = codec.digest  # goes with the weights into every export
    return made


def _check_codec(made: Any, where: str, codec: Codec, pretrained: bool) -> None:
    """Refuse a codec that gives codes another meaning than those which a pretrained model has learned."""
    begin = min(made.audio_stream_bos_id, made.audio_stream_eos_id)
    if pretrained and codec.codes != begin:
        raise ConfigError(
            f"{where}: the model's codes are 0 to {begin - 1}, and the codec's 0 to {codec.codes - 1}, so it is the "
            "codec of another model; name the model's own, e.g. data.codec.kind=higgs data.codec.path=DIR"
        )
    learned = getattr(made, "codec_digest", codec.digest)
    if learned != codec.digest:
        raise ConfigError(
            f"{where}: the model was trained with the codec {learned}, and data.codec is {codec.digest}, whose codes "
            f"mean other sounds. Copy {KMeansCodec.NAME} of its run (RUN/assets) into that directory, and set "
            "data.codec as it was"
        )


def stream_of(config: Any) -> Stream:
    """The begin and end codes of a model."""
    return Stream(config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id)


def build(config: ModelGroup, settings: Any, text_head: bool, saved: Path | None = None) -> nn.Module:
    """A model in fp32 on the CPU: random weights from torch's generator, or those of the directory.

    `settings` are as `check` returns them. If a pretrained model no longer exists, its weights are random and a run's
    are loaded.

    Raises:
        ConfigError: for weights that cannot be read, or do not fit.
    """
    if isinstance(config, Pretrained) and (saved is None or config.path.is_dir()):
        return _load_pretrained(config, settings, text_head)
    return build_untrained(config, settings, text_head)


def build_untrained(config: ModelGroup, settings: Any, text_head: bool) -> nn.Module:
    """The model with weights of torch's generator, on the current default device; settings may be refused."""
    from transformers import HiggsAudioV2ForConditionalGeneration

    try:
        model = HiggsAudioV2ForConditionalGeneration._from_config(
            settings, dtype=torch.float32, use_text_head=text_head, attn_implementation=config.attention
        )
    except Exception as error:  # the library validates in its own way
        raise ConfigError(f"a Higgs Audio v2 cannot be made with these model.settings: {error}") from error
    assert isinstance(model, nn.Module)
    return model


def _load_pretrained(config: Pretrained, settings: Any, text_head: bool) -> nn.Module:
    from transformers import HiggsAudioV2ForConditionalGeneration

    model: nn.Module = hf_config.load_pretrained(
        HiggsAudioV2ForConditionalGeneration, config.path, settings, use_text_head=text_head,
        attn_implementation=config.attention,
        advice={"text_lm_head.weight": "; set task.text_weight=0, which needs no text head"},
    )  # fmt: skip
    return model


def _read(path: Path) -> Any:
    from transformers import HiggsAudioV2Config

    made = hf_config.open_folder(path, "model.path")
    if not isinstance(made, HiggsAudioV2Config):
        raise ConfigError(f"model.path: {path} holds a {made.model_type} model, not a higgs_audio_v2")
    return made


def _from_settings(config: FromConfig, tokens: Tokens, codec: Codec) -> Any:
    from unisono.recipe_tools import import_extra

    kind = import_extra("transformers", "speech", "the recipe speech").HiggsAudioV2Config
    known = set(kind().to_dict()) | set(kind.attribute_map)
    for name in config.settings:
        if name in _OURS:
            raise ConfigError(f"model.settings.{name} follows from tokenizer and codec; leave it out")
        if name not in known:  # the library would keep it and ignore it
            raise ConfigError(f"unknown key 'model.settings.{name}' of HiggsAudioV2Config, {nearest(name, known)}")
    fixed = {
        "vocab_size": tokens.size,
        "num_codebooks": codec.codebooks,
        "codebook_size": codec.codes + 2,
        "audio_stream_bos_id": codec.codes,
        "audio_stream_eos_id": codec.codes + 1,
        "bos_token_id": tokens.ids[names.BEGIN],
        "pad_token_id": tokens.ids[names.PAD],
        "eos_token_id": tokens.ids[names.TURN],
        **{key: tokens.ids[name] for key, name in _IDS.items()},
    }
    try:
        return kind(**config.settings, **fixed)
    except Exception as error:  # the library validates in its own way
        raise ConfigError(f"model.settings do not fit HiggsAudioV2Config: {error}") from error
