"""Mixtures of experts: their grouped product, and the losses and the load of their routers.

Sums are over tokens and means over layers, so that each loss is a term with its own count like any other.

The load-balancing loss (Fedus et al., "Switch Transformers", 2022, equations 4 to 6) of one layer is
`E · Σ_e f_e · P_e`, where `f_e` is the fraction of tokens that choose expert e among their best k, and `P_e` the mean
of its probability. It is no sum over tokens. But `f` has no gradient, and once it is known the loss is one: the mean
over tokens of `E · Σ_e f_e · p_e`. So `f` is counted over the whole global batch first, or over a row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono import ConfigError

GROUPED = "unisono_grouped"  # its name among the kernels of transformers
_SUPPORTED_DEVICES = ("cpu", "cuda")  # devices on which torch 2.11 and newer multiply by groups, forward and backward
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # what architectures call their number
_ALIGNMENT_BYTES = 16  # bytes: torch refuses matrices whose rows are no multiple of it


def has_experts(model: nn.Module) -> bool:
    """Whether experts are stacked in one parameter per matrix, with a choice of kernels."""
    return bool(_expert_modules(model))


def check_experts_per_token(text: Any) -> None:
    """Refuse more experts per token than the text part of a model has, naming both settings."""
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    for name in EXPERT_COUNT_KEYS:
        there = getattr(text, name, None)
        if isinstance(there, int) and 0 < there < chosen:
            raise ConfigError(
                f"model.settings: num_experts_per_tok={chosen} is more than {name}={there}; use at most {there}"
            )


def grouped_obstacle(model: nn.Module, device: str, precision: str) -> str:
    """Why the grouped product cannot be used; empty if it can."""
    if precision == "fp64":
        return "torch has no fp64 kernel for grouped matrix products"
    if device not in _SUPPORTED_DEVICES:
        return f"torch's grouped matrix product is not known to work on {device}"
    least = _ALIGNMENT_BYTES // (2 if precision == "bf16" else 4)
    odd = sorted({size for matrices in _expert_matrices(model) for size in matrices.shape[1:] if size % least})
    if odd:
        return f"in {precision} torch's grouped product needs widths that are multiples of {least}, but some are {odd}"
    return ""


def active_elements(model: Any) -> float:
    """Number of expert weights used per token: k of the E experts of each layer."""
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
    return sum(chosen * matrices.numel() / len(matrices) for matrices in _expert_matrices(model))


def register_grouped() -> None:
    """Make the grouped product known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(GROUPED, _multiply_grouped)


def _multiply_grouped(stack: nn.Module, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The grouped product of transformers, in the precision of autocast where that is on.

    torch does not cast for it (pytorch/pytorch#174763), and transformers would multiply in the precision of the
    weights: fp32 in a run in bf16 under DDP, and bf16 under FSDP, which gathers them so.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        stack = _CastParameters(stack, torch.get_autocast_dtype(device))  # type: ignore[assignment]
    result: Tensor = grouped_mm_experts_forward(stack, hidden, chosen, shares)
    return result


class _CastParameters:
    """A module with its own parameters cast to another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value


def _expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers' `use_experts_implementation` has made; it leaves these marks on them."""
    return [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "has_bias")]


def _expert_matrices(model: nn.Module) -> list[Tensor]:
    every = [matrices for stack in _expert_modules(model) for matrices in stack.parameters(recurse=False)]
    return [matrices for matrices in every if matrices.dim() == 3]


# routers ----------------------------------------------------------------------------------------------------------


def check_router(model: Any) -> None:
    """Refuse router losses if transformers has none for the architecture, which is named."""
    text = model.config.get_text_config()
    if not (has_experts(model) and hasattr(text, "router_aux_loss_coef")):
        what = "chooses its experts by another rule" if has_experts(model) else "is not a mixture of experts"
        raise ConfigError(
            f"model.balance_weight and model.router_z_weight: {text.model_type} {what}, and transformers has no such "
            "loss for it; set them to 0"
        )


def count_routed(logits: Tensor, real: Tensor, best: int) -> Tensor:
    """How many tokens choose each expert, (rows, layers, experts), whole numbers of the dtype of the probabilities.

    Logits of the routers are (rows, length, layers, experts), and `real` is (rows, length), false for padding.
    """
    probabilities = _probabilities(logits.detach())
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(best, dim=-1).indices, 1.0)
    return (chosen * real[..., None, None]).sum(1)


def balance_loss(logits: Tensor, real: Tensor, counts: Tensor, best: int) -> Tensor:
    """The load-balancing loss, summed over tokens and averaged over layers; k where all experts get as many.

    Logits and `real` are as of `count_routed`; counts are tokens per expert, of each row or, with a first axis of 1,
    of the whole global batch.
    """
    number, layers = logits.shape[-1], logits.shape[-2]
    tokens = counts.sum(-1, keepdim=True) / best
    fractions = counts / tokens.clamp_min(1)  # a row of nothing but padding has no tokens, and no share below
    per_token = number * (_probabilities(logits) * fractions[:, None].to(logits.device)).sum((-2, -1)) / layers
    return (per_token * real).sum()


def z_loss(logits: Tensor, real: Tensor) -> Tensor:
    """The squared logarithm of the normaliser, summed over tokens and averaged over layers (Zoph et al., 2022)."""
    return (_to_float(logits).logsumexp(-1).square().mean(-1) * real).sum()


def expert_load(counts: Tensor) -> Tensor:
    """Load of the busiest expert relative to the mean, averaged over layers; (rows,) or (1,)."""
    return (counts.amax(-1) / counts.mean(-1).clamp_min(1e-12)).mean(-1)


def _probabilities(logits: Tensor) -> Tensor:
    return _to_float(logits).softmax(-1)


def _to_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
