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
import ctypes, json, os, socket, sys
from unisono.checkpoint.exchange import sandbox
home, allowed, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
open_before = open(os.path.join(home, "out"), "w")
shut = sys.argv[4] == "shut"
missing = sandbox.enter([allowed]) if shut else []
tries = {
    "read a key": lambda: open(os.path.join(home, "key")).read(),
    "write into the home": lambda: open(os.path.join(home, "new"), "w"),
    "list the home": lambda: os.listdir(home),
    "read the parent's environment": lambda: open(f"/proc/{parent}/environ", "rb").read(),
    "make a socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "signal the parent": lambda: os.kill(parent, 0),
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
done["read what it is given"] = open(allowed).read() == "given"
os.write(1, json.dumps([missing, done]).encode())
"""
KEPT = {"read what it is given": True}


def tried(folder: Path, how: str) -> tuple[list[str], dict[str, bool]]:
    (folder / "key").write_text("secret")
    (folder / "given").write_text("given")
    words = [sys.executable, "-c", TRIES, str(folder), str(folder / "given"), str(os.getpid()), how]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing, found = json.loads(done.stdout)
    return missing, found


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux alone")
def test_the_process_of_a_pickle_has_no_way_out(tmp_path: Path) -> None:
    _, open_ = tried(tmp_path, "open")
    assert all(open_.values()), "without it each of them is possible, or nothing is shown"
    (tmp_path / "new").unlink()
    missing, shut = tried(tmp_path, "shut")
    files = {"read a key", "write into the home", "list the home", "read the parent's environment"}
    possible = {name for name, can in shut.items() if can} - KEPT.keys()
    expected = (files if any("Landlock" in name for name in missing) else set()) | (
        {"make a socket", "signal the parent", "run a program"} if any("seccomp" in name for name in missing) else set()
    )
    assert possible <= expected, f"{possible - expected} are possible, and nothing says so"
    assert shut["read what it is given"]
    assert (tmp_path / "out").read_text() == "still", "what was open stays open"
    if not missing:
        assert possible == set()


def test_what_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "another")
    assert [name.split()[0] for name in sandbox.enter([])] == ["Landlock", "seccomp"]
