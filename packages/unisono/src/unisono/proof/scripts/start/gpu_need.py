"""Whether a script failed for want of a GPU: one that a CPU can stand in for, or one for kernels of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from unisono.proof.scripts.recording.script_hooks import NO_UPDATE

REPLACED = "not seen: what a GPU computes (a CPU stood in place of it, cuda=cpu): its kernels, its precisions, NCCL"
_ASKS = re.compile(r"cuda|nccl|nvidia driver|device_ids and output_device", re.IGNORECASE)
_KERNELS = {
    "triton": "Triton", "flash_attn": "flash-attn", "apex": "apex", "transformer_engine": "Transformer Engine",
    "xformers": "xFormers", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "flashinfer": "FlashInfer",
    "bitsandbytes": "bitsandbytes", "liger_kernel": "Liger kernels", "deepspeed": "DeepSpeed",
}  # fmt: skip
_MISSING = re.compile(r"No module named '(\w+)")


def asks_for_gpu(errors: Iterable[Exception]) -> bool:
    """Whether one of the errors speaks of CUDA, on a host without a GPU."""
    return not torch.cuda.is_available() and any(_ASKS.search(str(error)) for error in errors)


def asks_for_devices(error: Exception) -> bool:
    """Whether a script ended before it trained, as one does that has looked for GPUs, on a host without one."""
    return not torch.cuda.is_available() and NO_UPDATE in str(error)


def name_kernels(error: Exception) -> str:
    """Of an error, what computes on a GPU alone and stands in nobody's place; empty if it is of none."""
    text = str(error)
    missing = _MISSING.search(text)
    if missing and missing[1] in _KERNELS:
        return f"the script needs {_KERNELS[missing[1]]}, whose kernels are those of a GPU"
    if "CUDA_HOME" in text or "nvcc" in text:
        return "the script builds a CUDA extension, which runs on a GPU alone"
    if "0 active drivers" in text:
        return "the script needs Triton, whose kernels are those of a GPU"
    return ""
