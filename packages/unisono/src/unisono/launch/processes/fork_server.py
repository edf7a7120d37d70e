"""Avoids the seconds that imports take: ranks are forks of one process that has already imported what a rank needs.

A launcher starts the server first and prepares the run meanwhile; the ranks then start at once. The server imports
libraries and Unisono but never user code, since a module may read its rank when it is imported. It opens no device and
starts no Python thread, so that a fork is as good as a new process. Where this is impossible (on systems other than
Linux, or with a library that starts threads), ranks are started as new processes, which only takes longer.

    python -m unisono.launch.processes.fork_server DESCRIPTOR MODULE …

Launcher and server exchange JSON over a socket. Sessions, signals and the death of a parent are handled as in
`unisono.launch.processes.children`, which uses this server or starts processes itself.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Self

from unisono.runtime.collector import paused_collector
from unisono.supervise.processes import die_with_process

# Imported by every rank; the loop and the engine import torch.
PRELOADED_MODULES = (
    "unisono.launch.processes.rank_process",
    "unisono.training.loop",
    "unisono.training.callbacks.build",
    "unisono.engines.torch.engine",
    "torch.distributed.fsdp",
)
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_PR_SET_NAME = 15
is_fork = False  # whether this process is a fork, which ends together with its server


class ForkServer:
    """The launcher's handle to a server. As a context manager, it ends the server with all its forks.

    Args:
        modules: To import in addition to `PRELOADED_MODULES`; import errors are left to the ranks.
        variables: Environment variables of server and ranks, in addition to those of this process.
    """

    def __init__(self, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        self._channel, there = Pipe()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unisono.launch.processes.fork_server", f"{there.fileno()}", *PRELOADED_MODULES,
                *modules],
                env={**os.environ, **(variables or {})}, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()],
                start_new_session=True,
            )  # fmt: skip
        self._exit_codes: dict[int, int] = {}
        self._ready: bool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all its forks."""
        self._channel.close()  # the server ends when the other end is closed
        if self._ready is None:  # still importing: it would notice only later, and has no forks
            self._process.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def ready(self) -> bool:
        """Whether the server can fork; waits until it has imported everything."""
        if self._ready is None:
            self._ready = bool((_receive(self._channel) or {}).get("ready"))
        return self._ready

    def preload(self, modules: Sequence[str]) -> None:
        """Let the server import more, while it has no forks; `ready` then waits for that, too."""
        if modules and self.ready:
            _send(self._channel, {"modules": list(modules)})
            self._ready = None

    def fork(self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[int]:
        """Fork one process per environment, each calling a module's `main` with a folder as a path, and strings.

        Returns:
            Their process ids.
        """
        order = {"module": module, "arguments": list(arguments), "environments": [dict(e) for e in environments]}
        _send(self._channel, {**order, "cwd": str(Path.cwd())})
        while (answer := _receive(self._channel)) is not None:
            if "pids" in answer:
                return list(answer["pids"])
            self._exit_codes[answer["pid"]] = answer["code"]
        raise OSError("the fork server is gone")

    def collect_exit_codes(self, seconds: float) -> dict[int, int]:
        """Return the exit codes of forks that have ended since, as in `subprocess`; wait at most `seconds` for one.

        Raises:
            OSError: If the server is gone, and all its forks with it.
        """
        found, self._exit_codes = self._exit_codes, {}
        while self._channel.poll(0.0 if found else seconds):
            answer = _receive(self._channel)
            if answer is None:
                raise OSError("the fork server is gone")
            found[answer["pid"]] = answer["code"]
        return found


def _send(channel: Connection, message: Any) -> None:
    channel.send_bytes(json.dumps(message).encode())


def _receive(channel: Connection) -> Any:
    """Return the next message; None if the other end is closed."""
    try:
        return json.loads(channel.recv_bytes())
    except (EOFError, OSError):
        return None


def can_fork() -> bool:
    """Whether ranks can be forks on this system."""
    return sys.platform == "linux" and hasattr(os, "fork")


# the server ---------------------------------------------------------------------------------------------------------


def main(descriptor: int, modules: Sequence[str]) -> NoReturn:
    """Run the server."""
    sys.modules["unisono.launch.processes.fork_server"] = sys.modules["__main__"]  # avoids a second copy when imported
    die_with_process(None)
    for number in _IGNORED_SIGNALS:  # meant for the ranks and the launcher
        signal.signal(number, signal.SIG_IGN)
    channel = Connection(descriptor)
    _preload(channel, modules)
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    wakeup.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled.fileno())
    children = set[int]()
    while True:
        ready = wait([channel, wakeup])
        if wakeup in ready:
            with suppress(BlockingIOError):
                wakeup.recv(4096)
            _report_exits(channel, children)
        if channel in ready:
            order = _receive(channel)
            if order is None:  # the launcher is gone or done
                for child in children:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                os._exit(0)
            if "modules" in order:
                _preload(channel, order["modules"])
                continue
            sockets = (channel, wakeup, signalled)
            pids = [_fork(order, environment, sockets) for environment in order["environments"]]
            children.update(pids)
            _send_or_exit(channel, {"pids": pids})


def _preload(channel: Connection, modules: Sequence[str]) -> None:
    """Import modules, and report whether this process can be forked."""
    with paused_collector():
        for module in modules:
            with suppress(Exception):  # a rank that needs it will report the error
                importlib.import_module(module)
    ready = threading.active_count() == 1 and not _has_opened_a_device()
    _send_or_exit(channel, {"ready": ready})
    gc.collect()
    gc.freeze()  # keeps collections in a fork from touching, and so copying, shared pages


def _report_exits(channel: Connection, children: set[int]) -> None:
    for child in sorted(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.discard(child)
            _send_or_exit(channel, {"pid": child, "code": os.waitstatus_to_exitcode(status)})


def _send_or_exit(channel: Connection, message: Any) -> None:
    try:
        _send(channel, message)
    except OSError:  # the launcher is gone
        os._exit(0)


def _fork(
    order: Mapping[str, Any], environment: Mapping[str, str], sockets: Sequence[Connection | socket.socket]
) -> int:
    """Fork a process that carries out an order; return its process id."""
    server = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads; Python started none here
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_process(server)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*_IGNORED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for one in sockets:
            one.close()
        _apply_environment(order, environment)
        folder, *more = order["arguments"]
        importlib.import_module(order["module"]).main(Path(folder), *more)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _apply_environment(order: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Make this process look like one that was started with this environment, including its process name."""
    global is_fork
    is_fork = True
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(order["cwd"])
    sys.argv = [order["module"], *order["arguments"]]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {environment.get('RANK', '?')}".encode())
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and threads != before and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))


def _has_opened_a_device() -> bool:
    """Whether an import has opened an accelerator, which a fork could not use."""
    torch = sys.modules.get("torch")
    backends: list[Any] = [getattr(torch, name, None) for name in ("cuda", "xpu", "npu", "hpu", "mtia")]
    return any(backend.is_initialized() for backend in backends if hasattr(backend, "is_initialized"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
