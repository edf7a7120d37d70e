"""Frozen matrices in 4 bits beside adapters (QLoRA: Dettmers et al., 2023), by the bitsandbytes library.

Blocks of 64 values share a scale, and scales are quantised too: 4.1 bits per value. A matrix is quantised on the CPU
from its whole value, whatever device computes with it later, so every process of every layout has the same bits.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn

from unisono.engines.torch.content import has_content
from unisono.runtime.errors import ConfigError

_BASE = "base_layer"  # what PEFT calls the frozen layer beside an adapter
_BLOCK = 64  # values that share a scale
_LARGEST_ERROR = 0.17  # of the largest value of a block: half of the widest gap of NF4 is 0.152, and scales are rounded
_COMPUTES_IN = {"fp32": torch.float32, "bf16": torch.bfloat16}


def quantise(model: nn.Module, precision: str) -> int:
    """Replace the frozen linear layers beside adapters by ones in 4 bits, in place; returns how many.

    Args:
        model: on the CPU, with its adapters. One without content (to be looked at only) is left as it is.
        precision: in which products with them are computed, `fp32` or `bf16`.

    Raises:
        ConfigError: if it has none.
    """
    if not has_content(model):
        return 0
    import bitsandbytes

    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    frozen = {
        name: layer
        for name, layer in model.named_modules()
        if name.endswith(f".{_BASE}") and isinstance(layer, nn.Linear) and owners[id(layer.weight)] == 1
    }
    if not frozen:
        raise ConfigError("adapter.base_dtype=nf4: none of the layers with an adapter is an nn.Linear; leave it out")
    for name, layer in frozen.items():
        small = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, quant_type="nf4", compute_dtype=_COMPUTES_IN[precision],
            device="meta",
        )  # fmt: skip
        whole = layer.weight.detach().float().contiguous()
        small.weight = bitsandbytes.nn.Params4bit(whole, requires_grad=False, quant_type="nf4", module=small)
        small.bias = layer.bias
        small.to("cpu")
        # On a CPU with AVX512-BF16 an evaluation would repack the matrix in place, for kernels without a gradient with
        # which training would then go on.
        small.support_avx512bf16_for_cpu = False
        small.register_forward_pre_hook(partial(_cast, _COMPUTES_IN[precision]))
        _check(name, whole, bitsandbytes.functional.dequantize_4bit(small.weight.data, small.weight.quant_state))
        model.get_submodule(name.rpartition(".")[0])._modules[_BASE] = small
    return len(frozen)


def _cast(dtype: torch.dtype, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs in the precision of the products, so that outputs are in it too, as those of a linear layer are."""
    return inputs[0].to(dtype), *inputs[1:]


def _check(name: str, whole: Tensor, rounded: Tensor) -> None:
    """Refuse what is not the matrix rounded to 4 bits: bitsandbytes 0.50 garbles short rows on a CPU, and says nothing.

    Raises:
        ConfigError: naming the layer.
    """
    values, errors = (
        nn.functional.pad(one.flatten(), (0, -one.numel() % _BLOCK)).view(-1, _BLOCK).abs().amax(1)
        for one in (whole, rounded - whole)
    )
    shown = name.removesuffix(f".{_BASE}")
    if bool((errors > _LARGEST_ERROR * values).any()):
        raise ConfigError(
            f"adapter.base_dtype=nf4: bitsandbytes does not give '{shown}' back from 4 bits (it has rows of "
            f"{whole.shape[1]} values; multiples of {_BLOCK} are safe); leave the layer out of adapter.targets, "
            "or use base_dtype=bf16"
        )
