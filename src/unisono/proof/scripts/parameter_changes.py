"""Who changes the parameters of a script: an optimizer, or the script itself, as it does with those of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.engines.torch.guards import replicas


class ParameterChanges:
    """Watches frozen parameters between updates, and at which rates optimizers hold the others.

    Args:
        frozen: parameters without a gradient, by name.
    """

    def __init__(self, frozen: Mapping[str, Tensor]) -> None:
        self._held: set[int] = set()  # parameters that an optimizer has updated at a rate other than 0, by `id`
        self._after = replicas.digests(frozen)  # the last update
        self._by_script: set[str] = set()

    def begin_update(self, optimizer: torch.optim.Optimizer, frozen: Mapping[str, Tensor]) -> None:
        """An update begins."""
        moving = [group for group in optimizer.param_groups if group.get("lr", 1.0) != 0]
        self._held |= {id(parameter) for group in moving for parameter in group["params"]}
        now = replicas.digests({name: value for name, value in frozen.items() if name in self._after})
        self._by_script |= {name for name, digest in now.items() if digest != self._after[name]}

    def end_update(self, frozen: Mapping[str, Tensor]) -> None:
        """It is made."""
        self._after = replicas.digests(frozen)

    def without_own(self, frozen: Sequence[str]) -> list[str]:
        """The frozen parameters that the script does not change itself."""
        return [name for name in frozen if name not in self._by_script]

    def find_untrained(self, trainable: Mapping[str, Tensor]) -> list[str]:
        """The names of those that no optimizer changes; none where none is changed, since then something is wrong."""
        result = [name for name, parameter in trainable.items() if id(parameter) not in self._held]
        return result if len(result) < len(trainable) else []
