"""What the files of a run say of how it ended, in plain sentences: why, what is saved, what is lost, what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit
from unisono.config import safe_yaml
from unisono.config.resolved_run import RESOLVED, resume_command
from unisono.observe import events
from unisono.runtime import safe_paths
from unisono.runtime.errors import CheckpointError, DeadlineError, RunError, page
from unisono.runtime.text import one_line

_LONGEST = 4000  # characters of a command that is shown
REMEDIES = {
    1: "Mend the code that the traceback names, and resume.",
    2: "Mend what the sentence names, and resume.",
    3: "Look at the rows that the sentence names; a lower optim.lr or train.clip_norm may help. The numbers never "
    "reached the parameters.",
    4: "`unisono prove` with the settings of this run shows where it begins.",
    5: "Look at the logs of the rank that was waited for, and at the network between the hosts.",
    6: "Give it a smaller layout.micro_batch, or `layout.micro_batch=auto` to find the largest that fits.",
    7: "See to the space and the rights of the file system that holds the run, and resume.",
    8: "The two calls that the sentence names must be made by all ranks, in one order.",
    9: "If it happens again at the same place, look at the host (`dmesg`, its memory); launch.max_restarts resumes by "
    "itself.",
    10: "Look at the line that the sentence names. If a step is meant to take so long, raise launch.stuck_after or the "
    "deadline that it names.",
    75: "Nothing: it was asked to stop.",
    130: "Nothing: it was interrupted.",
}


def explained(folder: Path) -> list[str]:
    """A page about a run, line by line.

    Args:
        folder: of the run.

    Raises:
        RunError: if it is none.
    """
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is no run: it has no config.yaml")
    config = safe_yaml.read(folder / "config.yaml")
    written = folder / "events.jsonl"
    seen = events.read(written) if written.is_file() else []
    steps = [event for event in seen if "loss" in event and not event.get("eval")]
    made = int(steps[-1]["step"]) if steps else 0
    total = _planned(folder) or (config.get("train") or {}).get("steps")
    lines = [f"{folder}: {f'{made} of {total}' if total else made} steps are made"]
    if steps:
        lines[0] += f"; the loss of the last one is {steps[-1]['loss']:.6g}"
    faults, findings = _read(folder, "*.fault.json"), _read(folder, "monitor-node-*.json")
    code, why = _why(faults, findings, finished=total is not None and made >= total)
    lines += ["", "How it ended", *(f"  {line}" for line in why)]
    lines += ["", "Where each rank was", *ranks] if (ranks := list(_ranks(findings, faults))) else []
    lines += ["", "What is saved", *(f"  {line}" for line in _saved(folder, made))]
    if again := [event for event in seen if "restart" in event]:
        lines += ["", "Starts after a failure (launch.max_restarts)"]
        lines += [f"  {event['restart']}: from step {event['step']}, after: {event['why']}" for event in again]
    if code is not None:
        fault = next((fault["fault"] for fault in faults if fault.get("fault")), "")
        more = f" See {page(fault)}." if fault else ""
        lines += ["", "What to do", f"  {REMEDIES.get(code, 'Resume.')}{more}"]
    if (total is None or made < total) and (command := _resumes_by(folder)):
        lines += ["", "Resume with", f"  {command}"]
    return lines


def _resumes_by(folder: Path) -> str:
    """What to type to resume the run, as its newest start wrote it down; empty where that is not known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = safe_paths.read_json(folder, RESOLVED)
        command = tuple(map(str, values["command"]))
        if command[:2] in ((), ("unisono", "train")):  # the file may be anybody's
            return one_line(resume_command(command, str(values["config"]["run"]["name"])), _LONGEST)
    return ""


def _planned(folder: Path) -> int | None:
    """How many steps the run makes; the configuration may have said it in epochs."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((folder / "fingerprint.json").read_text(encoding="utf-8"))["data"]["steps"])
    return None


def _why(
    faults: list[dict[str, Any]], findings: list[dict[str, Any]], finished: bool
) -> tuple[int | None, Iterator[str]]:
    """The exit code and the sentence; a fault that is no wait in vain comes first, as it does on the console."""
    own = sorted((f for f in faults if f["kind"] != "DeadlineError"), key=lambda fault: fault["time"])
    if own:
        text = own[0]["text"].splitlines()
        told = [text[0], *(["…", *text[-3:]] if len(text) > 4 else text[1:])]
        return own[0]["code"], iter([f"rank {own[0]['rank']}: {told[0]}", *(f"  {line}" for line in told[1:])])
    if findings:
        first = min(findings, key=lambda found: found["time"])
        return first["code"], iter([first["text"]])
    if faults:
        first = min(faults, key=lambda fault: fault["time"])
        return DeadlineError.exit_code, iter([first["text"].splitlines()[0]])
    if finished:
        return None, iter(["It is finished: all steps are made, and nothing went wrong."])
    return None, iter(
        [
            "Nothing tells of a fault. It runs, was interrupted, or all of it was killed at once with its launcher, as",
            "when a host goes down.",
        ]
    )


def _ranks(findings: list[dict[str, Any]], faults: list[dict[str, Any]]) -> Iterator[str]:
    for found in findings:
        for rank, one in sorted(found["ranks"].items(), key=lambda item: int(item[0])):
            where = f", at {one['where']}" if "where" in one else ""
            yield f"  rank {rank} on {found['host']} (process {one['pid']}): {one['at']}{where}"
        if found.get("stacks"):
            yield f"  all stacks: {found['stacks']}"
    for fault in sorted(faults, key=lambda fault: fault["rank"]):
        yield f"  rank {fault['rank']} said: {fault['text'].splitlines()[-1]}"


def _saved(folder: Path, made: int) -> Iterator[str]:
    good: int | None = None
    found = commit.find(folder / "checkpoints")
    for path in reversed(found):
        try:
            step = commit.open_(path).step
        except CheckpointError as error:
            yield f"{path.name} is damaged: {error}"
            continue
        if good is None:
            good = step
            yield f"{path.name} is the newest good checkpoint: all its files are as they were written"
        else:
            yield f"{path.name} is good"
    if good is None:
        yield "There is no checkpoint that can be used" if found else "There is no checkpoint"
    lost = made - (good or 0)
    if lost > 0:
        which = f"Steps {made - lost + 1} to {made} are" if lost > 1 else f"Step {made} is"
        yield f"{which} not saved, and would be made again"


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The JSON files of a run's logs that can be read."""
    found: list[Mapping[str, Any]] = []
    for path in sorted((folder / "logs").glob(pattern)):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return [dict(one) for one in found]
