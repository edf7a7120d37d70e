"""The verb `unisono data`: prepare, merge, reshard, preview and audit the rows of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments, plugins
from unisono.runtime.console import say, terminal_width
from unisono.runtime.display.work_progress import show_progress

if TYPE_CHECKING:
    from unisono.data.prepare.shards import Shards

TEXT = "prepare data, reshard it, preview what a run will see, audit what it has seen"
EPILOG = """\
examples:
  unisono data prepare language data=corpus data.path=DIR out=tokens    tokenise; the same command resumes it
  unisono data prepare language … out=tokens shard=$SLURM_ARRAY_TASK_ID/8   one of eight parts
  unisono data merge tokens                                             combine the parts
  unisono train language data=prepared data.path=tokens                 on any machine, without the documents
  unisono data reshard tokens shards=64 out=tokens64                    the same rows in other shards
  unisono data preview language position=1000 world_size=4              the next rows, for any layout
  unisono data audit runs/NAME                                          was every sample consumed exactly once?
"""


def add_verb(verbs: Any, with_plugins: bool) -> None:
    """Put the verb and its own verbs among the others; those of plug-ins only where they are asked for."""
    parser = verbs.add_parser(
        "data", help=TEXT, description=TEXT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inner = parser.add_subparsers(dest="data_verb", metavar="VERB", required=True)

    def verb(
        name: str, run: Callable[[argparse.Namespace], int], text: str, words: str, place: str = ""
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = inner.add_parser(name, help=text, description=text)
        if place:
            added.add_argument("folder", type=str if place == "PATH" else Path, metavar=place)
        else:
            arguments.add_recipe(added)
        if words:
            arguments.add_overrides(added, words)
        added.set_defaults(run=run)
        return added

    verb(
        "prepare",
        _prepare,
        "prepare a recipe's samples: shards and a manifest, byte for byte the same with any workers or interruptions",
        "as for train; and out=DIR, shard=i/n, workers=auto, worker_kind=threads|processes, shard_mb=64",
    )
    verb("merge", _merge, "combine shards that several jobs prepared", "", "DIR")
    verb("reshard", _reshard, "write the same rows into a different number of shards", "shards=N out=DIR2", "DIR")
    verb(
        "preview",
        _preview,
        "print the rows that a run sees from a position on, for any layout, even one you do not have",
        "as for train; and position=0, count=8, world_size=layout.world_size",
    )
    audit = verb(
        "audit", _audit, "check that a run consumed every sample exactly once, or list the exceptions", "", "RUN"
    )
    arguments.add_task_options(audit)
    if with_plugins:
        plugins.add_verbs("unisono.data_verbs", inner)


def _prepare(parsed: argparse.Namespace) -> int:
    from unisono.config.schema.verbs import Prepare
    from unisono.data.prepare.manifest import Plan, read_json
    from unisono.data.prepare.partitions import PLAN_FILE, Partition
    from unisono.data.prepare.preparation import prepare
    from unisono.protocols import find_preparations
    from unisono.runtime.files import make_private
    from unisono.task_config import build_task

    own = arguments.parse_settings(parsed, Prepare)
    share = Partition.parse(own.shard)
    config = arguments.load_config(parsed)
    made_ahead = find_preparations(build_task(config))
    for name, (preparation, cached) in made_ahead.items():
        folder = (own.out / name if name else own.out) if own.out else cached
        with show_progress(folder, max(1, preparation.records // share.count)) as progress:
            workers = None if own.workers == "auto" else own.workers
            made = prepare(
                preparation, folder, share=share, workers=workers, kind=own.worker_kind, shard_mb=own.shard_mb,
                progress=progress,
            )  # fmt: skip
        if not own.out:
            make_private(folder)
        if made is not None:
            _print_shards(made)
        else:
            total = len(read_json(folder / PLAN_FILE, Plan)["bounds"]) - 1
            say(f"{folder}: part {share.number}/{share.count} is done, {len(share.shards(total))} of {total} shards")
    if share.count > 1:
        say(f"when all parts are done: unisono data merge {own.out or next(iter(made_ahead.values()))[1]}")
    return 0


def _merge(parsed: argparse.Namespace) -> int:
    from unisono.data.prepare.partitions import PLAN_FILE, merge_partitions

    folder: Path = parsed.folder
    is_plan = (folder / PLAN_FILE).is_file()
    several = [] if is_plan else sorted(path.parent for path in folder.glob(f"*/{PLAN_FILE}"))
    for one in several or [folder]:
        _print_shards(merge_partitions(one))
    return 0


def _reshard(parsed: argparse.Namespace) -> int:
    from unisono.config.schema.verbs import Reshard
    from unisono.data.prepare.reshard import reshard
    from unisono.data.prepare.shards import Shards

    own = arguments.parse_settings(parsed, Reshard)
    with show_progress(own.out, len(Shards(parsed.folder))) as progress:
        made = reshard(parsed.folder, own.shards, own.out, progress)
    _print_shards(made)
    return 0


def _preview(parsed: argparse.Namespace) -> int:
    from unisono.config.schema.verbs import Preview
    from unisono.data import preview
    from unisono.launch.resolving import layout
    from unisono.task_config import build_task

    own = arguments.parse_settings(parsed, Preview)
    config = layout.resolve_layout(arguments.load_config(parsed), None)
    assert isinstance(config.layout.world_size, int)
    task = build_task(config)
    world = own.world_size or config.layout.world_size
    shown = preview.preview(task, config, own.position, own.count, world)
    say("\n".join(preview.format_table(shown, terminal_width())))
    return 0


def _audit(parsed: argparse.Namespace) -> int:
    from unisono.data.audit import audit

    report = audit(parsed.folder, task=parsed.task, trust=parsed.trust)
    say(report)
    return 0 if report.is_clean else 1


def _print_shards(made: Shards) -> None:
    manifest, blocks = made.manifest, len(made.blocks)
    say(
        f"{made.folder}: {manifest['rows']} rows, {manifest['units']} units ({manifest['shortest']} to "
        f"{manifest['longest']} a row), {manifest['left_out']} records left out; {len(manifest['shards'])} shards, "
        f"{blocks} blocks, content {manifest['content']}"
    )
