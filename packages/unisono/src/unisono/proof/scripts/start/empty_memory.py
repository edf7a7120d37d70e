"""Memory that `to_empty` leaves uninitialised holds one number while a script is proved, so that it is recognised.

What it would hold otherwise is whatever was there before: a script that forgets to initialise a layer repeats on one
machine and not on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from unisono.optim.sharded import local

_FILLING = 85 / 256  # is itself in every precision, and nobody initialises with it


@contextmanager
def filled_memory() -> Iterator[None]:
    """A context in which modules that `to_empty` has allocated are filled with one number."""
    home: Any = nn.Module
    original: Callable[..., Any] = home.to_empty

    @wraps(original)
    def to_empty(module: nn.Module, *args: Any, **named: Any) -> Any:
        made = original(module, *args, **named)
        deep = named.get("recurse", True)
        with torch.no_grad():
            for tensor in (*module.parameters(deep), *module.buffers(deep)):
                if tensor.is_floating_point() and not tensor.is_meta:
                    local(tensor).fill_(_FILLING)
        return made

    home.to_empty = to_empty
    try:
        yield
    finally:
        home.to_empty = original


def find_uninitialised(tensors: Mapping[str, Tensor]) -> list[str]:
    """Those that still are what `to_empty` has left."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and (own := local(tensor.detach())).numel() and bool((own == _FILLING).all())
    ]
