"""The process that reads a pickle: it shuts itself in, then asks torch's restricted reader, and never another.

Started by `unisono.checkpoint.exchange.pickle_import` with a descriptor to write to; it answers with one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import socket
import sys
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER
_NO_NEW_PRIVILEGES, _DEATH_SIGNAL = 38, 1
_MEMORY = 16 << 30  # bytes of addresses for Python, torch and a block, besides the file


class _RefusedError(ValueError):
    """What is wrong with the content, as the end of a sentence that begins with the file's name."""


def cut_off() -> bool:
    """Leave the network for one of this process alone, where the kernel lets it; returns whether it did.

    A user namespace, which it may need for that, can only be made before there is a second thread, so before torch.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_DEATH_SIGNAL, 9, 0, 0, 0)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(library.unshare(_NEW_NETWORK) == 0 or library.unshare(_NEW_USER | _NEW_NETWORK) == 0)


def shut_in(source: str, limit: int) -> None:
    """Bound memory, the size of files, and processes; from here on, connecting is refused by Python, too."""
    size = os.stat(source).st_size  # noqa: PTH116
    for what, most in (
        (resource.RLIMIT_AS, _MEMORY + 4 * size),
        (resource.RLIMIT_FSIZE, limit + (64 << 20)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no network here")

    socket.socket = refuse  # type: ignore[misc, assignment]


def take_out(source: str, key: str | None, limit: int, descriptor: int) -> dict[str, Any]:
    """Write the tensors of a pickle as safetensors; returns the answer."""
    import pickle

    import torch

    from unisono.checkpoint.exchange.hf_shards import Entry, blocks, write

    torch.set_num_threads(1)
    shut_in(source, limit)
    try:
        # Without mmap only where the file is older than what can be mapped; always the restricted reader.
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except pickle.UnpicklingError as error:
        asked = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        if asked:
            return {"global": asked[1]}
        detail = str(error).partition("WeightsUnpickler error:")[2].strip().split("\n")[0]
        return {
            "sentence": "is refused: it is no file of torch.save, or a pickle of more than tensors and plain data "
            f"({detail[:200] or 'no pickle'}). Nothing of it was run"
        }
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        return {"sentence": f"cannot be read as a file of torch.save: {_first(error)}"}
    except MemoryError:
        return {"sentence": "cannot be read: it takes far more memory than a file of its size should"}
    try:
        tensors, left = _tensors(content, key)
        _check(tensors, limit)
    except _RefusedError as error:
        return {"sentence": str(error)}

    def cut(entry: Entry) -> Iterator[torch.Tensor]:
        for offset, shape in blocks(entry.shape, entry.dtype.itemsize):
            yield tensors[entry.name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    with os.fdopen(descriptor, "wb") as file:
        write(file, [Entry(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()], cut)
    return {"left": left}


def _tensors(content: Any, key: str | None) -> tuple[dict[str, Any], list[str]]:
    """The tensors of a dictionary, and what else it holds."""
    import torch

    for part in key.split("/") if key else ():
        if not (isinstance(content, Mapping) and part in content):
            raise _RefusedError(f"has no '{part}' for key={key}; there {_told(content)}")
        content = content[part]
    found = (
        {k: v.detach() for k, v in content.items() if isinstance(v, torch.Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not found:
        where = f" at key={key}" if key else ""
        raise _RefusedError(
            f"holds no tensors by name{where}; there {_told(content)}. Say which by key=NAME, or key=NAME/NAME"
        )
    for name in found:
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise _RefusedError(f"has a tensor under {name!r}, which is no name for one")
    return found, [f"{k!s} ({_kind(v)})" for k, v in content.items() if not isinstance(v, torch.Tensor)]


def _check(tensors: Mapping[str, Any], limit: int) -> None:
    import torch

    from unisono.checkpoint.exchange.hf_shards import CODES

    for name, value in tensors.items():
        if (
            value.layout != torch.strided
            or value.is_quantized
            or value.device.type != "cpu"
            or value.dtype not in CODES
        ):
            raise _RefusedError(
                f"has '{name}' as a {value.layout} {value.dtype} tensor, which safetensors files do not have"
            )
    size = sum(value.numel() * value.dtype.itemsize for value in tensors.values())
    if size > limit:
        raise _RefusedError(
            f"would take {size} bytes, more than four times its own size: its tensors are views that repeat "
            "themselves, and it is not written"
        )


def _told(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"is {_kind(content)}"
    return "are " + (
        ", ".join(f"{name!s} ({_kind(value)})" for name, value in list(content.items())[:12]) or "no entries"
    )


def _kind(value: Any) -> str:
    import torch

    if isinstance(value, Mapping):
        count = sum(isinstance(entry, torch.Tensor) for entry in value.values())
        return f"{count} tensors" if count else f"dict of {len(value)}"
    return "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _first(error: BaseException) -> str:
    """The first line of an error; torch's go on with how to read without care."""
    return str(error).strip().split("\n")[0].split("Please")[0].split(". ")[0][:300] or type(error).__name__


def main() -> None:
    """Entry of the process."""
    cut_off()
    asked = json.loads(sys.stdin.read())
    answer = take_out(asked["source"], asked["key"], asked["limit"], int(sys.argv[1]))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
