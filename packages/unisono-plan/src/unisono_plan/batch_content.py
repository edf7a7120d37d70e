"""Content of a batch, where shapes of a step depend on it: `torch.unique`, `x[mask]`, `mask.sum(1).tolist()`.

A traced step has shapes alone. But its micro-batch is real, and so is all that follows from it without a parameter:
numbers of taxa, masks, places. Those operators are computed, and what has the shape of a content gets that of this
micro-batch. Weights and activations stay without content, so nothing of their size is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from unisono_plan.torch_recorder import tensors, written

_aten = torch.ops.aten
_LARGEST = 1 << 22  # numbers of a tensor whose content is kept, unless a shape follows from it
_FACTORIES = {_aten.arange, _aten.zeros, _aten.ones, _aten.full, _aten.scalar_tensor}
# Which of their arguments are lists of indices; a mask among these is as good as the places where it is true.
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class BatchContent(TorchDispatchMode):
    """Computes what follows from known tensors alone, above a mode in which all others have no content.

    Args:
        mode: In which the step is traced.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._known: Any = WeakTensorKeyDictionary()

    def fake(self, real: Tensor) -> Tensor:
        """A tensor of the mode, whose content is known from now on."""
        with unset_fake_temporarily():
            tensor: Tensor = self._mode.from_tensor(real)
        self._known[tensor] = real
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operator."""
        kwargs, packet = kwargs or {}, func.overloadpacket
        given = tensors((args, kwargs))
        known = all(self._content(tensor) is not None for tensor in given) if given else packet in _FACTORIES
        if not known or torch.Tag.nondeterministic_seeded in func.tags:
            if packet in _INDEXING:
                args = (args[0], self._places(args[1]), *args[2:])
            elif packet is _aten.masked_select and self._content(args[1]) is not None:
                func, args = _aten.index.Tensor, (args[0], self._places([args[1]]))
            result = func(*args, **kwargs)
            if func._schema.is_mutable:
                self._forget(written(func, args, kwargs))
            return result
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            real = self._compute(func, args, kwargs)
            return pytree.tree_map_only(Tensor, self.fake, real)
        made = tensors(result)
        if sum(tensor.numel() for tensor in made) > _LARGEST:
            if func._schema.is_mutable:
                self._forget(written(func, args, kwargs))
            return result
        real = tensors(self._compute(func, args, kwargs))
        for tensor, content in zip(made, real, strict=True):
            if isinstance(tensor, FakeTensor):
                self._known[tensor] = content
        return result

    def _content(self, tensor: Tensor) -> Tensor | None:
        """What a tensor contains, if that is known."""
        found: Tensor | None = self._known.get(tensor)
        return getattr(tensor, "constant", None) if found is None else found

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._content, (args, kwargs))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices with the places of each mask whose content is known, instead of the mask."""
        found: list[Tensor | None] = []
        for index in indices:
            content = None if index is None else self._content(index)
            if index is None or content is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            with unset_fake_temporarily():
                places = content.nonzero().unbind(1)
            found += map(self.fake, places)
        return found

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Forget what shares memory with tensors that were written to, and with content that nobody knows."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in [one for one in self._known if one.untyped_storage()._cdata in storages]:
            del self._known[tensor]
