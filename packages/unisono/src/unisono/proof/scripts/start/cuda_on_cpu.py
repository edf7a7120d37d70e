"""Lets a script that asks for CUDA run where there is no GPU: `cuda` means the CPU in torch's public interface.

Devices in arguments are replaced where torch is called (`_OnCpu`), and functions of `torch.cuda` answer for a GPU that
has nothing to wait for. Kernels that exist on a GPU only (Triton, extensions) fail as before.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

NAME = "a CPU in place of a GPU"
_CPU = torch.device("cpu")
_MEMORY = 16 << 30
_SILENT = (
    "set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_accumulated_memory_stats", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "init", "_lazy_init", "set_rng_state", "set_rng_state_all", "set_per_process_memory_fraction", "set_stream",
)  # fmt: skip
_ZERO = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "utilization", "memory_usage", "temperature", "power_draw",
)  # fmt: skip


def replace_device(value: Any) -> Any:
    """A value as an argument of torch, with CUDA replaced by the CPU.

    Example:
        >>> replace_device("cuda:1"), replace_device(torch.device("cuda")).type, replace_device("mean")
        ('cpu', 'cpu', 'mean')
    """
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def replace_backend(value: Any) -> Any:
    """A backend of torch.distributed with gloo in place of NCCL.

    Example:
        >>> replace_backend("nccl"), replace_backend("cpu:gloo,cuda:nccl"), replace_backend(None)
        ('gloo', 'gloo', 'gloo')
    """
    return "gloo" if value is None or "nccl" in str(value).lower() else value


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function while the mode is on."""
        if func is torch.device:  # a script may ask for its type
            return func(*args, **(kwargs or {}))
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.is_pinned:
            return False
        named = {key: _number_as_cpu(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        named = {key: replace_device(value) for key, value in named.items()}
        if named.get("pin_memory"):
            named["pin_memory"] = False
        given = [replace_device(value) for value in args]
        if func is Tensor.to and len(given) > 1:
            given[1] = _number_as_cpu(given[1])
        return func(*given, **named)


def _number_as_cpu(value: Any) -> Any:
    """The number of a GPU is a device, too."""
    return _CPU if type(value) is int else replace_device(value)


class _Stream:
    """A stream or an event: nothing is ever under way."""

    def __init__(self, *_: Any, **named: Any) -> None:
        self.device, self.cuda_stream, self.priority = _CPU, 0, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return False

    def elapsed_time(self, *_: Any) -> float:
        """Milliseconds between events."""
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        """An event that is through."""
        return event or _Stream()

    def _nothing(self, *_: Any, **named: Any) -> None:
        pass

    record = wait = synchronize = wait_event = wait_stream = _nothing


class _Averaged:
    """The handle of a sum that becomes a mean when it is waited for: gloo adds up alone."""

    def __init__(self, work: Any, output: Tensor, count: int) -> None:
        self._work, self._output, self._count, self._divided = work, output, count, False

    def wait(self, *args: Any, **named: Any) -> bool:
        """Wait for the sum, and divide it once."""
        if self._work is not None:
            self._work.wait(*args, **named)
        if not self._divided:
            self._output.div_(self._count)
            self._divided = True
        return True

    def is_completed(self) -> bool:
        """Whether the mean is there."""
        return self._divided

    def get_future(self) -> _Averaged:
        """As its own future."""
        return self

    def value(self) -> list[Tensor]:
        """The mean."""
        return [self._output]


@contextmanager
def cuda_on_cpu(devices: int = 0) -> Iterator[None]:
    """While a script runs; only where there is no GPU.

    Args:
        devices: how many GPUs there are said to be; 0: one for every process.
    """
    with ExitStack() as stack:

        def put(home: Any, name: str, value: Any) -> None:
            stack.callback(setattr, home, name, getattr(home, name))
            setattr(home, name, value)

        def change(home: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
            original = getattr(home, name)
            put(home, name, wraps(original)(wrap(original)))

        for home, name, value in _constant_answers(devices or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            if hasattr(home, name):
                put(home, name, value)
        change(nn.Module, "to", _with_devices)
        put(nn.Module, "cuda", lambda module, *_: module)
        put(torch, "Generator", _generator_of(torch.Generator))
        change(torch, "set_default_device", _with_devices)
        change(torch, "load", _load_on_cpu)
        change(torch.autocast, "__init__", _with_devices)
        change(torch.amp.GradScaler, "__init__", _with_devices)
        change(DataLoader, "__init__", lambda init: lambda *a, **n: init(*a, **{**n, "pin_memory": False}))
        change(DistributedDataParallel, "__init__", _without_device_ids)
        for home in (dist, distributed_c10d):
            change(home, "init_process_group", _join_by_gloo)
            change(home, "new_group", _group_of_gloo)
            for name in ("all_reduce", "reduce_scatter_tensor", "reduce"):
                change(home, name, _average)
        for home in (device_mesh, dist):
            change(home, "init_device_mesh", _with_devices)
        change(device_mesh.DeviceMesh, "__init__", _with_devices)
        stack.enter_context(_OnCpu())
        yield


def _constant_answers(count: int) -> Iterator[tuple[Any, str, Any]]:
    """What `torch.cuda`, `torch.accelerator` and the compiler say."""
    cuda, accelerator = torch.cuda, torch.accelerator
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name in _SILENT:
        yield cuda, name, _answer(None)
    for name in _ZERO:
        yield cuda, name, _answer(0)
    properties = SimpleNamespace(name=NAME, total_memory=_MEMORY, major=8, minor=0, multi_processor_count=1)
    answers = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": count,
        "current_device": rank, "get_device_name": NAME, "get_device_capability": (8, 0),
        "get_device_properties": properties, "mem_get_info": (_MEMORY, _MEMORY), "get_arch_list": ["sm_80"],
        "is_current_stream_capturing": False, "can_device_access_peer": True, "memory_summary": "",
    }  # fmt: skip
    for name, value in answers.items():
        yield cuda, name, _answer(value)
    yield cuda, "memory_stats", lambda *_: defaultdict(int)
    yield cuda, "get_rng_state", lambda *_: torch.get_rng_state()
    yield cuda, "get_rng_state_all", lambda *_: [torch.get_rng_state()]
    for name in ("Stream", "Event", "ExternalStream", "current_stream", "default_stream"):
        yield cuda, name, _Stream
    for name in ("Stream", "Event"):
        yield torch, name, _Stream
    yield Tensor, "record_stream", _answer(None)  # which refuses a stream that is none before a mode is asked
    for name in ("stream", "StreamContext", "device", "device_of"):
        yield cuda, name, lambda *_: contextlib.nullcontext()
    yield accelerator, "is_available", _answer(True)
    yield accelerator, "device_count", _answer(count)
    yield accelerator, "current_accelerator", lambda *_, **named: torch.device("cuda")
    for name in ("current_device_index", "current_device_idx"):
        yield accelerator, name, _answer(rank)
    for name in ("set_device_index", "set_device_idx", "synchronize", "set_stream", "empty_cache"):
        yield accelerator, name, _answer(None)
    yield accelerator, "current_stream", _Stream
    yield torch, "compile", _leave_uncompiled
    yield nn.Module, "compile", lambda module, *_, **named: None
    yield dist, "is_nccl_available", _answer(True)
    yield dist, "get_default_backend_for_device", _answer("gloo")


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **named: value


def _leave_uncompiled(model: Any = None, **named: Any) -> Any:
    return model if model is not None else lambda function: function


def _with_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        given = [replace_device(value) for value in args]
        if original.__name__ == "to" and len(given) > 1:
            given[1] = _number_as_cpu(given[1])
        more = {
            key: _number_as_cpu(value) if key == "device" else replace_device(value) for key, value in named.items()
        }
        return original(*given, **more)

    return call


def _generator_of(kind: type[torch.Generator]) -> type:
    """A class that builds generators of the CPU, of which all generators are instances."""

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, kind)

        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return kind(device=replace_device(device))

    return Kind("Generator", (), {})


def _load_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(file: Any, map_location: Any = None, *args: Any, **named: Any) -> Any:
        return original(file, "cpu", *args, **named)

    return load


def _without_device_ids(original: Callable[..., None]) -> Callable[..., None]:
    def begin(
        ddp: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **named: Any
    ) -> None:
        original(ddp, module, None, None, *args, **named)

    return begin


def _join_by_gloo(original: Callable[..., None]) -> Callable[..., None]:
    def join(backend: Any = None, *args: Any, **named: Any) -> None:
        original(replace_backend(backend), *args, **{**named, "device_id": None})

    return join


def _group_of_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **named: Any) -> Any:
        given = None if backend is None else replace_backend(backend)
        named = {key: None if key == "device_id" else value for key, value in named.items()}
        return original(ranks, timeout, given, *args, **named)

    return build


def _average(original: Callable[..., Any]) -> Callable[..., Any]:
    """Collectives with `ReduceOp.AVG` as a sum that is divided."""

    def call(*args: Any, **named: Any) -> Any:
        if not any(_is_average(one) for one in (*args, *named.values())):
            return original(*args, **named)
        args = tuple(dist.ReduceOp.SUM if _is_average(one) else one for one in args)
        named = {key: dist.ReduceOp.SUM if _is_average(one) else one for key, one in named.items()}
        output: Any = named.get("tensor", named.get("output", args[0] if args else None))
        done = _Averaged(original(*args, **named), output, dist.get_world_size(named.get("group")))
        if named.get("async_op"):
            return done
        done.wait()
        return None

    return call


def _is_average(value: Any) -> bool:
    return isinstance(value, dist.ReduceOp.RedOpType | dist.ReduceOp) and value == dist.ReduceOp.AVG
