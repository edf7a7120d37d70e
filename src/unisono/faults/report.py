"""Running the fault matrix, and writing its results into a page."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

from unisono.faults import scenarios
from unisono.faults.matrix import SCENARIOS, Outcome, Scenario, open_sandbox
from unisono.runtime.communicator import usable_cores
from unisono.runtime.errors import ConfigError, nearest

GROUPS = {
    "A": "Processes that die or freeze",
    "B": "Ranks that wait, or do not do the same",
    "C": "Storage",
    "D": "Numbers",
    "E": "Configuration, code and data that differ",
    "F": "Machines and their environment",
    "G": "Records",
    "S": "Security",
}
_HEAD = "| | Fault | Verdict | Ended after | Lost | Exact? | What is said | Measured |"
BEGIN, END = "<!-- the matrix -->", "<!-- end of the matrix -->"
OnOutcome = Callable[[Scenario, Outcome], None]


def load_scenarios() -> dict[str, Scenario]:
    """All faults by key, in the order of the list."""
    for module in pkgutil.iter_modules(scenarios.__path__):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return dict(sorted(SCENARIOS.items(), key=lambda pair: _sort_key(pair[0])))


def choose_scenarios(keys: Sequence[str], *, quick: bool = False) -> list[Scenario]:
    """The faults that are asked for: keys or whole groups; all if none are.

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
    """Let faults happen, one after the other."""
    shown = []
    with open_sandbox() as where:
        for fault in faults:
            outcome = fault.show(where)
            on_outcome(fault, outcome)
            shown.append((fault, outcome))
    return shown


def format_outcome(fault: Scenario, outcome: Outcome) -> str:
    """A fault and what came of it, in a line and one for each promise that was not kept."""
    parts = [f"{outcome.verdict:7} {fault.key:4} {fault.text}"]
    if outcome.seconds is not None:
        parts.append(f"ended after {outcome.seconds:g} s")
    if outcome.lost is not None:
        parts.append(f"{outcome.lost} step{'s' * (outcome.lost != 1)} repeated")
    if outcome.exact is not None:
        parts.append("exact" if outcome.exact else "NOT exact")
    lines = [f"        {' '.join(wrong.split())[-600:]}" for wrong in outcome.broken_promises]
    return "\n".join(["; ".join(parts), *([f"        {outcome.abstain}"] if outcome.abstain else lines)])


def write_report(path: Path, shown: Sequence[tuple[Scenario, Outcome]]) -> None:
    """Put the matrix into a page between its marks, or make the page; rows that are not shown now stay as they are."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Faults\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        raise ConfigError(f"{path} has no lines '{BEGIN}' and '{END}' to mark where the matrix goes")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {**_parse_rows(old), **{fault.key: _format_row(fault, outcome) for fault, outcome in shown}}
    path.write_text(f"{before}{BEGIN}\n{format_matrix(rows)}\n{END}{after}", encoding="utf-8")


def format_matrix(rows: Mapping[str, str]) -> str:
    """The matrix in Markdown, of rows by key; those that no fault has any more are left out."""
    everything = load_scenarios()
    verdicts = [_split_cells(row)[2] for key, row in rows.items() if key in everything]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("PASS", "FAIL", "ABSTAIN"))
    where = f"{platform.machine()}, {usable_cores()} cores, CPU and gloo"
    lines = [f"{counts}. Each row says when it was measured; the last of them by `unisono faults --report` on {where}."]
    if missing := [key for key in everything if key not in rows]:
        lines.append(f"Not measured: {', '.join(missing)}.")
    for letter, title in GROUPS.items():
        if mine := [rows[key] for key in everything if key[0] == letter and key in rows]:
            lines += ["", f"### {letter}. {title}", "", _HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *mine]
    return "\n".join(lines)


def _parse_rows(text: str) -> dict[str, str]:
    """The rows that a page has, by key."""
    found = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == _HEAD.count("|")]
    return {_split_cells(line)[0]: line for line in found if line != _HEAD}


def _split_cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def _format_row(fault: Scenario, outcome: Outcome) -> str:
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    lost = "" if outcome.lost is None else f"{outcome.lost} step{'' if outcome.lost == 1 else 's'}"
    exact = {None: "", True: "yes", False: "no"}[outcome.exact]
    said = outcome.abstain or (
        " ".join(outcome.broken_promises[0].split())[:200] if outcome.broken_promises else shorten_message(outcome.said)
    )
    cells = [fault.key, fault.text, outcome.verdict, seconds, lost, exact, said, f"{date.today():%Y-%m-%d}"]
    return f"| {' | '.join(cell.replace('|', '·') for cell in cells)} |"


def shorten_message(said: str) -> str:
    """A sentence without what is of this machine alone: temporary folders, and where libraries lie or were built."""
    short = re.sub(r"\S*unisono-faults-[^/\s]*/[^/\s]*/", "", " ".join(said.split()))
    short = re.sub(r"(?<![\w.])/\S*/(?:site-packages|lib/python3\.\d+)/", "", short)
    short = re.sub(r"(?<![\w.])/(?:[^\s/]+/)+(?=[^\s/]+\.(?:py|cc|cpp|h)\b)", "", short)
    return short if len(short) <= 220 else short[:217] + " …"


def _sort_key(key: str) -> tuple[str, int, str]:
    found = re.fullmatch(r"([A-Z])(\d+)([a-z]*)", key)
    assert found, key
    return found[1], int(found[2]), found[3]
