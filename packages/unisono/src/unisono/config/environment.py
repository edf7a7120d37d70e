"""The environment of a run that could change its results: library versions and environment variables.

Only the variables matched here count, except those that name locations or logging: they differ from host to host
without affecting results. None of them is a secret.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from pathlib import Path

from unisono.runtime import secrets
from unisono.version import __version__

_RELEVANT = (
    "ATEN_*", "CUBLAS*", "CUDA_*", "CUDNN_*", "GLOO_*", "JAX_*", "KMP_*", "MKL_*", "NCCL_*", "NVIDIA_TF32_OVERRIDE",
    "OMP_*", "OPENBLAS_*", "PYTORCH_*", "TORCH_*", "XLA_*",
)  # fmt: skip
_IGNORED = (
    "*_IFNAME", "*_HOME", "*_DIR", "*_PATH", "*_FILE", "*_VERSION", "*_DEBUG", "*_DEBUG_*", "*_LOGS", "*_LOG_LEVEL",
    "*_TRACE", "*_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "NCCL_IB_HCA", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_FR_*", "TORCH_NCCL_*", "TORCH_SHOW_*", "TORCH_WARN_*",
)  # fmt: skip
_OF_ACCELERATORS = ("PYTORCH_*ALLOC_CONF",)  # set by every start that may use one, and read by none on the CPU
_ENGINE_PACKAGES = {"torch": ("torch", "peft", "flash_attn"), "jax": ("jax", "jaxlib", "optax", "equinox")}
_DRIVER = Path("/sys/module/nvidia/version")


@cache
def library_versions(engine: str = "torch") -> dict[str, str]:
    """Versions of whatever could change what a run on an engine computes; another engine's packages cannot."""
    names = (*_ENGINE_PACKAGES[engine], "numpy", "transformers", "tokenizers", "pydantic", "safetensors")
    found = {"unisono": __version__, "python": platform.python_version()}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def driver_version() -> str | None:
    """Version of the driver of this host's NVIDIA accelerators, if it has one."""
    try:
        return _DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        return None


def relevant_variables(environment: Mapping[str, str] = os.environ, device: str = "auto") -> dict[str, str]:
    """Variables that change numbers or how processes talk to each other, without those that say where something is.

    Args:
        environment: of this process.
        device: `layout.device`; nothing reads those of accelerators on the CPU.

    >>> relevant_variables({"OMP_NUM_THREADS": "2", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/root", "NCCL_SECRET": "x"})
    {'OMP_NUM_THREADS': '2'}
    """
    ignored = (*_IGNORED, *(_OF_ACCELERATORS if device == "cpu" else ()))
    return {
        name: secrets.mask(value)
        for name, value in sorted(environment.items())
        if _matches_any(name, _RELEVANT) and not _matches_any(name, ignored) and not secrets.names_secret(name.lower())
    }


def _matches_any(name: str, kinds: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, kind) for kind in kinds)
