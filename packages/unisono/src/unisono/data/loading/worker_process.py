"""The main function of a worker process, which receives a `BatchBuilder` and serves requests until its parent exits."""

from __future__ import annotations

import faulthandler
import importlib
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from multiprocessing import spawn
from queue import SimpleQueue
from typing import Any, NoReturn

from unisono.data.loading import ipc
from unisono.runtime.errors import DataError, UnisonoError

PAGE_SIZE = mmap.PAGESIZE
_ROW = struct.Struct("<q")
# Each worker computes on one core; the user's settings of these variables are meant for training.
_POOLS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS", "POLARS_MAX_THREADS",
)  # fmt: skip
THREAD_VARIABLES = {**dict.fromkeys(_POOLS, "1"), "TOKENIZERS_PARALLELISM": "false"}
# Schedulers send these to all processes of a job, but only the parent ends a worker. It starts with them blocked.
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
WORKER_VARIABLE = "UNISONO_DATA_WORKER"  # set in the environment of a worker


def main(channel: int, page: int) -> NoReturn:
    """Serve requests until the parent exits.

    Args:
        channel: file descriptor of the socket to the parent.
        page: file descriptor of shared memory for the number of the row being built.
    """
    for number in BLOCKED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    faulthandler.enable()
    sock = socket.socket(fileno=channel)
    here = mmap.mmap(page, PAGE_SIZE)
    os.close(page)
    try:
        _import_task(*ipc.receive(sock))
        maker = ipc.receive(sock, mapped=True)
    except EOFError:
        os._exit(0)
    except BaseException as error:
        _send(sock, (False, _portable_error(error, "the task cannot be rebuilt in a worker process")))
        os._exit(1)
    maker.note_row = lambda row: _ROW.pack_into(here, 0, row)
    maker.note_row(-1)
    _send(sock, (True, os.getpid()))
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive_requests, args=(sock, requests), daemon=True).start()
    while True:
        act, arguments = requests.get()
        try:
            answer = True, getattr(maker, act)(*arguments)
        except BaseException as error:
            answer = False, _portable_error(error, "a worker process failed")
        maker.mark_idle()
        _send(sock, answer)
        del answer


def read_row(page: mmap.mmap) -> int:
    """The row of the source that a worker is building; -1 for none."""
    return int(_ROW.unpack_from(page, 0)[0])


def _import_task(place: str | None, file: str | None, again: dict[str, Any]) -> None:
    """Import modules that the pickle needs but `import` would not find: the task's file and the main script."""
    if again:
        spawn.prepare(again)  # as multiprocessing does
    elif place is None and file is not None:  # of a notebook, whose cells no process can run again
        from unisono.config.code import references

        written = references.load_module(file, file)
        vars(sys.modules["__main__"]).update({n: v for n, v in vars(written).items() if not n.startswith("__")})
    if place is not None:
        try:
            importlib.import_module(place)
        except ModuleNotFoundError:
            from unisono.config.code import references

            assert file is not None
            references.load_module(f"{file}:{place}", file)


def _receive_requests(sock: socket.socket, requests: SimpleQueue[Any]) -> None:
    """Receive requests; exit with the parent."""
    try:
        while True:
            requests.put(ipc.receive(sock))
    except (EOFError, OSError):
        os._exit(0)


def _send(sock: socket.socket, answer: tuple[bool, Any]) -> None:
    try:
        message = ipc.IpcMessage(answer)
    except Exception as error:  # the batch cannot be pickled
        fault = DataError(
            f"what collate() returned cannot be sent from a worker process: {type(error).__name__}: {error}. Return "
            "arrays, or use data.worker_kind=threads"
        )
        message = ipc.IpcMessage((False, fault))
    try:
        message.send(sock)
    except OSError:  # the parent has exited
        os._exit(0)
    finally:
        message.close()


def _portable_error(error: BaseException, what: str) -> UnisonoError:
    """The error in a form that can be sent to another process."""
    if not isinstance(error, UnisonoError):
        from unisono.runtime.code.user_code import describe_error

        return DataError(f"{what}: {describe_error(error)}")
    error.__cause__ = error.__context__ = error.__traceback__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DataError(str(error), error.fault)
    return error
