"""Losses across samples: all outputs on every process, and the gradient of the loss with respect to its own rows.

The loss is computed on outputs detached from the model, so the rows of a whole global batch cost the memory of
their outputs and not of their activations. Multiplied by the outputs of each micro-batch, the gradients found
there make its surrogate loss, whose backward pass reaches the model (gradient caching: Gao et al., "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup", 2021). The price of several micro-batches is a second
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.nested import leaves, map_leaves
from unisono.engines.protocol import EngineJob
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.gradients import push_and_add, tree_additions, tree_sum
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, GlobalBatch, Loss

PrepareMicroBatch = Callable[[MicroBatch, Context], tuple[Batch, Context]]
ArrayKind = list[Any]  # name, shape of a row, dtype
_REPEAT_TOLERANCE = 1e-2  # relative; other draws change more, other kernels less


class TorchCrossSampleLoss:
    """Collects the outputs of one global batch from all processes and computes the loss on them.

    Args:
        job: of the engine; the loss of its task crosses samples.
        random_state: seeded for every loss.
        local: a micro-batch on the device, and the context with the recurrent state of its rows.
        repeated: whether second forward passes are known to repeat the first, so that not even the first is checked.

    Attributes:
        random: whether a loss that depends on how the batch is cut drew random numbers.
    """

    def __init__(
        self, job: EngineJob, random_state: RandomState, local: PrepareMicroBatch, *, repeated: bool = False
    ) -> None:
        task, config = job.task, job.config
        name = type(task).__name__
        self._is_whole = job.features.cross_sample == "whole"
        if self._is_whole and job.features.recurrent is not None:
            raise ConfigError(
                f"{name} carries state of rows from step to step, which its loss cannot return with "
                "cross_sample='whole', since it does not get rows; use 'rows', or remove initial_carry()"
            )
        self._task, self._process, self._communicator = task, job.process, job.communicator
        self._features = job.features
        self._precision, self._ordered = config.train.precision, config.layout.reduction == "ordered"
        self._random_state, self._local = random_state, local
        self._parts: list[_MicroBatchOutputs] = []
        self._computed: dict[int, _MicroBatchOutputs] = {}
        self._is_repeated = repeated
        self.random = False

    def add_outputs(self, micro: MicroBatch, outputs: Any, batch: Batch) -> None:
        """Keep the outputs of a micro-batch, and the arrays that it shares with all processes."""
        cut_off = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
        self._parts.append(_MicroBatchOutputs(micro, cut_off, self._features.shared_arrays(batch)))

    def compute_loss(self, context: Context, scales: Mapping[str, Tensor]) -> list[tuple[MicroBatch, Loss]]:
        """Compute the loss of the added outputs, and in training its gradient in this process's ones; collective.

        Returns:
            The micro-batches of these outputs, each with its sums.

        Raises:
            ConfigError: on every process, for outputs that cannot be concatenated.
        """
        parts, self._parts = self._parts, []
        everyone = self._gather(parts, context.training)
        with self._random_state.restore_on_exit():  # whether the model drew is asked after it
            vector = (self._whole if self._is_whole else self._by_rows)(parts, everyone, context, scales)
        if context.training:
            self._keep_gradients(parts, everyone, vector)
        self._computed = {part.micro.number: part for part in parts}
        return [(part.micro, part.loss) for part in parts]

    def surrogate_loss(self, micro: MicroBatch, outputs: Any) -> tuple[Tensor, Loss]:
        """A scalar with the same gradient in these outputs as the computed loss, and the sums of the micro-batch.

        The pass must repeat the one whose outputs were added; the first pass of a run is checked.
        """
        part = self._computed[micro.number]
        total = torch.zeros((), device=part.leaves[0].device)
        for (name, leaf), kept, gradient in zip(leaves(outputs), part.leaves, part.gradients, strict=True):
            if not (self._is_repeated or _outputs_match(leaf.detach(), kept)):
                raise ConfigError(
                    f"{type(self._task).__name__}: the output '{name}' differs in a second forward pass over the same "
                    "rows, which a loss across samples must repeat. outputs() must draw from torch's default "
                    "generators, which are seeded for it, and may change nothing but buffers."
                )
            if gradient is not None and leaf.requires_grad:
                total = total + (leaf * gradient).sum()
        self._is_repeated = True
        return total, part.loss

    def rows_not_finite(self, micro: MicroBatch) -> list[int]:
        """Rows of a micro-batch with a non-finite output; call after its loss was computed."""
        part = self._computed[micro.number]
        good = [torch.isfinite(leaf).reshape(part.rows, -1).all(1) for leaf in part.leaves]
        return torch.nonzero(~torch.stack(good).all(0)).flatten().tolist()

    # gathering ----------------------------------------------------------------------------------------------------

    def _gather(self, parts: Sequence[_MicroBatchOutputs], training: bool) -> GatheredOutputs:
        """Outputs and shared arrays of all processes, concatenated by row; idle rows are left out."""
        real = [part for part in parts if not part.micro.idle]
        kinds, refusal = [], ""
        try:
            kinds = _array_kinds(type(self._task).__name__, parts)
        except ConfigError as error:
            refusal = str(error)
        mine = [refusal, sum(part.rows for part in real) if kinds else 0, kinds]
        everyone = self._communicator.gather(mine, "names and shapes of the outputs of all ranks")
        for rank, (why, _, theirs) in enumerate(everyone):
            if why:
                raise ConfigError(f"rank {rank}: {why}" if self._process.world_size > 1 else why)
            if theirs != everyone[0][2]:
                raise ConfigError(
                    f"outputs() or shared() return {_format_kinds(everyone[0][2])} on rank 0 and "
                    f"{_format_kinds(theirs)} on rank {rank}; names, row shapes and dtypes must not depend on the "
                    "rows"
                )
        rows = [count for _, count, _ in everyone]
        own = [torch.cat(of) for of in zip(*(part.arrays for part in real or parts), strict=True)]
        if any(rows):  # else all rows were left out, and those that stand in for them count nothing
            own = gather_rows([array if real else array[:0] for array in own], rows)
        names = list(parts[0].shared)
        outputs, shared = own[: len(own) - len(names)], own[len(own) - len(names) :]
        outputs = [leaf.requires_grad_(training and leaf.is_floating_point()) for leaf in outputs]
        first = sum(rows[: self._process.rank])
        return GatheredOutputs(outputs, parts[0].outputs, dict(zip(names, shared, strict=True)), first)

    # the loss -----------------------------------------------------------------------------------------------------

    def _by_rows(
        self,
        parts: Sequence[_MicroBatchOutputs],
        everyone: GatheredOutputs,
        context: Context,
        scales: Mapping[str, Tensor],
    ) -> Tensor | None:
        """The local rows' share of the loss, and its gradient in all outputs, summed over processes."""
        stack: list[Tensor | None] = []
        for (part, first), adds in zip(everyone.with_offsets(parts), tree_additions(len(parts)), strict=True):
            outputs, batch_wide = part.outputs, GlobalBatch(part.outputs, part.shared, 0)
            if not part.micro.idle:  # which is nowhere in the global batch
                outputs = everyone.rebuild([leaf[first : first + part.rows] for leaf in everyone.leaves])
                batch_wide = GlobalBatch(everyone.rebuild(everyone.leaves), everyone.shared, first)
            batch, own = self._local(part.micro, context)
            own = replace(own, global_batch=batch_wide)
            total, part.loss = self._scaled_loss(outputs, batch, own, scales, part.micro.number)
            push_and_add(stack, everyone.gradient(total), adds)
        (vector,) = stack
        if not context.training:
            return None
        vector = everyone.zeros() if vector is None else vector
        return sum_vector(vector, self._process.world_size, self._ordered)

    def _whole(
        self,
        parts: Sequence[_MicroBatchOutputs],
        everyone: GatheredOutputs,
        context: Context,
        scales: Mapping[str, Tensor],
    ) -> Tensor | None:
        """The loss of all rows together, the same on every process, and its gradient in all outputs.

        Nothing is added up: each process keeps its own rows' gradient. The sums are counted once, with the first row.
        """
        outputs = everyone.rebuild(everyone.leaves)
        total, loss = self._scaled_loss(outputs, everyone.shared, context, scales)
        if loss.carry is not None:
            raise ConfigError(f"{type(self._task).__name__}: a loss with cross_sample='whole' cannot return a carry")
        vector = everyone.gradient(total)
        nothing = replace(
            loss,
            sums={name: torch.zeros_like(value) for name, value in loss.sums.items()},
            metrics=dict.fromkeys(loss.metrics, (0.0, 0.0)),
        )
        for part, first in everyone.with_offsets(parts):
            part.loss = loss if first == 0 and not part.micro.idle else nothing
        return vector

    def _scaled_loss(
        self, outputs: Any, batch: Batch, context: Context, scales: Mapping[str, Tensor], *number: int
    ) -> tuple[Tensor, Loss]:
        address: tuple[int | str, ...] = ("loss", context.step) if context.training else ("eval", "loss")
        seed = self._random_state.seed(*address, *number)
        with precision.autocast(self._precision, next(leaves(outputs))[1].device):
            total, loss = rules.scaled_loss(self._task, outputs, batch, context, scales)
        # What the whole loss draws does not depend on how the batch is cut.
        self.random |= bool(number) and context.training and self._random_state.was_used(seed)
        return total, replace(loss, sums={name: value.detach() for name, value in loss.sums.items()})

    def _keep_gradients(
        self, parts: Sequence[_MicroBatchOutputs], everyone: GatheredOutputs, vector: Tensor | None
    ) -> None:
        """Give each micro-batch the gradient in its outputs; zeros for idle ones."""
        found = everyone.split(vector)
        for part, first in everyone.with_offsets(parts):
            own = [None if g is None else g[first : first + part.rows] for g in found]
            part.gradients = [
                None if g is None else torch.zeros_like(leaf) if part.micro.idle else g.to(leaf.dtype)
                for g, leaf in zip(own, part.leaves, strict=True)
            ]


@dataclass
class _MicroBatchOutputs:
    """One micro-batch of this process: its detached outputs, and later its sums and gradients."""

    micro: MicroBatch
    outputs: Any
    shared: dict[str, Any]
    loss: Loss = None  # type: ignore[assignment] # until it is computed
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
class GatheredOutputs:
    """The outputs of all processes, as leaves of a graph of their own.

    Attributes:
        leaves: tensors of the outputs, each (rows of the global batch, …).
        structure: outputs of the same structure.
        shared: what `CrossSample.shared` gave, each (rows of the global batch, …).
        first: place of this process's first row.
    """

    leaves: list[Tensor]
    structure: Any
    shared: dict[str, Tensor]
    first: int

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Outputs of these tensors."""
        these = iter(tensors)
        return map_leaves(lambda _: next(these), self.structure)

    def with_offsets(self, parts: Sequence[_MicroBatchOutputs]) -> Iterator[tuple[_MicroBatchOutputs, int]]:
        """Each part with the place of its first row; that of an idle one has no meaning."""
        first = self.first
        for part in parts:
            yield part, first
            first += 0 if part.micro.idle else part.rows

    def gradient(self, total: Tensor) -> Tensor | None:
        """The gradient of a scalar in all outputs as one vector, with flags for the outputs it depends on.

        It is at least float32, since it is summed over micro-batches and processes.
        """
        if not total.requires_grad:
            return None
        found = torch.autograd.grad(total, self._inputs, allow_unused=True)
        flat = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(self._inputs, found, strict=True)]
        used = torch.tensor([g is not None for g in found], device=total.device)
        return torch.cat([g.reshape(-1).to(self._wide_dtype) for g in (*flat, used)])

    def zeros(self) -> Tensor:
        """The vector for a scalar that depends on no output."""
        size = sum(leaf.numel() + 1 for leaf in self._inputs)
        return torch.zeros(size, dtype=self._wide_dtype, device=self.leaves[0].device)

    def split(self, vector: Tensor | None) -> list[Tensor | None]:
        """The gradients in a vector, by tensor; None for what the loss does not depend on."""
        vector = self.zeros() if vector is None else vector
        *parts, flags = vector.split([*(leaf.numel() for leaf in self._inputs), len(self._inputs)])
        used = zip(self._inputs, parts, flags.tolist(), strict=True)
        gradients = iter([part.reshape(leaf.shape) if flag else None for leaf, part, flag in used])
        return [next(gradients) if leaf.requires_grad else None for leaf in self.leaves]

    @property
    def _inputs(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if leaf.requires_grad]

    @property
    def _wide_dtype(self) -> torch.dtype:
        wide = torch.float32
        for leaf in self._inputs:
            wide = torch.promote_types(wide, leaf.dtype)
        return wide


def _outputs_match(mine: Tensor, other: Tensor) -> bool:
    """Whether two passes over the same rows agree up to differences between kernels."""
    if not mine.is_floating_point():
        return torch.equal(mine, other)
    return not float((mine - other).norm()) > _REPEAT_TOLERANCE * float(other.norm())


def gather_rows(own: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Tensors by row of all processes, one below the other in the order of ranks, of any dtype; collective.

    Args:
        own: of this process.
        rows: how many every process has.
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


def sum_vector(vector: Tensor, world_size: int, ordered: bool) -> Tensor:
    """The sum over all processes, what the backward pass of a gather is; ordered, as in `OrderedSum`. Collective."""
    if world_size == 1:
        return vector
    if not ordered:
        dist.all_reduce(vector)
        return vector
    everyone = [torch.empty_like(vector) for _ in range(world_size)]
    dist.all_gather(everyone, vector)
    return tree_sum(everyone)


def _array_kinds(name: str, parts: Sequence[_MicroBatchOutputs]) -> list[ArrayKind]:
    """Name, shape of a row, and dtype of every output and shared array, the same in all micro-batches of a process.

    Raises:
        ConfigError: for what has no rows, or other rows than the micro-batch, and for rows that are not alike.
    """
    kinds: list[ArrayKind] = []
    for part in parts:
        where = f"{name}, micro-batch {part.micro.number}"
        mine = [
            *((f"outputs {path}".rstrip(), leaf) for path, leaf in leaves(part.outputs)),
            *((f"shared {path}", leaf) for path, leaf in part.shared.items()),
        ]
        if not any(path.startswith("outputs") for path, _ in mine):
            raise ConfigError(f"{where}: outputs() returned no tensor, so samples cannot be compared")
        for path, leaf in mine:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.is_complex():
                is_tensor = isinstance(leaf, Tensor)
                kind = f"of {leaf.dtype} with {leaf.dim()} axes" if is_tensor else f"a {type(leaf).__name__}"
                raise ConfigError(
                    f"{where}: '{path}' is {kind}; for a loss across samples, outputs() must return real tensors whose "
                    "first axis is the row, or a nested dict of them, and shared() a dict of arrays"
                )
            if not part.micro.idle and len(leaf) != part.micro.size:
                raise ConfigError(
                    f"{where}: '{path}' has {len(leaf)} rows, but the micro-batch {part.micro.size}; for a loss across "
                    "samples, the first axis of everything that outputs() and shared() return must be the row"
                )
        own = [[path, list(leaf.shape[1:]), str(leaf.dtype)] for path, leaf in mine]
        kinds = kinds or own
        if own != kinds:
            raise ConfigError(
                f"{where} returns {_format_kinds(own)}, but the previous one {_format_kinds(kinds)}. A loss across "
                "samples combines the rows of all micro-batches: return the same shape for every row, e.g. sums over "
                "its tokens instead of a number for each"
            )
    return kinds


def _format_kinds(kinds: Sequence[ArrayKind]) -> str:
    return ", ".join(f"{name} {tuple(shape)} {dtype.removeprefix('torch.')}" for name, shape, dtype in kinds)
