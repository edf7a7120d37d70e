"""The verb `plan`, for the command `unisono`; nothing heavy is imported until it runs."""

from __future__ import annotations

import argparse
from typing import Any

from unisono.cli import arguments

PLAN = "foretell memory, collectives and time of a layout on devices that are not here"


def add_verbs(verbs: Any) -> None:
    """Put the verb among the others."""
    verb = verbs.add_parser("plan", help=PLAN, description=f"{PLAN}, and look for the best one; nothing is trained")
    verb.set_defaults(run=_plan)
    arguments.add_recipe(verb)
    arguments.add_overrides(
        verb,
        "as for train; and hardware=h100x64 (or h100x64/4 with 4 devices a node), search=false, memory_gb=80, "
        "inter_gbps=400",
    )


def _plan(parsed: argparse.Namespace) -> int:
    from unisono.runtime.console import say, terminal_width
    from unisono_plan.plan import PlanSettings, make_plan
    from unisono_plan.report import describe

    settings = arguments.parse_settings(parsed, PlanSettings)
    say("\n".join(describe(make_plan(arguments.load_config(parsed), settings), terminal_width())))
    return 0
