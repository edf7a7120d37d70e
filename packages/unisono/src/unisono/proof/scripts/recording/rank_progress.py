"""Where every process of a script is, so that one that waits for an update of the others learns that there is none.

What is recorded of an update is collective. A process that makes an update which another one skips would wait for it,
and the other one, in its next backward pass, for the first. So each leaves in a file how far it has come.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from unisono.runtime.code.source_files import is_user_file
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.runtime.fault_names import FaultName

_PATIENCE = 0.2  # of the time that a run may take
_RECEIVING = 5.0  # seconds, of a process that waits for what another one sends


@dataclass
class _Progress:
    receives: bool = False  # whether it has waited for what another one sends, before it trained
    begun: bool = False  # to train
    updates: int = 0  # that it has begun
    passes: int = 0  # backward passes in all
    since: int = 0  # backward passes since the last update
    line: str = ""  # of the user's, where the last of them began
    ended: bool = False


class UnequalUpdatesError(UnisonoError):
    """A process makes an update that another one does not make."""

    exit_code = 1
    fault = FaultName.UNEQUAL_UPDATES


def _find_line() -> str:
    """The innermost line of the user's that has led here; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _say_where(line: str) -> str:
    return f", which began at {line}" if line else ""


def describe_waiting(folder: Path, size: int) -> str:
    """In words, a process that is at an update which another one has not begun; empty where all are at the same.

    The first may wait because updates are recorded on all ranks together, and not because the script does.
    """
    made = [one.updates for one in _read(_files_of(folder, size))]
    if min(made) == max(made):
        return ""
    first, last = made.index(max(made)), made.index(min(made))
    return (
        f"; rank {first} is at update {made[first]}, which is recorded on all ranks together, and rank {last} has "
        f"begun {made[last]}: does every rank make each update?"
    )


def describe_ended(folder: Path, size: int) -> str:
    """In words, a process that has returned while another one was in a later backward pass; empty if there is none."""
    every = _read(_files_of(folder, size))
    ended = [rank for rank, one in enumerate(every) if one.ended]
    later = [rank for rank, one in enumerate(every) if ended and one.passes > every[ended[0]].passes]
    if not later:
        return ""
    gone, other = every[ended[0]], every[later[0]]
    return (
        f"rank {ended[0]} has ended after {gone.updates} updates and {gone.passes} backward passes, and rank "
        f"{later[0]} is in backward pass {other.passes}"
    )


def _files_of(folder: Path, size: int) -> list[Path]:
    return [folder / f"progress-{number}.json" for number in range(size)]


def _read(files: Iterable[Path]) -> list[_Progress]:
    return [_Progress(**json.loads(file.read_text("utf-8"))) if file.exists() else _Progress() for file in files]


class RankProgress:
    """What this process has done so far.

    Args:
        folder: that all processes of the run share.
        rank: of this one.
        size: number of processes.
        timeout: seconds that the run may take.
    """

    def __init__(self, folder: Path, rank: int, size: int, timeout: float) -> None:
        self._files = _files_of(folder, size)
        self._rank, self._patience = rank, _PATIENCE * timeout
        self._mine = _Progress()

    def begin_receiving(self) -> None:
        """Before it trains, this process waits for what another one sends."""
        self._mine.receives = True
        self._tell()

    def begin_records(self) -> None:
        """Wait until all processes are where they begin to train.

        Raises:
            ConfigError: if one does not come there, since it waits for what this one has not sent yet.
        """
        self._mine.begun = True
        self._tell()
        since = time.monotonic()
        while late := {rank: one for rank, one in self._read().items() if not one.begun}:
            receiving = [rank for rank, one in late.items() if one.receives]
            if receiving and time.monotonic() - since > _RECEIVING:
                raise ConfigError(
                    f"rank {self._rank} begins its first forward pass, and rank {receiving[0]} waits for what another "
                    "one sends. All ranks are recorded together, so a script whose ranks compute one after the other "
                    "(stages of a pipeline) cannot be proved; prove its model on one process"
                )
            time.sleep(0.002)

    def begin_pass(self) -> str:
        """A backward pass begins; returns the user's line that has called it."""
        self._mine.passes += 1
        self._mine.since += 1
        self._mine.line = _find_line() if len(self._files) > 1 else ""
        self._tell()
        return self._mine.line

    def begin_update(self) -> None:
        """Wait until all processes are at the same update.

        Raises:
            UnequalUpdatesError: if one has ended, or has been in a later backward pass for long.
        """
        passes = self._mine.since
        self._mine.updates, self._mine.since = self._mine.updates + 1, 0
        self._tell()
        before, since = self._read(), time.monotonic()
        while behind := [rank for rank, one in before.items() if one.updates < self._mine.updates]:
            late = time.monotonic() - since > self._patience
            for rank in behind:
                if before[rank].ended or (late and before[rank].since > passes):
                    raise UnequalUpdatesError(self._describe(rank, before[rank]))
            time.sleep(0.002)
            now = self._read()
            before, since = now, since if now == before else time.monotonic()

    def end(self) -> None:
        """The script has returned; wait until it has on the others, or they have made all updates that are compared.

        Raises:
            UnequalUpdatesError: if another one waits for a part of an update that this one does not make.
        """
        self._mine.ended = True
        self._tell()
        before, since = self._read(), time.monotonic()
        while left := {rank: one for rank, one in before.items() if not one.ended}:
            later = [rank for rank, one in left.items() if one.since > self._mine.since]
            if later and time.monotonic() - since > _RECEIVING:
                other = left[later[0]]
                raise UnequalUpdatesError(
                    f"rank {self._rank} has ended after {self._mine.updates} updates and {self._mine.passes} backward "
                    f"passes, and rank {later[0]} waits in or after its backward pass {other.passes}"
                    f"{_say_where(other.line)}"
                )
            time.sleep(0.01)
            now = self._read()
            before, since = now, since if now == before else time.monotonic()

    def close(self) -> None:
        """All updates that are compared are made."""
        self._mine.ended = True
        self._tell()

    def _describe(self, rank: int, other: _Progress) -> str:
        made = other.updates
        end = "ended after" if other.ended else "is in"
        return (
            f"rank {self._rank} makes its update {self._mine.updates} after backward pass {self._mine.passes}, "
            f"and rank {rank} has made {made} update{'' if made == 1 else 's'} and {end} backward pass "
            f"{other.passes}{'' if other.ended else _say_where(other.line)}"
        )

    def _tell(self) -> None:
        if len(self._files) > 1:
            file = self._files[self._rank]
            new = file.with_suffix(".new")
            new.write_text(json.dumps(asdict(self._mine)), encoding="utf-8")
            new.replace(file)

    def _read(self) -> dict[int, _Progress]:
        """What the others have done."""
        others = {rank: file for rank, file in enumerate(self._files) if rank != self._rank}
        return dict(zip(others, _read(others.values()), strict=True))
