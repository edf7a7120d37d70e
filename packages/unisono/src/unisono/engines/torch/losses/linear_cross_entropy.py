"""Cross-entropy of a large head directly from hidden states, without the logits of a whole micro-batch.

Logits exist for one chunk of tokens at a time. Since the loss is a sum, its gradient can be computed in the forward
pass: it is the chunk's softmax minus its targets, up to a scalar factor applied in the backward pass. So nothing is
recomputed, and memory is needed for one chunk of logits and one gradient of the head. torch's own
`linear_cross_entropy` (2.13) does the same, but returns the loss in bf16 under bf16 (`benchmarks/linear_loss.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.engines.torch.content import has_content

IGNORED = -100
# Devices on which padding is dropped. On others it is masked, since dropping it would synchronise with the device.
_DROPS_PADDING = ("cpu",)


def _drops_padding(tensor: Tensor) -> bool:
    return tensor.device.type in _DROPS_PADDING and has_content(tensor)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of `softmax(hidden · weightᵀ + bias)` in nats, and the number of correct predictions.

    Args:
        hidden: (tokens, width), floating.
        weight: (vocabulary, width).
        bias: (vocabulary,) or None.
        targets: (tokens,) int64; `IGNORED` targets do not count.
        chunk: number of tokens whose logits exist at the same time.

    Returns:
        Two scalars: the sum (float32, or float64 if the inputs are), and the number of correct predictions, which is
        only counted without gradients and is zero otherwise.
    """
    if _drops_padding(targets):
        kept = targets != IGNORED
        hidden, targets = hidden[kept], targets[kept]
    arguments = (hidden, weight, bias, targets, chunk, torch.is_grad_enabled())
    total, right = _SummedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return total, right


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, grad: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        device = hidden.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        needed = grad and any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        right = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needed else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needed else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needed and bias is not None else None
        masked = not _drops_padding(targets)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(low)
            for first in range(0, hidden.shape[0], chunk):
                part = slice(first, first + chunk)
                states, wanted = hidden[part].to(low), targets[part, None]
                logits = (states @ matrix.T).to(wide)  # (chunk, vocabulary)
                if bias is not None:
                    logits += bias.to(wide)
                normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
                losses = normaliser - logits.gather(1, wanted.clamp_min(0))
                total += torch.where(wanted == IGNORED, 0.0, losses).sum() if masked else losses.sum()
                if grad_hidden is None or grad_weight is None:
                    right += (logits.argmax(dim=-1, keepdim=True) == wanted).sum()
                    continue
                errors = logits.sub_(normaliser).exp_()  # softmax, in place of the logits
                errors.scatter_add_(1, wanted.clamp_min(0), torch.full_like(wanted, -1, dtype=wide))
                if masked:
                    errors.masked_fill_(wanted == IGNORED, 0.0)
                if grad_bias is not None:
                    grad_bias += errors.sum(0)
                errors = errors.to(low)
                grad_hidden[part] = errors @ matrix
                if low == wide:
                    grad_weight.addmm_(errors.T, states)
                else:
                    grad_weight += errors.T @ states
        if grad_weight is not None:
            ctx.save_for_backward(
                grad_hidden,
                grad_weight.to(weight.dtype),
                None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            )
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    @once_differentiable  # gradients are computed without a graph, so second derivatives would be silently wrong
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_hidden * scale,
            grad_weight * scale,
            None if grad_bias is None else grad_bias * scale,
            None,
            None,
            None,
        )


def logits_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same from logits, for models whose head is not a plain linear layer.

    Args:
        logits: (rows, length, vocabulary).
        targets: (rows · length,) int64.
    """
    flat = logits.reshape(len(targets), -1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    total = torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return total, (flat.detach().argmax(-1) == targets).sum().to(total.dtype)
