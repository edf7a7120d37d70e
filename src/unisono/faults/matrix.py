"""What the matrix is made of: a fault, what is promised of it, and what came of it."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.faults import job
from unisono.faults.job import Done, Job

Act = Callable[["Ground"], "Outcome"]


class Abstain(Exception):  # noqa: N818
    """Why a fault cannot be shown here."""


@dataclass
class Outcome:
    """What came of a fault.

    Attributes:
        seconds: from the fault to the end of the job; None where nothing ended.
        lost: steps that were made and had to be made again; None where there were none to lose.
        exact: whether the run ended as the one that never failed, bit for bit; None where it was not to go on.
        said: the sentence.
        wrong: promises that were not kept.
    """

    seconds: float | None = None
    lost: int | None = None
    exact: bool | None = None
    said: str = ""
    wrong: list[str] = field(default_factory=list)
    abstain: str = ""

    @property
    def verdict(self) -> str:
        """`PASS`, `FAIL` or `ABSTAIN`."""
        return "FAIL" if self.wrong else "ABSTAIN" if self.abstain else "PASS"

    def promise(self, kept: bool, what: str) -> None:
        """Note a promise that was not kept."""
        if not kept:
            self.wrong.append(what)


@dataclass(frozen=True)
class Fault:
    """A row of the matrix.

    Attributes:
        key: number in the list of faults, e.g. `A1`, with a letter where there are several ways.
        text: what goes wrong.
        act: shows it.
        quick: whether it is among the few that every test run shows.
    """

    key: str
    text: str
    act: Act
    quick: bool = False

    def show(self, ground: Ground) -> Outcome:
        """Let it happen, and say what came of it."""
        try:
            return self.act(ground.for_(self.key))
        except Abstain as reason:
            return Outcome(abstain=str(reason))
        except Exception:
            return Outcome(wrong=[traceback.format_exc()])


FAULTS: dict[str, Fault] = {}


def fault(key: str, text: str, *, quick: bool = False) -> Callable[[Act], Act]:
    """Make a function a row of the matrix."""

    def add(act: Act) -> Act:
        assert key not in FAULTS, key
        FAULTS[key] = Fault(key, text, act, quick)
        return act

    return add


class Ground:
    """Where faults are shown: a folder, and the runs in it that never failed, each made once.

    Args:
        folder: of all faults.
        own: of this fault.
        spent: states of the runs that never failed.
    """

    def __init__(self, folder: Path, own: Path | None = None, known: dict[str, dict[str, str]] | None = None) -> None:
        self.folder = folder
        self.own = own or folder
        self._known = {} if known is None else known

    def for_(self, key: str) -> Ground:
        """The same, for one fault."""
        own = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self.folder))
        return Ground(self.folder, own, self._known)

    def job(self, *words: str, misbehave: str = "", world: int = 2, **options: object) -> Job:
        """Start a job in this fault's folder."""
        return Job(self.own, f"layout.world_size={world}", *words, misbehave=misbehave, **options)  # type: ignore[arg-type]

    def unharmed(self, *words: str, world: int = 2) -> dict[str, str]:
        """The state of a run that never failed."""
        key = " ".join([f"{world}", *words])
        if key not in self._known:
            with Job(
                Path(tempfile.mkdtemp(prefix="unharmed-", dir=self.folder)), f"layout.world_size={world}", *words
            ) as run:
                done = run.finish()
                assert done.code == 0, f"the run that nothing harms ended with {done.code}: {done.said[-2000:]}"
                self._known[key] = job.state(run.run)
        return self._known[key]

    def unharmed_values(self, *words: str, world: int = 2) -> dict[str, Any]:
        """The arrays of a run that never failed, in fp64."""
        own = self.for_("unharmed")
        with own.job(*words, world=world) as run:
            done = run.finish()
            assert done.code == 0, done.said[-2000:]
            return job.values(run.run)

    def for_copy(self) -> Ground:
        """The same in a copy of this fault's folder."""
        own = self.for_("copy")
        shutil.copytree(self.own, own.own, dirs_exist_ok=True)
        return own

    def harmed(
        self,
        misbehave: str,
        *words: str,
        code: int,
        says: tuple[str, ...] = (),
        within: float = 10.0,
        world: int = 2,
        act: Callable[[Job], float] | None = None,
        goes_on: bool = True,
    ) -> Outcome:
        """A run that a fault ends, and that goes on without it.

        Args:
            misbehave: the fault, or nothing if `act` does it from outside and returns when.
            words: settings.
            code: the exit code that is promised.
            says: what the sentence has to name.
            within: seconds from the fault to the end.
            world: number of processes.
            act: what is done to the running job.
            goes_on: whether it is to be resumed, and to end as the run that never failed.
        """
        before = self.unharmed(*words, world=world) if goes_on else {}
        with self.job(*words, misbehave=misbehave, world=world) as run:
            began = act(run) if act else None
            done = run.finish()
            outcome = self.judge(run, done, began or job.happened(self.own), code, says, within)
            made, kept = run.step(), job.newest(run.run)
            # The first save goes on beside the steps, and the second one waits for it.
            outcome.promise(made <= 2 * job.EVERY or kept > 0, f"no commit can be loaded after step {made}")
            outcome.lost = max(0, made - max(kept, 0))
        if goes_on:
            self.go_on(outcome, before, *words, world=world)
        return outcome

    def judge(
        self, run: Job, done: Done, began: float | None, code: int, says: tuple[str, ...], within: float
    ) -> Outcome:
        """Hold the end of a job against what is promised of it."""
        outcome = Outcome(said=done.sentence)
        outcome.promise(began is not None, f"the fault did not happen; the job ended with {done.code}")
        outcome.seconds = None if began is None else round(done.ended - began, 1)
        outcome.promise(done.code == code, f"exit code {done.code}, not {code}: {done.said[-1500:]}")
        for word in says:
            outcome.promise(word in done.said, f"'{word}' is not said: {done.said[-1500:]}")
        outcome.promise(len(done.told) == 1, f"{len(done.told)} reasons are told, not one: {done.said[-1500:]}")
        outcome.promise(not done.orphans, f"processes {done.orphans} were there ten seconds after the end")
        if outcome.seconds is not None:
            outcome.promise(outcome.seconds <= within, f"it took {outcome.seconds} s, not {within:g}")
        return outcome

    def go_on(self, outcome: Outcome, before: dict[str, str], *words: str, world: int = 2) -> None:
        """Resume the run in this fault's folder, and compare its end with that of the run that never failed."""
        with self.job(*words, world=world) as run:
            done = run.finish()
            outcome.promise(done.code == 0, f"it did not go on: {done.code}: {done.said[-1500:]}")
            after = job.state(run.run) if done.code == 0 else {}
        differing = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        outcome.exact = not differing and len(before) > 0
        outcome.promise(outcome.exact, f"it ended otherwise than the run that never failed, in {sorted(differing)[:5]}")


@contextmanager
def ground() -> Iterator[Ground]:
    """A ground in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="unisono-faults-") as folder:
        yield Ground(Path(folder))
