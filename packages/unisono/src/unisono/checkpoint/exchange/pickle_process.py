"""The process that reads a pickle: it sandboxes itself, then uses torch's restricted reader, and never another.

Started by `unisono.checkpoint.exchange.pickle_import` with a descriptor to write to; it answers with one line of JSON.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import math
import os
import re
import resource
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unisono.checkpoint.exchange import sandbox
from unisono.runtime.untrusted.resource_limits import lower_limit

if TYPE_CHECKING:
    from unisono.checkpoint.exchange.dcp_folder import Taking

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER
_NO_NEW_PRIVILEGES, _DEATH_SIGNAL = 38, 1
# What reading a damaged file raises.
_DAMAGED = (
    RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, zipfile.BadZipFile,
    AssertionError, OverflowError, struct.error,
)  # fmt: skip
_MEMORY_BYTES = 16 << 30  # bytes of addresses for Python, torch and a block, besides the file


class _RefusedError(ValueError):
    """What is wrong with the content, as the end of a sentence that begins with the file's name."""


def leave_network() -> bool:
    """Leave the network for one of this process alone, where the kernel lets it; returns whether it did.

    A user namespace, which it may need for that, can only be made before there is a second thread, so before torch.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_DEATH_SIGNAL, 9, 0, 0, 0)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(library.unshare(_NEW_NETWORK) == 0 or library.unshare(_NEW_USER | _NEW_NETWORK) == 0)


def limit_resources(sources: list[str], limit: int, seconds: int) -> list[str]:
    """Bound memory, time, the size of files, and processes, and give up files, sockets and other processes.

    Returns:
        Protections that this host does not have, in words.
    """
    size = sum(os.stat(source).st_size for source in sources)  # noqa: PTH116
    for what, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES + 4 * size),
        (resource.RLIMIT_FSIZE, limit + (64 << 20)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        lower_limit(what, most)
    lower_limit(resource.RLIMIT_CPU, seconds, 5)
    packages = [
        entry for entry in sys.path if entry.rstrip("/").endswith(("-packages", ".zip")) or "/lib/python" in entry
    ]
    # Where they are, if an installer has put links there, as PDM does from its cache.
    packages += {os.path.realpath(one) for entry in packages if os.path.isdir(entry) for one in _links(entry)}  # noqa: PTH112
    own = Path(__file__).parents[2]  # where this package is, if it is not among the others
    system = ["/usr/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/self", "/dev/null", "/dev/urandom"]
    return sandbox.enter([*sources, sys.prefix, sys.base_prefix, *packages, str(own), *system])


def _links(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        yield from (entry.path for entry in entries if entry.is_symlink())


def do_without_helpers() -> None:
    """Have torch imported without what the limits would refuse."""
    cast(dict[str, Any], sys.modules)["dill"] = None  # it opens devices for writing
    # It starts compilers on files in /tmp. A torch for CUDA asks it, and can do without an answer.
    cast(Any, ctypes.util).find_library = lambda name: None


def extract_tensors(source: str, key: str | None, limit: int, descriptor: int) -> dict[str, Any]:
    """Write the tensors of a pickle as safetensors; returns the answer."""
    import pickle

    import torch

    torch.set_num_threads(1)
    try:
        # Without mmap only where the file is older than what can be mapped; always the restricted reader.
        if mapped := zipfile.is_zipfile(source):
            _check_records(source)
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except _RefusedError as error:
        return {"sentence": str(error)}
    except pickle.UnpicklingError as error:
        if named := _find_named(error):
            return {"needed": named}
        detail = str(error).partition("WeightsUnpickler error:")[2].strip().split("\n")[0]
        return {
            "sentence": "was refused: it is not a torch.save file, or a pickle of more than tensors and plain data "
            f"({detail[:200] or 'not a pickle'}). Nothing of it was run"
        }
    except _DAMAGED as error:
        return {"sentence": f"cannot be read as a torch.save file: {_first_line(error)}"}
    except MemoryError:
        return {"sentence": "cannot be read: it needs far more memory than a file of its size should"}
    try:
        tensors, left = _tensors(content, key)
        _check(tensors, limit)
    except _RefusedError as error:
        return {"sentence": str(error)}

    _write(
        {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}, tensors.__getitem__, descriptor
    )
    return {"left": left}


def _check_records(source: str) -> None:
    """Refuse an archive that torch would map wrongly, and have it take no more of a tensor than was stored of it.

    It takes a tensor's bytes from where its record begins, whether they are compressed and how many there are or not;
    in place of what is missing stands what follows in the file. So what it takes of the mapping is compared.
    """
    import torch

    sizes: dict[int, int] = {}  # by their places in the file
    with zipfile.ZipFile(source) as archive, open(source, "rb") as file:  # noqa: PTH123
        names = archive.namelist()
        if len(set(names)) < len(names):
            raise _RefusedError("cannot be read as a torch.save file: two of its records have the same name")
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise _RefusedError(
                    "is compressed, as torch.save writes none: it is of TorchScript (save its state_dict()), or was "
                    "packed again (unpack it, and pack it with zip -0)"
                )
            file.seek(record.header_offset + 26)
            sizes[record.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))] = record.file_size
    storages: Any = torch.UntypedStorage
    take = storages.__getitem__

    def take_whole(storage: Any, part: Any) -> Any:
        if isinstance(part, slice) and sizes.get(part.start) != part.stop - part.start:
            raise RuntimeError(
                f"a tensor needs {part.stop - part.start} bytes, and {sizes.get(part.start, 0)} are stored of it"
            )
        return take(storage, part)

    storages.__getitem__ = take_whole  # in this process, which reads this file and ends


def extract_folder(
    metadata: str, files: Mapping[str, str], key: str | None, limit: int, descriptor: int, taking: Taking
) -> dict[str, Any]:
    """Write the tensors of a folder of torch.distributed.checkpoint as safetensors; returns the answer.

    Args:
        metadata: path of its metadata.
        files: path of each of its files, by name.
        key: the keys above the tensors; None for the model.
        limit: bytes that may be written.
        descriptor: to write to.
        taking: which of its tensors.
    """
    import pickle

    import torch

    from unisono.checkpoint.exchange import dcp_folder
    from unisono.checkpoint.exchange.hf_shards import CODES
    from unisono.runtime.errors import CheckpointError

    torch.set_num_threads(1)
    try:
        tensors, others = dcp_folder.read_metadata(Path(metadata).read_bytes())
        if taking == "moments":
            chosen, left = dcp_folder.choose_moments(tensors, others)
        else:
            chosen, left = dcp_folder.choose_tensors(tensors, key, taking == "weights beside moments")
        described: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for name, one in chosen.items():
            dtype = dcp_folder.find_dtype(one)
            if dtype not in CODES:
                raise CheckpointError(f"has '{name}' as {one.dtype}, which safetensors files do not support")
            described[name] = dtype, one.shape
        if sum(math.prod(shape) * dtype.itemsize for dtype, shape in described.values()) > limit:
            raise CheckpointError("describes far more than its files hold")
        _write(described, lambda name: dcp_folder.read_tensor(chosen[name], files), descriptor)
    except CheckpointError as error:
        return {"sentence": str(error)}
    except pickle.UnpicklingError as error:
        return {"needed": _find_named(error) or "more than tensors"}
    except _DAMAGED as error:
        return {"sentence": f"cannot be read as a folder of torch.distributed.checkpoint: {_first_line(error)}"}
    except MemoryError:
        return {"sentence": "cannot be read: it needs far more memory than a folder of its size should"}
    return {"left": left + dcp_folder.describe_plain(others, taking)}


def _write(described: Mapping[str, tuple[Any, tuple[int, ...]]], read: Callable[[str], Any], descriptor: int) -> None:
    """Write tensors, given their dtypes and shapes, one after the other as safetensors."""
    from unisono.checkpoint.exchange.hf_shards import TensorEntry, blocks, write

    def cut(entry: TensorEntry) -> Iterator[Any]:
        value = read(entry.name)
        for offset, shape in blocks(entry.shape, entry.dtype.itemsize):
            yield value[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    with os.fdopen(descriptor, "wb") as file:
        write(file, [TensorEntry(name, dtype, shape) for name, (dtype, shape) in described.items()], cut)


def _find_named(error: BaseException) -> str:
    """What a refused pickle wanted to use; empty if it is not said."""
    named = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
    return named[1] if named else ""


def _tensors(content: Any, key: str | None) -> tuple[dict[str, Any], list[str]]:
    """The tensors of a dictionary, and what else it holds."""
    import torch

    for part in key.split("/") if key else ():
        if not (isinstance(content, Mapping) and part in content):
            raise _RefusedError(f"has no '{part}' for key={key}; there {_describe_content(content)}")
        content = content[part]
    found = (
        {k: v.detach() for k, v in content.items() if isinstance(v, torch.Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not found:
        where = f" at key={key}" if key else ""
        raise _RefusedError(
            f"holds no tensors by name{where}; there {_describe_content(content)}. Choose with key=NAME, or "
            "key=NAME/NAME"
        )
    for name in found:
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise _RefusedError(f"has a tensor under {name!r}, which is not a valid name")
    return found, [f"{k!s} ({_describe_value(v)})" for k, v in content.items() if not isinstance(v, torch.Tensor)]


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
                f"has '{name}' as a {value.layout} {value.dtype} tensor, which safetensors files do not support"
            )
    size = sum(value.numel() * value.dtype.itemsize for value in tensors.values())
    if size > limit:
        raise _RefusedError(
            f"would take {size} bytes, more than four times its own size: its tensors are views of the same "
            "memory, so it was not written"
        )


def _describe_content(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"is {_describe_value(content)}"
    return "are " + (
        ", ".join(f"{name!s} ({_describe_value(value)})" for name, value in list(content.items())[:12]) or "no entries"
    )


def _describe_value(value: Any) -> str:
    import torch

    if isinstance(value, Mapping):
        count = sum(isinstance(entry, torch.Tensor) for entry in value.values())
        return f"{count} tensors" if count else f"dict of {len(value)}"
    return "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _first_line(error: BaseException) -> str:
    """The first line of an error; torch's go on with how to read without care."""
    return str(error).strip().split("\n")[0].split("Please")[0].split(". ")[0][:300] or type(error).__name__


def main() -> None:
    """Entry point of the process."""
    leave_network()
    request = json.loads(sys.stdin.read())
    files = request["files"]  # of a folder whose metadata is the source
    sources = [request["source"], *(files or {}).values()]
    missing = limit_resources(sources, request["limit"], request["seconds"])  # before torch, which has threads
    do_without_helpers()
    options = request["key"], request["limit"], int(sys.argv[1])
    source = request["source"]
    if files is None:
        answer = extract_tensors(source, *options)
    else:
        answer = extract_folder(source, files, *options, request["taking"])
    sys.stdout.write(json.dumps({**answer, "without": missing}) + "\n")


if __name__ == "__main__":
    main()
