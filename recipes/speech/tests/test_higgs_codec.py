"""The Higgs tokenizer of transformers as a codec: a tiny one with random weights, saved and opened again."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, numpy as np
from pathlib import Path
from transformers import DacConfig, HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel, HubertConfig
from unisono import ConfigError
from unisono_speech.higgs_codec import HiggsCodec
from unisono_speech.settings import Higgs

folder = Path(sys.argv[1])
torch.manual_seed(0)
acoustic = DacConfig(encoder_hidden_size=8, downsampling_ratios=[8, 5, 4, 4], decoder_hidden_size=32,
    upsampling_ratios=[8, 5, 4, 4], hidden_size=16, n_codebooks=2, codebook_size=16, codebook_dim=4)
semantic = HubertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    conv_dim=[8] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)
config = HiggsAudioV2TokenizerConfig(sample_rate=16000, semantic_sample_rate=16000, codebook_size=16, codebook_dim=8,
    acoustic_model_config=acoustic, semantic_model_config=semantic, target_bandwidths=[0.1, 0.2])
model = HiggsAudioV2TokenizerModel(config).eval()
for quantizer in model.quantizer.quantizers:  # they are zero until they are trained
    quantizer.codebook.embed.normal_()
model.save_pretrained(folder)

codec = HiggsCodec(Higgs(kind="higgs", path=folder))
sound = np.random.default_rng(0).normal(size=16000).astype(np.float32)
codes = codec.encode(sound)
assert (codec.rate, codec.codebooks, codec.codes) == (16000, 2, 16), codec
assert codes.shape == (25, 2) and len(np.unique(codes)) > 1 and codes.max() < 16, codes
with torch.no_grad():
    theirs = model.encode(torch.from_numpy(sound)[None, None]).audio_codes
assert np.array_equal(codes.T, theirs[0].numpy())
assert codec.decode(codes).shape == (16000,) and codec.decode(codes).dtype == np.float32
narrow = HiggsCodec(Higgs(kind="higgs", path=folder, bandwidth=0.1))
assert narrow.codebooks == 1 and np.array_equal(narrow.encode(sound), codes[:, :1]) and narrow.digest != codec.digest
try:
    HiggsCodec(Higgs(kind="higgs", path=folder, bandwidth=0.3))
except ConfigError as error:
    assert "the codec has [0.1, 0.2] kbit/s" in str(error)
else:
    raise SystemExit("an unknown bandwidth was taken")
print("all is well")
"""


@pytest.mark.slow
def test_its_codes_are_those_of_transformers_and_become_sound_again(tmp_path: Path) -> None:
    """Where torchaudio is not installed, an empty one stands in: at equal rates transformers calls nothing of it."""
    found = dict(os.environ)
    if find_spec("torchaudio") is None:
        (tmp_path / "stub" / "torchaudio").mkdir(parents=True)
        (tmp_path / "stub" / "torchaudio" / "__init__.py").write_text('__version__ = "2.11.0"\n')
        facts = tmp_path / "stub" / "torchaudio-2.11.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.11.0\n")
        found["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "stub"), found.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "codec")], env=found, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout.endswith("all is well\n"), ended.stderr[-2000:]
