"""Operations on the whole gradient: norm, clipping, and a summation order independent of the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from unisono.engines.rules import clip_factor
from unisono.optim.sharded import local


def collect_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This process's part of every existing gradient."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def squared_norm(gradients: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """The sum of all squares, a scalar of the dtype `wide` on the device. Not finite if any element is not."""
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g.numel()]
    if not parts:  # a rank may hold empty shards only
        return torch.zeros((), dtype=wide)
    # Added up in `wide` from the start: in fp32 the norm of four million elements is 8e-5 off on a CPU, and off
    # differently for every way of cutting them into shards.
    return torch.stack(torch._foreach_norm(parts, dtype=wide)).square().sum()


def clip_gradients(gradients: Sequence[Tensor], norm: float, largest: float | None) -> None:
    """Scale all gradients so that their norm is at most `largest`; untouched if it is already."""
    factor = clip_factor(norm, largest)
    if factor is not None and gradients:
        torch._foreach_mul_(list(gradients), factor)


@contextmanager
def local_gradients(step: nn.Module, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see(name, gradient)` for every gradient that backward passes inside make on this process alone.

    It watches the tensors that the forward pass computes with, before any reduction over ranks, so under FSDP it sees
    the local gradient of the gathered parameter. Names begin at the step module, as `model.…`.
    """
    units: list[nn.Module] = [module for module in step.modules() if isinstance(module, FSDPModule)] or [step]
    handles: list[RemovableHandle] = []

    def gathered(unit: nn.Module, _: object, paths: Mapping[nn.Module, str]) -> None:
        for module, path in paths.items():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
                    handles.append(parameter.register_hook(partial(see, path + name)))

    members = {unit: set(unit.modules()) for unit in units}
    names = [(module, f"{path}.") for path, module in step.named_modules()]
    for unit, own in members.items():
        inner = set().union(*(members[other] for other in units if other is not unit and other in own))
        paths = {module: path for module, path in names if module in own and module not in inner}
        handles.append(unit.register_forward_pre_hook(partial(gathered, paths=paths)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class OrderedSum:
    """Sums gradients over micro-batches in one order for every world size that is a power of two.

    The order is a tree over the micro-batches of the *global* batch: halved while the number is even, added from left
    to right below that. A process's own micro-batches are a subtree, and the ranks' sums are the levels above it, so
    one process and many add the same pairs. Costs up to log2(micro-batches) more copies of the gradient, and a gather
    of every rank's gradient in place of a reduction.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], passes: int, world_size: int) -> None:
        self._parameters = list(parameters)
        self._passes = passes
        self._adds, self._adds_over_ranks = tree_additions(passes), tree_additions(world_size)
        self._partial: dict[Tensor, list[Tensor | None]] = {}
        self._pass = 0

    def begin(self, passes: int) -> None:
        """Begin a step of this many passes; missing ones come first and have no gradient."""
        self._partial, self._pass = {parameter: [] for parameter in self._parameters}, 0
        while self._pass < self._passes - passes:
            for parameter in self._parameters:
                self._push(parameter, None)
            self._pass += 1

    def end_pass(self) -> None:
        """Move the gradients of the last pass from `.grad` into the sum; after the final one, store the sum there.

        Of several processes, the last pass is summed by `hook` instead.
        """
        last = self._pass == self._passes - 1
        if last and len(self._adds_over_ranks) > 1:
            return
        for parameter in self._parameters:
            self._push(parameter, parameter.grad)
            parameter.grad = None
            if last:
                (parameter.grad,) = self._partial[parameter]
        self._pass += 1

    def hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook for the last pass: add this process's earlier passes, gather, add in rank order."""
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._push(parameter, view.clone())
            (total,) = self._partial[parameter]
            assert total is not None
            view.copy_(total)
        own = bucket.buffer()
        parts = [torch.empty_like(own) for _ in self._adds_over_ranks]
        work = dist.all_gather(parts, own, async_op=True)
        assert work is not None
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda _: tree_sum(parts))
        return future

    def _push(self, parameter: Tensor, gradient: Tensor | None) -> None:
        push_and_add(self._partial[parameter], gradient, self._adds[self._pass])


def tree_additions(leaves: int) -> list[int]:
    """How many additions follow each leaf when a tree over `leaves` is summed from left to right with a stack.

    >>> tree_additions(4)  # (a + b) + (c + d)
    [0, 1, 0, 2]
    >>> tree_additions(6)  # ((a + b) + c) + ((d + e) + f)
    [0, 1, 1, 0, 1, 2]
    """
    if leaves % 2:
        return [0] + [1] * (leaves - 1)
    half = tree_additions(leaves // 2)
    return [*half, *half[:-1], half[-1] + 1]


def push_and_add(stack: list[Tensor | None], leaf: Tensor | None, adds: int) -> None:
    """Put the next leaf of a tree on the stack, and make the additions that follow it; None is a leaf without value."""
    for _ in range(adds):
        left = stack.pop()
        leaf = left if leaf is None else leaf if left is None else left + leaf
    stack.append(leaf)


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all parts in the order of the tree."""
    stack: list[Tensor | None] = []
    for part, adds in zip(parts, tree_additions(len(parts)), strict=True):
        push_and_add(stack, part, adds)
    (total,) = stack
    assert total is not None
    return total
