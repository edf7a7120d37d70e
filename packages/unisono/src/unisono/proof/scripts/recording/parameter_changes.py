"""Who changes the parameters of a script: an optimizer, or the script itself, as it does with those of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.engines.torch.guards import replicas


class ParameterChanges:
    """Watches parameters between updates, and at which rates optimizers hold them.

    Args:
        parameters: by name, before the first pass.

    Attributes:
        changed: those that something has changed since the last update, when the one under way began.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._held: set[int] = set()  # that an optimizer has updated at a rate other than 0, by `id`
        self._after = replicas.digests(parameters)  # the last update
        self._by_script: set[str] = set()
        self.changed: list[str] = []

    def begin_update(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """An update begins; returns the digests of the parameters as it finds them."""
        moving = [group for group in optimizer.param_groups if group.get("lr", 1.0) != 0]
        self._held |= {id(parameter) for group in moving for parameter in group["params"]}
        now = replicas.digests(parameters)
        self.changed = [name for name, digest in now.items() if digest != self._after.get(name, digest)]
        self._by_script |= {*self.changed}
        return now

    def end_update(self, parameters: Mapping[str, Tensor]) -> None:
        """It is made."""
        self._after = replicas.digests(parameters)

    @property
    def by_script(self) -> list[str]:
        """The parameters that were changed between updates."""
        return sorted(self._by_script)

    def find_untrained(self, trainable: Sequence[str], parameters: Mapping[str, Tensor]) -> list[str]:
        """Of those to be trained, the ones that no optimizer changes; none where none is changed, which is a fault."""
        result = [name for name in trainable if name in parameters and id(parameters[name]) not in self._held]
        return result if len(result) < len(trainable) else []
