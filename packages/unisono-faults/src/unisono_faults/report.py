"""Runs the fault matrix and writes its results into a page."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.errors import ConfigError, nearest
from unisono_faults import scenarios
from unisono_faults.matrix import SCENARIOS, Outcome, Scenario, open_sandbox

GROUPS = {
    "A": "Processes that die or freeze",
    "B": "Ranks that hang or diverge",
    "C": "Storage",
    "D": "Numbers",
    "E": "Mismatched configuration, code or data",
    "F": "Hosts and their environment",
    "G": "Records",
    "S": "Security",
}
_HEAD = "| | Fault | Verdict | Ended after | Lost | Exact? | Message | Measured |"
BEGIN, END = "<!-- the matrix -->", "<!-- end of the matrix -->"
OnOutcome = Callable[[Scenario, Outcome], None]


def load_scenarios() -> dict[str, Scenario]:
    """All faults by key, in the order of the list."""
    for module in pkgutil.iter_modules(scenarios.__path__):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return dict(sorted(SCENARIOS.items(), key=lambda pair: _sort_key(pair[0])))


def choose_scenarios(keys: Sequence[str], *, quick: bool = False) -> list[Scenario]:
    """Select scenarios by key or group; all if none are given.

    Raises:
        ConfigError: for a key that does not exist.
    """
    everything = load_scenarios()
    for key in keys:
        if key not in everything and key not in GROUPS:
            raise ConfigError(f"there is no fault '{key}'; {nearest(key, everything)}, or a group: {', '.join(GROUPS)}")
    chosen = [fault for fault in everything.values() if not keys or fault.key in keys or fault.key[0] in keys]
    return [fault for fault in chosen if fault.quick or not quick]


def run_scenarios(faults: Iterable[Scenario], on_outcome: OnOutcome) -> list[tuple[Scenario, Outcome]]:
    """Inject faults one after the other."""
    outcomes = []
    with open_sandbox() as sandbox:
        for fault in faults:
            outcome = fault.show(sandbox)
            on_outcome(fault, outcome)
            outcomes.append((fault, outcome))
    return outcomes


def format_outcome(fault: Scenario, outcome: Outcome) -> str:
    """Format a fault and its outcome in one line, plus one line for each broken promise."""
    parts = [f"{outcome.verdict:7} {fault.key:4} {fault.text}"]
    if outcome.seconds is not None:
        parts.append(f"ended after {outcome.seconds:g} s")
    if outcome.lost_steps is not None:
        parts.append(f"{outcome.lost_steps} step{'s' * (outcome.lost_steps != 1)} repeated")
    if outcome.exact is not None:
        parts.append("exact" if outcome.exact else "NOT exact")
    lines = [f"        {' '.join(problem.split())[-600:]}" for problem in outcome.broken_promises]
    return "\n".join(["; ".join(parts), *([f"        {outcome.abstain}"] if outcome.abstain else lines)])


def write_report(path: Path, outcomes: Sequence[tuple[Scenario, Outcome]]) -> None:
    """Write the matrix between its marks in a page, or create the page; rows without a new outcome are kept."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Faults\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        raise ConfigError(f"{path} has no lines '{BEGIN}' and '{END}' to mark where the matrix goes")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {**_parse_rows(old), **{fault.key: _format_row(fault, outcome) for fault, outcome in outcomes}}
    path.write_text(f"{before}{BEGIN}\n{format_matrix(rows)}\n{END}{after}", encoding="utf-8")


def format_matrix(rows: Mapping[str, str]) -> str:
    """Format the matrix in Markdown from rows by key; rows of scenarios that no longer exist are left out."""
    everything = load_scenarios()
    verdicts = [_split_cells(row)[2] for key, row in rows.items() if key in everything]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("PASS", "FAIL", "ABSTAIN"))
    host = f"{platform.machine()}, {usable_cores()} cores, CPU and gloo"
    lines = [f"{counts}. Each row says when it was measured; the last of them by `unisono faults --report` on {host}."]
    if missing := [key for key in everything if key not in rows]:
        lines.append(f"Not measured: {', '.join(missing)}.")
    for letter, title in GROUPS.items():
        if group_rows := [rows[key] for key in everything if key[0] == letter and key in rows]:
            lines += ["", f"### {letter}. {title}", "", _HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *group_rows]
    return "\n".join(lines)


def _parse_rows(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == _HEAD.count("|")]
    return {_split_cells(line)[0]: line for line in lines if line != _HEAD}


def _split_cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def _format_row(fault: Scenario, outcome: Outcome) -> str:
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    lost_steps = (
        "" if outcome.lost_steps is None else f"{outcome.lost_steps} step{'' if outcome.lost_steps == 1 else 's'}"
    )
    exact = {None: "", True: "yes", False: "no"}[outcome.exact]
    message = outcome.abstain or (
        " ".join(outcome.broken_promises[0].split())[:200]
        if outcome.broken_promises
        else shorten_message(outcome.message)
    )
    cells = [fault.key, fault.text, outcome.verdict, seconds, lost_steps, exact, message, f"{date.today():%Y-%m-%d}"]
    return f"| {' | '.join(cell.replace('|', '·') for cell in cells)} |"


def shorten_message(message: str) -> str:
    """Remove what depends on this machine: temporary folders, and the paths of libraries and their sources."""
    short = re.sub(r"\S*unisono-faults-[^/\s]*/[^/\s]*/", "", " ".join(message.split()))
    short = re.sub(r"(?<![\w.])/\S*/(?:site-packages|lib/python3\.\d+)/", "", short)
    short = re.sub(r"(?<![\w.])/(?:[^\s/]+/)+(?=[^\s/]+\.(?:py|cc|cpp|h)\b)", "", short)
    return short if len(short) <= 220 else short[:217] + " …"


def _sort_key(key: str) -> tuple[str, int, str]:
    match = re.fullmatch(r"([A-Z])(\d+)([a-z]*)", key)
    assert match, key
    return match[1], int(match[2]), match[3]
