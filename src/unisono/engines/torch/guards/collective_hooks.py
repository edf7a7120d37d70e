"""Every collective of this process, logged where torch itself sends it to a backend.

All of them, whoever makes them, pass torch's dispatcher as operators `c10d::…`: those of a task, functional ones, those
of compiled code, of DTensor, and of DDP, whose reducer calls from C++. A kernel at `BackendSelect`, which is in every
call's way on every device and below autograd and fake tensors, logs the call and passes it on. The conversion of the
arguments to Python and back costs more than the log (`benchmarks/desync.py`); what this package sends itself at every
step, and FSDP's three calls for every unit of a model (`fsdp_communication`), are logged where they are made instead.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey
from torch.library import Library

from unisono.runtime import collective_log

# As users call them; where several names end in one operator, the oldest.
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
# Of which argument all members have to give the same shape. Elsewhere than in the first: of several parts of uneven
# sizes everybody knows all, and a root alone has what it sends to each.
_ALIKE = {
    "allgather_coalesced_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_base_": 1,
    "gather_": 1,
}
_UNEVEN = {"alltoall_", "alltoall_base_"}  # sizes differ by rank, as they should
_SHAPELESS = {"barrier", "monitored_barrier_"}
_BETWEEN_TWO = {"send", "recv_", "recv_any_source_"}
# A root may come from another line than the others, and rank 0 to a barrier before all others.
_ANY_SITE = {"broadcast_", "reduce_", "gather_", "scatter_", *_SHAPELESS}
_REDUCE = {value.value: name for name, value in dist.ReduceOp.RedOpType.__members__.items()}

_Line = tuple[CodeType | None, int]  # where a call is made; no code where C++ makes it

_KINDS = 4096  # of calls whose fingerprints are kept; shapes that always change make more


class CollectiveHooks:
    """The kernels, and the log that they write; there is one at a time in a process.

    Args:
        log: of this process.
        buckets: what collectives are called that the backward pass makes from C++, e.g. `gradient bucket`.
    """

    def __init__(self, log: collective_log.Log, buckets: str = "collective of the backward pass") -> None:
        self._log, self._buckets = log, buckets
        self._home = threading.current_thread()
        self._kinds: dict[Any, tuple[int, bytes]] = {}
        self._sites = _Sites()
        self._bucket = 0
        self._named = ""
        self._library = Library("c10d", "IMPL")
        self._below = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
        for name in sorted(torch._C._dispatch_get_all_op_names()):
            space, _, name = name.partition("::")
            if space == "c10d":
                operator = getattr(torch.ops.c10d, name).default
                arguments = [argument.name for argument in operator._schema.arguments]
                if "process_group" in arguments:
                    self._library.impl(name, self._kernel(operator, arguments), "BackendSelect", with_keyset=True)

    def close(self) -> None:
        """Log nothing any more."""
        self._library._destroy()

    @contextmanager
    def at(self, site: str) -> Iterator[None]:
        """The context of calls that are logged under this site instead of their line."""
        before, self._named = self._named, site
        try:
            yield
        finally:
            self._named = before

    def members(self, group: dist.ProcessGroup) -> collective_log.Members:
        """The log of this process's calls in a group so far."""
        name = group.group_name
        found = self._log.groups.get(name)
        if found is None:
            ranks = dist.get_process_group_ranks(group)
            found = self._log.groups[name] = collective_log.Members(name, ranks, group.rank())
        return found

    def _kernel(self, operator: Any, arguments: list[str]) -> Callable[..., Any]:
        """What takes an operator's place: log the call, then make it."""
        group_at = arguments.index("process_group")
        reduce_at = arguments.index("reduce_op") if "reduce_op" in arguments else None
        root_at = arguments.index("root_rank") if "root_rank" in arguments else None
        name = operator._schema.name.removeprefix("c10d::")
        tensors_at = _ALIKE.get(name, 0)
        shape_of = _nothing if name in _SHAPELESS else _uneven if name in _UNEVEN else _shape
        redispatch, below = operator._handle.redispatch_boxed, self._below
        unbox = dist.ProcessGroup.unbox

        def kernel(keyset: Any, *given: Any) -> Any:
            reduce = -1 if reduce_at is None else given[reduce_at].op()
            root = -1 if root_at is None else given[root_at]
            members = self.members(unbox(given[group_at]))
            site = self._named
            place = (None, 0) if site else self._sites.caller(sys._getframe(1))
            self._add(name, members, reduce, root, shape_of(given[tensors_at]), place, site)
            return redispatch(keyset & below, *given)

        return kernel

    def note(self, name: str, group: dist.ProcessGroup, tensor: Tensor, site: str, reduce: int = -1) -> None:
        """Log a call that is about to be made, and bypasses the dispatcher.

        Args:
            name: of the operator that it would be there, without `c10d::`.
            group: in which it is made.
            tensor: whose dtype and shape have to be the same on all members.
            site: where it comes from, the same on all members.
            reduce: value of the ReduceOp.
        """
        shape = (tensor.dtype,), (tensor.shape,)
        self._add(name, self.members(group), reduce, -1, shape, (None, 0), site)

    def _add(
        self, name: str, members: collective_log.Members, reduce: int, root: int, shape: Any, place: _Line, site: str
    ) -> None:
        """Write a call into the log, from a line of code, from C++ (no code and no site), or from what a site names."""
        code, line = place
        if code is None and not site:
            self._bucket += 1
            line = self._bucket
        else:
            self._bucket = 0
        aside = name in _BETWEEN_TWO or not self._in_order()
        path = None if code is None else code.co_filename  # code is dear to hash
        key = (name, members.name, reduce, root, shape, path, line, site, aside)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kind(members, name, reduce, root, shape, (code, line), site, aside)
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            self._kinds[key] = kind
        self._log.add(members, *kind, aside)

    def _in_order(self) -> bool:
        """Whether this thread's calls have a place among the others.

        Autograd's have, whose threads are not Python's; those of other Python threads come when they come.
        """
        thread = threading.current_thread()
        return thread is self._home or isinstance(thread, threading._DummyThread)

    def _kind(
        self,
        members: collective_log.Members,
        name: str,
        reduce: int,
        root: int,
        shape: Any,
        place: _Line,
        site: str,
        aside: bool,
    ) -> tuple[int, bytes]:
        code, line = place
        key = site = site or f"{self._buckets} {line - 1}"
        if code is not None:
            site, key = (
                f"{short_path(code.co_filename)}:{line}",
                f"{Path(code.co_filename).name}:{line} {code.co_qualname}",
            )
        dtypes, shapes = shape
        what = collective_log.What(
            members.name,
            members.told,
            _NAMES.get(name, name.strip("_")),
            _REDUCE.get(reduce, ""),
            root,
            ",".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes)),
            " ".join(str(list(one)) for one in shapes),
            site,
            "" if name in _ANY_SITE else key,
            aside,
        )
        return what.fingerprint, collective_log.written(what)


def _shape(given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dtypes and shapes of a tensor, of a list of them, or of the first and the last of a list per tensor."""
    if isinstance(given, Tensor):
        return (given.dtype,), (given.shape,)
    if given and not isinstance(given[0], Tensor):
        return _shape([given[0][0], given[0][-1]]) if given[0] else ((), ())
    return tuple([t.dtype for t in given]), tuple([t.shape for t in given])


def _uneven(given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The dtype, and the axes behind the first."""
    tensors = [given] if isinstance(given, Tensor) else given[:1]
    return tuple([t.dtype for t in tensors]), tuple([t.shape[1:] for t in tensors])


def _nothing(given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (), ()


# where a call comes from --------------------------------------------------------------------------------------------

_OWN = str(Path(collective_log.__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PLUMBING = ("distributed_c10d.py", "c10d_logger.py")  # through which all calls go
_LIBRARIES = tuple(sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")}))
_STANDARD = tuple(sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}))
_USER, _OURS, _LIBRARY, _NOT = range(4)


class _Sites:
    """The frame that a collective is of: the innermost of the user's code, or of this package, behind any library's."""

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {}

    def caller(self, frame: FrameType | None) -> _Line:
        """Code and line; no code where C++ called from a backward pass."""
        if frame is None or frame.f_code.co_name == "_engine_run_backward":
            return None, 0
        first: FrameType | None = None
        library: FrameType | None = None
        while frame is not None:
            path = frame.f_code.co_filename
            kind = self._kinds.get(path)
            if kind is None:
                kind = self._kinds[path] = _kind_of(path)
            if kind == _USER:
                return frame.f_code, frame.f_lineno
            if kind == _OURS:
                break
            if kind == _LIBRARY and library is None:
                library = frame
            elif kind == _NOT and first is None and not path.endswith(_PLUMBING):
                first = frame
            frame = frame.f_back
        found = library or frame or first
        return (None, 0) if found is None else (found.f_code, found.f_lineno)


def _kind_of(path: str) -> int:
    """Whose file it is. Compiled code has names of its own, which are not the same on all ranks."""
    if path.startswith(_OWN):
        return _OURS
    if path.startswith((_TORCH, "<")) or "torchinductor" in path:
        return _NOT
    if path.startswith(_LIBRARIES) or "site-packages" in path or "dist-packages" in path:
        return _LIBRARY
    return _NOT if path.startswith(_STANDARD) else _USER


def short_path(path: str) -> str:
    """A file for people: short below this package and the working directory, else whole."""
    for root in (Path(_OWN).parent, Path.cwd()):
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    return path
