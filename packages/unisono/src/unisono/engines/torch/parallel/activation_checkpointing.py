"""Activation checkpointing: blocks are recomputed in the backward pass without changing their buffers twice.

torch replays a block's random draws, but not its buffer changes. Without this module, a batch norm would count every
batch twice in its running statistics, and a block that reads what it changes, like spectral normalisation, would be
recomputed with different values from those of the forward pass, giving wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unisono.engines.torch.numerics.precision import promotion


def checkpoint_forward(block: nn.Module, forward: Callable[..., Any], precision: str) -> Callable[..., Any]:
    """A forward that saves only its inputs, and is repeated when the backward pass needs its activations.

    Args:
        block: whose forward it is.
        forward: the block's own, perhaps compiled; checkpoint() itself is never traced.
        precision: of the run.
    """
    return partial(checkpoint, forward, use_reentrant=False, context_fn=partial(_checkpoint_contexts, block, precision))


def _checkpoint_contexts(
    block: nn.Module, precision: str
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass and its replay, which sees the same buffers as the pass and does not change them."""
    found: list[tuple[Tensor, Tensor]] = []  # buffers, and what they were

    @contextmanager
    def first_pass() -> Iterator[None]:
        buffers = list(block.buffers()) if torch.is_grad_enabled() else []  # else there is no replay
        before = [(buffer, buffer.clone(), buffer._version) for buffer in buffers]
        yield
        # A batch norm's statistics are written past the version counter; the number of its batches is not.
        if any(buffer._version != version for buffer, _, version in before):
            found.extend((buffer, was) for buffer, was, _ in before)

    @contextmanager
    def recomputation() -> Iterator[None]:
        now = [buffer.clone() for buffer, _ in found]
        for buffer, was in found:
            buffer.copy_(was)
        try:
            with promotion(precision):
                yield
        finally:
            for (buffer, _), value in zip(found, now, strict=True):
                buffer.copy_(value)

    return first_pass(), recomputation()
