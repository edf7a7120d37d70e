"""The matrix shown, and written down."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

from unisono.faults import scenarios
from unisono.faults.matrix import FAULTS, Fault, Outcome, ground
from unisono.runtime.communicator import cores
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
Told = Callable[[Fault, Outcome], None]


def known() -> dict[str, Fault]:
    """All faults by key, in the order of the list."""
    for module in pkgutil.iter_modules(scenarios.__path__):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return dict(sorted(FAULTS.items(), key=lambda pair: _place(pair[0])))


def choose(keys: Sequence[str], *, quick: bool = False) -> list[Fault]:
    """The faults that are asked for: keys or whole groups; all if none are.

    Raises:
        ConfigError: for a key that does not exist.
    """
    everything = known()
    for key in keys:
        if key not in everything and key not in GROUPS:
            raise ConfigError(f"there is no fault '{key}'; {nearest(key, everything)}, or a group: {', '.join(GROUPS)}")
    chosen = [fault for fault in everything.values() if not keys or fault.key in keys or fault.key[0] in keys]
    return [fault for fault in chosen if fault.quick or not quick]


def show(faults: Iterable[Fault], told: Told) -> list[tuple[Fault, Outcome]]:
    """Let faults happen, one after the other."""
    shown = []
    with ground() as where:
        for fault in faults:
            outcome = fault.show(where)
            told(fault, outcome)
            shown.append((fault, outcome))
    return shown


def line(fault: Fault, outcome: Outcome) -> str:
    """A fault and what came of it, in a line and one for each promise that was not kept."""
    parts = [f"{outcome.verdict:7} {fault.key:4} {fault.text}"]
    if outcome.seconds is not None:
        parts.append(f"ended after {outcome.seconds:g} s")
    if outcome.lost is not None:
        parts.append(f"{outcome.lost} steps made again")
    if outcome.exact is not None:
        parts.append("exact" if outcome.exact else "NOT exact")
    told = [f"        {' '.join(wrong.split())[-600:]}" for wrong in outcome.wrong]
    return "\n".join(["; ".join(parts), *([f"        {outcome.abstain}"] if outcome.abstain else told)])


def write(path: Path, shown: Sequence[tuple[Fault, Outcome]]) -> None:
    """Put the matrix into a page between its marks, or make the page; rows that are not shown now stay as they are."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Faults\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        raise ConfigError(f"{path} has no lines '{BEGIN}' and '{END}' between which the matrix could stand")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {**_rows(old), **{fault.key: _row(fault, outcome) for fault, outcome in shown}}
    path.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


def table(rows: Mapping[str, str]) -> str:
    """The matrix in Markdown, of rows by key; those that no fault has any more are left out."""
    everything = known()
    verdicts = [_cells(row)[2] for key, row in rows.items() if key in everything]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("PASS", "FAIL", "ABSTAIN"))
    where = f"{platform.machine()}, {cores()} cores, CPU and gloo"
    lines = [f"{counts}. Each row says when it was measured; the last of them by `unisono faults --report` on {where}."]
    if missing := [key for key in everything if key not in rows]:
        lines.append(f"Not measured: {', '.join(missing)}.")
    for letter, title in GROUPS.items():
        if mine := [rows[key] for key in everything if key[0] == letter and key in rows]:
            lines += ["", f"### {letter}. {title}", "", _HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *mine]
    return "\n".join(lines)


def _rows(text: str) -> dict[str, str]:
    """The rows that a page has, by key."""
    found = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == _HEAD.count("|")]
    return {_cells(line)[0]: line for line in found if line != _HEAD}


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def _row(fault: Fault, outcome: Outcome) -> str:
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    lost = "" if outcome.lost is None else f"{outcome.lost} step{'' if outcome.lost == 1 else 's'}"
    exact = {None: "", True: "yes", False: "no"}[outcome.exact]
    said = outcome.abstain or (" ".join(outcome.wrong[0].split())[:200] if outcome.wrong else plain(outcome.said))
    cells = [fault.key, fault.text, outcome.verdict, seconds, lost, exact, said, f"{date.today():%Y-%m-%d}"]
    return f"| {' | '.join(cell.replace('|', '·') for cell in cells)} |"


def plain(said: str) -> str:
    """A sentence without what is of this machine alone: temporary folders, and where libraries lie or were built."""
    short = re.sub(r"\S*unisono-faults-[^/\s]*/[^/\s]*/", "", " ".join(said.split()))
    short = re.sub(r"(?<![\w.])/\S*/(?:site-packages|lib/python3\.\d+)/", "", short)
    short = re.sub(r"(?<![\w.])/(?:[^\s/]+/)+(?=[^\s/]+\.(?:py|cc|cpp|h)\b)", "", short)
    return short if len(short) <= 220 else short[:217] + " …"


def _place(key: str) -> tuple[str, int, str]:
    found = re.fullmatch(r"([A-Z])(\d+)([a-z]*)", key)
    assert found, key
    return found[1], int(found[2]), found[3]
