"""The task into which faults are injected: small, with everything that a resumed run can get wrong.

The file is copied next to the runs, where it plays the part of a user's file.
A fault is requested by the environment, `UNISONO_TASK_FAULT=act@where:rank:step`, not by the configuration, which must
be the same when the run is resumed. It happens once in a run's life; its time is recorded just before. `--fault`
(`unisono_faults.injection`) cannot do this: it does not know the task, and it repeats in every start.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unisono.task import Context, Loss
from unisono_faults.task_fault import MARK, FaultyTask, TaskFault, rank_of_process


class Small(FaultyTask):
    """Least squares by a small network with dropout, on noisy rows."""

    def build(self) -> nn.Module:
        """The network."""
        width = self.config.width
        return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def outputs(self, model: nn.Module, batch: Mapping[str, Any], context: Context) -> torch.Tensor:
        """The outputs of the network; faults of the forward and backward pass and of the update begin here."""
        time.sleep(self.config.sleep)
        fault, step = self.fault, context.step
        if fault is None or step < fault.step:
            return torch.as_tensor(model(batch["x"]))
        if fault.is_due("forward" if context.training else "evaluate", step):
            if fault.act in _COLLECTIVES:
                fault.write_mark()
            elif fault.act != "unused":
                fault.trigger()
        if fault.act in _COLLECTIVES and context.training == (fault.where == "forward") and step == fault.step:
            _COLLECTIVES[fault.act](fault.rank == rank_of_process())
        result = torch.as_tensor(model(batch["x"]))
        if not context.training:
            return result
        if fault.act == "unused" and fault.rank == rank_of_process() and step == fault.step:
            fault.write_mark()
            result = model[-1](torch.zeros(len(batch["x"]), self.config.width))  # type: ignore[index]
        if result.requires_grad and fault.is_due("backward", step):  # not when a guard searches for the cause
            result.register_hook(functools.partial(_in_backward, fault))
        if fault.is_due("update", step):
            register_optimizer_step_pre_hook(functools.partial(_in_update, fault, model))
        if fault.is_due("updated", step):
            register_optimizer_step_post_hook(functools.partial(_after_update, fault))
        return result

    def loss(self, outputs: torch.Tensor, batch: Mapping[str, Any], context: Context) -> Loss:
        """The sum of squares."""
        total = (outputs - batch["y"]).square().sum()
        if self.fault is not None and context.training and self.fault.is_due("loss", context.step):
            self.fault.write_mark()
            total = total * float("nan")
        return Loss({"square": total}, metrics={"bias": ((outputs - batch["y"]).sum(), len(outputs))})


def _in_backward(fault: TaskFault, gradient: torch.Tensor) -> torch.Tensor:
    if fault.act in ("nan", "flip"):
        fault.write_mark()
        return gradient * float("nan") if fault.act == "nan" else gradient * 2.0
    fault.trigger()
    return gradient


def _in_update(fault: TaskFault, model: nn.Module, *_: Any) -> None:
    if MARK.exists():
        return
    if fault.act == "drift":  # a replica that diverges from the others
        fault.write_mark()
        with torch.no_grad():
            next(model.parameters()).add_(1e-6)
        return
    fault.trigger()


def _after_update(fault: TaskFault, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not MARK.exists():
        fault.write_mark()
        next(iter(optimizer.state.values()))["exp_avg"].add_(1e-6)


def _sum(values: list[float], op: Any = None, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.tensor(values, dtype=dtype), op=op or dist.ReduceOp.SUM)


def _swap_order(is_faulty: bool) -> None:  # two lines of code, since messages name the line
    if is_faulty:
        dist.all_reduce(torch.tensor([3.0, 4.0]))
    dist.all_reduce(torch.tensor([1.0, 2.0]))
    if not is_faulty:
        dist.all_reduce(torch.tensor([3.0, 4.0]))


# What the faulty rank (True) and the others (False) call.
_COLLECTIVES: dict[str, Callable[[bool], None]] = {
    "swap": _swap_order,
    "op": lambda faulty: _sum([1.0], dist.ReduceOp.MAX if faulty else dist.ReduceOp.SUM),
    "dtype": lambda faulty: _sum([1.0], dtype=torch.float64) if faulty else _sum([1.0, 2.0]),
    "skip": lambda faulty: None if faulty else _sum([1.0]),
    "lonely": lambda faulty: _sum([1.0]) if faulty else None,
    "shape": lambda faulty: _sum([1.0] * (3 if faulty else 5)),
}
