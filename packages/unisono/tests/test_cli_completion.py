"""Shell completion, by a real bash on a pseudo-terminal: a key press of Tab completes what was begun."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs

pytest.importorskip("argcomplete", reason="argcomplete is not installed: pip install 'unisono[completion]'")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")

TASK = """
import unisono
import a_module_that_does_not_exist  # a file is read, not run

class Shared(unisono.Settings):
    width: int = 64

class Mine(unisono.Task):
    Model = Shared

    class Config(unisono.Settings):
        temperature: float = 1.0
"""


_SHELLS = {
    "bash": (["--norc"], 'bind "set bell-style none"'),
    "zsh": (["-f"], "autoload -Uz compinit && compinit -u -D"),
}


class Shell:
    """An interactive shell with completion, in which lines are typed and completed."""

    def __init__(self, folder: Path, name: str = "bash") -> None:
        words, setup = _SHELLS[name]
        self._child, self._terminal = pty.fork()
        if self._child == 0:
            os.chdir(folder)
            path = f"{Path(jobs.UNISONO).parent}:{os.environ['PATH']}"
            os.execvpe(name, [name, *words, "-i"], {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "$ "})
        self._type(f'{setup}; eval "$(unisono completion {name})"; echo is "ready"\n', "is ready")

    def complete(self, begun: str) -> str:
        """The line after Tab: it is then given to echo, so that the shell itself says what it has become."""
        text = self._type(f"{begun}\t\x01echo '<<' \x05 '>>'\n", ">>\r\n")
        return text.rpartition("\n<< ")[2].partition(" >>")[0]

    def close(self) -> None:
        with suppress(OSError):
            os.write(self._terminal, b"\x03\nexit\n")
        os.close(self._terminal)
        os.waitpid(self._child, 0)

    def _type(self, keys: str, until: str) -> str:
        os.write(self._terminal, keys.encode())
        seen, deadline = "", time.monotonic() + 60
        while time.monotonic() < deadline:
            if select.select([self._terminal], [], [], 1.0)[0]:
                seen += os.read(self._terminal, 65536).decode()
            if "\n" in seen and until in seen.partition("\n")[2]:
                return seen
        raise AssertionError(f"bash did not answer {keys!r}: {seen!r}")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "mine.py").write_text(TASK)
    for name in ("first_try", "second_try"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").write_text("recipe: mine.py:Mine\n")
    opened = Shell(folder)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("begun", "completed"),
    [
        ("unisono desc", "unisono describe"),
        ("unisono predi", "unisono predict"),  # a verb of every task, which the parser does not know
        ("unisono train min", "unisono train mine.py"),
        ("unisono check mine.py optim.l", "unisono check mine.py optim.lr="),
        ("unisono train mine.py train.epochs=3 train.glo", "unisono train mine.py train.epochs=3 train.global_batch="),
        ("unisono train mine.py task.te", "unisono train mine.py task.temperature="),
        ("unisono train mine.py:Mine model.w", "unisono train mine.py:Mine model.width="),
        ("unisono train mine.py layout.strategy=fs", "unisono train mine.py layout.strategy=fsdp"),
        ("unisono train mine.py optim=mu", "unisono train mine.py optim=muon"),
        ("unisono resume runs/sec", "unisono resume runs/second_try"),
        ("unisono resume runs/second_try task.te", "unisono resume runs/second_try task.temperature="),
        ("unisono diagnose ru", "unisono diagnose runs/"),
        ("unisono explain a-mean", "unisono explain a-mean-of-means"),
    ],
)
def test_tab_completes_verbs_files_keys_values_and_runs(shell: Shell, begun: str, completed: str):
    assert shell.complete(begun) == completed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_tab_completes_in_zsh_too(tmp_path: Path):
    zsh = Shell(tmp_path, "zsh")
    try:
        assert zsh.complete("unisono desc").split() == ["unisono", "describe"]
        line = "unisono train mine.py layout.strategy=fs"
        assert zsh.complete(line).split() == ["unisono", "train", "mine.py", "layout.strategy=fsdp"]
    finally:
        zsh.close()


def test_tab_completes_recipes_and_the_keys_of_their_files(spirals: Path, tmp_path: Path):
    shell = Shell(tmp_path)
    try:
        assert shell.complete("unisono train spir") == "unisono train spirals"
        assert shell.complete("unisono train spirals model=na") == "unisono train spirals model=narrow"
        line = "unisono train spirals model=narrow model.wid"
        assert shell.complete(line) == f"{line}th="
    finally:
        shell.close()


def test_completing_imports_no_library_that_computes(tmp_path: Path):
    line = "unisono train mine.py optim."
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
             "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"), "_ARGCOMPLETE_IFS": "\n"}  # fmt: skip
    code = (
        "import os, sys\nleave = os._exit\n"
        "def report(code):\n    print(sorted({'torch', 'jax', 'hydra', 'transformers'} & set(sys.modules)))\n"
        "    sys.stdout.flush()\n    leave(code)\n"
        "os._exit = report\nsys.argv = ['unisono']\nfrom unisono.cli.main import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
    assert "optim.lr=" in (tmp_path / "answer").read_text()


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_every_shell_has_its_code(command: Callable[..., tuple[int, str, str]], shell_name: str):
    code, told, _ = command("completion", shell_name)
    assert code == 0 and "unisono" in told and "_ARGCOMPLETE" in told
