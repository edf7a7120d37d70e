"""Losses across samples: everyone's outputs on every process, and the gradient of the loss in the outputs of its rows.

The loss is computed on outputs that are cut off from the model, so the rows of a whole global batch cost the memory of
their outputs and not that of their activations. The gradients found there drive the backward pass of every micro-batch
(gradient caching: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021). The
price of several micro-batches is a second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono import protocols
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import MicroBatch
from unisono.engines.torch.guards.oom import LOSSES, OUTPUTS, OutElsewhereError, Owed
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.gradients import add_onto, additions
from unisono.engines.torch.numerics.random_state import Randomness
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.transfer import each, leaves
from unisono.runtime.communicator import Group, Place
from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, GlobalBatch, Loss, Task

Local = Callable[[MicroBatch, Context], tuple[Batch, Context]]
Kind = list[Any]  # name, shape of a row, dtype
_SHORT = "out of memory"  # in place of a fault
_REPEATED = 1e-2  # relative; other draws change more, other kernels less


class Crossing:
    """The outputs of one global batch at a time, those of all processes.

    Args:
        task: whose loss crosses samples.
        config: concrete.
        place: of this process.
        group: all processes.
        randomness: seeded for every loss.
        local: a micro-batch on the device, and the context with the carry of its rows.
        owed: what this process still has to exchange.

    Raises:
        ConfigError: for a way of crossing that there is not.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        place: Place,
        group: Group,
        randomness: Randomness,
        local: Local,
        owed: Owed | None = None,
    ) -> None:
        name = type(task).__name__
        self._is_whole = protocols.cross_sample(task) == "whole"
        if self._is_whole and isinstance(task, protocols.Recurrent):
            raise ConfigError(
                f"{name} carries state of rows from step to step, which its loss cannot give back with "
                "cross_sample='whole', since it is not given rows; use 'rows', or leave initial_carry() out"
            )
        self._task, self._place, self._group = task, place, group
        self._precision, self._ordered = config.train.precision, config.layout.reduction == "ordered"
        self._randomness, self._local, self._owed = randomness, local, owed or Owed()
        self._nothing: Callable[[], Tensor] | None = None  # in place of a gradient that there is no memory for
        self._parts: list[_Part] = []
        self._settled: dict[int, _Part] = {}
        self._is_repeated = False
        self.random = False

    def take(self, micro: MicroBatch, outputs: Any, batch: Batch) -> None:
        """Keep what a forward pass returned for a micro-batch, and what everyone is to know of it."""
        cut_off = each(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
        self._parts.append(_Part(micro, cut_off, protocols.shared(self._task, batch)))

    def settle(self, context: Context, scales: Mapping[str, Tensor]) -> list[tuple[MicroBatch, Loss]]:
        """Compute the loss of what was taken, and in training its gradient in this process's outputs; collective.

        Args:
            context: of the step.
            scales: what each term's sum is multiplied with.

        Returns:
            The micro-batches that were taken, each with its sums.

        Raises:
            ConfigError: on every process, for outputs that cannot be put side by side.
        """
        parts, self._parts = self._parts, []
        every = self._gathered(parts, context.training)
        with self._randomness.kept():  # whether the model drew is asked after it
            vector = (self._whole if self._is_whole else self._by_rows)(parts, every, context, scales)
        if context.training:
            self._deal_out(parts, every, vector)
        self._settled = {part.micro.number: part for part in parts}
        return [(part.micro, part.loss) for part in parts]

    def driven(self, micro: MicroBatch, outputs: Any) -> tuple[Tensor, Loss]:
        """A scalar whose gradient in these outputs is that of the settled loss, and the sums of the micro-batch.

        Args:
            micro: that was settled.
            outputs: of a pass that repeats the one whose outputs were taken.

        Raises:
            ConfigError: if the first of all did not repeat it.
        """
        part = self._settled[micro.number]
        total = torch.zeros((), device=part.leaves[0].device)
        for (name, leaf), kept, gradient in zip(leaves(outputs), part.leaves, part.gradients, strict=True):
            if not (self._is_repeated or _alike(leaf.detach(), kept)):
                raise ConfigError(
                    f"{type(self._task).__name__}: the output '{name}' came out otherwise in a second forward pass "
                    "over the same rows, which a loss across samples needs to repeat. outputs() must draw from torch's "
                    "default generators, which are seeded for it, and may change nothing but buffers."
                )
            if gradient is not None and leaf.requires_grad:
                total = total + (leaf * gradient).sum()
        self._is_repeated = True
        return total, part.loss

    def forget(self) -> None:
        """Let go of a step that was not finished."""
        self._parts, self._settled = [], {}

    def take_part(self) -> None:
        """Take part in the exchanges that are left, without memory for what they are about; collective."""
        if OUTPUTS in self._owed.left:
            with self._owed.exchange(OUTPUTS):
                self._group.gather([_SHORT, 0, []], "what the outputs of all ranks are like")
            self._owed.drop(LOSSES)  # nobody gets that far
        elif LOSSES in self._owed.left:
            assert self._nothing is not None
            nothing, self._nothing = self._nothing(), None
            self._summed(nothing)

    def not_finite(self, micro: MicroBatch) -> list[int]:
        """Rows of a settled micro-batch that have an output which is not finite."""
        part = self._settled[micro.number]
        good = [torch.isfinite(leaf).reshape(part.rows, -1).all(1) for leaf in part.leaves]
        return torch.nonzero(~torch.stack(good).all(0)).flatten().tolist()

    # gathering ----------------------------------------------------------------------------------------------------

    def _gathered(self, parts: Sequence[_Part], training: bool) -> _Every:
        """Outputs and shared arrays of all processes, row after row; rows that do not exist are in nobody's."""
        real = [part for part in parts if not part.micro.idle]
        kinds, fault = [], ""
        try:
            kinds = _kinds(type(self._task).__name__, parts)
        except ConfigError as error:
            fault = str(error)
        mine = [fault, sum(part.rows for part in real) if kinds else 0, kinds]
        with self._owed.exchange(OUTPUTS):
            return self._side_by_side(parts, real, training, mine)

    def _side_by_side(self, parts: Sequence[_Part], real: Sequence[_Part], training: bool, mine: list[Any]) -> _Every:
        told = self._group.gather(mine, "what the outputs of all ranks are like")
        if any(why == _SHORT for why, _, _ in told):
            self._owed.drop(OUTPUTS, LOSSES)
            raise OutElsewhereError
        for rank, (why, _, theirs) in enumerate(told):
            if why:
                raise ConfigError(f"rank {rank}: {why}" if self._place.world_size > 1 else why)
            if theirs != told[0][2]:
                raise ConfigError(
                    f"outputs() or shared() return {_told(told[0][2])} on rank 0 and {_told(theirs)} on rank {rank}; "
                    "names, shapes of a row and dtypes may not depend on the rows"
                )
        rows = [count for _, count, _ in told]
        own = [torch.cat(of) for of in zip(*(part.arrays for part in real or parts), strict=True)]
        if any(rows):  # else all rows were left out, and those that stand in for them count nothing
            own = gathered([array if real else array[:0] for array in own], rows)
        names = list(parts[0].shared)
        outputs, shared = own[: len(own) - len(names)], own[len(own) - len(names) :]
        outputs = [leaf.requires_grad_(training and leaf.is_floating_point()) for leaf in outputs]
        first = sum(rows[: self._place.rank])
        return _Every(outputs, parts[0].outputs, dict(zip(names, shared, strict=True)), first)

    # the loss -----------------------------------------------------------------------------------------------------

    def _by_rows(
        self, parts: Sequence[_Part], every: _Every, context: Context, scales: Mapping[str, Tensor]
    ) -> Tensor | None:
        """The local rows' share of the loss, and its gradient in everyone's outputs, added up over processes."""
        self._nothing = every.nothing if context.training else None
        stack: list[Tensor | None] = []
        for (part, first), adds in zip(every.placed(parts), additions(len(parts)), strict=True):
            outputs, everyone = (
                part.outputs,
                GlobalBatch(part.outputs, part.shared, 0),
            )  # of an idle one, which is nowhere
            if not part.micro.idle:
                outputs = every.made_of([leaf[first : first + part.rows] for leaf in every.leaves])
                everyone = GlobalBatch(every.made_of(every.leaves), every.shared, first)
            batch, own = self._local(part.micro, context)
            total, part.loss = self._computed(
                outputs, batch, replace(own, global_batch=everyone), scales, part.micro.number
            )
            add_onto(stack, every.gradient(total), adds)
        (vector,) = stack
        if not context.training:
            return None
        vector = every.nothing() if vector is None else vector
        self._nothing = None  # it holds everyone's outputs
        return self._summed(vector)

    def _summed(self, vector: Tensor) -> Tensor:
        with self._owed.exchange(LOSSES):
            return summed(vector, self._place.world_size, self._ordered)

    def _whole(
        self, parts: Sequence[_Part], every: _Every, context: Context, scales: Mapping[str, Tensor]
    ) -> Tensor | None:
        """The loss of all rows together, the same on every process, and its gradient in everyone's outputs.

        Nothing is added up: each process drives its own rows with their gradient. Its sums are counted once, with the
        first row.
        """
        outputs = every.made_of(every.leaves)
        total, loss = self._computed(outputs, every.shared, context, scales)
        if loss.carry is not None:
            raise ConfigError(f"{type(self._task).__name__}: a loss with cross_sample='whole' cannot return a carry")
        vector = every.gradient(total)
        nothing = replace(
            loss,
            sums={name: torch.zeros_like(value) for name, value in loss.sums.items()},
            metrics=dict.fromkeys(loss.metrics, (0.0, 0.0)),
        )
        for part, first in every.placed(parts):
            part.loss = loss if first == 0 and not part.micro.idle else nothing
        return vector

    def _computed(
        self, outputs: Any, batch: Batch, context: Context, scales: Mapping[str, Tensor], *number: int
    ) -> tuple[Tensor, Loss]:
        address: tuple[int | str, ...] = ("loss", context.step) if context.training else ("eval", "loss")
        seed = self._randomness.begin(*address, *number)
        with precision.casting(self._precision, next(leaves(outputs))[1].device):
            total, loss = wrap.scaled(self._task, outputs, batch, context, scales)
        # What the whole loss draws does not depend on how the batch is cut.
        self.random |= bool(number) and context.training and self._randomness.drew(seed)
        return total, replace(loss, sums={name: value.detach() for name, value in loss.sums.items()})

    def _deal_out(self, parts: Sequence[_Part], every: _Every, vector: Tensor | None) -> None:
        """Give each micro-batch the gradient in its outputs; zeros to what is nowhere in the global batch."""
        found = every.split(vector)
        for part, first in every.placed(parts):
            own = [None if g is None else g[first : first + part.rows] for g in found]
            part.gradients = [
                None if g is None else torch.zeros_like(leaf) if part.micro.idle else g.to(leaf.dtype)
                for g, leaf in zip(own, part.leaves, strict=True)
            ]


@dataclass
class _Part:
    """One micro-batch of this process: its outputs, cut off from the model, and then its sums and gradients."""

    micro: MicroBatch
    outputs: Any
    shared: dict[str, Any]
    loss: Loss = None  # type: ignore[assignment] # until it is settled
    gradients: Sequence[Tensor | None] = ()

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for _, leaf in leaves(self.outputs)]

    @property
    def arrays(self) -> list[Tensor]:
        return [*self.leaves, *self.shared.values()]

    @property
    def rows(self) -> int:
        return len(self.leaves[0])


@dataclass
class _Every:
    """Everyone's outputs, with a gradient of their own.

    Attributes:
        leaves: tensors of the outputs, each (rows of the global batch, …).
        like: outputs of the same structure.
        shared: what `Task.shared` gave, each (rows of the global batch, …).
        first: place of this process's first row.
    """

    leaves: list[Tensor]
    like: Any
    shared: dict[str, Tensor]
    first: int

    def made_of(self, tensors: Sequence[Tensor]) -> Any:
        """Outputs of these tensors."""
        these = iter(tensors)
        return each(lambda _: next(these), self.like)

    def placed(self, parts: Sequence[_Part]) -> Iterator[tuple[_Part, int]]:
        """Each part with the place of its first row; that of an idle one says nothing."""
        first = self.first
        for part in parts:
            yield part, first
            first += 0 if part.micro.idle else part.rows

    def gradient(self, total: Tensor) -> Tensor | None:
        """The gradient of a scalar in all outputs as one vector, and which of them it depends on.

        It is as wide as float32 at least: it is still to be added up over micro-batches and processes.
        """
        if not total.requires_grad:
            return None
        found = torch.autograd.grad(total, self._driven, allow_unused=True)
        flat = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(self._driven, found, strict=True)]
        used = torch.tensor([g is not None for g in found], device=total.device)
        return torch.cat([g.reshape(-1).to(self._wide) for g in (*flat, used)])

    def nothing(self) -> Tensor:
        """The vector of a scalar that depends on nothing."""
        size = sum(leaf.numel() + 1 for leaf in self._driven)
        return torch.zeros(size, dtype=self._wide, device=self.leaves[0].device)

    def split(self, vector: Tensor | None) -> list[Tensor | None]:
        """The gradients in a vector, by tensor; None for what the loss does not depend on."""
        vector = self.nothing() if vector is None else vector
        *parts, flags = vector.split([*(leaf.numel() for leaf in self._driven), len(self._driven)])
        used = zip(self._driven, parts, flags.tolist(), strict=True)
        gradients = iter([part.reshape(leaf.shape) if flag else None for leaf, part, flag in used])
        return [next(gradients) if leaf.requires_grad else None for leaf in self.leaves]

    @property
    def _driven(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if leaf.requires_grad]

    @property
    def _wide(self) -> torch.dtype:
        wide = torch.float32
        for leaf in self._driven:
            wide = torch.promote_types(wide, leaf.dtype)
        return wide


def _alike(mine: Tensor, other: Tensor) -> bool:
    """Whether two passes over the same rows agree, but for what other kernels may change."""
    if not mine.is_floating_point():
        return torch.equal(mine, other)
    return not float((mine - other).norm()) > _REPEATED * float(other.norm())


def gathered(own: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Tensors of all processes, one below the other in the order of ranks; bit for bit, of any dtype; collective.

    Args:
        own: of this process; their first axis is the row.
        rows: of every process.
    """
    if len(rows) == 1:
        return list(own)
    sizes = [array.element_size() * array.shape[1:].numel() for array in own]  # bytes of a row
    packed = torch.zeros(max(rows) * sum(sizes), dtype=torch.uint8, device=own[0].device)  # the largest share
    bits = torch.cat([array.contiguous().reshape(-1).view(torch.uint8) for array in own])
    packed[: len(bits)] = bits
    everyone = [torch.empty_like(packed) for _ in rows]
    dist.all_gather(everyone, packed)
    cut = [
        part[: count * sum(sizes)].split([count * size for size in sizes])
        for part, count in zip(everyone, rows, strict=True)
    ]
    return [
        # Cloned, since the bytes of a wider dtype have to begin where its numbers can.
        torch.cat([part.clone().view(array.dtype).reshape(-1, *array.shape[1:]) for part in parts])
        for array, parts in zip(own, zip(*cut, strict=True), strict=True)
    ]


def summed(vector: Tensor, world_size: int, ordered: bool) -> Tensor:
    """The sum over all processes: what the backward pass of a gather is; collective.

    Args:
        vector: of this process.
        world_size: number of processes.
        ordered: in a tree over the ranks, whose lower levels are the micro-batches.
    """
    if world_size == 1:
        return vector
    if not ordered:
        dist.all_reduce(vector)
        return vector
    everyone = [torch.empty_like(vector) for _ in range(world_size)]
    dist.all_gather(everyone, vector)
    stack: list[Tensor | None] = []
    for part, adds in zip(everyone, additions(world_size), strict=True):
        add_onto(stack, part, adds)
    (total,) = stack
    assert total is not None
    return total


def _kinds(name: str, parts: Sequence[_Part]) -> list[Kind]:
    """Name, shape of a row, and dtype of every output and shared array, the same in all micro-batches of a process.

    Raises:
        ConfigError: for what has no rows, or not those of the micro-batch, and for rows that are not alike.
    """
    kinds: list[Kind] = []
    for part in parts:
        where = f"{name}, micro-batch {part.micro.number}"
        mine = [
            *((f"outputs {path}".rstrip(), leaf) for path, leaf in leaves(part.outputs)),
            *((f"shared {path}", leaf) for path, leaf in part.shared.items()),
        ]
        if not any(told.startswith("outputs") for told, _ in mine):
            raise ConfigError(f"{where}: outputs() returned no tensor, so there is nothing to compare samples by")
        for told, leaf in mine:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.is_complex():
                is_tensor = isinstance(leaf, Tensor)
                kind = f"of {leaf.dtype} with {leaf.dim()} axes" if is_tensor else f"a {type(leaf).__name__}"
                raise ConfigError(
                    f"{where}: '{told}' is {kind}; where a loss crosses samples, outputs() returns real tensors whose "
                    "first axis is the row, or a nested dict of them, and shared() a dict of arrays"
                )
            if not part.micro.idle and len(leaf) != part.micro.size:
                raise ConfigError(
                    f"{where}: '{told}' has {len(leaf)} rows, the micro-batch {part.micro.size}; where a loss crosses "
                    "samples, the first axis of all that outputs() and shared() return is the row"
                )
        those = [[told, list(leaf.shape[1:]), str(leaf.dtype)] for told, leaf in mine]
        kinds = kinds or those
        if those != kinds:
            raise ConfigError(
                f"{where} returns {_told(those)}, and the one before {_told(kinds)}. Where a loss crosses samples, "
                "rows of all micro-batches are put side by side: return the same shape for every row, e.g. sums over "
                "its tokens in place of a number for each"
            )
    return kinds


def _told(kinds: Sequence[Kind]) -> str:
    return ", ".join(f"{name} {tuple(shape)} {dtype.removeprefix('torch.')}" for name, shape, dtype in kinds)
