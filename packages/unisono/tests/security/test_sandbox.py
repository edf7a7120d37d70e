"""What the process that reads a pickle can still do, tried from inside of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.checkpoint.exchange import sandbox

TRIES = """
import ctypes, json, os, queue, resource, socket, sys, threading, time
from unisono.checkpoint.exchange import sandbox
home, allowed, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
open_before = open(os.path.join(home, "out"), "w")
shut = sys.argv[4] == "shut"
early = threading.Thread(target=lambda: jobs.get()(), daemon=True)
jobs = queue.Queue()
if sys.argv[5:] == ["thread"]:
    early.start()
missing = sandbox.enter([allowed]) if shut else []
system = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise PermissionError(ctypes.get_errno())
def fork():
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
tries = {
    "read a key": lambda: open(os.path.join(home, "key")).read(),
    "write into the home": lambda: open(os.path.join(home, "new"), "w"),
    "list the home": lambda: os.listdir(home),
    "read the parent's environment": lambda: open(f"/proc/{parent}/environ", "rb").read(),
    "make a socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "signal the parent": lambda: os.kill(parent, 0),
    "change its mode": lambda: os.chmod(os.path.join(home, "key"), 0o600),
    "change its owner": lambda: os.chown(os.path.join(home, "key"), os.getuid(), -1),
    "change its time": lambda: os.utime(os.path.join(home, "key")),
    "set an attribute": lambda: checked(system.setxattr(os.path.join(home, "key").encode(), b"user.a", b"b", 1, 0)),
    "make a process": fork,
    "limit the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
    "change the session": lambda: os.setpgid(0, 0),
    "write what it may read": lambda: os.close(os.open(allowed, os.O_WRONLY)),
    "run a program": lambda: os.execv("/bin/true", ["true"]) if shut else None,
}
done = {}
for name, act in tries.items():
    try:
        act()
        done[name] = True
    except PermissionError:
        done[name] = False
open_before.write("still"), open_before.close()
later = []
if early.is_alive():
    jobs.put(lambda: later.append(system.socket(1, 1, 0)))
    early.join()
done["a socket of an earlier thread"] = bool(later) and later[0] >= 0
working = []
helper = threading.Thread(target=working.append, args=(1,))
helper.start(), helper.join()
done["start a thread"] = working == [1]
done["read what it is given"] = open(allowed).read() == "given"
os.write(1, json.dumps([missing, done]).encode())
"""
KEPT = {"read what it is given": True, "start a thread": True}


def tried(folder: Path, *how: str) -> tuple[list[str], dict[str, bool]]:
    (folder / "key").write_text("secret")
    (folder / "given").write_text("given")
    words = [sys.executable, "-c", TRIES, str(folder), str(folder / "given"), str(os.getpid()), *how]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing, found = json.loads(done.stdout)
    return missing, found


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux alone")
def test_the_process_of_a_pickle_has_no_way_out(tmp_path: Path) -> None:
    _, open_ = tried(tmp_path, "open", "thread")
    open_.pop("set an attribute")  # not every file system has them
    assert all(open_.values()), "without it each of them is possible, or nothing is shown"
    (tmp_path / "new").unlink()
    missing, shut = tried(tmp_path, "shut")
    files = {"read a key", "write into the home", "list the home", "read the parent's environment"}
    possible = {name for name, can in shut.items() if can} - KEPT.keys()
    calls = {
        "make a socket", "signal the parent", "run a program", "change its mode", "change its owner", "change its time",
        "set an attribute", "make a process", "limit the parent", "change the session", "write what it may read",
    }  # fmt: skip
    expected = (files if any("Landlock" in name for name in missing) else set()) | (
        calls if any("seccomp" in name for name in missing) else set()
    )
    assert possible <= expected, f"{possible - expected} are possible, and nothing says so"
    assert shut["read what it is given"]
    assert (tmp_path / "out").read_text() == "still", "what was open stays open"
    if not missing:
        assert possible == set()


def test_what_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "another")
    assert [name.split()[0] for name in sandbox.enter([])] == ["Landlock", "seccomp"]


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux alone")
def test_threads_that_exist_are_restricted_too_or_it_is_said(tmp_path: Path) -> None:
    """The sandbox bound one thread, and torch's import had started others before it."""
    missing, shut = tried(tmp_path, "shut", "thread")
    assert "Landlock (files)" in missing
    assert not shut["a socket of an earlier thread"] or "seccomp (system calls)" in missing
