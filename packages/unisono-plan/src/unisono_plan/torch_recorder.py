"""What a step does, written down operator by operator while it runs on fake tensors.

Memory is that of storages: each belongs to a kind, from its allocation to its end, and the peak is kept with its parts.
Work is FLOPs of products and bytes that everything else reads and writes. Collectives are seen where torch dispatches
them, whoever calls them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from unisono.engines.observers import Observer
from unisono_plan.recording import Collective, Kind, Phase, Recording, Work, allocated

_aten = torch.ops.aten
READ = 4.0  # what every number is that a step reads from the device; a norm of 2 is clipped, as most are
_CREATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # allocate, and write nothing
_MESSAGE_ARGUMENT = {"_reduce_scatter_base_": 1, "reduce_scatter_": 1, "reduce_scatter_tensor_coalesced_": 1}
_NAMES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    # DTensor's own, as `full_tensor` calls them
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Recorder(TorchDispatchMode, Observer):
    """Writes down what happens inside of it; within a fake tensor mode, so that nothing is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.passes = 1  # forward passes that are still to come
        self._phase: Phase = "other"
        self._kinds: dict[int, Kind] = {}
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._now: Counter[Kind] = Counter()
        self._most = 0
        self._paused = 0
        self._made_up = False

    # memory -------------------------------------------------------------------------------------------------------

    def mark(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Say what tensors are; their storages are counted from now on if they were not."""
        for tensor in tensors:
            if tensor is not None:
                self._add(_local(tensor), kind, again=True)

    def mark_rest(self, kind: Kind) -> None:
        """Say what everything is that counts as activations now."""
        for key, before in self._kinds.items():
            if before == "activations":
                self._kinds[key] = kind
        self._now[kind] += self._now.pop("activations", 0)

    def restart(self) -> None:
        """Forget the work and the peak so far; what is in use stays."""
        self.recording, self._most = Recording(), 0
        self._note_peak()

    @property
    def in_use(self) -> dict[Kind, int]:
        """Bytes by kind now."""
        return {kind: size for kind, size in self._now.items() if size}

    def _add(self, tensor: Tensor, kind: Kind, again: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._references:
            self._references[key] = weakref.ref(storage, lambda _: self._remove(key))
            self._kinds[key], self._sizes[key] = kind, 0
        elif again and self._kinds[key] != kind:
            self._now[self._kinds[key]] -= self._sizes[key]
            self._now[kind] += self._sizes[key]
            self._kinds[key] = kind
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        size = allocated(size)
        self._now[self._kinds[key]] += size - self._sizes[key]
        self._sizes[key] = size
        self._note_peak()

    def _remove(self, key: int) -> None:
        self._references.pop(key)
        self._now[self._kinds.pop(key)] -= self._sizes.pop(key)

    def _note_peak(self) -> None:
        most = self.recording.most
        if self._now["activations"] > most.get("activations", 0):
            self.recording.fullest = self.in_use
        for kind, size in self._now.items():
            if size > most.get(kind, 0):
                most[kind] = size
        if (total := sum(self._now.values())) > self._most:
            self._most, self.recording.peak = total, self.in_use

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """A context in which resized storages are followed: FSDP frees and allocates parameters like that."""
        original: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._references:
                self._resize(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    # as an observer of the step -----------------------------------------------------------------------------------

    def part(self, name: str) -> AbstractContextManager[Any] | None:
        """The phase of a part of a step."""
        phases: dict[str, Phase] = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}
        return self.within(phases[name]) if name in phases else None

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """A context that is a phase of a step."""
        before, self._phase = self._phase, phase
        self.passes -= phase == "forward"
        try:
            yield
        finally:
            self._phase = before
            if phase == "forward":
                self.recording.held = self.in_use

    @contextmanager
    def making_up(self) -> Iterator[None]:
        """A context in which every number that is read is made up."""
        self._made_up = True
        try:
            yield
        finally:
            self._made_up = False

    # operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operator."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it more often than for all operators together
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come here in their turn
        kwargs = kwargs or {}
        # The optimizer's count of steps, which decides no shape, and what the engine reads.
        if func is _aten._local_scalar_dense.default and (self._phase == "optimizer" or self._made_up):
            return READ if args[0].is_floating_point() else round(READ)
        result = func(*args, **kwargs)
        if self._paused:
            return result
        given, made = tensors((args, kwargs)), tensors(result)
        before = {tensor.untyped_storage()._cdata for tensor in given}
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            self._collective(name, args)
        elif space == "_c10d_functional":
            self._functional_collective(name, args, made)
        elif space == "fsdp":
            self.mark([*written(func, args, kwargs), *made], "communication")
        else:
            for tensor in made:
                self._add(tensor, "activations")
            views = all(tensor.untyped_storage()._cdata in before for tensor in made)
            if not (views and not func._schema.is_mutable) and name not in _CREATES:
                self._compute(func, name, args, kwargs, result, given, made)
        return result

    def _compute(
        self, func: Any, name: str, args: Any, kwargs: Any, result: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        work = self.recording.work.setdefault(self._phase, Work())
        work.calls += 1
        moved = sum(tensor.numel() * tensor.element_size() for tensor in [*given, *made])
        if (count := _FLOPS.get(func.overloadpacket)) is not None:
            work.flops += count(*args, **kwargs, out_val=result)
            work.product_bytes += moved
        else:
            work.other_bytes += moved

    def _collective(self, name: str, args: Sequence[Any]) -> None:
        group = next((one for one in args if isinstance(one, torch.ScriptObject) and _is_group(one)), None)
        if group is None:
            return
        message, members = tensors(args[_MESSAGE_ARGUMENT.get(name, 0)]), dist.ProcessGroup.unbox(group)
        size = sum(tensor.numel() * tensor.element_size() for tensor in message)
        ranks = tuple(dist.get_process_group_ranks(members))
        kind = _NAMES.get(name, name.strip("_"))
        self.recording.collectives.append(Collective(kind, size, ranks, self._phase, self.passes <= 0))
        if name == "_reduce_scatter_base_":
            self.mark(tensors(args[0]), "gradients")
            self.mark(message, "communication")
        elif name == "_allgather_base_":
            self.mark(message, "communication")

    def _functional_collective(self, name: str, args: Sequence[Any], made: list[Tensor]) -> None:
        """A collective that returns its result, with its group by name in the last place."""
        self.mark(made, "communication")
        if name == "wait_tensor":
            return
        kind = _NAMES.get(name, name)
        message = tensors(args[0]) if kind == "reduce_scatter" else made
        size = sum(tensor.numel() * tensor.element_size() for tensor in message)
        ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(args[-1])))
        self.recording.collectives.append(Collective(kind, size, ranks, self._phase, self.passes <= 0))


class Pause:
    """A context, to be entered any number of times, in which a recorder writes nothing down."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._paused += 1

    def __exit__(self, *_: object) -> None:
        self._recorder._paused -= 1


def _is_group(value: torch.ScriptObject) -> bool:
    return str(value._type().qualified_name()).endswith("ProcessGroup")


def tensors(values: Any) -> list[Tensor]:
    """Tensors among the arguments or results of an operator; pytree's way to them takes a tenth of a plan's time."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors(value)]


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors among the arguments that an operator writes to."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors(named.get(argument.name))
    ]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


# torch counts attention of GPUs alone; a step is traced on the CPU.
_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
