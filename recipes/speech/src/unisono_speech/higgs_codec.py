"""The Higgs Audio v2 tokenizer of the transformers library as a codec; from a local directory, never downloaded."""

from __future__ import annotations

import hashlib
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, file_hash
from unisono.recipe_tools import hf_config
from unisono_speech.codec import VERSION, Codes
from unisono_speech.settings import Higgs


class HiggsCodec:
    """A neural codec: sound to codes and back by a network that stays as it is.

    Raises:
        ConfigError: for a directory without such a codec, or a bandwidth that it does not have.
    """

    def __init__(self, config: Higgs) -> None:
        self.config = config
        self._settings = hf_config.open_folder(config.path, "data.codec.path")
        if self._settings.model_type != "higgs_audio_v2_tokenizer":
            raise ConfigError(
                f"data.codec.path: {config.path} holds a {self._settings.model_type}, not the Higgs tokenizer"
            )
        bandwidths = list(self._settings.target_bandwidths)
        if config.bandwidth is not None and config.bandwidth not in bandwidths:
            raise ConfigError(f"data.codec.bandwidth={config.bandwidth:g}: the codec has {bandwidths} kbit/s")
        self.rate = int(self._settings.sample_rate)
        if find_spec("torchaudio") is None:
            raise ConfigError(
                "data.codec.kind=higgs: transformers needs the package 'torchaudio' for it: pip install torchaudio"
            )
        self.codes = int(self._settings.codebook_size)
        bits = self._settings.frame_rate * self._settings.codebook_nbits
        self.codebooks = int(1000 * (config.bandwidth or bandwidths[-1]) // bits)

    @cached_property
    def digest(self) -> str:
        """Of the weights, the settings and the bandwidth."""
        files = sorted([*self.config.path.glob("*.safetensors"), self.config.path / "config.json"])
        facts = [str(VERSION), str(self.config.bandwidth), *map(file_hash, files)]
        return hashlib.sha256(" ".join(facts).encode()).hexdigest()[:32]

    def encode(self, samples: NDArray[np.float32]) -> Codes:
        """Sound (n,) to codes (frames, codebooks)."""
        import torch

        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            sound = torch.from_numpy(np.ascontiguousarray(samples))[None, None]
            made = self._model.encode(sound, bandwidth=self.config.bandwidth).audio_codes
        return np.asarray(made[0].T.numpy(), dtype=np.int64)

    def decode(self, codes: Codes) -> NDArray[np.float32]:
        """Codes (frames, codebooks) to sound (n,)."""
        import torch

        if not len(codes):
            return np.zeros(0, dtype=np.float32)
        with torch.no_grad():
            made = self._model.decode(torch.from_numpy(np.ascontiguousarray(codes.T))[None]).audio_values
        return np.asarray(made.reshape(-1).numpy(), dtype=np.float32)

    def save(self, folder: Path) -> None:
        """Nothing: the run's configuration names the directory."""

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import HiggsAudioV2TokenizerModel

        model = HiggsAudioV2TokenizerModel.from_pretrained(
            self.config.path, config=self._settings, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        return model.eval()
