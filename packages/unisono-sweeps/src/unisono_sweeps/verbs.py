"""The verbs of this package, for the command `unisono`; nothing heavy is imported until one runs."""

from __future__ import annotations

import argparse
from typing import Any

from unisono.cli import arguments

SWEEP = "train a recipe many times, with every combination of some settings"
SEARCH = "look for the best settings of a recipe, with Optuna"
COMPARE = "show what several runs reached and what distinguishes them"
REPORT = "write a run or a sweep as one HTML file, readable without a network"


def add_verbs(verbs: Any) -> None:
    """Put the verbs among the others."""
    verb = verbs.add_parser(
        "sweep", help=SWEEP, description=f"{SWEEP}; the same command resumes, and runs nothing twice"
    )
    verb.set_defaults(run=_sweep)
    arguments.add_recipe(verb)
    arguments.add_overrides(
        verb,
        "as for train, with several values: optim.lr=1e-3,3e-4 'model.width=range(128,513,128)' "
        "'optim.lr=tag(log,interval(1e-5,1e-2))' 'experiment=glob(*)'; and seeds=3, zip=[KEY,KEY], draws=20, "
        "configs=FILE.py, name=NAME, jobs=2, launcher=local, trial=false",
    )
    verb.add_argument("--dry-run", action="store_true", help="check all runs and print them, without starting any")
    verb = verbs.add_parser("search", help=SEARCH, description=f"{SEARCH}; the same command resumes")
    verb.set_defaults(run=_search)
    arguments.add_recipe(verb)
    arguments.add_overrides(
        verb,
        "as for sweep: 'optim.lr=tag(log,interval(1e-5,1e-2))' model.width=128,256; and trials=50, metric=eval/loss, "
        "mode=min, prune=true, space=FILE.py, name=NAME, jobs=2, launcher=local",
    )
    verb = verbs.add_parser("compare", help=COMPARE, description=f"{COMPARE}: a table, as Parquet too, and pictures")
    verb.set_defaults(run=_compare)
    verb.add_argument(
        "paths",
        nargs="+",
        metavar="RUN|SWEEP|KEY=VALUE",
        help="folders of runs or sweeps; and metric=…, mode=min|max, fit=COLUMN, out=FOLDER",
    )
    verb = verbs.add_parser("report", help=REPORT, description=REPORT)
    verb.set_defaults(run=_report)
    verb.add_argument("folder", metavar="RUN|SWEEP", help="folder of a run, or of several")
    verb.add_argument("out", nargs="?", metavar="out=FILE", help="file to write (default: report.html in that folder)")
    verb.add_argument("--serve", action="store_true", help="show it at an address of this host, and follow the runs")
    verb.add_argument("--port", type=int, default=0, help="for --serve (default: any that is free)")


def _sweep(parsed: argparse.Namespace) -> int:
    from unisono_sweeps.sweep import run_sweep

    return run_sweep(parsed.recipe, parsed.config_dir, parsed.overrides, dry_run=parsed.dry_run)


def _search(parsed: argparse.Namespace) -> int:
    from unisono_sweeps.search import run_search

    return run_search(parsed.recipe, parsed.config_dir, parsed.overrides)


def _compare(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from unisono.config.key_values import parse_settings
    from unisono_sweeps.compare.verb import CompareSettings, compare

    settings, paths = parse_settings(parsed.paths, CompareSettings)
    compare([Path(path) for path in paths], settings)
    return 0


def _report(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from unisono.runtime.console import say
    from unisono.runtime.errors import ConfigError
    from unisono.runtime.files import write_whole
    from unisono_sweeps.report.content import describe

    key, sign, value = (parsed.out or "out=").partition("=")
    if key != "out" or not sign:
        raise ConfigError(f"unknown word '{parsed.out}'; write out=FILE")
    folder = Path(parsed.folder)
    if parsed.serve:
        from unisono_sweeps.report.serve import serve

        serve(folder, parsed.port)
        return 0
    page = describe(folder).render()
    path = Path(value) if value else folder / "report.html"
    try:
        write_whole(path, page)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place: out=FILE") from error
    say(path)
    return 0
