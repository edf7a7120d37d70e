"""A fork is what a new process would be; as a program, this module says what it sees of itself."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import fork_server

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "packages.unisono.tests.test_fork_server"]
FILE = [sys.executable, str(Path(__file__))]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are real ones elsewhere")


def describe() -> dict[str, Any]:
    """What a process can see of itself that does not differ between two real ones."""
    return {
        "name": __name__,
        "words": sys.argv[1:],
        "command": [word for word in Path("/proc/self/cmdline").read_text().split("\0") if word],
        "environment": sorted(v for v in Path("/proc/self/environ").read_text().split("\0") if v.startswith("OURS")),
        "variable": os.environ.get("OURS"),
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "folder": str(Path.cwd()),
        "path": sys.path,
        "input": sys.stdin.read(),
        "open": sorted(str(Path(f"/proc/self/fd/{n}").readlink()).partition(":")[0] for n in range(3)),
        "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "mask": os.umask(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN,
        "torch": "torch" in sys.modules,
    }


def ask(*words: str, program: list[str] = PROGRAM, **options: Any) -> tuple[dict[str, Any], str, int]:
    done = subprocess.run(
        [*program, *words], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'docs'}", "OURS": "a=b"}, **options,
    )  # fmt: skip
    return json.loads(done.stdout or "{}"), done.stderr, done.returncode


@pytest.mark.parametrize(
    "options",
    [{"input": "said"}, {"input": "", "start_new_session": True}, {"input": "", "program": FILE}],
    ids=["plain", "session", "script"],
)
def test_a_fork_sees_of_itself_what_a_new_process_does(
    tmp_path: Path, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN), os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: (signal.signal(signal.SIGUSR2, before[0]), os.umask(before[1])))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before[2]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[2][1]))
    forked, said, code = ask("3", "two words", cwd=tmp_path, **options)
    with fork_server.real():
        real, _, expected = ask("3", "two words", cwd=tmp_path, **options)
    assert (forked.pop("torch"), real.pop("torch")) == (True, False), "one of them was not what it was to be"
    assert forked == real
    assert said == "to stderr\n"
    assert code == expected == 3


@pytest.mark.parametrize("how", ["a hash seed", "code of the site"])
def test_what_a_fork_cannot_have_gives_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    assert ask("0", input="", cwd=tmp_path)[0]["torch"]
    if how == "a hash seed":
        monkeypatch.setenv("PYTHONHASHSEED", "3")
    else:
        (tmp_path / "sitecustomize.py").write_text("")
    assert not ask("0", input="", cwd=tmp_path)[0]["torch"]


def test_what_ends_a_fork_is_told_as_of_any_child() -> None:
    assert ask("signal", input="")[2] == -signal.SIGTERM
    _, said, code = ask("no number", input="")
    assert (code, "ValueError: invalid literal" in said) == (1, True)


if __name__ == "__main__":
    if sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    print("to stderr", file=sys.stderr)
    print(json.dumps(describe()))
    raise SystemExit(int(sys.argv[1]))
