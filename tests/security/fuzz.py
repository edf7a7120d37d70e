"""Mutations of the bytes that somebody else may have written, given to every reader of them.

    python -m tests.security.fuzz --count 20000 [READER …]

A reader may refuse what it is given with an error of ours and in no other way, within 5 seconds, and in an address
space that is at most 2 GB larger than before. Each reader has a process of its own, which says where it ended if it
does.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from tests.security.foreign_readers import READERS, fork
from unisono.runtime.errors import UnisonoError
from unisono.runtime.untrusted import hdf5

FIELDS = tuple(
    n.to_bytes(8, "little", signed=True) for n in (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
)
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # 20,000 folders on a disk take ten times as long
SECONDS, MEMORY = 5.0, 2 << 30
ODD: tuple[Any, ...] = (
    None, True, -1, -5, 2**31, 2**63, 2**64, 1e300, float("nan"), float("inf"), int("9" * 4000), "", "x" * 5000,
    "../../x",
    "/etc/passwd", "a\x1b[2J\n", "\ud800", "\0", [], {}, [[]], {"a": {}}, [None] * 9, "step-99999999999999999999",
    "F99",
)  # fmt: skip
TOKENS = (b"\0", b"\xff" * 8, b"-5", b"1e300", b"9" * 5000, b"18446744073709551616", b"[" * 2000, b'{"a":' * 2000,
b"NaN",
          b"null", b"\xed\xa0\x80", b"\\ud800", b'"', b"}", b",", b"\n", b"\t", b"&a [*a]", b"!!python/object", b"${a}",
          b"\x7f\xff\xff\xff")  # fmt: skip


def mutated(content: bytes, chance: random.Random, seal: Callable[[Any], bytes] | None) -> bytes:
    """One to four changes: of single bytes, of stretches, of values where it is JSON, and of fields.

    A field is a number of 4 or 8 bytes, as the headers and indices of binary formats have it; it becomes 0, -1, huge,
    or another field's value, which flips of single bits seldom make of it.
    """
    if seal is not None and chance.random() < 0.6:
        with suppress(ValueError):
            value = json.loads(content)
            for _ in range(chance.randint(1, 2)):
                value = _changed(value, chance)
            return seal(value)
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1) if chance.random() < 0.7 else min(len(data), chance.randrange(64))
        kind = chance.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at:at] = chance.choice(TOKENS)
        elif kind == 2:
            token = chance.choice(TOKENS)
            data[at : at + len(token)] = token
        elif kind == 3:
            del data[at : at + chance.choice((1, 4, 8, 100))]
        elif kind == 4:
            data[at : at + 8] = chance.randbytes(8)
        elif kind >= 6 and len(data) >= 16:
            size = chance.choice((4, 8))
            here, there = (chance.randrange(len(data) // size) * size for _ in range(2))
            data[here : here + size] = chance.choice((*(n[:size] for n in FIELDS), bytes(data[there : there + size])))
        else:
            del data[at:]
    return bytes(data)


def _changed(value: Any, chance: random.Random) -> Any:
    """A nested value with one place changed."""
    places: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        at = pending.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        places += [(at, key) for key in keys]
        pending += [at[key] for key in keys]
    if not places:
        return copy.deepcopy(chance.choice(ODD))
    holder, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.2:  # what another place has
        other, name = chance.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif kind < 0.7:
        holder[key] = copy.deepcopy(chance.choice(ODD))  # or what is changed in it later is changed in all that follow
    elif kind < 0.85 or isinstance(holder, list):
        del holder[key]
    else:
        holder[str(chance.choice(ODD))] = holder.pop(key)
    return value


def fuzz(name: str, count: int, seed: int = 0, note: Callable[[int], None] = lambda _: None) -> list[str]:
    """Give a reader mutations; returns what it did that it may not, each with the number that makes it again.

    Args:
        name: of `READERS`.
        count: of mutations.
        seed: of the first; mutation n is that of seed + n alone.
        note: takes the number of each mutation before it is read.
    """
    reader, wrong, outcomes = READERS[name](), [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="unisono-fuzz-", dir=_MEMORY) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["UNISONO_CACHE"] = f"{folder}/cache"
        honest = Path(folder) / "honest"
        honest.mkdir()
        file = reader.make(honest)
        content, where = file.read_bytes(), file.relative_to(honest)
        reader.read(honest)  # which must be read, or nothing is shown
        tried = Path(folder) / "tried"
        for number in range(seed, seed + count):
            note(number)
            shutil.rmtree(tried, ignore_errors=True)
            shutil.copytree(honest, tried)
            (tried / where).write_bytes(mutated(content, random.Random(f"{name} {number}"), reader.seal))
            began = time.process_time()  # on a machine with other work the clock says nothing of a reader
            try:
                with redirect_stderr(io.StringIO()):
                    reader.read(tried)
                outcomes["read"] += 1
            except UnisonoError:
                outcomes["refused"] += 1
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                ours = [f for f in traceback.extract_tb(error.__traceback__) if "/unisono/" in f.filename]
                at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else f"{last.filename}:{last.lineno}"
                wrong.append(f"{name} {number}: {type(error).__name__} at {at}: {str(error)[:150]!r}")
            if (took := time.process_time() - began) > SECONDS:
                wrong.append(f"{name} {number}: {took:.1f} s")
    if reader.refuses and count >= 50 and not outcomes["refused"]:
        wrong.append(f"{name}: nothing was refused, so nothing was shown")
    return wrong


def _child(name: str, first: int, count: int) -> int:
    """One reader, in a process whose address space is bounded; says where it is before each mutation."""
    READERS[name]()  # what it imports is not of its memory
    hdf5._ask_process = fork  # 20,000 processes that import h5py would take hours
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    fuzz(name, 3)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY + (4 << 30),) * 2)  # threads of libraries reserve some GB
    place = Path(os.environ["FUZZ_PLACE"])

    def note(number: int) -> None:
        if number % 20 == 0:
            faulthandler.dump_traceback_later(60, exit=True)
        place.write_text(str(number))

    wrong = fuzz(name, count, first, note)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for line in wrong[:2000]:
        print(line)
    print(f"peak {peak:.0f} MB", file=sys.stderr)
    return int(bool(wrong))


def main() -> int:
    """All readers, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", default=list(READERS))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--child", action="store_true")
    asked = parser.parse_args()
    if asked.child:
        return _child(asked.readers[0], asked.first, asked.count)
    failed = False
    for name in asked.readers:
        with tempfile.NamedTemporaryFile() as place:
            first, end = asked.first, asked.first + asked.count
            lines: list[str] = []
            began, peaks = time.monotonic(), ""
            while first < end:  # a process that was ended goes on behind what ended it
                command = [sys.executable, "-m", "tests.security.fuzz", name, "--child"]
                words = ["--first", str(first), "--count", str(end - first)]
                done = subprocess.run(
                    [*command, *words], env={**os.environ, "FUZZ_PLACE": place.name}, capture_output=True, text=True
                )
                lines += done.stdout.splitlines()
                peaks = (done.stderr.strip().splitlines() or [""])[-1]
                if done.returncode in (0, 1) and peaks.startswith("peak"):
                    break
                at = int(Path(place.name).read_text() or first)
                lines.append(f"{name} {at}: the process ended with {done.returncode}: {done.stderr[-800:]}")
                first = at + 1
        kinds = Counter(" ".join(line.split(": ")[1].split()[:3]) for line in lines)
        print(
            f"{name}: {asked.count} mutations, {len(lines)} wrong, {peaks}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for kind, times in kinds.most_common(12):
            print(
                f"    {times} × {next(line for line in lines if kind in ' '.join(line.split(': ')[1].split()[:3]))}",
                flush=True,
            )
        failed |= bool(lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
