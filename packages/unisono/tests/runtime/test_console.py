"""What is printed: lost output ends no run, missing streams lead nowhere, and what libraries warn of is filtered."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.runtime import console
from unisono.runtime.display.run_console import RunConsole


class FullDisk(io.StringIO):
    """A file into which nothing can be written."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def fileno(self) -> int:
        raise io.UnsupportedOperation


@pytest.fixture(autouse=True)
def nothing_lost() -> None:
    console.lost = None


def test_output_on_a_full_disk_ends_no_run_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`unisono train … > log` ended with a traceback when the disk of `log` was full, whatever its checkpoints were."""
    monkeypatch.setattr(sys, "stdout", FullDisk())
    console.say("a line")
    RunConsole(file=sys.stdout).print("another")
    assert capsys.readouterr().err == "unisono: WARNING: what this command prints is lost: No space left on device\n"
    assert console.lost == "No space left on device"


def test_nothing_ends_a_run_whose_terminal_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last picture of a live display did: exit code 1 instead of that of the run, which had saved."""
    for write in (console.say, lambda text: RunConsole(file=sys.stdout).print(text), draw):
        terminal, side = pty.openpty()
        with os.fdopen(side, "w") as screen:
            monkeypatch.setattr(sys, "stdout", screen)
            os.close(terminal)
            for _ in range(2):
                write("a line")
    assert console.lost is None, "nobody is there to be told"


def draw(text: str) -> None:
    """As a live display does."""
    screen = RunConsole(file=sys.stdout)
    with screen:
        screen.print(text)


def test_a_line_that_is_lost_keeps_nothing_in_memory() -> None:
    """Each kept its error, and with the traceback whatever the frames held that printed it."""

    class Held:
        pass

    def print_in_vain() -> weakref.ref[Held]:
        held = Held()
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            console.note_lost(error)
        return weakref.ref(held)

    assert print_in_vain()() is None


@pytest.mark.parametrize(("words", "code"), [(["list"], 1), (["train"], 0), ([], 1)])
def test_a_command_whose_output_was_the_point_fails_without_it(
    monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    def run(words: object) -> int:
        console.note_lost(OSError(28, "No space left on device"))
        return 0

    monkeypatch.setattr(main, "_run", run)
    monkeypatch.setattr(console, "discard_output", lambda stream: None)
    assert main.main(words) == code


def test_a_process_without_standard_streams_gets_some_before_it_opens_a_file(tmp_path: Path) -> None:
    """With `>&-` a run ended with a traceback, or the file opened next was what a library's C code printed into."""
    code = (
        "from unisono.runtime.console import open_missing_streams\n"
        "import os, sys\n"
        "open_missing_streams(); first = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "os.write(1, b'printed by C'); print('printed'); print('failed', file=sys.stderr)\n"
        "sys.stdout.flush(); sys.exit(0 if first > 2 and sys.stdin.read() == '' else 3)"
    )
    closed = [sys.executable, "-c", code, str(tmp_path / "record")]
    ended = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *closed], env=os.environ, timeout=60)
    assert ended.returncode == 0
    assert (tmp_path / "record").read_bytes() == b""


def test_what_a_library_warns_of_passes_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib warned of a glyph of a run's name, and wrote the escape sequence itself to the terminal."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    console.clean_warnings()
    assert "\\x1b[2J" in warnings.formatwarning("Glyph \x1b[2J", UserWarning, "figures.py", 1)
