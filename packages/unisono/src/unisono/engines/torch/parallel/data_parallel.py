"""`layout.strategy=dp`: nn.DataParallel, one process that computes on several devices.

torch's wrapper concatenates the devices' results along the rows, but a loss has no rows. Here a micro-batch is split by
rows, each device computes outputs and loss of its rows, and sums and counts are added on the first device, so nothing
is averaged. For losses across samples, devices compute only outputs, and the loss is computed on the first device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unisono.engines.nested import map_leaves
from unisono.engines.torch.numerics.precision import autocast, promotion
from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, Loss


def device_indices(device: torch.device) -> list[int]:
    """Indices of the devices that one process computes on; empty without several devices."""
    if device.type in ("cpu", "mps"):
        return []
    return list(range(torch.accelerator.device_count()))


class Replica(nn.Module):
    """The step module of one device, in the precision of the run: threads do not take it over from the one they are of.

    torch would have autocast compute in the device's default dtype there, which is fp16.
    """

    def __init__(self, step: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.step = step
        self.precision, self.device = precision, device

    def forward(self, *inputs: Any) -> Any:
        """What the step computes."""
        with promotion(self.precision), autocast(self.precision, self.device):
            return self.step(*inputs)


class DataParallel(nn.DataParallel[Replica]):
    """The step module on several devices, including the first one.

    Where it `crosses` samples, it returns outputs by row in place of a loss.
    """

    def __init__(
        self, step: nn.Module, crosses: bool, precision: str, device: torch.device, devices: Sequence[int]
    ) -> None:
        super().__init__(Replica(step, precision, device), list(devices))
        self._crosses = crosses
        self._totals = False

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """The inputs of every device: its rows, and inputs shared by all rows."""
        batch, context, scales = inputs
        self._totals = scales is None and not self._crosses
        parts = split_batch(batch, context, scales, [self._place(number) for number in device_ids])
        return parts, tuple({} for _ in parts)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """The results of all devices, combined on the first."""
        first = self._place(output_device)
        if self._crosses:
            return concatenate_rows(outputs, first)
        return sum_by_name(outputs, first) if self._totals else sum_losses(outputs, first)

    def _place(self, number: Any) -> torch.device:
        return torch.device(self.module.device.type, number)


def split_batch(
    batch: Batch, context: Context, scales: Mapping[str, Tensor] | None, devices: Sequence[torch.device]
) -> tuple[tuple[Batch, Context, dict[str, Tensor] | None], ...]:
    """A micro-batch for each device: its rows as evenly as they go, none without a row.

    Raises:
        ConfigError: if an array cannot be split by row.
    """
    lengths = {name: len(value) if value.dim() else None for name, value in _tensors(batch)}
    sizes = {length for length in lengths.values() if length is not None}
    if len(sizes) != 1:
        raise ConfigError(
            "layout.strategy=dp splits a micro-batch along the first axis of its arrays, which must be the row; here "
            f"it has {lengths}. Use layout.strategy=ddp, where every process has its own micro-batches"
        )
    (rows,) = sizes
    parts, begin = [], 0
    for number, device in enumerate(devices[:rows]):
        end = begin + rows // min(rows, len(devices)) + (number < rows % min(rows, len(devices)))
        own = slice(begin, end)

        def of_rows(value: Any, own: slice = own, device: torch.device = device) -> Any:
            if not isinstance(value, Tensor):
                return value
            return (value[own] if value.dim() else value).to(device, non_blocking=True)

        carry = None if context.carry is None else map_leaves(of_rows, context.carry)
        totals = {name: value.to(device) for name, value in context.totals.items()}
        there = None if scales is None else {name: scale.to(device) for name, scale in scales.items()}
        parts.append((map_leaves(of_rows, batch), replace(context, carry=carry, totals=totals), there))
        begin = end
    return tuple(parts)


def sum_losses(results: Sequence[tuple[Tensor, Loss]], first: torch.device) -> tuple[Tensor, Loss]:
    """The loss of all rows from those of parts: totals, sums, and both numbers of every metric are added up."""
    total = torch.stack([part.to(first) for part, _ in results]).sum()
    losses = [loss for _, loss in results]
    expected, *others = [(loss.sums.keys(), loss.metrics.keys(), dict(loss.weights)) for loss in losses]
    for found in others:
        if found != expected:
            one, other = (f"{sorted(terms)}, {sorted(named)}, {weights}" for terms, named, weights in (expected, found))
            raise ConfigError(
                f"devices report different terms, metrics or weights: {one} and {other}. They must not depend on the "
                "rows."
            )
    carries, metrics = [loss.carry for loss in losses], [loss.metrics for loss in losses]
    return total, Loss(
        sums=sum_by_name([loss.sums for loss in losses], first),
        weights=losses[0].weights,
        metrics={
            name: (
                _sum_values([one[name][0] for one in metrics], first),
                _sum_values([one[name][1] for one in metrics], first),
            )
            for name in losses[0].metrics
        },
        carry=None if carries[0] is None else concatenate_rows(carries, first),
    )


def sum_by_name(parts: Sequence[Mapping[str, Tensor]], first: torch.device) -> dict[str, Tensor]:
    """Sums by name, added up."""
    return {name: _sum_values([part[name] for part in parts], first) for name in parts[0]}


def concatenate_rows(parts: Sequence[Any], first: torch.device) -> Any:
    """Rows of parts, one after the other; tensors, or nested dicts of them."""
    if isinstance(parts[0], Mapping):
        return {name: concatenate_rows([part[name] for part in parts], first) for name in parts[0]}
    return torch.cat([part.to(first) for part in parts])


def _sum_values(values: Sequence[Any], first: torch.device) -> Any:
    if not any(isinstance(value, Tensor) for value in values):
        return sum(values)
    return torch.stack([torch.as_tensor(value).to(first) for value in values]).sum(0)


def _tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _tensors(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list | tuple):
        raise ConfigError(
            f"layout.strategy=dp splits a micro-batch by row, and cannot split '{name}', a {type(value).__name__}; use "
            "dicts of arrays, or layout.strategy=ddp"
        )
    return [(name, value)] if isinstance(value, Tensor) else []
