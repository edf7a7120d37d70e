"""The parts of the fault matrix: a fault, the promises about it, and its outcome."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono_faults import job
from unisono_faults.job import Job, JobResult

ShowFault = Callable[["Sandbox"], "Outcome"]
# Exit codes, see `unisono.runtime.errors`.
REFUSED, NOT_FINITE, GUARD, UNREACHED, UNSAVED, DESYNC, DIED, STUCK, PREEMPTED = 2, 3, 4, 5, 7, 8, 9, 10, 75


class AbstainError(Exception):
    """The fault cannot be injected on this host; the message says why."""


@dataclass
class Outcome:
    """The outcome of a fault.

    Attributes:
        seconds: from the fault to the end of the job; None if no job ended.
        lost_steps: steps that had to be repeated; None if the fault cannot lose steps.
        exact: whether the result equals that of the reference run, bit for bit; None if the run was not resumed.
        message: the message that the command printed.
        broken_promises: promises that did not hold.
        abstain: why the fault could not be injected here; empty if it was.
    """

    seconds: float | None = None
    lost_steps: int | None = None
    exact: bool | None = None
    message: str = ""
    broken_promises: list[str] = field(default_factory=list)
    abstain: str = ""

    @property
    def verdict(self) -> str:
        """`PASS`, `FAIL` or `ABSTAIN`."""
        return "FAIL" if self.broken_promises else "ABSTAIN" if self.abstain else "PASS"

    def check(self, condition: bool, problem: str) -> None:
        """Record a problem unless the condition holds."""
        if not condition:
            self.broken_promises.append(problem)

    def expect(self, done: JobResult, code: int, *says: str, name: str = "") -> None:
        """Check exit code and output of a job.

        Args:
            done: how it ended.
            code: expected exit code.
            says: words that the output must contain.
            name: what distinguishes it from other jobs of the scenario.
        """
        if done.code:
            self.message = done.message or self.message
        end = f"{done.code}: {done.output[-1500:]}"
        self.check(done.code == code, f"{name or 'the job'} ended with {end}")
        for word in says:
            self.check(word in done.output, f"'{word}' is missing from the output{f' of {name}' * bool(name)}: {end}")

    def compare(self, done: JobResult, before: Mapping[str, str], name: str = "") -> None:
        """Check that a job ended well, with the same result as the reference run."""
        self.expect(done, 0, name=name)
        after = job.read_digests(done.run) if done.code == 0 else {}
        differing = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        self.exact = self.exact is not False and not differing and len(before) > 0
        self.check(not differing, f"{name or 'the result'} differs from the reference run in {differing[:5]}")


@dataclass(frozen=True)
class Scenario:
    """A row of the matrix.

    Attributes:
        key: number in the list of faults, e.g. `A1`, with a letter for variants.
        text: describes the fault.
        act: injects it and checks the promises.
        quick: whether it is among the few that every test run includes.
    """

    key: str
    text: str
    act: ShowFault
    quick: bool = False

    def show(self, ground: Sandbox) -> Outcome:
        """Inject the fault and return its outcome."""
        try:
            return self.act(ground.for_scenario(self.key))
        except AbstainError as reason:
            return Outcome(abstain=str(reason))
        except Exception:
            return Outcome(broken_promises=[traceback.format_exc()])


SCENARIOS: dict[str, Scenario] = {}


def scenario(key: str, text: str, *, quick: bool = False) -> Callable[[ShowFault], ShowFault]:
    """Register a function as a row of the matrix."""

    def add(act: ShowFault) -> ShowFault:
        assert key not in SCENARIOS, key
        SCENARIOS[key] = Scenario(key, text, act, quick)
        return act

    return add


class Sandbox:
    """A folder in which faults are injected, and the results of reference runs without faults, each run once.

    Args:
        root: folder of all scenarios.
        folder: of this scenario; default: `root`.
        references: digests of the reference runs by settings, shared by all scenarios.
        engine: of the small task.
    """

    def __init__(
        self,
        root: Path,
        folder: Path | None = None,
        references: dict[str, dict[str, str]] | None = None,
        engine: str = "torch",
    ) -> None:
        self.root, self.engine = root, engine
        self.folder = folder or root
        self._references = {} if references is None else references

    def for_scenario(self, key: str) -> Sandbox:
        """Return a sandbox with a new folder for one scenario."""
        folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self.root))
        return Sandbox(self.root, folder, self._references, self.engine)

    def in_jax(self) -> Sandbox:
        """Return the same sandbox with the small task in JAX; abstains if JAX is not installed."""
        if not all(importlib.util.find_spec(name) for name in ("jax", "optax", "equinox")):
            raise AbstainError("JAX is not installed: pip install 'unisono[jax]'")
        return Sandbox(self.root, self.folder, self._references, "jax")

    def job(self, *words: str, fault: str = "", world: int = 2, **options: object) -> Job:
        """Start a job in the folder of this scenario."""
        job_options = {"engine": self.engine, **options}
        return Job(self.folder, f"layout.world_size={world}", *words, fault=fault, **job_options)  # type: ignore[arg-type]

    def node(self, rank: int, port: int, *words: str, **options: Any) -> Job:
        """Start one of two nodes of a job, both on this host."""
        own = ("layout.world_size=2", "launch.nodes=2", f"launch.node_rank={rank}")
        where = f"launch.rendezvous=127.0.0.1:{port}"
        return Job(self.folder, *own, where, *words, output=f"node-{rank}.txt", **options)

    def run(self, *words: str, **options: Any) -> JobResult:
        """Run a job in the folder of this scenario to its end."""
        with self.job(*words, **options) as run:
            return run.finish()

    def train_to_end(self, *words: str) -> Path:
        """Train a run to its end; return its newest checkpoint."""
        done = self.run(*words)
        assert done.code == 0, done.output[-2000:]
        return sorted((done.run / "checkpoints").glob("step-*"))[-1]

    def run_verb(self, *words: str, answers: bool = False) -> JobResult:
        """Run another verb to its end; with `answers` a pipe answers yes to every question."""
        command = job.verb_command(*words)
        return self.run(command=["sh", "-c", 'yes | "$0" "$@"', *command] if answers else command)

    def reference_digests(self, *words: str, world: int = 2) -> dict[str, str]:
        """Return the digests of a run without faults."""
        key = " ".join([self.engine, f"{world}", *words])
        if key not in self._references:
            done = self.for_scenario("reference").run(*words, world=world)
            assert done.code == 0, f"the reference run ended with {done.code}: {done.output[-2000:]}"
            self._references[key] = job.read_digests(done.run)
        return self._references[key]

    def reference_arrays(self, *words: str, world: int = 2) -> dict[str, Any]:
        """Return the arrays of a run without faults, in fp64."""
        done = self.for_scenario("reference").run(*words, world=world)
        assert done.code == 0, done.output[-2000:]
        return job.read_arrays(done.run)

    def copy(self) -> Sandbox:
        """Return a sandbox with a copy of this scenario's folder."""
        copy = self.for_scenario("copy")
        shutil.copytree(self.folder, copy.folder, dirs_exist_ok=True)
        return copy

    def run_with_fault(
        self,
        fault: str,
        *words: str,
        code: int,
        says: tuple[str, ...] = (),
        within: float = 10.0,
        resumes: bool = True,
    ) -> Outcome:
        """Run a job that a fault ends within some seconds; if it `resumes`, compare it with the reference run."""
        before = self.reference_digests(*words) if resumes else {}
        with self.job(*words, fault=fault) as run:
            outcome = self.check_end(run.finish(), job.fault_time(self.folder), code, says, within)
            steps_done, saved_step = run.step(), job.newest_step(run.run)
            # The first save runs in the background, and the second one waits for it.
            outcome.check(
                steps_done <= 2 * job.EVERY or saved_step > 0, f"no checkpoint can be loaded after step {steps_done}"
            )
            outcome.lost_steps = max(0, steps_done - max(saved_step, 0))
        if resumes:
            self.check_resume(outcome, before, *words)
        return outcome

    def check_end(
        self, done: JobResult, began: float | None, code: int, says: tuple[str, ...], within: float
    ) -> Outcome:
        """Check exit code, output and duration of a finished job."""
        outcome = Outcome(message=done.message)
        outcome.check(began is not None, f"the fault did not happen; the job ended with {done.code}")
        outcome.seconds = None if began is None else round(done.ended_at - began, 1)
        outcome.expect(done, code, *says)
        outcome.check(
            len(done.reasons) == 1, f"{len(done.reasons)} messages give a reason, not one: {done.output[-1500:]}"
        )
        outcome.check(not done.orphans, f"processes {done.orphans} were still running ten seconds after the end")
        if outcome.seconds is not None:
            outcome.check(outcome.seconds <= within, f"it took {outcome.seconds} s, not {within:g}")
        return outcome

    def check_resume(self, outcome: Outcome, before: dict[str, str], *words: str) -> None:
        """Resume the run in this scenario's folder, and compare its result with that of the reference run."""
        outcome.compare(self.run(*words), before, "the resumed run")


@contextmanager
def open_sandbox() -> Iterator[Sandbox]:
    """Yield a sandbox in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="unisono-faults-") as folder:
        yield Sandbox(Path(folder))
