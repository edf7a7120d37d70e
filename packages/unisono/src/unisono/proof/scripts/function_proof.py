"""`compare`: proves a training function, by what it records itself or by what can be seen of it as it is."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from unisono.config import environment
from unisono.config.code import code_digest
from unisono.launch import cluster
from unisono.launch.task_objects import reference_to
from unisono.proof import certificate, judgement
from unisono.proof.comparison import ComparedQuantity
from unisono.proof.diagnoses import diagnosis
from unisono.proof.scripts.judging import self_check
from unisono.proof.scripts.judging.script_comparison import Report, ScriptRuns, name_local_statistics
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.scripts.recording.script_process import ScriptRun
from unisono.proof.scripts.script_proof import ScriptSettings, prove_script
from unisono.proof.trace_room import trace_room
from unisono.proof.verdict import Verdict
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError


def compare(
    train: Callable[..., Any],
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
        train: defined at the top level of a file. It trains a few steps on a world and returns `world.records(…)`; a
            function without parameters is run as it is, as `unisono prove train.py` runs a script.
        worlds: numbers of processes to compare with one.
        precision: fp64 makes float64 torch's default dtype and promotes casts to lower ones; fp32 leaves all as it is.
        timeout: seconds that every run may take; one that takes longer is a fault, told with the line where it hangs.
        folder: for the certificate and the traces; None keeps neither.
        adaptive: whether the optimizer divides by the size of gradients; None: unless its class is called SGD.
        quiet: print nothing.

    Raises:
        ConfigError: for a function that other processes cannot import, or one that does not record as it should.
        RunError: for one that fails on one process, so that nothing can be compared.

    Example:
        if __name__ == "__main__":
            raise SystemExit(compare(train, worlds=[2, 4]).exit_code)
    """
    place = cluster.process_info()
    if place is not None and (place.launcher != "slurm" or place.world_size > 1):
        raise ConfigError(
            "unisono.proof.compare starts its own processes, but was called by a process of a run: put the call "
            "under `if __name__ == '__main__':`, and start the script with plain python"
        )
    if not worlds or min(worlds) < 2:
        raise ConfigError(f"worlds={list(worlds)}: one process is compared with 2 or more; give numbers of at least 2")
    if precision not in judgement.FLOOR:
        raise ConfigError(f"precision must be fp64 or fp32, not {precision!r}")
    reference = reference_to(train)
    digests = code_digest.digest_sources(reference)
    with trace_room() if folder is None else nullcontext(Path(folder)) as root:
        root.mkdir(parents=True, exist_ok=True)
        if inspect.signature(train).parameters:
            run = ScriptRun(reference, precision, timeout)
            runs = ScriptRuns(run, dict.fromkeys((1, *worlds), sys.argv), root, quiet)
            report = Report(*_judge_runs(runs, adaptive))
        else:
            settings = ScriptSettings(worlds=[1, *worlds], precision=precision, timeout=timeout)
            report = prove_script(train, (), settings, quiet=quiet)
        if folder is not None:
            about = {"script": reference, "precision": precision, "code": digests, "versions": _versions()}
            report.certificate = certificate.write_certificate(root, report.verdicts, report.alone, about)
    if not quiet:
        say("\n".join(report.lines))
    return report


def _judge_runs(runs: ScriptRuns, adaptive: bool | None) -> tuple[list[Verdict], list[Verdict]]:
    one, again, *many = runs.cases
    reference = runs.record(one)
    if reference is None:
        runs.refuse_unrunnable()
    divides = reference.facts.optimizer != "SGD" if adaptive is None else adaptive
    runs.record(again)
    stray = runs.explain_stray(divides)
    if stray:
        reference.facts.unrepeatable = stray
        said = [ComparedQuantity("the run", "ABSTAIN", why=f"{one.name} cannot be repeated")]
        skipped = [Verdict(case.name, case.reference, False, said) for case in many]
        return skipped, judgement.judge_cases([one], runs.traces, divides)[1]
    for case in many:
        runs.record(case)
    verdicts, alone = runs.judge(divides)
    for judged in verdicts:
        if judged.case in runs.traces:
            _check_beginnings_and_buffers(judged, runs.traces[judged.case], reference)
    name_local_statistics(verdicts, runs.traces, reference)
    return verdicts, alone


def _check_beginnings_and_buffers(judged: Verdict, trace: ScriptTrace, reference: ScriptTrace) -> None:
    """Add what ranks show of each other that is not compared with one process: rank 0's buffers may be its."""
    check = self_check.check_run(trace)
    judged.invariants += [c for c in check.found if c.quantity in (self_check.BEGIN, self_check.BUFFERS)]
    if judged.first is None or judged.first.quantity not in ("buffers", self_check.BEGIN, self_check.BUFFERS):
        return
    judged.diagnosis = diagnosis.diagnose(trace, reference, [*judged.compared, *judged.invariants], len(trace.ranks[0]))
    if check.failed in judged.invariants:
        judged.diagnosis = check.diagnosis


def _versions() -> dict[str, str]:
    result = environment.library_versions()
    for name in ("accelerate", "lightning", "lightning-fabric", "pytorch-lightning"):
        with suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result
