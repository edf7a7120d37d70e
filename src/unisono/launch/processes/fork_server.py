"""Processes without the seconds that imports take: forks of one process that has imported what a rank imports.

A launcher starts the server first and prepares the run beside it; the ranks are then there at once. The server imports
libraries and Unisono, never the user's code: a module may read its rank where it is imported. It opens no device and
starts no thread of Python's, so that a fork is as good as a new process; where that cannot be had (another system than
Linux, a library that starts threads) ranks are started as new processes, which takes longer and is the same.

    python -m unisono.launch.processes.fork_server DESCRIPTOR MODULE …

Launcher and server exchange JSON, one message a line, over a socket. A process group, signals and the death of a parent
are as in `unisono.launch.processes.children`, which asks this server or starts processes itself.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# What every rank imports: the loop and the engine bring torch with them.
PRELOADED_MODULES = (
    "unisono.launch.processes.rank_process",
    "unisono.training.loop",
    "unisono.training.callbacks.build",
    "unisono.engines.torch.engine",
    "torch.distributed.fsdp",
)
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
is_fork = False  # whether this process is one, which ends with its server already


class ForkServer:
    """A server, from the side of the launcher. A context: its forks end with it.

    Args:
        modules: to import, besides `PRELOADED_MODULES`; what cannot be imported is left to the ranks.
        variables: of the environment of server and ranks, besides those of this process.
    """

    def __init__(self, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unisono.launch.processes.fork_server", f"{there.fileno()}", *PRELOADED_MODULES,
                *modules],
                env={**os.environ, **(variables or {})}, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()],
                start_new_session=True,
            )  # fmt: skip
        self._channel = JsonChannel(here)
        self._exit_codes: dict[int, int] = {}
        self._ready: bool | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all its forks."""
        self._channel.close()  # it ends when nobody is there any more
        if self._ready is None:  # it is still importing, would only see that afterwards, and has no forks
            self._process.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def ready(self) -> bool:
        """Whether it can fork; waits until it has imported everything."""
        if self._ready is None:
            answer = self._channel.receive()
            self._ready = bool(answer and answer["ready"])
        return self._ready

    def fork(self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[int]:
        """Fork a process for each environment, which calls `main` of a module; returns their numbers.

        Args:
            module: whose `main` takes a folder, as a path, and texts.
            arguments: of `main`.
            environments: of the processes.
        """
        order = {"module": module, "arguments": list(arguments), "environments": [dict(e) for e in environments]}
        self._channel.send({**order, "cwd": str(Path.cwd())})
        while (answer := self._channel.receive()) is not None:
            if "pids" in answer:
                return list(answer["pids"])
            self._exit_codes[answer["pid"]] = answer["code"]
        raise OSError("the fork server is gone")

    def collect_exit_codes(self, seconds: float) -> dict[int, int]:
        """The exit codes of forks that have ended since, as `subprocess` has them; waits so long for the first.

        Raises:
            OSError: if the server is gone, and all its forks with it.
        """
        found, self._exit_codes = self._exit_codes, {}
        while self._channel.has_message(0.0 if found else seconds):
            answer = self._channel.receive()
            if answer is None:
                raise OSError("the fork server is gone")
            found[answer["pid"]] = answer["code"]
        return found


class JsonChannel:
    """JSON messages, one a line, over a socket."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._read = b""

    def send(self, message: Any) -> None:
        """Send a message, or raise an OSError."""
        self.link.sendall(json.dumps(message).encode() + b"\n")

    def has_message(self, seconds: float) -> bool:
        """Whether a message, or the end, can be received; waits so long for it."""
        return b"\n" in self._read or bool(select.select([self.link], [], [], seconds)[0])

    def receive(self) -> Any:
        """The next message; None at the end."""
        while b"\n" not in self._read:
            try:
                part = self.link.recv(1 << 16)
            except ConnectionError:
                return None
            if not part:
                return None
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Hang up."""
        self.link.close()


def die_with_process(parent: int | None) -> None:
    """Ask the kernel to end this process with its parent (on Linux); at once if that is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def can_fork() -> bool:
    """Whether ranks may be forks on this system."""
    return sys.platform == "linux" and hasattr(os, "fork")


# the server ---------------------------------------------------------------------------------------------------------


def main(descriptor: int, modules: Sequence[str]) -> NoReturn:
    """Entry of the server."""
    sys.modules["unisono.launch.processes.fork_server"] = sys.modules["__main__"]  # one module, whoever imports it
    die_with_process(None)
    for number in _IGNORED_SIGNALS:  # they are meant for the ranks and the launcher
        signal.signal(number, signal.SIG_IGN)
    channel = JsonChannel(socket.socket(fileno=descriptor))
    for module in modules:
        with suppress(ImportError):  # a rank says so, if it needs it
            importlib.import_module(module)
    ready = threading.active_count() == 1 and not _has_opened_a_device()
    _send_or_exit(channel, {"ready": ready})
    gc.collect()
    gc.freeze()  # a collection in a fork need not touch, and so copy, what all share
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    wakeup.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled.fileno())
    children = set[int]()
    while True:
        asked, _, _ = select.select([channel.link, wakeup], [], [])
        if wakeup in asked:
            with suppress(BlockingIOError):
                wakeup.recv(4096)
            _report_exits(channel, children)
        if channel.link in asked:
            order = channel.receive()
            if order is None:  # the launcher is gone, or has no more work
                for child in children:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                os._exit(0)
            sockets = (channel.link, wakeup, signalled)
            pids = [_fork(order, environment, sockets) for environment in order["environments"]]
            children.update(pids)
            _send_or_exit(channel, {"pids": pids})


def _report_exits(channel: JsonChannel, children: set[int]) -> None:
    """Say which children have ended, and how."""
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        children.discard(pid)
        _send_or_exit(channel, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _send_or_exit(channel: JsonChannel, message: Any) -> None:
    try:
        channel.send(message)
    except OSError:  # the launcher is gone
        os._exit(0)


def _fork(order: Mapping[str, Any], environment: Mapping[str, str], sockets: Sequence[socket.socket]) -> int:
    """The number of a fork that does what was ordered."""
    server = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads: there are none of its own
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
            os.close(one.detach())
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
    """Be a process that was started with this environment, and that people find by its name."""
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
    """Whether an import has opened an accelerator, which no fork could use."""
    torch = sys.modules.get("torch")
    backends: list[Any] = [getattr(torch, name, None) for name in ("cuda", "xpu", "npu", "hpu", "mtia")]
    return any(backend.is_initialized() for backend in backends if hasattr(backend, "is_initialized"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
