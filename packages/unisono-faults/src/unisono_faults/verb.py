"""The verb `unisono faults`: run the fault matrix on this host."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from unisono.runtime.console import say

TEXT = "inject faults into runs of a small task and check that they end and recover as promised"


def add_verb(verbs: Any) -> None:
    """Put the verb among the others."""
    verb = verbs.add_parser("faults", help=TEXT, description=f"{TEXT}; exit code 1 if a promise is broken")
    verb.set_defaults(run=_run)
    verb.add_argument("keys", nargs="*", metavar="FAULT", help="faults or groups, e.g. A1 C; default: all")
    verb.add_argument("--list", action="store_true", help="only list the faults")
    verb.add_argument("--quick", action="store_true", help="run only a few of them")
    verb.add_argument("--kills", type=int, metavar="N", help="number of kills at random instants (default 200)")
    verb.add_argument("--report", type=Path, metavar="FILE", help="write the matrix into a page, e.g. docs/faults.md")


def _run(parsed: argparse.Namespace) -> int:
    import os

    from unisono_faults import report
    from unisono_faults.scenarios import kills

    chosen = report.choose_scenarios(parsed.keys, quick=parsed.quick)
    if parsed.list:
        say("\n".join(f"{fault.key:4} {fault.text}" for fault in chosen))
        return 0
    if parsed.kills is not None:
        os.environ[kills.KILLS] = str(parsed.kills)
    outcomes = report.run_scenarios(chosen, lambda fault, outcome: say(report.format_outcome(fault, outcome)))
    if parsed.report:
        report.write_report(parsed.report, outcomes)
    return int(any(outcome.verdict == "FAIL" for _, outcome in outcomes))
