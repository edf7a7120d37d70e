"""Implements `train.precision`, also where the model itself names a dtype.

`fp64` is strict: models cast to fp32 inside (norms, rotary angles, softmax), and one such cast would limit to 1e-7
under every comparison. A function mode turns those casts into casts to fp64. What torch's own optimizers, gradient
scaler and FSDP make in a dtype of their choice keeps it: a kernel reads it as that dtype. `fp32` has no TF32. `bf16` is
autocast over fp32 master weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

MASTER = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
_PROMOTED = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
_CAST_METHODS = {
    **dict.fromkeys((torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16), torch.float64),
    **dict.fromkeys((torch.Tensor.cfloat, torch.Tensor.chalf), torch.complex128),  # type: ignore[attr-defined]
}
_GROUPED_MM = torch._grouped_mm
_READS_BYTES = (torch.frombuffer, torch.Tensor.view)  # given a dtype, they say what bytes are, not what they shall be
# Modules of torch whose kernels read a tensor by the dtype they made it in: a fused CUDA optimizer takes the bytes of
# its step counts for float32. The step of `_muon` is arithmetic on the gradient, which shall be exact.
_OWN_DTYPES = ("torch.optim.", "torch.amp.grad_scaler", "torch.distributed.fsdp.")
_CASTS_GRADIENTS = "torch.optim._muon"


class PromoteToDouble(TorchFunctionMode):
    """Every request for a lower floating dtype, by argument or shorthand, becomes one for float64 or complex128."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function while the mode is on."""
        if _is_called_by_library():
            return func(*args, **(kwargs or {}))
        if func in _CAST_METHODS:
            return args[0].to(_CAST_METHODS[func])
        if func is _GROUPED_MM and _is_grouped_double(*args, **(kwargs or {})):
            return _grouped_matmul(args[0], args[1], (kwargs or {})["offs"])
        if func in _READS_BYTES and not (args and _is_floating(args[0])):
            return _to_double(func(*args, **(kwargs or {})))
        promoted = tuple(_promote(value) for value in args)
        named = {name: _promote(value) for name, value in (kwargs or {}).items()}
        if _mixes_precisions(func, promoted, named):
            promoted, named = pytree.tree_map_only(torch.Tensor, _to_double, (promoted, named))
        return func(*promoted, **named)


def _is_called_by_library() -> bool:
    """Whether the function was called by a module of torch that chooses dtypes for its own kernels."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # of a mode derived from this one
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(_OWN_DTYPES) and module != _CASTS_GRADIENTS


def _mixes_precisions(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function computes of float64 and of less, as of weights and of rows that were float32 in NumPy.

    torch refuses most of these. One that writes into its arguments, or returns a view of one, is left as it is.
    """
    name = getattr(func, "__name__", "")
    dunder = name.startswith("__")
    kept = name.startswith(("__i", "__set")) if dunder else name.endswith(("_", "_as", "batch_norm", "instance_norm"))
    if kept or len(args) + len(kwargs) < 2 or kwargs.get("out") is not None:
        return False
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor | list | tuple)]
    with torch._C.DisableTorchFunction():
        dtypes = {one.dtype for value in given for one in ([value] if isinstance(value, torch.Tensor) else value)
                  if isinstance(one, torch.Tensor)}  # fmt: skip
    return torch.float64 in dtypes and not dtypes.isdisjoint(_PROMOTED)


def _is_grouped_double(*args: Any, **kwargs: Any) -> bool:
    given = {name for name, value in kwargs.items() if value is not None}
    return given == {"offs"} and [a.dim() for a in args] == [2, 3] and args[0].dtype == torch.float64


def _grouped_matmul(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What torch's grouped product of experts computes, which it has no kernel for in float64."""
    edges = [0, *ends.tolist(), len(rows)]
    parts = [rows[a:b] @ matrix for a, b, matrix in zip(edges, edges[1:], matrices, strict=False)]
    beyond = rows.new_zeros(len(rows) - edges[-2], matrices.shape[-1])  # rows of no group
    return torch.cat([*parts, beyond])


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_promote(tensor.dtype))


def _promote(value: Any) -> Any:
    return _PROMOTED.get(value, value) if isinstance(value, torch.dtype) else value


def to_master(model: torch.nn.Module, precision: str) -> None:
    """Give parameters and buffers the dtype in which they are kept, in place; complex ones stay complex.

    `Module.to(dtype)` would throw imaginary parts away. Tensors of one storage, as `b.data = a.data` makes them, stay
    tensors of one.
    """
    real = MASTER[precision]
    cast: dict[tuple[Any, ...], torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        kind = real.to_complex() if tensor.is_complex() else real if tensor.is_floating_point() else tensor.dtype
        if kind != tensor.dtype:
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            shared = cast.get(place) if tensor.numel() and not tensor.is_meta else None
            cast[place] = tensor.data = tensor.data.to(kind) if shared is None else shared


def promotion(precision: str) -> AbstractContextManager[Any]:
    """The context of a step.

    It is not in force inside `backward`, which torch runs outside of all function modes; blocks that compute again
    there need it for themselves.
    """
    return PromoteToDouble() if precision == "fp64" else nullcontext()


@contextmanager
def promoted_inside_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """A mode that is in force inside `backward` too, where losses and kernels in Python may cast as they like.

    It changes torch for all threads, as `loaded_as_double` does.
    """
    autograd: Any = torch.autograd  # which does not declare the name
    original = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    autograd._engine_run_backward = run
    try:
        yield
    finally:
        autograd._engine_run_backward = original


@contextmanager
def loaded_as_double() -> Iterator[None]:
    """Tensors of files are promoted once they are read as what they are: `torch.load` makes them by asking for a dtype.

    It changes torch for all threads, so it is for a process that is in `promotion` from its beginning to its end.
    """
    original: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor

    def rebuild(*args: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return _to_double(original(*args))

    torch._utils._rebuild_tensor = rebuild
    try:
        yield
    finally:
        torch._utils._rebuild_tensor = original


@contextmanager
def double_by_default() -> Iterator[None]:
    """Float64 as torch's default dtype, also where a library sets another one, as transformers does to build a model.

    It changes torch for all threads, as `loaded_as_double` does.
    """
    original, before = torch.set_default_dtype, torch.get_default_dtype()

    def set_promoted(dtype: torch.dtype, /) -> None:
        original(_PROMOTED.get(dtype, dtype))

    torch.set_default_dtype = set_promoted
    original(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype = original
        original(before)


@contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """Torch's default dtype while a run of this precision computes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(MASTER[precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_tf32(precision: str) -> Iterator[None]:
    """In fp32, cuDNN's convolutions and recurrent layers are fp32 too: torch lets them be TF32 unless it is told."""
    try:
        before = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # somebody has set the two apart, which is their decision, and torch has no one answer
        before = False
    if not before or precision != "fp32":
        yield
        return
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def to_device(array: Any, device: torch.device, precision: str) -> Any:
    """An array of a batch as a tensor on the device, in float64 under fp64; other values pass as they are."""
    if hasattr(array, "__array_interface__") and array.dtype.kind not in "OUSMm":  # strings and dates have no tensors
        array = torch.as_tensor(array)
    if not isinstance(array, torch.Tensor):
        return array
    if precision == "fp64" and array.is_floating_point():
        array = array.to(torch.float64)
    return array.to(device, non_blocking=True)
