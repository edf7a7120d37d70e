"""What a task computes for rows outside of a run: its outputs and its loss, as an evaluation computes them.

Without gradients, in the precision of the run, and with the evaluation's seed for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.torch.devices import find_device, select_device
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.transfer import Transfer
from unisono.protocols import resolve_features
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.task import Context, Loss, Task


class RowForward:
    """Outputs and loss of micro-batches by a model.

    Args:
        task: whose functions they are.
        seed: of the run, from which a task that draws in evaluation gets its seeds.
        kind: `train.precision` of the run.
        device: cpu, cuda, …; auto for an accelerator if there is one.
        load_model: returns the model with its weights, on the CPU; called once the task knows its kernels.

    Raises:
        ConfigError: for a device that this host does not have.
    """

    def __init__(
        self, task: Task, seed: int, kind: str, device: str, load_model: Callable[[], torch.nn.Module]
    ) -> None:
        self.device = select_device(find_device(device, kind), ProcessInfo())
        self._task, self._kind = task, kind
        task.kernels(self.device.type, kind)
        self._model = load_model().eval().to(self.device)
        self._transfer, self._random = Transfer(self.device, kind), RandomState(seed, self.device)
        self._features = resolve_features(task)

    def __call__(
        self, micro: MicroBatch, context: Context, columns: Callable[[Any], dict[str, Any]]
    ) -> tuple[dict[str, Any], Loss | None]:
        """Columns and loss of a micro-batch; no loss where it looks across rows.

        Args:
            micro: its rows.
            context: of the checkpoint, in evaluation.
            columns: makes columns of the task's outputs, which may compute as the loss does.
        """
        with (
            self._random.restore_on_exit(),
            torch.no_grad(),
            precision.default_dtype(self._kind),
            precision.promotion(self._kind),
            precision.without_tf32(self._kind),
            precision.autocast(self._kind, self.device),
        ):
            self._random.seed("eval", micro.number)
            batch = self._transfer.to_device(micro.arrays)
            own = replace(context, carry=self._features.initial_carry(batch))
            outputs = self._task.outputs(self._model, batch, own)
            loss = self._task.loss(outputs, batch, own) if self._features.cross_sample is None else None
            return columns(outputs), loss
