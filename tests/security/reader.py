"""What a reader of foreign bytes is, and how those that start a process for each file do with a copy of this one."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.security.mutations import Form
from unisono.runtime.untrusted import hdf5


@dataclass(frozen=True)
class Reader:
    """What reads foreign bytes.

    Attributes:
        make: writes an honest file into a folder; returns it.
        read: reads it, as the product does.
        form: how its format holds values.
        refuses: whether what is wrong is an error; else it is passed over.
        budget: bytes of memory that reading it may take, or four times the file if that is more.
        in_copy: has what it starts a process for done in a copy of this one.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    form: Form | None = None
    refuses: bool = True
    budget: int = 64 << 20
    in_copy: Callable[[], AbstractContextManager[None]] = nullcontext


class Copy:
    """A copy of this process that answers, one text after the other, until one of them ends it; then another begins.

    Stands for a process that the product starts for each file, which takes seconds to import h5py or torch.
    """

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer, self._child = answer, 0

    def ask(self, text: str) -> tuple[int, str]:
        """What it answers, after 0; or what the copy ended with, and its last words."""
        if not self._child:
            self._begin()
        self._there.sendall(text.encode() + b"\n")
        if line := self._lines.readline():
            return 0, str(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._child = 0
        self._said.seek(0)
        return status, self._said.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End the copy."""
        if self._child:
            self._lines.close(), self._there.close()
            os.waitpid(self._child, 0)

    def _begin(self) -> None:
        self._there, here = socket.socketpair()
        self._lines = self._there.makefile("rb")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - until the next copy begins
        if not (child := os.fork()):
            with suppress(BaseException):
                self._lines.close(), self._there.close()  # so that it ends when this process does
                os.dup2(self._said.fileno(), 2)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                with mock.patch.object(hdf5, "lower_limit", _limit), here.makefile("rb") as asked:
                    try:
                        for text in asked:
                            here.sendall(json.dumps(self._answer(text.decode().strip())).encode() + b"\n")
                    except BaseException:
                        os.write(2, traceback.format_exc().encode(errors="replace"))
            os._exit(1)
        here.close()
        self._child = child


def _limit(what: int, most: int, *_: int) -> None:
    """As `lower_limit`, of this file alone."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@contextmanager
def hdf5_in_copy() -> Iterator[None]:
    """Have HDF5 files checked in a copy of this process, within the same limits."""
    import h5py  # noqa: F401 - before the copy is made

    copy = Copy(hdf5.check_within_limits)

    def ask(path: Path, _: float) -> str | None:
        status, answer = copy.ask(str(path))
        return None if status else answer

    with closing(copy), mock.patch.object(hdf5, "_ask_process", ask):
        yield


@contextmanager
def pickle_in_copy() -> Iterator[None]:
    """Have pickles read in a copy of this process, without the sandbox, which no test of their reader needs."""
    import torch

    from unisono.checkpoint.exchange import pickle_import, pickle_process

    take = torch.UntypedStorage.__getitem__

    def read(text: str) -> str:
        source, out, key, size = json.loads(text)
        _limit(resource.RLIMIT_CPU, int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 6)
        _limit(resource.RLIMIT_AS, _addresses() + 4 * size + (256 << 20))
        descriptor = os.open(out, os.O_WRONLY)
        try:
            return json.dumps(pickle_process.extract_tensors(source, key, 4 * size + (64 << 20), descriptor))
        finally:
            torch.UntypedStorage.__getitem__ = take  # type: ignore[method-assign]
            with suppress(OSError):
                os.close(descriptor)

    copy = Copy(read)

    def run(pickle: Any, _: Any, what: dict[str, Any], file: Any, shown: Path) -> subprocess.CompletedProcess[str]:
        status, answer = copy.ask(json.dumps([str(shown), file.name, what["key"], os.fstat(pickle.fileno()).st_size]))
        if status:  # the product says that the process ended, but its reader should have found words
            raise AssertionError(f"the process of the pickle ended with {status}: {answer[-300:]}")
        return subprocess.CompletedProcess([], 0, answer + "\n", "")

    with closing(copy), mock.patch.object(pickle_import, "_run", run):
        yield


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
