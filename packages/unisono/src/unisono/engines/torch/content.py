"""Whether tensors have content. A model that is only looked at, by `check`, `describe` or a plan, has shapes alone.

Such tensors are on the device `meta`, or fake ones of torch, which claim to be on a real device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def has_content(source: nn.Module | Tensor) -> bool:
    """Whether a tensor, or all parameters of a model, hold numbers that can be read."""
    tensors = [source] if isinstance(source, Tensor) else [*source.parameters()]
    return not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


@contextmanager
def real_tensors() -> Iterator[None]:
    """A context in which new tensors have content, on the CPU, also where a model without any is being built."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield
