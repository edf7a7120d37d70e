"""Mutations of what somebody else may have written, given to every reader of it.

    python -m tests.security.fuzz --count 20000 [READER …]

A reader may refuse what it is given with an error of ours and in no other way, within 5 seconds of processor time, and
in memory that grows by no more than its budget meanwhile. Each reader has a process of its own, a copy of one that has
imported it; what ends that process is noted, and the next one goes on behind it.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

from tests.security.foreign_readers import READERS
from tests.security.mutations import mutated
from unisono.runtime.errors import UnisonoError

_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # 20,000 folders on a disk take ten times as long
SECONDS, WAIT = 5.0, 300  # of the processor; of the clock, for what waits for something that never comes
ADDRESSES = 6 << 30  # bytes that the process may reserve besides, so that no mutation takes the machine's memory
_SHOWN = 1000  # findings that are kept of a process


@dataclass
class Outcome:
    """What came of the mutations of one reader.

    Attributes:
        wrong: what it did that it may not, each with the number that makes it again.
        structural: mutations that were changed in their values and sealed again.
        read: mutations that were read.
        refused: with an error of ours.
        grown: bytes that one of them took at most.
    """

    wrong: list[str] = field(default_factory=list)
    structural: int = 0
    read: int = 0
    refused: int = 0
    grown: int = 0

    def numbers(self) -> tuple[int, ...]:
        """All but the texts."""
        return self.structural, self.read, self.refused, self.grown

    def add(self, numbers: tuple[int, ...]) -> None:
        """Add the numbers of another process."""
        structural, read, refused, grown = numbers
        self.structural, self.grown = self.structural + structural, max(self.grown, grown)
        self.read, self.refused = self.read + read, self.refused + refused


def fuzz(
    name: str,
    count: int,
    seed: int = 0,
    before: Callable[[int, Outcome], None] = lambda *_: None,
    found: Callable[[str], None] = lambda _: None,
    place: str | None = _MEMORY,
) -> Outcome:
    """Give a reader mutations in this process.

    Args:
        name: of `READERS`.
        count: of mutations.
        seed: of the first; mutation n is that of seed + n alone.
        before: takes the number of each mutation before it is read, and what came of the others.
        found: takes what is wrong when it is found.
        place: for a folder; None for that of temporary files.
    """
    reader, outcome = READERS[name](), Outcome()

    def note(number: int, what: str) -> None:
        outcome.wrong.append(f"{name} {number}: {what}")
        found(outcome.wrong[-1])

    with tempfile.TemporaryDirectory(prefix="unisono-fuzz-", dir=place) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["UNISONO_CACHE"], os.environ["XDG_STATE_HOME"] = f"{folder}/cache", f"{folder}/state"
        honest = Path(folder) / "honest"
        honest.mkdir()
        file = reader.make(honest)
        content, where = file.read_bytes(), file.relative_to(honest)
        tried = Path(folder) / "tried"
        # What is not changed must be read, also where it was taken apart and sealed, or nothing is shown.
        for same in (content, reader.form.seal(reader.form.parse(content)) if reader.form else content):
            _lay_out(honest, tried, where, same)
            reader.read(tried)
        for number in range(seed, seed + count):
            before(number, outcome)
            given, structural = mutated(content, random.Random(f"{name} {number}"), reader.form)
            _lay_out(honest, tried, where, given)
            outcome.structural += structural
            began, resident = time.process_time(), _reset_peak()  # on a busy machine the clock says nothing of a reader
            try:
                with redirect_stderr(io.StringIO()):
                    reader.read(tried)
                outcome.read += 1
            except UnisonoError:
                outcome.refused += 1
            except BaseException as error:
                note(number, _describe(error))
            grown = _status("VmHWM") - resident
            outcome.grown = max(outcome.grown, grown)
            if grown > max(reader.budget, 4 * len(given)):
                note(number, f"memory: {grown >> 20} MB, of {len(given)} bytes")
            if (took := time.process_time() - began) > SECONDS:
                note(number, f"time: {took:.1f} s of the processor")
    if reader.refuses and count >= 50 and not outcome.refused:
        note(seed, "nothing was refused, so nothing was shown")
    return outcome


def _lay_out(honest: Path, tried: Path, where: Path, content: bytes) -> None:
    """The honest folder, with another file in it."""
    shutil.rmtree(tried, ignore_errors=True)
    if honest / where.name == honest / where and len(os.listdir(honest)) == 1:  # noqa: PTH208 - a third of the time
        tried.mkdir()
    else:
        shutil.copytree(honest, tried)
    (tried / where).write_bytes(content)


def _describe(error: BaseException) -> str:
    """An error and the last of our lines that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([f for f in frames if "/src/unisono" in f.filename] or frames)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:150]!r}"


def _status(key: str) -> int:
    """Bytes of memory of this process, by a key of /proc/self/status."""
    content = Path("/proc/self/status").read_bytes()
    at = content.index(key.encode()) + len(key) + 1
    return int(content[at : content.index(b"kB", at)]) << 10


def _reset_peak() -> int:
    """Have the kernel count the peak of memory anew; returns what is in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


_NUMBERS = struct.Struct("5q")  # of what a child shares: the number of the mutation, and the numbers of its outcome


def fuzz_apart(name: str, count: int, first: int = 0) -> Outcome:
    """Give a reader mutations in copies of this process, each of which goes on behind what ended the one before.

    Args:
        name: of `READERS`.
        count: of mutations.
        first: number of the first one.
    """
    READERS[name]()  # what it imports is imported once
    whole, end = Outcome(), first + count
    while first < end:
        with (
            mmap.mmap(-1, _NUMBERS.size) as shared,
            tempfile.TemporaryFile() as said,
            tempfile.TemporaryFile() as died,
            tempfile.TemporaryDirectory(prefix="unisono-fuzz-", dir=_MEMORY) as place,
        ):
            _NUMBERS.pack_into(shared, 0, -1, 0, 0, 0, 0)
            if not (child := os.fork()):
                _go_on(name, first, end, shared, said.fileno(), died.fileno(), place)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            at, *numbers = _NUMBERS.unpack_from(shared)
            whole.add(tuple(numbers))
            said.seek(0), died.seek(0)
            whole.wrong += said.read().decode().splitlines()
            if at == end:
                break
            why = died.read().decode(errors="replace")
            late = {
                -signal.SIGPROF: f"more than {SECONDS:g} s of the processor",
                -signal.SIGALRM: f"waited for more than {WAIT:g} s",
            }
            how = late.get(status, f"ended with {status}")
            if at < 0:
                whole.wrong.append(f"{name} {first}: honest: was not read: {_last_calls(why)}")
                break
            whole.wrong.append(f"{name} {at}: {'time' if status in late else 'process'}: {how}: {_last_calls(why)}")
            first = at + 1
    return whole


def _go_on(name: str, first: int, end: int, shared: mmap.mmap, said: int, died: int, place: str) -> None:
    """What the copy does."""
    status = 1
    try:
        os.dup2(died, 2)
        faulthandler.enable(died)
        for late in (signal.SIGPROF, signal.SIGALRM):  # shows where it is, and then ends it
            signal.signal(late, signal.SIG_DFL)
            faulthandler.register(late, died, chain=True)
        lines = 0

        parent = os.getppid()

        def before(number: int, outcome: Outcome) -> None:
            if os.getppid() != parent:
                os._exit(1)  # nobody waits for the rest
            _NUMBERS.pack_into(shared, 0, number, *outcome.numbers())
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, WAIT)  # faulthandler's own timer may be held by pytest at the fork

        def found(line: str) -> None:
            nonlocal lines
            lines += 1
            if lines <= _SHOWN:
                os.write(said, f"{line.encode('unicode_escape').decode()}\n".encode())

        with READERS[name]().in_copy():  # 20,000 processes that import h5py or torch would take hours
            size = _status("VmSize")
            resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            outcome = fuzz(name, end - first, first, before, found, place)
        _NUMBERS.pack_into(shared, 0, end, *outcome.numbers())
        status = 0
    except BaseException:
        os.write(died, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(status)


def _last_calls(text: str) -> str:
    """The innermost calls of what faulthandler wrote, or the end of a traceback."""
    calls = [" ".join(line.split()) for line in text.splitlines() if line.strip().startswith("File")]
    return " < ".join(calls[:4])[:600] if "most recent call first" in text else text.strip()[-600:]


def main() -> int:
    """All readers, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", default=list(READERS))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    failed = False
    for name in asked.readers:
        began = os.times()
        outcome = fuzz_apart(name, asked.count, asked.first)
        now = os.times()
        seconds = sum(now[:4]) - sum(began[:4])
        print(
            f"{name}: {asked.count} mutations from {asked.first}, {outcome.structural} structural, "
            f"{outcome.read} read, {outcome.refused} refused, {len(outcome.wrong)} wrong, "
            f"{outcome.grown / 1e6:.0f} MB at most, {seconds:.0f} s of the processor, {now[4] - began[4]:.0f} s",
            flush=True,
        )
        kinds = Counter(_kind(line) for line in outcome.wrong)
        for kind, times in kinds.most_common(20):
            print(f"    {times} × {next(line for line in outcome.wrong if kind == _kind(line))}", flush=True)
        failed |= bool(outcome.wrong)
    return int(failed)


def _kind(line: str) -> str:
    """What findings of one cause have in common: an error and its place, else what was exceeded."""
    return " ".join(line.split(": ")[1].split()[:3])


if __name__ == "__main__":
    sys.exit(main())
