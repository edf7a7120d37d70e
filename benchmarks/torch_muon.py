"""How far torch's own Muon is from its formula in fp64, on whole matrices and on shards, beside ours.

    python -m benchmarks.torch_muon

Two processes with gloo; three updates from given gradients, the same on every row of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from packages.unisono.tests import processes
from unisono.optim.muon import Muon
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

SHAPES = ((64, 64), (256, 64), (64, 256), (63, 64), (65, 128), (1, 64))
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch.optim.Muon": lambda parameters: torch.optim.Muon(parameters, **SETTINGS),  # type: ignore[arg-type]
    "unisono": lambda parameters: Muon(parameters, **SETTINGS, adjust_lr="original"),  # type: ignore[arg-type]
}


def updated(process: ProcessInfo, group: Communicator, name: str, shape: tuple[int, int]) -> np.ndarray | str:
    """The change of a matrix in three updates; sharded where there are several processes."""
    rng = np.random.default_rng(0)
    mesh = init_device_mesh("cpu", (process.world_size,)) if process.world_size > 1 else None

    def laid_out(value: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(value)
        return distribute_tensor(tensor, mesh, [Shard(0)]) if mesh else tensor

    start = rng.normal(size=shape)
    parameter = nn.Parameter(laid_out(start.copy()))
    optimizer = OPTIMIZERS[name]([parameter])
    try:
        for _ in range(3):
            parameter.grad = laid_out(rng.normal(size=shape))
            optimizer.step()
    except RuntimeError as error:
        return f"refused: {str(error).splitlines()[0][:60]} …"
    value: Any = parameter.detach()
    return (value.full_tensor() if mesh else value).numpy() - start


def every(process: ProcessInfo, group: Communicator) -> dict[tuple[str, tuple[int, int]], np.ndarray | str]:
    return {(name, shape): updated(process, group, name, shape) for name in OPTIMIZERS for shape in SHAPES}


def formula(shape: tuple[int, int]) -> np.ndarray:
    """The same by singular values, in NumPy."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=shape)
    value, momentum = start.copy(), np.zeros(shape)
    for _ in range(3):
        gradient = rng.normal(size=shape)
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = 0.05 * gradient + 0.95 * momentum
        left, values, right = np.linalg.svd(direction, full_matrices=False)
        values = values / np.linalg.norm(direction)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        step = left @ np.diag(values) @ right * max(1.0, shape[0] / shape[1]) ** 0.5
        value = value * (1 - 0.02 * 0.1) - 0.02 * step
    return value - start


def main() -> None:
    alone, two = processes.alone(every), processes.run(every, 2)[0]
    print("| optimizer | matrix | whole, from the formula | two shards, from the formula | shards from whole |")
    print("|---|---|---|---|---|")
    for key, whole in alone.items():
        reference, sharded = formula(key[1]), two[key]

        def away(a: np.ndarray | str, b: np.ndarray) -> str:
            return a if isinstance(a, str) else f"{np.linalg.norm(a - b) / np.linalg.norm(b):.0e}"

        cells = [away(whole, reference), away(sharded, reference), away(sharded, whole)]
        print(f"| {key[0]} | {key[1][0]}×{key[1][1]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
