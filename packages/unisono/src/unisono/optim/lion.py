"""Lion from the package lion-pytorch (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675).

Its update is elementwise, so shards are updated in place. Imported only when requested, since the package is optional.
"""

from __future__ import annotations

from typing import Any

from lion_pytorch import Lion
from lion_pytorch.foreach import Lion as _Foreach


class LionForeach(_Foreach):  # type: ignore[misc]
    """The package's foreach version, skipping groups without any gradient: torch rejects empty lists."""

    param_groups: list[dict[str, Any]]

    def step(self, closure: Any = None) -> Any:
        """One update."""
        every = self.param_groups
        self.param_groups = [group for group in every if any(p.grad is not None for p in group["params"])]
        try:
            return super().step(closure)
        finally:
            self.param_groups = every


__all__ = ["Lion", "LionForeach"]
