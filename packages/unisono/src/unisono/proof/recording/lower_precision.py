"""Finds what a model computes in a lower precision inside, and what that does to everything after it.

Under fp64 the engine promotes the casts that a model writes down; what a compiled kernel, a NumPy round trip or a
tensor of another dtype lowers is left. A dispatch mode sees the result of every operation: it names the modules that
make such tensors, and in the perturbed run it changes each of their numbers in its last bit, as another order of sums
would, so that the floor which they impose is measured rather than guessed. It also sees whether torch's own attention
kernels are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from unisono.engines.observers import Observer
from unisono.runtime import rng

_LOWER_DTYPES = {
    "fp64": (torch.float32, torch.float16, torch.bfloat16),
    "fp32": (torch.float16, torch.bfloat16),
    "bf16": (),
}


class LowerPrecision(Observer):
    """Looks for lower precision in the passes of every step.

    Args:
        module: the model.
        precision: of the run.
        seed: of the changes.
        perturbing: whether results of a lower precision are changed in their last bit.

    Attributes:
        found: dtypes by the modules that make such tensors.
    """

    def __init__(self, module: nn.Module, precision: str, seed: int, perturbing: bool) -> None:
        self._mode = _DispatchMode(module, precision, seed, perturbing)
        self.found = self._mode.found

    @property
    def attention(self) -> bool:
        """Whether one of torch's fused attention kernels was used."""
        return self._mode.attention

    def part(self, name: str) -> AbstractContextManager[Any] | None:
        """The passes of a step are looked at."""
        return self._mode if name == "passes" else None


class _DispatchMode(TorchDispatchMode):
    """Sees every operation; as a context.

    Args:
        model: whose modules are named.
        precision: of the run.
        seed: of the changes.
        perturbing: whether results of a lower precision are changed in their last bit.
    """

    def __init__(self, model: nn.Module, precision: str, seed: int, perturbing: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._dtypes, self._perturbing = _LOWER_DTYPES[precision], perturbing
        self._generator = torch.Generator().manual_seed(rng.key(seed, "lower"))
        self._inside: list[str] = []
        self.found: dict[str, str] = {}
        self.attention = False

    def __enter__(self) -> _DispatchMode:
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation while the mode is on."""
        result = func(*args, **(kwargs or {}))
        self.attention |= "scaled_dot_product" in func.name()
        return tree_map_only(Tensor, self._on_tensor, result) if self._dtypes and not func.is_view else result

    def _on_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in self._dtypes:
            return tensor
        self.found.setdefault(self._inside[-1] if self._inside else "outside of the model", str(tensor.dtype)[6:])
        if self._perturbing:
            change = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
            tensor.mul_(1 + change.to(tensor.device) * torch.finfo(tensor.dtype).eps)
        return tensor

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if module in self._names:
            self._inside.append(self._names[module])

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module in self._names and self._inside:
            self._inside.pop()
