"""Steps that ran out of memory: known by their error, and left off by all processes together.

A process that runs out of memory is in the middle of a step in which the others count on it. Under DDP what they
exchange is a short list that is known before: so the process lets go of what it has made, takes part in the rest of the
list with zeros, and the sums that end every step tell everyone that this one is void. No step costs a message more for
it. Under FSDP every block of the forward and of the backward pass is an exchange of its own, in the order in which the
passes come to it, and a process that has lost its activations cannot get there.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from unisono.config.batch_split import Split, divisors
from unisono.engines.torch.numerics.gradients import OrderedSum
from unisono.engines.torch.numerics.metric_reduction import over_ranks
from unisono.engines.torch.transfer import leaves
from unisono.protocols import cross_sample, needs_totals
from unisono.runtime.errors import MemoryExhaustedError
from unisono.task import Task

_ON_CPU = re.compile(r"DefaultCPUAllocator|not enough memory|[Cc]annot allocate memory")

TOTALS, OUTPUTS, LOSSES, GRADIENTS = "totals", "outputs", "losses", "gradients"


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_ON_CPU.search(str(error)))


def told(error: BaseException) -> str:
    """What an allocator says, in a line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def give_back(device: torch.device) -> None:
    """Let go of what the part of a step that was made has left behind."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


class OutElsewhereError(Exception):
    """Another process ran out of memory before it had its part of an exchange, so nobody can go on with the step."""


class Attempt:
    """The context of the passes of a step, left off if memory runs out, here or elsewhere.

    Only after it does nothing hold any more what the passes had made: until then the error does.

    Attributes:
        short: what this process's allocator said; empty if it was another's.
    """

    short = ""

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and ran_out(error):
            self.short = told(error)
            return True
        return isinstance(error, OutElsewhereError)


class Owed:
    """What a process still has to exchange with the others in a step, and how far its last backward pass has come.

    Attributes:
        left: exchanges that are still to come, in their order.
        within: the one that is under way; a process that runs out of memory within one cannot take part in the rest.
        made: outputs of the pass that reduces gradients, once its forward is made.
    """

    def __init__(self) -> None:
        self.left: list[str] = []
        self.within = ""
        self.made: Any = None
        self._arrived: set[nn.Parameter] = set()

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """See of which parameters DDP has the gradient: its own hook comes right after this one."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived.add)

    def begin(self, *exchanges: str) -> None:
        """Begin a step with these exchanges before it."""
        self.left, self.within, self.made = list(exchanges), "", None

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """The context of an exchange."""
        self.within = name
        yield
        self.drop(name)

    def drop(self, *names: str) -> None:
        """These are over, or will not come."""
        self.left, self.within = [name for name in self.left if name not in names], ""

    def reducing(self, made: Any) -> None:
        """From now on the gradients of these outputs are reduced while they are made."""
        self.made = made
        self._arrived.clear()

    def take_part(
        self,
        wrapped: nn.Module,
        totals: Mapping[str, Tensor],
        crossing: Callable[[], None] | None,
        device: torch.device,
        passes: bool,
    ) -> None:
        """Go through the exchanges that are left with zeros; collective.

        Args:
            wrapped: by DDP.
            totals: like those of a step, if the task needs any.
            crossing: takes part in the exchanges of a loss across samples.
            device: of this process.
            passes: whether every pass is an exchange, too.

        Raises:
            RuntimeError: if this process cannot: the passes are exchanges, or it stopped within one.
        """
        if passes:
            raise RuntimeError("passes are exchanges")
        if self.within:
            raise RuntimeError(f"out of memory within {self.within}")
        if TOTALS in self.left and totals:
            over_ranks({name: torch.zeros_like(value) for name, value in totals.items()})
        if crossing is not None:
            crossing()
        self._reduce_nothing(wrapped, device)

    def _reduce_nothing(self, wrapped: nn.Module, device: torch.device) -> None:
        """Take part in the reduction of gradients with zeros for all that has not been reduced yet; collective.

        A backward pass that broke off has left some gradients to DDP and others not. One over a sum of the others
        times zero brings those, too, and with the last of them DDP ends its pass as ever.
        """
        assert isinstance(wrapped, DistributedDataParallel)
        made, self.made = self.made, None
        if made is None:
            total = wrapped(None, None, None)
        else:
            parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
            if wrapped.find_unused_parameters:  # DDP has looked for the others itself, in the forward pass
                reached = _reached(made)
                parameters = [parameter for parameter in parameters if parameter in reached]
            rest = [parameter for parameter in parameters if parameter not in self._arrived]
            if (
                not rest
            ):  # it broke off after the last of them, and DDP waits for an end of this pass that will not come
                raise RuntimeError("the backward pass broke off at its end")
            total = zero(rest)
        made = None
        give_back(device)  # until now the graph has held its activations
        total.backward()


def zero(parameters: Sequence[nn.Parameter]) -> Tensor:
    """A zero that depends on these parameters."""
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
    return sum((part.sum() * 0 for part in parts), torch.zeros((), device=parts[0].device))


def _reached(made: Any) -> set[nn.Parameter]:
    """The parameters that a graph leads to, even where a backward pass has been through a part of it."""
    nodes = [leaf.grad_fn for _, leaf in leaves(made) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen, found = set(nodes), set()
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):  # AccumulateGrad
            found.add(node.variable)
        after = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= after
        nodes.extend(after)
    return found


def exchanges(task: Task) -> list[str]:
    """What processes exchange in the passes of a step."""
    totals = [TOTALS] if needs_totals(task) else []
    crossing = {None: [], "rows": [OUTPUTS, LOSSES], "whole": [OUTPUTS]}[cross_sample(task)]
    return [*totals, *crossing, GRADIENTS]


def ordered(sums: OrderedSum, owed: Owed, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for gradients that are added up in one order: without memory for it, nobody could be told."""
    with owed.exchange("a bucket of gradients"):
        return sums.hook(bucket)


def fault(
    step: int, split: Split, why: Mapping[int, str], *, again: bool = False, alone: bool = False
) -> MemoryExhaustedError:
    """What to say of a step that ran out of memory.

    Args:
        step: updates made before it.
        split: with which it was made.
        why: what the allocators say of the ranks that ran out of it.
        again: whether all processes know of it, and the step can be made again.
        alone: whether the others do not know of it, and cannot be told.
    """
    smaller = [size for size in divisors(split.passes * split.micro_batch) if size < split.micro_batch]
    rank, short = next(iter(why.items()))
    rest = [*why][1:]
    more = f" and {', '.join(map(str, rest))}" if rest else ""
    others = "The other processes are in the middle of the step, and are ended. " if alone else ""
    return MemoryExhaustedError(
        f"rank {rank}{more}, step {step + 1}: out of memory with {split.micro_batch} rows in a micro-batch ({short}). "
        f"{others}The parameters are those of the step before. Start the run again with a smaller layout.micro_batch "
        f"({', '.join(map(str, smaller[-4:])) or 'there is none'}), and it goes on from its newest checkpoint; "
        "`unisono autobatch` finds the largest that fits",
        again,
    )
