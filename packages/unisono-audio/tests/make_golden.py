"""How golden.npz was made: torchaudio's own functions on synthetic clips.

    python -m packages.unisono-audio.tests.make_golden DIRECTORY     # of an unpacked torchaudio wheel (2.11.0)

torchaudio's wheel on PyPI loads CUDA libraries, so its pure Python modules are loaded under a parent that is empty. The
tests need neither torchaudio nor torch: they read the arrays.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden.npz"
FBANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "birdsong": (32000, {"num_mel_bins": 128, "window_type": "hanning"}),
    "speech": (16000, {"num_mel_bins": 80}),
    "telephone": (8000, {"num_mel_bins": 23, "low_freq": 64.0, "high_freq": -200.0, "window_type": "hamming"}),
    "magnitude": (
        16000,
        {"num_mel_bins": 40, "use_power": False, "remove_dc_offset": False, "preemphasis_coefficient": 0.0},
    ),
}
RATES = [(44100, 32000), (22050, 32000), (48000, 32000), (44100, 16000), (22000, 32000), (8000, 16000), (48000, 8000)]
MELS: dict[str, dict[str, Any]] = {
    "htk": {"n_fft": 1024, "hop_length": 320, "n_mels": 64},
    "slaney": {"n_fft": 400, "hop_length": 160, "n_mels": 80, "mel_scale": "slaney", "norm": "slaney"},
    "short": {"n_fft": 512, "win_length": 320, "hop_length": 128, "n_mels": 40, "power": 1},
}


def clip(rate: int, seconds: float = 0.6, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Chirps over a noise floor, with a quiet stretch and an offset."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(rate * seconds)) / rate
    x = 0.01 * rng.standard_normal(len(time)) + 0.05
    for start, low, high in ((0.05, 0.1, 0.3), (0.2, 0.05, 0.8), (0.45, 0.5, 0.2)):
        at = np.clip((time - start) / 0.12, 0, 1)
        x += 0.3 * np.sin(2 * np.pi * rate / 2 * (low + (high - low) * at / 2) * time) * np.sin(np.pi * at) ** 2
    x[round(0.36 * rate) : round(0.42 * rate)] *= 0.01
    return x.astype(np.float32)


def main(wheel: str) -> None:
    """Write the arrays."""
    import torch

    root = Path(wheel) / "torchaudio"
    for name in ("torchaudio", "torchaudio.compliance", "torchaudio.functional", "torchaudio.transforms"):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    extension = types.ModuleType("torchaudio._extension")
    extension.fail_if_no_align = lambda f: f  # type: ignore[attr-defined]
    extension._IS_TORCHAUDIO_EXT_AVAILABLE = False  # type: ignore[attr-defined]
    internal = types.ModuleType("torchaudio._internal")
    internal.module_utils = types.SimpleNamespace(dropping_support=lambda f: f)  # type: ignore[attr-defined]
    sys.modules |= {"torchaudio._extension": extension, "torchaudio._internal": internal,
                    "torchaudio._internal.module_utils": types.ModuleType("module_utils")}  # fmt: skip
    sys.modules["torchaudio._internal.module_utils"].dropping_support = lambda f: f  # type: ignore[attr-defined]
    sys.modules["torchaudio"]._extension = extension  # type: ignore[attr-defined]
    kaldi = importlib.import_module("torchaudio.compliance.kaldi")
    functional: Any = importlib.import_module("torchaudio.functional.functional")

    sys.modules["torchaudio"].functional = types.SimpleNamespace(create_dct=functional.create_dct)  # type: ignore[attr-defined]
    arrays: dict[str, Any] = {}
    for name, (rate, settings) in FBANKS.items():
        x = torch.from_numpy(clip(rate))[None]
        arrays[f"fbank/{name}"] = kaldi.fbank(x, sample_frequency=rate, dither=0.0, **settings).numpy()
    x = torch.from_numpy(clip(16000))[None]
    arrays["mfcc"] = kaldi.mfcc(x, sample_frequency=16000, dither=0.0).numpy()
    for source, target in RATES:
        x = torch.from_numpy(clip(source)).double()
        arrays[f"resample/{source}/{target}"] = functional.resample(x, source, target).float().numpy()
    x = torch.from_numpy(clip(44100)).double()
    kaiser = {"resampling_method": "sinc_interp_kaiser", "lowpass_filter_width": 64, "rolloff": 0.9475937167399596,
              "beta": 14.769656459379492}  # fmt: skip
    arrays["resample/kaiser_best"] = functional.resample(x, 44100, 16000, **kaiser).float().numpy()
    for name, settings in MELS.items():
        own = dict(settings)
        n_fft, window = own["n_fft"], own.get("win_length", own["n_fft"])
        x = torch.from_numpy(clip(16000)).double()
        hann = torch.hann_window(window, dtype=torch.float64)
        spectrum = torch.stft(x, n_fft, own["hop_length"], window, hann, center=True, return_complex=True).abs()
        banks = functional.melscale_fbanks(
            n_fft // 2 + 1, 0.0, 8000.0, own["n_mels"], 16000, own.get("norm"), own.get("mel_scale", "htk")
        )
        mel = (spectrum ** own.get("power", 2)).T @ banks.double()
        arrays[f"mel/{name}"] = torch.log(mel.clamp(min=1e-10)).float().numpy()
    np.savez_compressed(GOLDEN, **arrays)
    print({name: array.shape for name, array in arrays.items()}, GOLDEN.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])
