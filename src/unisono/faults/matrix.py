"""The parts of the fault matrix: a fault, the promises about it, and its outcome."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.faults import job
from unisono.faults.job import Job, JobResult

ShowFault = Callable[["Sandbox"], "Outcome"]


class AbstainError(Exception):
    """Why a fault cannot be shown here."""


@dataclass
class Outcome:
    """What came of a fault.

    Attributes:
        seconds: from the fault to the end of the job; None where nothing ended.
        lost: steps that were made and had to be made again; None where there were none to lose.
        exact: whether the run ended as the one that never failed, bit for bit; None where it was not to go on.
        said: the sentence.
        broken_promises: promises that were not kept.
    """

    seconds: float | None = None
    lost: int | None = None
    exact: bool | None = None
    said: str = ""
    broken_promises: list[str] = field(default_factory=list)
    abstain: str = ""

    @property
    def verdict(self) -> str:
        """`PASS`, `FAIL` or `ABSTAIN`."""
        return "FAIL" if self.broken_promises else "ABSTAIN" if self.abstain else "PASS"

    def check(self, kept: bool, what: str) -> None:
        """Note a promise that was not kept."""
        if not kept:
            self.broken_promises.append(what)


@dataclass(frozen=True)
class Scenario:
    """A row of the matrix.

    Attributes:
        key: number in the list of faults, e.g. `A1`, with a letter where there are several ways.
        text: what goes wrong.
        act: shows it.
        quick: whether it is among the few that every test run shows.
    """

    key: str
    text: str
    act: ShowFault
    quick: bool = False

    def show(self, ground: Sandbox) -> Outcome:
        """Let it happen, and say what came of it."""
        try:
            return self.act(ground.for_scenario(self.key))
        except AbstainError as reason:
            return Outcome(abstain=str(reason))
        except Exception:
            return Outcome(broken_promises=[traceback.format_exc()])


SCENARIOS: dict[str, Scenario] = {}


def scenario(key: str, text: str, *, quick: bool = False) -> Callable[[ShowFault], ShowFault]:
    """Make a function a row of the matrix."""

    def add(act: ShowFault) -> ShowFault:
        assert key not in SCENARIOS, key
        SCENARIOS[key] = Scenario(key, text, act, quick)
        return act

    return add


class Sandbox:
    """Where faults are shown: a folder, and the runs in it that never failed, each made once.

    Args:
        folder: of all faults.
        own: of this fault.
        known: states of the runs that never failed.
        engine: of the small task.
    """

    def __init__(
        self,
        folder: Path,
        own: Path | None = None,
        known: dict[str, dict[str, str]] | None = None,
        engine: str = "torch",
    ) -> None:
        self.folder, self.engine = folder, engine
        self.own = own or folder
        self._known = {} if known is None else known

    def for_scenario(self, key: str) -> Sandbox:
        """The same, for one fault."""
        own = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self.folder))
        return Sandbox(self.folder, own, self._known, self.engine)

    def in_jax(self) -> Sandbox:
        """The same with the small task in JAX; abstains where JAX is not installed."""
        if not all(importlib.util.find_spec(name) for name in ("jax", "optax", "equinox")):
            raise AbstainError("JAX is not installed: pip install 'unisono[jax]'")
        return Sandbox(self.folder, self.own, self._known, "jax")

    def job(self, *words: str, misbehave: str = "", world: int = 2, **options: object) -> Job:
        """Start a job in this fault's folder."""
        given = {"engine": self.engine, **options}
        return Job(self.own, f"layout.world_size={world}", *words, misbehave=misbehave, **given)  # type: ignore[arg-type]

    def reference_digests(self, *words: str, world: int = 2) -> dict[str, str]:
        """The state of a run that never failed."""
        key = " ".join([self.engine, f"{world}", *words])
        if key not in self._known:
            own = Path(tempfile.mkdtemp(prefix="unharmed-", dir=self.folder))
            with Job(own, f"layout.world_size={world}", *words, engine=self.engine) as run:
                done = run.finish()
                assert done.code == 0, f"the run that nothing harms ended with {done.code}: {done.said[-2000:]}"
                self._known[key] = job.read_digests(run.run)
        return self._known[key]

    def reference_arrays(self, *words: str, world: int = 2) -> dict[str, Any]:
        """The arrays of a run that never failed, in fp64."""
        own = self.for_scenario("unharmed")
        with own.job(*words, world=world) as run:
            done = run.finish()
            assert done.code == 0, done.said[-2000:]
            return job.read_arrays(run.run)

    def copy(self) -> Sandbox:
        """The same in a copy of this fault's folder."""
        own = self.for_scenario("copy")
        shutil.copytree(self.own, own.own, dirs_exist_ok=True)
        return own

    def run_harmed(
        self,
        misbehave: str,
        *words: str,
        code: int,
        says: tuple[str, ...] = (),
        within: float = 10.0,
        world: int = 2,
        act: Callable[[Job], float] | None = None,
        resumes: bool = True,
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
            resumes: whether it is to be resumed, and to end as the run that never failed.
        """
        before = self.reference_digests(*words, world=world) if resumes else {}
        with self.job(*words, misbehave=misbehave, world=world) as run:
            began = act(run) if act else None
            done = run.finish()
            outcome = self.check_end(run, done, began or job.fault_time(self.own), code, says, within)
            made, kept = run.step(), job.newest_step(run.run)
            # The first save goes on beside the steps, and the second one waits for it.
            outcome.check(made <= 2 * job.EVERY or kept > 0, f"no commit can be loaded after step {made}")
            outcome.lost = max(0, made - max(kept, 0))
        if resumes:
            self.check_resume(outcome, before, *words, world=world)
        return outcome

    def check_end(
        self, run: Job, done: JobResult, began: float | None, code: int, says: tuple[str, ...], within: float
    ) -> Outcome:
        """Hold the end of a job against what is promised of it."""
        outcome = Outcome(said=done.sentence)
        outcome.check(began is not None, f"the fault did not happen; the job ended with {done.code}")
        outcome.seconds = None if began is None else round(done.ended_at - began, 1)
        outcome.check(done.code == code, f"exit code {done.code}, not {code}: {done.said[-1500:]}")
        for word in says:
            outcome.check(word in done.said, f"'{word}' is not said: {done.said[-1500:]}")
        outcome.check(len(done.reasons) == 1, f"{len(done.reasons)} reasons are told, not one: {done.said[-1500:]}")
        outcome.check(not done.orphans, f"processes {done.orphans} were there ten seconds after the end")
        if outcome.seconds is not None:
            outcome.check(outcome.seconds <= within, f"it took {outcome.seconds} s, not {within:g}")
        return outcome

    def check_resume(self, outcome: Outcome, before: dict[str, str], *words: str, world: int = 2) -> None:
        """Resume the run in this fault's folder, and compare its end with that of the run that never failed."""
        with self.job(*words, world=world) as run:
            done = run.finish()
            outcome.check(done.code == 0, f"it did not go on: {done.code}: {done.said[-1500:]}")
            after = job.read_digests(run.run) if done.code == 0 else {}
        differing = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        outcome.exact = not differing and len(before) > 0
        outcome.check(outcome.exact, f"it ended otherwise than the run that never failed, in {sorted(differing)[:5]}")


@contextmanager
def open_sandbox() -> Iterator[Sandbox]:
    """A ground in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="unisono-faults-") as folder:
        yield Sandbox(Path(folder))
