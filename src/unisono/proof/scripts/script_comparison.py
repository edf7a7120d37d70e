"""The proof for training scripts that are not ours: one process and many run the same function, and are compared.

The function is run in fresh processes: once on one process, once more with its initial weights changed in their last
bit, which measures what rounding comes to, and once for every other number of processes.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from unisono.config import code_digest, environment
from unisono.launch import cluster
from unisono.launch.layout import threads_per_process
from unisono.launch.processes import local_processes
from unisono.launch.task_objects import reference_to
from unisono.proof import certificate, comparison, prove, verdict
from unisono.proof.cases import EPSILON, Case
from unisono.proof.comparison import Compared, Difference
from unisono.proof.fault_names import named
from unisono.proof.recording.trace import QUANTITIES, Trace, folder_of
from unisono.proof.scripts.script_process import LATE, Run
from unisono.proof.scripts.script_recorder import Records, World
from unisono.proof.verdict import Verdict
from unisono.runtime.errors import ConfigError

# What rounding may come to. Beyond it, two runs on one process are not the same run.
_LARGEST = {"fp64": 1e-6, "fp32": 1e-2}
_MIXED = re.compile(r"(?=.*\b(?:float|float32)\b)(?=.*\b(?:double|float64)\b)", re.IGNORECASE | re.DOTALL)


@dataclass
class Report:
    """What a comparison came to.

    Attributes:
        verdicts: of every number of processes, against one process.
        alone: of one process, for itself.
        certificate: the file with everything, if a folder for it was given.
    """

    verdicts: list[Verdict]
    alone: list[Verdict]
    certificate: Path | None = None

    @property
    def exit_code(self) -> int:
        """0: an equality passed and nothing failed; 1: something failed; 2: nothing could be said."""
        return verdict.exit_code([*self.verdicts, *self.alone])

    @property
    def mark(self) -> str:
        """PASS, FAIL or ABSTAIN."""
        return {0: "PASS", 1: "FAIL", 2: "ABSTAIN"}[self.exit_code]

    @property
    def lines(self) -> list[str]:
        """The table, what explains it, and the verdict."""
        return [*verdict.lines(self.verdicts, self.alone), self.mark]


def compare(
    train: Callable[[World], Records],
    worlds: Sequence[int] = (2,),
    *,
    precision: Literal["fp64", "fp32"] = "fp64",
    timeout: float = 300.0,
    folder: str | Path | None = None,
    adaptive: bool | None = None,
    quiet: bool = False,
) -> Report:
    """Run a training function on one process and on many, compare everything it records, and print what was found.

    Args:
        train: defined at the top level of a file. It trains a few steps on a world and returns `world.records(…)`.
        worlds: numbers of processes to compare with one.
        precision: fp64 makes float64 torch's default dtype and promotes casts to lower ones; fp32 leaves all as it is.
        timeout: seconds that every run may take; one that takes longer is a fault, told with the line where it hangs.
        folder: for the certificate and the traces; None keeps neither.
        adaptive: whether the optimizer divides by the size of gradients; None: unless its class is called SGD.
        quiet: print nothing.

    Raises:
        ConfigError: for a function that other processes cannot import, or one that does not record as it should.

    Example:
        if __name__ == "__main__":
            raise SystemExit(compare(train, worlds=[2, 4]).exit_code)
    """
    place = cluster.process_info()
    if place is not None and (place.launcher != "slurm" or place.world_size > 1):
        raise ConfigError(
            "unisono.proof.compare starts its processes itself, but was called by a process of a run: put the call "
            "under `if __name__ == '__main__':`, and start the script with python alone"
        )
    reference = reference_to(train)
    if not worlds or min(worlds) < 2:
        raise ConfigError(f"worlds={list(worlds)}: one process is compared with 2 or more, so name numbers from 2 on")
    if precision not in prove.FLOOR:
        raise ConfigError(f"precision must be fp64 or fp32, not {precision!r}")
    digests = code_digest.digests(reference)
    root = Path(tempfile.mkdtemp(prefix="unisono-proof-")) if folder is None else Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    try:
        one = Case("1 process", 1, {}, precision)
        again = Case("1 process, perturbed", 1, {}, precision, perturbed=EPSILON[precision])
        every = [one, again, *(Case(f"{world} processes", world, {}, precision, one.name) for world in worlds)]
        run = Run(reference, precision, timeout, "", arguments=sys.argv)
        verdicts, alone = _judged(every, run, root, adaptive, quiet)
        report = Report(verdicts, alone)
        if folder is not None:
            about = {"script": reference, "precision": precision, "code": digests, "versions": _versions()}
            report.certificate = certificate.write(root, verdicts, alone, about)
    finally:
        if folder is None:
            shutil.rmtree(root, ignore_errors=True)
    if not quiet:
        print("\n".join(report.lines))
    return report


def _judged(
    every: list[Case], run: Run, root: Path, adaptive: bool | None, quiet: bool
) -> tuple[list[Verdict], list[Verdict]]:
    """Run all cases, and compare them with the first."""
    one, again = every[:2]
    traces: dict[str, Trace] = {}
    ended: dict[str, local_processes.WorkerError] = {}

    def ran(case: Case) -> Trace | None:
        if not quiet:
            print(f"{case.name} …", file=sys.stderr, flush=True)
        threads = threads_per_process(max(other.world_size for other in every))
        try:
            traces[case.name] = _ran(case, run, root, threads)
        except local_processes.WorkerError as error:
            ended[case.name] = error
        return traces.get(case.name)

    reference = ran(one)
    if reference is None:
        return prove.judged(every, traces, False, ended)
    divides = reference.facts.optimizer != "SGD" if adaptive is None else adaptive
    perturbed = ran(again)
    stray = _stray(perturbed, reference, run.precision, divides) if perturbed else str(ended[again.name])
    if stray:
        reference.facts.unrepeatable = stray
        said = [Compared("the run", "ABSTAIN", why=f"{one.name} cannot be repeated")]
        skipped = [Verdict(case.name, case.reference, False, said) for case in every[2:]]
        return skipped, prove.judged([one], traces, divides)[1]
    for case in every[2:]:
        ran(case)
    verdicts, alone = prove.judged(every, traces, divides, ended)
    for found in verdicts:
        local_statistics = traces[found.case].facts.per_process if found.case in traces else []
        if local_statistics and found.first and found.first.quantity in ("loss", "raw gradients"):
            told = f"{local_statistics[0]} and others are of the rows of one process, which normalises by them"
            found.diagnosis = named("Buffers are those of one process", told)
    return verdicts, alone


def _ran(case: Case, run: Run, root: Path, threads: int) -> Trace:
    """Run a case to its end.

    Raises:
        ConfigError: for a mistake in the use of the recorder.
        WorkerError: for an error of the script, or if it took too long.
    """
    trace = folder_of(root, case.name)
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir()
    own = replace(run, trace=trace.name, perturbed=case.perturbed)
    (root / "run.json").write_text(json.dumps(asdict(own)), encoding="utf-8")
    try:
        module, world = "unisono.proof.scripts.script_process", case.world_size
        local_processes.processes(module, root, world, threads, run.reference, loopback=True, ours=False)
    except local_processes.WorkerError as error:
        code = error.exit_code
        if code == ConfigError.exit_code:
            raise ConfigError(str(error)) from None
        if late := _late(root / "logs"):
            told = f"it was not at its end after {run.timeout:g} s (timeout={run.timeout:g}): {late}"
            if case.world_size == 1:
                raise local_processes.WorkerError(told, code) from None
            raise local_processes.WorkerError(told, code, fault="Processes wait for each other") from None
        if run.precision == "fp64" and _MIXED.search(str(error)):
            raise local_processes.WorkerError(str(error), code, fault="Single precision meets double") from None
        raise
    return Trace(trace)


def _late(logs: Path) -> str:
    """Where every process was when the time was up, if that is what ended the run."""
    faults = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(logs.glob("*.fault.json"))]
    late = [fault["text"] for fault in faults if fault["kind"] == LATE]
    return "; ".join(late) if len(late) == len(faults) else ""


def _stray(again: Trace, reference: Trace, precision: str, adaptive: bool) -> str:
    """Why two runs on one process, of which one began with weights changed in their last bit, are not the same run."""
    allowed = {**dict.fromkeys(QUANTITIES, math.inf), "sample ids": 0.0}
    found = {c.quantity: c for c in comparison.compare(again, reference, allowed, adaptive=False)}
    if adaptive:  # what it makes of rounding is told from the rest by the floor of the gradients
        allowed["raw gradients"] = prove.FLOOR[precision]
        told = comparison.compare(again, reference, allowed, adaptive=True)
        found |= {c.quantity: c for c in told if c.quantity in ("optimizer state", "parameters", "EMA")}
    for quantity in QUANTITIES:
        worst = found[quantity].worst
        if found[quantity].mark == "FAIL" or worst.size > _LARGEST[precision]:
            return (
                "two runs on one process, whose initial weights differ in their last bit, differ in "
                f"{quantity}{_by(worst)}; give every generator a seed (torch.manual_seed)"
            )
    return ""


def _by(worst: Difference) -> str:
    step = f" at step {worst.step}" if worst.step else ""
    return step if math.isinf(worst.size) else f" by {worst.size:.0e}{step}"


def _versions() -> dict[str, str]:
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    libraries = {"accelerate", "lightning", "lightning-fabric"} & installed
    return {**environment.versions(), **{name: importlib.metadata.version(name) for name in sorted(libraries)}}
