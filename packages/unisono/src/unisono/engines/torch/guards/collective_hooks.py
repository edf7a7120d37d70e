"""Logs every collective of this process where torch dispatches it to a backend.

All of them, whoever calls them, pass torch's dispatcher as operators `c10d::…`: those of a task, functional ones, those
of compiled code, of DTensor, and of DDP, whose reducer calls from C++. A kernel at `BackendSelect`, which is in every
path of every call on every device and below autograd and fake tensors, logs the call and forwards it. Converting the
arguments to Python and back costs more than the log (`benchmarks/desync.py`); what this package itself sends at every
step, and FSDP's three calls for every unit of a model (`fsdp_communication`), are logged where they are made instead.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey
from torch.library import Library

from unisono.runtime.code import source_files
from unisono.runtime.communication import collective_log

# The names that users know; if several functions use one operator, the oldest.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
# Index of the argument whose shape must be the same on all members, if it is not the first: of several parts of uneven
# sizes every member knows all, and a root alone has what it sends to each.
_SHAPE_ARGUMENT = {
    "allgather_coalesced_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_base_": 1,
    "gather_": 1,
}
_UNEVEN_OPS = {"alltoall_", "alltoall_base_"}  # sizes differ by rank, as they should
_SHAPELESS_OPS = {"barrier", "monitored_barrier_"}
_POINT_TO_POINT_OPS = {"send", "recv_", "recv_any_source_"}
# A root may call from another line than the others, and rank 0 may reach a barrier before all others.
_ANY_SITE_OPS = {"broadcast_", "reduce_", "gather_", "scatter_", *_SHAPELESS_OPS}
_REDUCE = {value.value: name for name, value in dist.ReduceOp.RedOpType.__members__.items()}

_Line = tuple[CodeType | None, int]  # where a call is made; no code where C++ makes it

_MAX_CALL_KINDS = 4096  # kinds of calls whose fingerprints are cached; shapes that keep changing create more


class CollectiveHooks:
    """The logging kernels; only one instance at a time in a process.

    Args:
        log: of this process.
        buckets: label for collectives that the backward pass calls from C++, e.g. `gradient bucket`.
    """

    def __init__(self, log: collective_log.CollectiveLog, buckets: str = "collective of the backward pass") -> None:
        self._log, self._backward_label = log, buckets
        self._main_thread = threading.current_thread()
        self._fingerprints: dict[Any, tuple[int, bytes]] = {}
        self._bucket_number = 0
        self._site_label = ""
        self._library = Library("c10d", "IMPL")
        self._lower_keys = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
        for name in sorted(torch._C._dispatch_get_all_op_names()):
            space, _, name = name.partition("::")
            if space == "c10d":
                operator = getattr(torch.ops.c10d, name).default
                arguments = [argument.name for argument in operator._schema.arguments]
                if "process_group" in arguments:
                    self._library.impl(name, self._make_kernel(operator, arguments), "BackendSelect", with_keyset=True)

    def close(self) -> None:
        """Stop logging."""
        self._library._destroy()

    @contextmanager
    def label_calls(self, site: str) -> Iterator[None]:
        """A context in which calls are logged under this site instead of their line."""
        before, self._site_label = self._site_label, site
        try:
            yield
        finally:
            self._site_label = before

    def members(self, group: dist.ProcessGroup) -> collective_log.GroupState:
        """The log of this process's calls in a group so far."""
        name = group.group_name
        found = self._log.groups.get(name)
        if found is None:
            ranks = dist.get_process_group_ranks(group)
            found = self._log.groups[name] = collective_log.GroupState(name, ranks, group.rank())
        return found

    def _make_kernel(self, operator: Any, arguments: list[str]) -> Callable[..., Any]:
        """The replacement of an operator: logs the call, then makes it."""
        group_at = arguments.index("process_group")
        reduce_at = arguments.index("reduce_op") if "reduce_op" in arguments else None
        root_at = arguments.index("root_rank") if "root_rank" in arguments else None
        name = operator._schema.name.removeprefix("c10d::")
        tensors_at = _SHAPE_ARGUMENT.get(name, 0)
        shape_of = _no_shape if name in _SHAPELESS_OPS else _uneven_shape_of if name in _UNEVEN_OPS else _shape_of
        redispatch, lower_keys = operator._handle.redispatch_boxed, self._lower_keys
        unbox = dist.ProcessGroup.unbox

        def kernel(keyset: Any, *arguments_given: Any) -> Any:
            reduce = -1 if reduce_at is None else arguments_given[reduce_at].op()
            root = -1 if root_at is None else arguments_given[root_at]
            members = self.members(unbox(arguments_given[group_at]))
            site = self._site_label
            place = (None, 0) if site else _find_caller(sys._getframe(1))
            self._log_call(name, members, reduce, root, shape_of(arguments_given[tensors_at]), place, site)
            return redispatch(keyset & lower_keys, *arguments_given)

        return kernel

    def note(self, name: str, group: dist.ProcessGroup, tensor: Tensor, site: str, reduce: int = -1) -> None:
        """Log a call that is about to be made and bypasses the dispatcher.

        Args:
            name: of the equivalent operator, without `c10d::`.
            group: in which the call is made.
            tensor: its dtype and shape must be the same on all members.
            site: where the call comes from; the same on all members.
            reduce: value of the ReduceOp.
        """
        shape = (tensor.dtype,), (tensor.shape,)
        self._log_call(name, self.members(group), reduce, -1, shape, (None, 0), site)

    def _log_call(
        self, name: str, members: collective_log.GroupState, reduce: int, root: int, shape: Any, place: _Line, site: str
    ) -> None:
        """Log a call from a line of code, from C++ (no code and no site), or from a named site."""
        code, line = place
        if code is None and not site:
            self._bucket_number += 1
            line = self._bucket_number
        else:
            self._bucket_number = 0
        unordered = name in _POINT_TO_POINT_OPS or not self._is_ordered_thread()
        path = None if code is None else code.co_filename  # code is dear to hash
        key = (name, members.name, reduce, root, shape, path, line, site, unordered)
        kind = self._fingerprints.get(key)
        if kind is None:
            kind = self._build_call(members, name, reduce, root, shape, (code, line), site, unordered)
            if len(self._fingerprints) >= _MAX_CALL_KINDS:
                self._fingerprints.clear()
            self._fingerprints[key] = kind
        self._log.add(members, *kind, unordered)

    def _is_ordered_thread(self) -> bool:
        """Whether this thread's calls have a defined order among the others.

        Autograd's threads, which are not Python's, have one; calls of other Python threads come at any time.
        """
        thread = threading.current_thread()
        return thread is self._main_thread or isinstance(thread, threading._DummyThread)

    def _build_call(
        self,
        members: collective_log.GroupState,
        name: str,
        reduce: int,
        root: int,
        shape: Any,
        place: _Line,
        site: str,
        unordered: bool,
    ) -> tuple[int, bytes]:
        code, line = place
        key = site = site or f"{self._backward_label} {line - 1}"
        if code is not None:
            site = f"{short_path(code.co_filename)}:{line}"
            key = f"{Path(code.co_filename).name}:{line} {code.co_qualname}"
        dtypes, shapes = shape
        what = collective_log.Collective(
            members.name,
            members.ranks_text,
            _NAMES.get(name, name.strip("_")),
            _REDUCE.get(reduce, ""),
            root,
            ",".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes)),
            " ".join(str(list(one)) for one in shapes),
            site,
            "" if name in _ANY_SITE_OPS else key,
            unordered,
        )
        return what.fingerprint, collective_log.encode_call(what)


def _shape_of(arguments_given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dtypes and shapes of a tensor, of a list of them, or of the first and the last of a list per tensor."""
    if isinstance(arguments_given, Tensor):
        return (arguments_given.dtype,), (arguments_given.shape,)
    if arguments_given and not isinstance(arguments_given[0], Tensor):
        return _shape_of([arguments_given[0][0], arguments_given[0][-1]]) if arguments_given[0] else ((), ())
    return tuple([t.dtype for t in arguments_given]), tuple([t.shape for t in arguments_given])


def _uneven_shape_of(arguments_given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The dtype, and the axes behind the first."""
    tensors = [arguments_given] if isinstance(arguments_given, Tensor) else arguments_given[:1]
    return tuple([t.dtype for t in tensors]), tuple([t.shape[1:] for t in tensors])


def _no_shape(arguments_given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (), ()


# where a call comes from --------------------------------------------------------------------------------------------

_OWN_FOLDER = str(Path(collective_log.__file__).parents[2]) + os.sep
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
_PLUMBING = ("distributed_c10d.py", "c10d_logger.py")  # through which all calls go
_USER, _OURS, _LIBRARY, _INTERNAL = range(4)


def _find_caller(frame: FrameType | None) -> _Line:
    """The frame that made a collective: the innermost of user code, else of this package, else a library's.

    Returns:
        Code and line; no code where C++ called from a backward pass.
    """
    if frame is None or frame.f_code.co_name == "_engine_run_backward":
        return None, 0
    first: FrameType | None = None
    library: FrameType | None = None
    while frame is not None:
        path = frame.f_code.co_filename
        kind = _classify_file(path)
        if kind == _USER:
            return frame.f_code, frame.f_lineno
        if kind == _OURS:
            break
        if kind == _LIBRARY and library is None:
            library = frame
        elif kind == _INTERNAL and first is None and not path.endswith(_PLUMBING):
            first = frame
        frame = frame.f_back
    found = library or frame or first
    return (None, 0) if found is None else (found.f_code, found.f_lineno)


@cache
def _classify_file(path: str) -> int:
    """Whether a file is user code, this package or a library. Names of compiled code differ between ranks."""
    if path.startswith((_TORCH_FOLDER, "<")) or "torchinductor" in path:
        return _INTERNAL
    if source_files.is_our_file(path):
        return _OURS
    if source_files.is_user_file(path):
        return _USER
    return _LIBRARY if "site-packages" in path or "dist-packages" in path else _INTERNAL  # Python's own


def short_path(path: str) -> str:
    """A path for messages: relative if below this package or the working directory, else absolute."""
    for root in (Path(_OWN_FOLDER).parent, Path.cwd()):
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    return path
