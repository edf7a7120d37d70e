"""A script without dropout: what every process draws for itself cannot be compared, what it computes without can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
    "dropout_", "alpha_dropout_", "feature_alpha_dropout_", "feature_dropout_",
)  # fmt: skip


@contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout of probability 0 in all of torch's functions and modules, and in its attention."""
    attend: Callable[..., Tensor] = functional.scaled_dot_product_attention

    def attend_to_all(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **named: Any,
    ) -> Tensor:
        return attend(query, key, value, attn_mask, 0.0, *args, **named)

    replaced: list[tuple[Any, str, Any]] = [(functional, "scaled_dot_product_attention", attend_to_all)]
    for home in (functional, torch):
        replaced += [(home, name, _keep_all) for name in _DROPOUTS if hasattr(home, name)]
    with ExitStack() as stack:
        for home, name, function in replaced:
            stack.callback(setattr, home, name, getattr(home, name))
            setattr(home, name, function)
        yield


def _keep_all(input: Tensor, *_: Any, **named: Any) -> Tensor:
    return input
