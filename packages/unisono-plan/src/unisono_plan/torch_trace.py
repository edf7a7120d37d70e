"""One step of a layout on rank 0, with the engine's own code and no content: fake tensors and a fake process group.

The model is built, wrapped and stepped as in a run; what differs is listed here and nowhere else. Numbers that a step
reads from the device are made up, nothing is compared between processes, and parameters are cut into shards without
those of the other ranks, of which torch would make 4,096 per parameter. A step is traced on the CPU, since torch would
ask a GPU's driver for streams, and eagerly: what compilation saves is in the cost model.
"""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.nested import map_leaves
from unisono.engines.protocol import EngineJob
from unisono.engines.torch.content import real_tensors
from unisono.engines.torch.guards.recompile_guard import RecompileGuard
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.cross_sample import GatheredOutputs
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state.train_state import TrainState
from unisono.engines.torch.step import TrainStep
from unisono.optim.schedules import ScheduledScalars
from unisono.runtime.code.source_files import is_user_file
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError
from unisono.task import Task
from unisono_plan.batch_content import BatchContent
from unisono_plan.recording import Trace
from unisono_plan.torch_recorder import READ, Pause, Recorder

_CONTENT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def trace_torch_step(task: Task, config: RunConfig, micro: MicroBatch, passes: int) -> Trace:
    """Trace one step.

    Args:
        task: Whose `setup` has run.
        config: With a concrete layout of any world size, on the CPU.
        micro: A micro-batch with content, of which only the shapes are used.
        passes: Micro-batches of each process in a step.

    Raises:
        ConfigError: If the model or its step need the content of tensors.
    """
    layout = config.layout.model_copy(update={"compile": False, "device": "cpu", "deterministic": False})
    config = config.model_copy(update={"layout": layout, "launch": config.launch.model_copy(update={"desync": False})})
    assert isinstance(layout.world_size, int)
    traced = min(passes, 2)
    batch = BatchSplit(layout.world_size * traced * micro.size, layout.world_size, micro.size)
    world = layout.world_size
    process = ProcessInfo(0, world, 0, world, "unisono" if world > 1 else "none")
    job = EngineJob(task, config, process, SingleProcess(), batch, check_updates=False)
    recorder, dtype = Recorder(), torch.get_default_dtype()
    kernels = logging.getLogger("unisono.engines")
    level = kernels.level
    try:
        kernels.setLevel(logging.ERROR)
        with (
            warnings.catch_warnings(),
            _fake_group(world),
            _wrapping(recorder),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            BatchContent(mode) as content,
        ):
            warnings.filterwarnings("ignore", "Set timeout is now only supported")  # of the fake backend
            with precision.promotion(config.train.precision), recorder.resizing(), recorder:
                rules.choose_kernels(task, job.communicator, "cpu", config.train.precision)
                parts = _contentless_parts(job)
                state = TrainState(parts)
                size = sum(parameter.numel() for parameter in state.parallel.trainable)
                _mark_state(recorder, state)
                with Pause(recorder):  # content itself is this host's, and in no device's memory
                    batches = [_fake_batch(content, micro, number) for number in range(traced)]
                _step(recorder, parts, state, batches)
    except _CONTENT as error:
        raise ConfigError(
            f"{type(task).__name__}: a step cannot be traced, because {_place(error)} needs the content of tensors "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}). Shapes and branches must "
            "not depend on what parameters compute, and build() must not read any content "
            "(unisono.recipe_tools.has_content tells)"
        ) from error
    finally:
        kernels.setLevel(level)
        torch.set_default_dtype(dtype)
        gc.collect()
    return Trace(recorder.recording, traced, micro.size, size, dict(micro.work))


def _place(error: Exception) -> str:
    """The innermost line of the user's code that an error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else "it"


def _step(recorder: Recorder, parts: EngineParts, state: TrainState, batches: Sequence[MicroBatch]) -> None:
    """A step as in the middle of a run: the optimizer has its state already."""
    scalars = ScheduledScalars(parts.job.config, 1)(0)
    for parameter in state.parallel.trainable:
        parameter.grad = torch.zeros_like(parameter)
    with recorder.within("optimizer"):
        state.update(0, scalars)
    gc.collect()
    tensors = [value for one in state.optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    recorder.mark([*tensors, *state.average.named_tensors.values()], "optimizer")
    recorder.mark([leaf for batch in batches for leaf in batch.arrays.values() if isinstance(leaf, Tensor)], "batch")
    # DDP's buckets exist from the beginning, and gradients are views of them.
    recorder.mark_rest("gradients" if isinstance(state.parallel.wrapped, DistributedDataParallel) else "communication")
    passes = Passes(parts, state, repeated=True)  # only a run's first step compares both forward passes
    step = TrainStep(parts, state, passes)
    recorder.passes = len(batches) * (2 if passes.has_first_pass else 1)
    parts.observers.add(RecompileGuard(parts.job.communicator))  # which votes in the step's reduction
    parts.observers.add(recorder)
    recorder.restart()
    step(list(batches), 0, scalars)


def _mark_state(recorder: Recorder, state: TrainState) -> None:
    recorder.mark(state.module.parameters(), "parameters")
    recorder.mark(state.module.buffers(), "buffers")
    wrapped = state.parallel.wrapped
    if isinstance(wrapped, DistributedDataParallel):
        # The future of the fake backend has no tensor, which DDP's own hook waits for.
        wrapped.register_comm_hook(None, lambda _, bucket: _reduce_bucket(bucket))
    if not any(isinstance(module, FSDPModule) for module in wrapped.modules()):
        for parameter in state.parallel.trainable:
            parameter.register_post_accumulate_grad_hook(lambda one: recorder.mark([one.grad], "gradients"))


def _reduce_bucket(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _fake_batch(content: BatchContent, micro: MicroBatch, number: int) -> MicroBatch:
    """A micro-batch with the shapes of another, whose content is known where a shape depends on it."""

    def fake(value: Any) -> Any:
        if hasattr(value, "__array_interface__") and value.dtype.kind not in "OUSMm":
            value = torch.as_tensor(value)
        return content.fake(value.clone()) if isinstance(value, Tensor) else value  # a step may write to its batch

    with unset_fake_temporarily():
        return replace(micro, number=number, arrays=map_leaves(fake, micro.arrays))


# what differs from a run ----------------------------------------------------------------------------------------------


class _MadeUpNumbers(MetricReduction):
    def read(self, vector: Tensor) -> list[float]:
        return [READ] * len(vector)


class _UnreadGenerators(RandomState):
    def was_used(self, seed: int) -> bool:
        return False


def _contentless_parts(job: EngineJob) -> EngineParts:
    parts = EngineParts(job)
    parts.reduction = _MadeUpNumbers(job.process.world_size, parts.device)
    parts.random_state = _UnreadGenerators(job.config.run.seed, parts.device)
    return parts


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """A process group of any size in which nobody answers; none for a single process."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _wrapping(recorder: Recorder) -> Iterator[None]:
    """A context in which torch's wrappers take fake tensors, and FSDP makes the shards of rank 0 alone.

    DTensor finds out the shapes of whole tensors by operators on fake ones, which no process has.
    """

    def first(tensor: Tensor, shards: int, dim: int) -> list[Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.size(dim) // shards))]

    def mesh(*arguments: Any, **named: Any) -> Any:  # it reads the ranks that are in it
        with real_tensors():
            return init_device_mesh(*arguments, **named)

    def split(gathered: GatheredOutputs, vector: Tensor | None) -> list[Tensor | None]:  # it reads which are used
        with recorder.making_up():
            return read_and_split(gathered, vector)

    read_and_split = GatheredOutputs.split

    def swap(tensor: Tensor, other: Tensor) -> None:  # it refuses what a fake tensor mode has in mind
        tensor.data = other.data

    replaced: list[tuple[Any, str, Any]] = [
        (torch.utils, "swap_tensors", swap),  # of `Module.to`
        (_fsdp_param, "_chunk_with_empty", first),
        (wrap, "init_device_mesh", mesh),
        (ShardingPropagator, "_fake_mode_lock", Pause(recorder)),
        (GatheredOutputs, "split", split),
        (nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),  # it draws until all are within bounds
        (ddp, "_verify_param_shape_across_processes", lambda *_, **__: None),  # it reads sizes from C++
    ]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)
