"""Explains how a run ended, from its files: why, what is saved, what is lost, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, placement
from unisono.config import CONFIG_FILE, safe_yaml
from unisono.config.resolved_run import RESOLVED_FILE
from unisono.observe import events
from unisono.runtime.errors import CheckpointError, RunError, UnavailableError, explain_command
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.supervise import records, run_facts

REMEDIES = {
    1: "Fix the code at the line that the error names, and resume.",
    2: "Fix what the message names, and resume.",
    3: "Check the rows that the message names; a lower optim.lr or train.clip_norm may help. The non-finite numbers "
    "never reached the parameters.",
    4: "Run `unisono prove` with the settings of this run to see where the difference begins.",
    5: "Check the logs of the rank that did not answer, and the network between the hosts.",
    6: "Use a smaller layout.micro_batch, or `layout.micro_batch=auto` to find the largest that fits.",
    7: "Check free space and permissions of the file system that holds the run, and resume.",
    8: "Make all ranks issue the two calls that the message names in the same order.",
    9: "If it happens again at the same place, check the host (`dmesg`, its memory); launch.max_restarts resumes "
    "automatically.",
    10: "Check the line that the message names. If a step may really take that long, raise launch.stuck_after or the "
    "deadline that the message names.",
    75: "Nothing to fix: the run was asked to stop.",
    130: "Nothing to fix: the run was interrupted.",
}


def diagnose_run(folder: Path) -> list[str]:
    """Return a report about a run, line by line.

    Raises:
        RunError: If it is not a run directory.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise RunError(f"{folder} is not a run directory (no config.yaml)")
    config = safe_yaml.read_yaml(folder / CONFIG_FILE)
    written = folder / "events.jsonl"
    seen = events.read_events(written) if written.is_file() else []
    steps = events.step_events(seen)
    steps_run = int(steps[-1]["step"]) if steps else 0
    total = run_facts.planned_steps(folder) or (config.get("train") or {}).get("steps")
    lines = [f"{folder}: {f'{steps_run} of {total}' if total else steps_run} steps done"]
    if steps:
        loss = steps[-1]["loss"]
        lines[0] += f"; loss of the last step: {'not finite' if loss is None else f'{loss:.6g}'}"
    logs = folder / "logs"
    faults = records.read(logs, "*.fault.json", records.Fault)
    findings = records.read(logs, "monitor-node-*.json", records.Finding)
    code, why = run_facts.find_cause(faults, findings)
    if not why and total is not None and steps_run >= total:
        why = ["It finished: all steps are done, and no error was recorded."]
    elif not why and run_facts.find_state(folder, steps_run, total)[0] == "stopped":
        asked = run_facts.find_stop(seen)
        why = [f"It was stopped after step {steps_run}{asked and f': {asked}'}."]
    elif not why:
        why = [
            "No error is recorded: it is still running, was interrupted, or was killed together with its launcher, as",
            "when a host goes down.",
        ]
    lines += ["", "How it ended", *(f"  {line}" for line in why)]
    lines += ["", "Where each rank was", *ranks] if (ranks := list(_describe_ranks(findings, faults))) else []
    lines += ["", "What is saved", *(f"  {line}" for line in _describe_checkpoints(folder, steps_run))]
    if again := [event for event in seen if "restart" in event]:
        lines += ["", "Restarts after a failure (launch.max_restarts)"]
        lines += [
            f"  {one_line(event['restart'])}: from step {event['step']}, after: {one_line(event.get('why', 'unknown'))}"
            for event in again
        ]
    if code is not None:
        fault = next((fault["fault"] for fault in faults if fault.get("fault")), "")
        more = f" See `{explain_command(fault)}`." if fault else ""
        lines += ["", "What to do", f"  {REMEDIES.get(code, 'Resume.')}{more}"]
    if (total is None or steps_run < total) and (command := _resume_command(folder)):
        lines += ["", "Resume with", f"  {command}"]
    return lines


def _resume_command(folder: Path) -> str:
    """Return what to type to resume the run; empty if it was never started.

    The folder may be anybody's, and its words would be typed: so all of them are ours, and the folder's name as the
    user gave it.
    """
    return shlex.join(("unisono", "resume", str(folder))) if safe_paths.is_inside(folder, RESOLVED_FILE) else ""


def _describe_ranks(findings: list[dict[str, Any]], faults: list[dict[str, Any]]) -> Iterator[str]:
    for found in findings:
        for rank, one in sorted(found["ranks"].items(), key=lambda item: int(item[0])):
            where = f", at {one_line(one['where'])}" if "where" in one else ""
            yield f"  rank {rank} on {one_line(found['host'])} (process {one['pid']}): {one_line(one['at'])}{where}"
        if found.get("stacks"):
            yield f"  all stacks: {one_line(found['stacks'], 1000)}"
    for fault in sorted(faults, key=lambda fault: fault["rank"]):
        lines = fault["text"].strip().splitlines() or [""]
        said = lines[-1 if lines[0].startswith("Traceback") else 0]  # Python says at the end what it is
        yield f"  rank {fault['rank']} reported: {one_line(said, 1000)}"


def _describe_checkpoints(folder: Path, steps_run: int) -> Iterator[str]:
    good: int | None = None
    try:
        found = commit.find_checkpoints(folder / placement.NAME)
        for path in reversed(found):
            try:
                step = commit.open_checkpoint(path).step
            except CheckpointError as error:
                yield f"{path.name} is damaged: {error}"
                continue
            if good is None:
                good = step
                yield f"{path.name} is the newest good checkpoint: the hashes of all its files match"
            else:
                yield f"{path.name} is good"
    except UnavailableError as error:
        yield str(error)
        if good is None:  # so nobody knows what is lost
            return
    if not found:
        try:
            placement.refuse_lost(folder)
        except RunError as error:
            yield str(error)
            return
    if good is None:
        yield "There is no usable checkpoint" if found else "There is no checkpoint"
    lost = steps_run - (good or 0)
    if lost > 0:
        which = f"Steps {steps_run - lost + 1} to {steps_run} are" if lost > 1 else f"Step {steps_run} is"
        yield f"{which} not saved and would be repeated"
