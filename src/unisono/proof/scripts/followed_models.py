"""Several models of one script as one: the first under its own names, each later one under its number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class FollowedModels(nn.Module):
    """What was followed so far, and one more model, whose names begin with its number.

    Args:
        before: a model, or another object of this class.
        model: that the script has made after that.
    """

    def __init__(self, before: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.before, self.model = before, model
        self._number: int = before._number + 1 if isinstance(before, FollowedModels) else 2

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Of both, each once."""
        yield from self.before.named_parameters(*args, **named)
        known = {id(parameter) for parameter in self.before.parameters()}
        own = (pair for pair in self.model.named_parameters(*args, **named) if id(pair[1]) not in known)
        yield from ((f"model-{self._number}.{name}", parameter) for name, parameter in own)

    def named_buffers(self, *args: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        """Of both, each once."""
        yield from self.before.named_buffers(*args, **named)
        known = {id(buffer) for buffer in self.before.buffers()}
        own = (pair for pair in self.model.named_buffers(*args, **named) if id(pair[1]) not in known)
        yield from ((f"model-{self._number}.{name}", buffer) for name, buffer in own)

    def named_modules(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        """Of both."""
        yield from self.before.named_modules()
        for name, module in self.model.named_modules():
            yield f"model-{self._number}{'.' if name else ''}{name}", module
