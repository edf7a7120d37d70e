"""`observe.norms`: the norms of gradients and weights by layer, whole on any layout, in the step's own reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.observers import Observer, StepResult, StepVerdict
from unisono.optim.sharded import local


class LayerNorms(Observer):
    """Measures the steps that `rules.is_recorded` names; in the others it adds zeros to the reduction.

    Args:
        module: the model.
        share: of this process's squares in the sum over all: sharded parameters are divided among processes, and of
            copies those of one process count.
        dtype: that squares are added up in.
        every: `observe.log_every`.
    """

    def __init__(self, module: nn.Module, share: float, dtype: torch.dtype, every: int) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._share, self._dtype, self._every, self._due = share, dtype, every, False

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """Whether this step is one of those that are measured."""
        self._due = rules.is_recorded(step + 1, self._every)

    def votes(self) -> Sequence[float]:
        """This process's squares, first of all gradients, then of all weights."""
        if not self._due or not self._share:
            return [0.0] * (2 * len(self._names))
        return [square * self._share for square in self._squares([p.grad for p in self._parameters], self._parameters)]

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        """The norms of the whole step."""
        if not self._due:
            return None
        half = len(self._names)
        return StepVerdict(norms=rules.layer_norms(self._names, votes[:half], votes[half:]))

    def _squares(self, *groups: Sequence[Tensor | None]) -> list[float]:
        """The sum of squares of each tensor of all groups; the device is waited for once."""
        tensors = [None if one is None else local(one.detach()) for group in groups for one in group]
        there, parts = list[int](), list[Tensor]()
        for number, one in enumerate(tensors):
            if one is not None and one.numel():  # a rank may hold an empty shard
                there.append(number)
                parts.append(torch.view_as_real(one) if one.is_complex() else one)
        squares = [0.0] * len(tensors)
        if parts:
            measured = torch.stack(torch._foreach_norm(parts, dtype=self._dtype)).square().tolist()
            for number, square in zip(there, measured, strict=True):
                squares[number] = square
        return squares
