"""Workers that build micro-batches: threads of this process, or processes that live as long as the loader.

Threads share the source and its caches, but only one runs Python at a time, so they suit tasks whose time is spent in
native code that releases Python's lock. Processes suit tasks whose time is spent in Python. Both build the same
samples, bit for bit.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from inspect import getattr_static
from multiprocessing import spawn
from queue import SimpleQueue
from typing import Any

from unisono.config.code import references
from unisono.data.loading import ipc, worker_process
from unisono.data.loading.batch_builder import BatchBuilder
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.untrusted.resource_limits import explain_sigbus

_MAX_PENDING = 2  # requests per process: one in progress, and the next one
_EXIT_TIMEOUT = 5.0  # seconds to wait for a process to exit
_SMALL_BYTES = 1 << 16  # a task's cached properties up to this many bytes are sent along
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from unisono.data.loading.worker_process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class ThreadWorkers:
    """Threads of this process."""

    def __init__(self, maker: BatchBuilder, count: int, name: str) -> None:
        self._maker = maker
        self._requests: SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = SimpleQueue()
        self._waiting: deque[Future[Any]] = deque()
        # Daemons, so that a thread stuck in a read does not keep the process from exiting.
        self._threads = [
            threading.Thread(target=self._work, name=f"unisono-{name}_{number}", daemon=True) for number in range(count)
        ]
        self._started = False

    @property
    def busy(self) -> list[int]:
        """Rows of the source being built."""
        return self._maker.busy

    def ask(self, act: str, *arguments: Any) -> Future[Any]:
        """Submit a call of the builder's method with this name."""
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        future: Future[Any] = Future()
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        self._waiting.append(future)
        self._requests.put((future, act, arguments))
        return future

    def close(self) -> None:
        """Stop the threads after their current requests, unless those take too long."""
        for future in self._waiting:
            future.cancel()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads if self._started else ():
            thread.join(_EXIT_TIMEOUT)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            future, act, arguments = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = getattr(self._maker, act)(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            self._maker.mark_idle()
            del future, request, arguments


class ProcessWorkers:
    """Processes that are started once and receive the builder over a socket.

    Raises:
        DataError: if the task or its rows cannot be pickled.
    """

    def __init__(self, maker: BatchBuilder, count: int, name: str) -> None:
        if worker_process.WORKER_VARIABLE in os.environ:
            raise ConfigError(
                "a worker process was about to start workers of its own while importing the task's file. Put the code "
                "that starts a run under `if __name__ == '__main__':`"
            )
        self._lock = threading.Lock()
        self._requests: deque[tuple[Future[Any], str, tuple[Any, ...]]] = deque()
        self._fault: DataError | None = None
        self.closed = False
        # Sending wakes a process, which may preempt the sender; so the training thread must not send.
        self._more: SimpleQueue[bool] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name=f"unisono-{name}", daemon=True)
        message = _pickle_builder(maker)
        file = references.registered_file(type(maker.task))
        file = file or getattr(sys.modules.get(type(maker.task).__module__), "__file__", None)
        again: dict[str, Any] = {}
        if b"__main__" in message:
            known = spawn.get_preparation_data(name)
            again = {n: v for n, v in known.items() if n.startswith("init_main")}
        module = type(maker.task).__module__
        begin = ipc.IpcMessage((None if module == "__main__" else module, file, again))
        self._processes: list[_WorkerHandle] = []
        try:
            for number in range(count):
                self._processes.append(_WorkerHandle(self, f"unisono-{name}_{number}", begin, message))
        except BaseException:
            self.close()
            raise
        finally:
            message.close()
        self._sender.start()

    @property
    def busy(self) -> list[int]:
        """Rows of the source being built."""
        return sorted({row for process in self._processes if (row := process.current_row) >= 0})

    def ask(self, act: str, *arguments: Any) -> Future[Any]:
        """Submit a call of the builder's method with this name."""
        future: Future[Any] = Future()
        self._requests.append((future, act, arguments))
        self._more.put(True)
        return future

    def dispatch(self) -> None:
        """Pass queued requests on to the processes with the fewest pending ones."""
        with self._lock:
            while self._requests:
                if self._fault is not None:
                    future, *_ = self._requests.popleft()
                    if future.set_running_or_notify_cancel():
                        future.set_exception(self._fault)
                    continue
                process = min(self._processes, key=lambda p: len(p.pending))
                if len(process.pending) >= _MAX_PENDING:
                    return
                future, act, arguments = self._requests.popleft()
                if future.set_running_or_notify_cancel():
                    process.submit(future, act, arguments)

    def fail_all(self, fault: DataError) -> None:
        """Fail all requests from now on, after a process has died."""
        with self._lock:
            self._fault = self._fault or fault
        self.dispatch()

    def close(self) -> None:
        """Stop all processes, even if they are busy."""
        with self._lock:
            self.closed = True
            for future, *_ in self._requests:
                future.cancel()
            self._requests.clear()
        self._more.put(False)
        for process in self._processes:
            process.leave()
        for process in self._processes:
            process.end()
        if self._sender.is_alive():
            self._sender.join(_EXIT_TIMEOUT)

    def _send(self) -> None:
        while self._more.get():
            self.dispatch()


Workers = ThreadWorkers | ProcessWorkers


class _WorkerHandle:
    """A worker process and the thread that receives its answers."""

    def __init__(self, owner: ProcessWorkers, name: str, begin: ipc.IpcMessage, maker: ipc.IpcMessage) -> None:
        self._owner, self._name = owner, name
        self.pending: deque[tuple[Future[Any], tuple[Any, ...]]] = deque()
        self._socket, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            file.truncate(worker_process.PAGE_SIZE)
            self._page = mmap.mmap(file.fileno(), worker_process.PAGE_SIZE)
            descriptors = theirs.fileno(), file.fileno()
            path = json.dumps([os.path.abspath(folder) for folder in sys.path])  # noqa: PTH100 - "" is where we are
            # Inherited by the worker, until it ignores them.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, worker_process.BLOCKED_SIGNALS)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, path, *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **worker_process.THREAD_VARIABLES, worker_process.WORKER_VARIABLE: "1"},
                    process_group=0,  # Ctrl-C should only reach this process, which stops the workers
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._ready = False
        self._thread = threading.Thread(target=self._receive_answers, name=name, daemon=True)
        with suppress(OSError):  # it has exited; the thread reports that
            begin.send(self._socket)
            maker.send(self._socket)
        self._thread.start()

    @property
    def current_row(self) -> int:
        """The row of the source that it is building; -1 for none."""
        return worker_process.read_row(self._page)

    def submit(self, future: Future[Any], act: str, arguments: tuple[Any, ...]) -> None:
        """Send it a request."""
        self.pending.append((future, arguments))
        with suppress(OSError):  # it has exited; the thread reports that
            ipc.send(self._socket, (act, arguments))

    def leave(self) -> None:
        """Ask it to exit."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait until it exits, or kill it."""
        try:
            self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(_EXIT_TIMEOUT)
        self._socket.close()

    def _receive_answers(self) -> None:
        try:
            while True:
                fine, value = ipc.receive(self._socket)
                if not self._ready:
                    if not fine:
                        self._fail_pending(value)
                        return
                    self._ready = True
                    continue
                future, _ = self.pending.popleft()
                if fine:
                    future.set_result(value)
                else:
                    future.set_exception(value)
                del future, value
                self._owner.dispatch()
        except (EOFError, OSError):
            self._fail_pending(None)

    def _fail_pending(self, fault: DataError | None) -> None:
        if self._owner.closed:
            fault = DataError("the loader was closed")
        elif fault is None:
            fault = DataError(self._describe_death())
        self._owner.fail_all(fault)
        while self.pending:
            self.pending.popleft()[0].set_exception(fault)

    def _describe_death(self) -> str:
        try:
            code = self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        row = self.current_row
        made = [getattr(argument, "samples", None) for _, arguments in list(self.pending)[:1] for argument in arguments]
        rows: list[int] = next((taken.rows.tolist() for taken in made if taken is not None), [])
        if row >= 0:
            where = f"while building the sample for row {row} of the source"
        elif rows:
            where = f"while building a batch of rows {', '.join(map(str, rows[:8]))}{', …' if len(rows) > 8 else ''}"
        else:
            where = "before its first sample" if not self._ready else "between two micro-batches"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        more = {-9: "; out of memory?", -7: f"; {explain_sigbus()}"}.get(code, "")
        return f"a worker process died {where} ({how}{more}). Its standard error may say more"


def _pickle_builder(maker: BatchBuilder) -> ipc.IpcMessage:
    """The pickled builder, without the task's large cached properties."""
    slim = copy.copy(maker)
    slim.task = copy.copy(maker.task)
    for name, value in list(vars(slim.task).items()):
        if isinstance(getattr_static(type(slim.task), name, None), cached_property):
            message = _try_pickle(value)
            if message is None or b"torch" in message or message.size > _SMALL_BYTES:
                del vars(slim.task)[name]  # recomputed on demand
    try:
        return ipc.IpcMessage(slim, shared=_SMALL_BYTES)  # fits into any socket's buffer, so sending does not block
    except Exception as error:
        kind = type(maker.task).__name__
        faulty = _try_pickle(maker.source) is None
        what = f"{kind}.data(), a {type(maker.source).__name__}," if faulty else f"the task {kind}"
        raise DataError(
            f"data.worker_kind=processes: {what} cannot be sent to a worker process "
            f"({type(error).__name__}: {error}). Define its classes and functions at the top level of a file, open "
            "files and connections when they are first used, or use data.worker_kind=threads"
        ) from error


def _try_pickle(value: Any) -> ipc.IpcMessage | None:
    try:
        return ipc.IpcMessage(value)
    except Exception:
        return None
