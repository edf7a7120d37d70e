"""Muon: orthogonalises the momentum of each hidden matrix as a whole, on every layout.

Update and coefficients are those of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024);
`match_rms_adamw` is from Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982). The options are those of
`torch.optim.Muon`, which is not used for two reasons (measured by `benchmarks/torch_muon.py`): it always
orthogonalises in bf16, and it updates sharded matrices differently, or not at all.

Momentum and decay are elementwise and computed on shards. Each matrix is orthogonalised by one process, with the same
operations as in a single-process run, so the update is bitwise the same on every layout. Matrices are assigned to
processes in rounds, the largest first, one per process and round. A round gathers each matrix at its owner, and sends
the result back to its shards and copies. So each iteration runs once in the whole job; a step moves two shards per
process and matrix (one matrix under ddp), and needs memory for one whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded

from unisono.optim.sharded import local


class Muon(torch.optim.Optimizer):
    """Muon for matrices; all other parameters need another optimizer.

    Args:
        params: matrices or groups of them.
        lr: learning rate, before it is adjusted to the shape.
        weight_decay: decoupled, multiplied by `lr` and applied before the step.
        momentum: decay rate of the momentum.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: a, b, c of the iteration X ← aX + (bA + cA²)X with A = XXᵀ.
        ns_steps: number of iterations.
        ns_dtype: dtype of the iterations; None for the parameter's. Not applied to fp64 parameters.
        eps: lower bound of the Frobenius norm that a matrix is divided by.
        adjust_lr: `original` or `match_rms_adamw`.

    Raises:
        ValueError: if a parameter is not a real matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        eps: float = 1e-7,
        adjust_lr: str = "match_rms_adamw",
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "ns_dtype": ns_dtype, "eps": eps,
            "adjust_lr": adjust_lr,
        }  # fmt: skip
        super().__init__(params, defaults)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.dim() != 2 or parameter.is_complex():
                raise ValueError(f"Muon updates real matrices, not a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; collective where parameters are sharded or there are several processes."""
        assert closure is None, "the engine runs the backward pass"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            directions = self._directions(parameters, group)

            def orthogonal(matrix: Tensor, group: dict[str, Any] = group) -> Tensor:
                return orthogonalise(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

            dtype = group["ns_dtype"]
            if dtype is not None and parameters[0].dtype != torch.float64:
                directions = [direction.to(dtype) for direction in directions]
            updates = apply_distributed(orthogonal, directions, parameters)
            for parameter, update in zip(parameters, updates, strict=True):
                rate = group["lr"] * lr_adjustment(group["adjust_lr"], *parameter.shape)
                local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _directions(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Update the momentum; returns the directions, of this process's parts."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        buffers = [local(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_lerp(gradients, buffers, group["momentum"]))


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Approximately orthogonalise a matrix: a quintic Newton-Schulz iteration moves its singular values close to one.

    With the usual coefficients they end up between 0.68 and 1.13 (Jordan et al., 2024).

    Args:
        matrix: (rows, columns), in any floating dtype, which is also that of the computation.
        coefficients: a, b, c.
        steps: number of iterations.
        eps: lower bound of the norm that the matrix is divided by.
    """
    a, b, c = coefficients
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix  # makes the Gram matrix small
    x = wide / torch.linalg.vector_norm(wide).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = x if wide is matrix else x.mT
    return result


def lr_adjustment(kind: str, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix of this shape.

    `original` is from Jordan et al. (2024); `match_rms_adamw` gives updates a root mean square of 0.2, typical of AdamW
    (Liu et al., 2025).
    """
    return math.sqrt(max(1.0, rows / columns)) if kind == "original" else 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class _MatrixLayout:
    """How copies and shards of a matrix are placed on processes: a grid of `copies` × `shards`.

    Attributes:
        shards: the group of processes that hold the shards of this process's copy; None if it is not sharded.
        copies: the group of those that hold the same shard; None if there is one copy.
        place: this process's coordinates in the grid.
        size: of the grid.
    """

    shards: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    place: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def for_parameter(cls, parameter: Tensor) -> _MatrixLayout:
        """The layout of a parameter: a DTensor's own; any other parameter is replicated on every process."""
        if not isinstance(parameter, DTensor):
            world = dist.get_world_size() if dist.is_initialized() else 1
            if world == 1:
                return cls(None, None, (0, 0), (1, 1))
            return cls(None, dist.group.WORLD, (dist.get_rank(), 0), (world, 1))
        mesh, placements = parameter.device_mesh, parameter.placements
        at = mesh.get_coordinate()
        assert at is not None
        (axis,) = (number for number, placement in enumerate(placements) if isinstance(placement, Sharded))
        assert placements[axis] == Sharded(0), "FSDP2 shards rows"
        others = [number for number in range(mesh.ndim) if number != axis]
        if not others:
            return cls(mesh.get_group(axis), None, (0, at[axis]), (1, mesh.size(axis)))
        (other,) = others
        return cls(
            mesh.get_group(axis), mesh.get_group(other), (at[other], at[axis]), (mesh.size(other), mesh.size(axis))
        )


def apply_distributed(
    function: Callable[[Tensor], Tensor], parts: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Apply a function of whole matrices to distributed matrices, each computed by one process.

    Args:
        function: maps a matrix to one of the same shape.
        parts: this process's part of each matrix.
        parameters: the parameter of each matrix, which has the same layout.

    Returns:
        This process's part of each result.
    """
    spread = _MatrixLayout.for_parameter(parameters[0])
    copies, shards = spread.size
    if copies * shards == 1:
        return [function(part) for part in parts]
    # A round is as slow as its largest matrix, so its matrices should be of similar size.
    order = sorted(range(len(parts)), key=lambda number: (-parameters[number].numel(), tuple(parameters[number].shape)))
    results: dict[int, Tensor] = {}
    for first in range(0, len(order), copies * shards):
        matrices = [
            _Matrix(parts[number], parameters[number].shape, spread, divmod(turn, shards))
            for turn, number in enumerate(order[first : first + copies * shards])
        ]
        for stage in ("gather", "compute", "scatter", "copy"):
            works = [work for matrix in matrices if (work := matrix.start_stage(stage, function)) is not None]
            for work in works:
                work.wait()
        results.update(zip(order[first:], (matrix.result() for matrix in matrices), strict=False))
    return [results[number] for number in range(len(parts))]


class _Matrix:
    """One matrix on its way to its owner and back. Every process runs all stages of all matrices in one order."""

    def __init__(self, part: Tensor, shape: torch.Size, spread: _MatrixLayout, owner: tuple[int, int]) -> None:
        self._spread, self._owner, self._shape = spread, owner, shape
        self._own_rows = part.shape[0]
        # FSDP2 shards like torch.chunk: all shards but the last ones have this many rows.
        self._rows = -(-shape[0] // spread.size[1])
        self._here = _pad_rows(part, self._rows)
        self._parts: list[Tensor] | None = None

    def start_stage(self, stage: str, function: Callable[[Tensor], Tensor]) -> Any:
        """Start a stage; returns the work to wait for."""
        spread, (copy, shard) = self._spread, self._owner
        mine, among = spread.place == self._owner, spread.place[0] == copy
        match stage:
            case "gather" if spread.shards is not None and among:
                self._parts = [torch.empty_like(self._here) for _ in range(spread.size[1])] if mine else None
                source = dist.get_global_rank(spread.shards, shard)
                return dist.gather(self._here, self._parts, dst=source, group=spread.shards, async_op=True)
            case "compute" if mine:
                parts = [self._here] if self._parts is None else self._parts
                results = function(torch.cat(parts)[: self._shape[0]])
                self._parts = list(_pad_rows(results, self._rows * spread.size[1]).split(self._rows))
                if spread.shards is None:
                    self._here = self._parts[0]
            case "scatter" if spread.shards is not None and among:
                source = dist.get_global_rank(spread.shards, shard)
                return dist.scatter(self._here, self._parts, src=source, group=spread.shards, async_op=True)
            case "copy" if spread.copies is not None:
                source = dist.get_global_rank(spread.copies, copy)
                return dist.broadcast(self._here, src=source, group=spread.copies, async_op=True)
        return None

    def result(self) -> Tensor:
        """This process's part."""
        self._parts = None
        return self._here[: self._own_rows]


def _pad_rows(matrix: Tensor, rows: int) -> Tensor:
    """A copy padded with zero rows, since gather and scatter need shards of equal size."""
    result = matrix.new_zeros(rows, matrix.shape[1])
    result[: matrix.shape[0]] = matrix
    return result
