"""What the user has put on the way of gradients: hooks, backward functions, layers that divide by a frequency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.proof.user_errors import find_place
from unisono.task import Loss

_MOST = 100_000  # nodes of a graph that are looked at


def find_on_the_way(model: Any, loss: Loss) -> list[str]:
    """In words, each with its line: what changes gradients between the loss of a pass and its update.

    A hook of an output cannot be seen.

    Args:
        model: a torch module.
        loss: of a pass over it, whose graph is there.
    """
    return list(dict.fromkeys([*_find_layers(model), *_find_hooks(model), *_find_functions(loss)]))


def _find_layers(model: Any) -> Iterator[str]:
    for name, part in model.named_modules():
        if getattr(part, "scale_grad_by_freq", False):
            yield f"'{name}', an {type(part).__name__} with scale_grad_by_freq=True"


def _find_hooks(model: Any) -> Iterator[str]:
    owners = [*model.named_parameters(), *model.named_modules()]
    for name, owner in owners:
        for kind in ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(owner, kind, None) or {}).values():
                if place := find_place(hook):
                    yield f"the hook of '{name}' ({place})"


def _find_functions(loss: Loss) -> Iterator[str]:
    left = [node for value in loss.sums.values() if (node := getattr(value, "grad_fn", None)) is not None]
    seen = set(left)
    while left and len(seen) < _MOST:
        node = left.pop()
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None and (place := find_place(made_by.backward)):
            yield f"{made_by.__name__}.backward ({place})"
        new = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= new
        left += new
