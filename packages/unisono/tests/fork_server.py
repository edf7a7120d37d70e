"""Commands of Python without the seconds that imports take: forks of one process that has imported torch.

Once a test run has called `install`, what is started as `python -m unisono…`, `-m packages…`, `python script.py`,
`unisono …` or `torchrun …`, with `subprocess` and by whomever, is a fork of a server, which is started when it is first
needed. All else about it is as it would be: its parent, its command line and environment in `/proc`, its streams,
folder, session and import path. Two things are not: more has been imported, and the hash seed of strings is the same in
all. What a command starts, as a launcher its ranks, is forked too: from a copy of the command that was made before it
began. In `real`, processes are started as ever; so is one whose environment asks for what only a new process can do, as
`PYTHONHASHSEED` does.

A fork would miss the threads of what it was forked from, and find their locks locked: the server computes nothing and
has no threads. Linux alone lets a process inherit the orphans of its children; elsewhere all processes are real ones.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import inspect
import os
import pickle
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
# What ranks and commands need in most tests. A module of tests is imported when a rank is first to call into it.
IMPORTED = (
    "torch", "torch.distributed.fsdp", "torch.nn.parallel", "numpy", "hydra", "unisono.cli.main",
    "unisono.launch.train", "unisono.launch.processes.rank_process", "unisono.supervise.monitor",
    "unisono.engines.torch.engine", "unisono.training.loop",
    "packages.unisono.tests.processes", "packages.unisono.tests.runs", "packages.unisono.tests.tasks",
)  # fmt: skip
# Libraries that these import start threads; each fork imports them for itself.
NEVER_IMPORTED = ("recipes.microbiome.tests", "tests.proofs.test_microbiome")
SCRIPTS = {"unisono": "unisono", "torchrun": "torch.distributed.run"}  # beside the interpreter: the modules they run
SCRIPT = "<script>"  # in place of a module: a file, which is the first argument
STARTERS = ("unisono", "torch.distributed.run", SCRIPT)  # whose processes start others
OURS = ("unisono", "tests", "packages", "recipes")  # whose modules are run
FORKS = "unisono.launch.processes.fork_server"  # a server of its own, which is given a descriptor
PATIENCE = 600.0  # seconds for a process to be there, the imports of a server on a busy machine included

_THREADS = {"jemalloc_bg_thd"}  # of pyarrow's allocator, which expects to be forked
_ROOM = 1 << 13  # bytes in /proc for the command line, and as many for the environment, of a fork
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_start_really = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_start_really)


@dataclass(frozen=True)
class Request:
    """A process to start.

    Attributes:
        words: its command line.
        module: what it runs.
        arguments: what it is given.
        environment: all variables.
        folder: to work in.
        session: whether it leads one.
        path: where it looks for modules before where any process does.
        limits: of resources, by number.
        mask: of the rights of new files.
        cores: that it may run on.
        ignored: signals.
        passed: descriptors that it gets; arguments name them.
    """

    words: tuple[str, ...]
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    session: bool
    path: tuple[str, ...]
    limits: Mapping[int, tuple[int, int]]
    mask: int
    cores: frozenset[int]
    ignored: frozenset[int]
    passed: tuple[int, ...] = ()

    @property
    def imports(self) -> list[str]:
        """What the server imports first, so that each of many ranks need not."""
        return [self.arguments[0].partition(":")[0]] if self.module == "packages.unisono.tests.processes" else []


# from the side of whoever wants a process ----------------------------------------------------------------------------


class Server:
    """What is forked."""

    enabled = True

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect, self._lock = connect, threading.Lock()
        self._connection: socket.socket | None = None

    def fork(self, request: Request, streams: Sequence[int]) -> int:
        """The number of a new process, whose parent is this one."""
        with self._lock:
            if self._connection is None:
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
                self._connection = self._connect()
                self._connection.settimeout(PATIENCE)
            body = pickle.dumps(request)
            socket.send_fds(self._connection, [len(body).to_bytes(8, "big")], streams)
            self._connection.sendall(body)
            answer = self._connection.recv(1 << 16)
        if not answer.isdigit():
            raise RuntimeError(f"the fork server failed\n{answer.decode()}")
        return int(answer)


_server: Server | None = None


def install(server: Server | None = None) -> None:
    """From now on, what this process starts of ours is forked."""
    global _server
    if sys.platform == "linux":
        _server = server or Server(_begin_server)
        subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]


@contextmanager
def real() -> Iterator[None]:
    """Processes that are started in here are real ones."""
    before, Server.enabled = Server.enabled, False
    try:
        yield
    finally:
        Server.enabled = before


def _start(popen: Any, *positional: Any, **named: Any) -> None:
    """`subprocess.Popen._execute_child`, which starts the process and sets `pid`."""
    given = _parameters.bind(popen, *positional, **named).arguments
    request = _read(given) if Server.enabled else None
    if _server is None or request is None:
        _start_really(popen, *positional, **named)
        return
    names = ("p2cread", "c2pwrite", "errwrite")
    streams = [own if given[name] == -1 else given[name] for own, name in enumerate(names)]
    popen.pid = _server.fork(request, [*streams, *request.passed])
    popen._child_created = True
    popen._close_pipe_fds(
        *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _read(given: Mapping[str, Any]) -> Request | None:
    """What is asked for, if it is a command of ours, and nothing is asked that a fork cannot do."""
    if isinstance(given["args"], str | bytes | os.PathLike) or given["shell"]:
        return None
    if given["preexec_fn"] or given["executable"] not in (None, sys.executable):
        return None
    words = tuple(map(os.fsdecode, given["args"]))
    environment = dict(os.environ if given["env"] is None else given["env"])
    folder = os.path.abspath(given["cwd"] or ".")  # noqa: PTH100
    path = [*environment.get("PYTHONPATH", "").split(os.pathsep)]
    if (script := Path(words[0])).name in SCRIPTS and script.parent == Path(sys.executable).parent:
        module, arguments = SCRIPTS[script.name], words[1:]
    elif words[:2] == (sys.executable, "-m") and words[2].partition(".")[0] in OURS:
        module, arguments, path = words[2], words[3:], [folder, *path]
    elif (
        words[0] == sys.executable
        and len(words) > 1
        and (rest := words[2:] if words[1:2] == ("-u",) else words[1:])
        and rest
        and (script := Path(folder, rest[0])).suffix == ".py"
    ):
        module, arguments, path = SCRIPT, rest, [str(script.resolve().parent), *path]
    else:
        return None
    if (
        not Path(folder).is_dir()
        or module == "packages.unisono.tests.fork_server"
        or (given["pass_fds"] and module != FORKS)
    ):
        return None
    path = [entry for entry in path if entry]
    if _startup(environment) != _BEGAN or any(Path(entry, "sitecustomize.py").exists() for entry in path):
        return None
    limits = {number: resource.getrlimit(number) for number in _LIMITS}
    os.umask(mask := os.umask(0))
    ignored = frozenset(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)
    return Request(
        words, module, arguments, environment, folder, given["start_new_session"], tuple(path), limits, mask,
        frozenset(os.sched_getaffinity(0)), ignored, tuple(given["pass_fds"]),
    )  # fmt: skip


def _startup(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process reads once, when it starts; a fork cannot have it otherwise."""
    found = {
        name: value for name, value in environment.items() if name.startswith(("PYTHON", "LD_", "GLIBC_", "MALLOC_"))
    }
    found |= {name: value for name in _THREAD_COUNTS if (value := environment.get(name, "1")) != "1"}
    return {name: value for name, value in found.items() if name != "PYTHONPATH"}


def _begin_server() -> socket.socket:
    ours, its = socket.socketpair()
    # the path of the session: a test that asks first may have one of its own, which others are not to find
    settings = {**dict.fromkeys(_THREAD_COUNTS, "1"), "UNISONO_TESTS_ROOM": "." * _ROOM, "PYTHONPATH": _SEARCHED}
    process = subprocess.Popen(
        [sys.executable, "-m", "packages.unisono.tests.fork_server", str(its.fileno()), "." * _ROOM],
        cwd=ROOT, pass_fds=[its.fileno()], env={**os.environ, **settings}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    its.close()
    atexit.register(_end_server, ours, process)
    return ours


def _end_server(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the server, though a process that a test has left behind may hold its connection open."""
    connection.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


# from the side of the server -----------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> Callable[[], None]:
    """Fork whatever is asked for, until nobody asks; returns in each fork, with what it is to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        header, streams, _, _ = socket.recv_fds(connection, 8, 4)
        if not header:
            os._exit(0)
        body = b""
        while len(body) < int.from_bytes(header, "big"):
            body += connection.recv(1 << 20)
        request: Request = pickle.loads(body)
        try:
            for name in request.imports:
                if not name.startswith(NEVER_IMPORTED):
                    importlib.import_module(name)
            _assert_one_thread(request)
        except BaseException:
            connection.sendall(traceback.format_exc().encode())
        else:
            reads, writes = os.pipe()
            if (between := os.fork()) == 0:
                between = os.getpid()
                if pid := os.fork():
                    os.write(writes, str(pid).encode())
                    os._exit(0)
                connection.close()
                os.close(reads)
                os.close(writes)
                while os.getppid() == between:  # until it is the child of whoever asked
                    time.sleep(0.0005)
                return _begin(request, streams)
            os.waitpid(between, 0)
            connection.sendall(os.read(reads, 20))
            os.close(reads)
            os.close(writes)
        for number in streams:
            os.close(number)


def _begin(request: Request, streams: Sequence[int]) -> Callable[[], None]:
    """Make of a fork what a new process would be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.umask(request.mask)
    os.sched_setaffinity(0, request.cores)
    for number, limits in request.limits.items():
        if limits != resource.getrlimit(number):
            resource.setrlimit(number, limits)
    if request.session:
        os.setsid()
    for own, number in enumerate(streams[:3]):
        os.dup2(number, own)
        os.close(number)
    passed = {str(old): str(new) for old, new in zip(request.passed, streams[3:], strict=True)}
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _show(request.words, [f"{name}={value}" for name, value in request.environment.items()])
    sys.path[:] = [*request.path, *_PATH]
    importlib.invalidate_caches()
    random.seed()
    sys.modules["numpy"].random.seed()
    if request.module in STARTERS:
        ours, its = socket.socketpair()
        if os.fork() == 0:
            return _stay_behind(its)
        its.close()
        install(Server(lambda: ours))

    def run() -> None:
        if request.module == FORKS:  # as others have imported it already, and it is to be one module
            sys.modules["__main__"] = module = importlib.import_module(FORKS)
            number, *modules = request.arguments
            module.main(int(passed[number]), modules)
        if request.module == SCRIPT:
            file = str(Path(request.arguments[0]).absolute())
            sys.argv, sys.modules["__main__"] = list(request.arguments), (main := types.ModuleType("__main__"))
            main.__dict__.update(__file__=file, __builtins__=builtins)
            exec(compile(Path(file).read_bytes(), file, "exec"), main.__dict__)
            return
        sys.argv = [request.module, *request.arguments]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.modules.pop(
            request.module if request.module != "unisono" else "unisono.__main__", None
        )  # as runpy wants it
        runpy._run_module_as_main(request.module)  # type: ignore[attr-defined]

    return run


def _stay_behind(connection: socket.socket) -> Callable[[], None]:
    """What a command was before it began, for the processes that it starts."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in range(3):
        os.dup2(nothing, own)
    os.close(nothing)
    os.chdir("/")
    _show(["packages.unisono.tests.fork_server"], [])
    return serve(connection)


def _show(words: Sequence[str], variables: Sequence[str]) -> None:
    """Have `/proc` show this command line and environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for first, last, texts in ((fields[45], fields[46], words), (fields[47], fields[48], variables)):
        start, size = int(first), int(last) - int(first)
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: size - 1]
        ctypes.memmove(start, data.ljust(size, b"\0"), size)


def _assert_one_thread(request: Request) -> None:
    """Threads do not survive a fork, and what they hold stays locked for ever."""
    assert threading.active_count() == 1, threading.enumerate()
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    found = sorted(text for task in tasks if (text := (task / "comm").read_text().strip()) not in _THREADS)
    assert not found, f"{', '.join(request.imports)} starts threads when imported ({found}); see NEVER_IMPORTED"


def main(descriptor: int) -> Callable[[], None]:
    """The server's own beginning; like `serve`, it returns in each fork."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork need not touch, and so copy, what all share
    return serve(socket.socket(fileno=descriptor))


_BEGAN = _startup(os.environ)
_SEARCHED = os.environ.get("PYTHONPATH", "")
# Of any process: `python -m` has put the server's folder first, and a fork has a PYTHONPATH of its own.
_PATH = [entry for entry in sys.path if entry not in (str(ROOT), *_SEARCHED.split(os.pathsep))]

if __name__ == "__main__":
    from packages.unisono.tests import fork_server

    fork_server.main(int(sys.argv[1]))()
