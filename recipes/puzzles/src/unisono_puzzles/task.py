"""The puzzle task in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono_puzzles.base import PuzzlesTask
from unisono_puzzles.batches import Fields

if TYPE_CHECKING:
    from torch import Tensor

    from unisono_puzzles.model.torch_model import PuzzleModel


class Puzzles(PuzzlesTask):
    """A small recursive model that solves puzzles, in torch."""

    def build(self) -> PuzzleModel:
        """The model."""
        from unisono_puzzles.model.torch_model import PuzzleModel

        return PuzzleModel(self.model_config, self.kinds)

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Floats, on the device of `like`."""
        import torch

        return torch.zeros(shape, device=like.device)

    def constant(self, array: Any, like: Tensor) -> Tensor:
        """A NumPy array, on the device of `like`."""
        import torch

        return torch.as_tensor(array, device=like.device)

    def without_gradient(self, compute: Callable[[], Any]) -> Any:
        """Call a function without recording gradients."""
        import torch

        with torch.no_grad():
            result = compute()
        if isinstance(result, dict):
            return {name: value.detach() for name, value in result.items()}
        return result.detach()

    def repeat(self, advance: Callable[[Fields], Fields], state: Fields, times: int) -> Fields:
        """Apply `advance` `times` times."""
        for _ in range(times):
            state = advance(state)
        return state

    def sum_rows(self, value: Tensor) -> Tensor:
        """The sum over rows."""
        return value.sum()

    def to_loss_precision(self, value: Tensor) -> Tensor:
        """fp64, or fp32 on devices without it."""
        return value.double() if value.device.type != "mps" else value.float()
