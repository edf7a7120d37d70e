"""The verb `unisono data`: prepare, merge, reshard, preview and audit the rows of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments
from unisono.runtime.console import clean, say

if TYPE_CHECKING:
    from unisono.data.prepare.preparation import ProgressCallback
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
  unisono data scan recordings/ out=bad.jsonl                           which recordings cannot be decoded?
  unisono data audio-cache recordings/ out=cache rate=32000 duration=5  decode them once, for many epochs
"""


def add_verb(verbs: Any) -> None:
    """Put the verb and its own verbs among the others."""
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
    verb(
        "scan",
        _scan,
        "decode every recording and list the rows that cannot be decoded; resumes after an interruption",
        "out=bad_recordings.jsonl, audio=COLUMN, workers=auto",
        "PATH",
    )
    verb(
        "audio-cache",
        _audio_cache,
        "decode recordings once for many epochs, into memory-mapped features or samples",
        "out=DIR, kind=features|samples, rate=32000, duration=5, windows=first|centre|all, leave_out=FILE, "
        "num_mel_bins=128, frames=, mean=0, std=1, method=sinc_hann, dtype=float32, on_error=stop|mask, workers=auto",
        "PATH",
    )
    audit = verb(
        "audit", _audit, "check that a run consumed every sample exactly once, or list the exceptions", "", "RUN"
    )
    arguments.add_task_options(audit)


def _prepare(parsed: argparse.Namespace) -> int:
    from unisono.config.schema.verbs import Prepare
    from unisono.data.prepare.manifest import read_json
    from unisono.data.prepare.partitions import PLAN_FILE, Partition
    from unisono.data.prepare.preparation import prepare
    from unisono.protocols import find_preparations
    from unisono.task_config import build_task

    own = arguments.parse_own_settings(parsed, Prepare)
    share = Partition.parse(own.shard)
    config = arguments.load_config(parsed)
    made_ahead = find_preparations(build_task(config))
    for name, (preparation, cached) in made_ahead.items():
        folder = (own.out / name if name else own.out) if own.out else cached
        with _progress(folder, max(1, preparation.records // share.count)) as progress:
            workers = None if own.workers == "auto" else own.workers
            made = prepare(
                preparation, folder, share=share, workers=workers, kind=own.worker_kind, shard_mb=own.shard_mb,
                progress=progress,
            )  # fmt: skip
        if made is not None:
            _print_shards(made)
        else:
            total = len(read_json(folder / PLAN_FILE)["bounds"]) - 1
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
    with _progress(own.out, len(Shards(parsed.folder))) as progress:
        made = reshard(parsed.folder, own.shards, own.out, progress)
    _print_shards(made)
    return 0


def _preview(parsed: argparse.Namespace) -> int:
    from unisono.config.schema.verbs import Preview
    from unisono.data import preview
    from unisono.launch import layout
    from unisono.task_config import build_task

    own = arguments.parse_own_settings(parsed, Preview)
    config = layout.resolve_layout(arguments.load_config(parsed), None)
    assert isinstance(config.layout.world_size, int)
    task = build_task(config)
    world = own.world_size or config.layout.world_size
    say("\n".join(preview.format_table(preview.preview(task, config, own.position, own.count, world))))
    return 0


def _audit(parsed: argparse.Namespace) -> int:
    from unisono.data.audit import audit

    report = audit(parsed.folder, task=parsed.task, trust=parsed.trust)
    say(report)
    return 0 if report.is_clean else 1


def _scan(parsed: argparse.Namespace) -> int:
    from unisono.config.schema.verbs import Scan
    from unisono.data.recordings import open_recordings
    from unisono.data.recordings.scan import scan

    own = arguments.parse_settings(parsed, Scan)
    source = open_recordings(parsed.folder, audio=own.audio, key="PATH", require_files=False)
    with _progress(own.out, len(source), "bad") as progress:
        found = scan(source, own.out, workers=None if own.workers == "auto" else own.workers, progress=progress)
    for row, reason in list(found.bad.items())[:10]:
        say(f"row {row}: {reason}")
    if len(found.bad) > 10:
        say(f"… and {len(found.bad) - 10} more")
    if found.bad:
        say(
            f"{found.rows} recordings, {len(found.bad)} cannot be decoded; they are listed in {found.path}, "
            f"for leave_out={found.path}"
        )
    else:
        say(f"all {found.rows} recordings can be decoded")
    return 1 if found.bad else 0


def _audio_cache(parsed: argparse.Namespace) -> int:
    from unisono.audio import Fbank, Pipeline
    from unisono.config.schema.verbs import AudioCache
    from unisono.data.recordings import open_recordings
    from unisono.data.recordings.decoded_cache import cut_rows, make_cache
    from unisono.runtime.communicator import usable_cores
    from unisono.runtime.errors import BadSamplesError, DataError

    own = arguments.parse_settings(parsed, AudioCache)
    source = open_recordings(parsed.folder, audio=own.audio, leave_out=own.leave_out, key="PATH")
    features = Fbank(own.num_mel_bins, window_type=own.window_type) if own.kind == "features" else None
    pipeline = Pipeline(own.rate, own.duration, features, own.frames, mean=own.mean, std=own.std, method=own.method)
    rows = cut_rows(source, pipeline, own.windows)
    with _progress(own.out, len(rows), "left out") as progress:
        try:
            made = make_cache(
                rows, pipeline, own.out, windows=own.windows, dtype=own.dtype, on_error=own.on_error,
                workers=usable_cores() if own.workers == "auto" else own.workers, progress=progress,
            )  # fmt: skip
        except BadSamplesError as error:
            raise DataError(
                f"{error}. Leave such rows out with on_error=mask; or list them with `unisono data scan "
                f"{parsed.folder} out=bad.jsonl`, and add leave_out=bad.jsonl"
            ) from error
    shape = " × ".join(map(str, made[0]["values"].shape))
    say(f"{own.out}: {len(made)} rows of {shape} {own.dtype}, {len(made.metadata['left_out'])} left out")
    return 0


def _print_shards(made: Shards) -> None:
    """What was made, and what it is good for."""
    manifest, blocks = made.manifest, len(made.blocks)
    say(
        f"{made.folder}: {manifest['rows']} rows, {manifest['units']} units ({manifest['shortest']} to "
        f"{manifest['longest']} a row), {manifest['left_out']} records left out; {len(manifest['shards'])} shards, "
        f"{blocks} blocks, content {manifest['content']}"
    )


@contextmanager
def _progress(folder: Path, total: int, unit: str = "units") -> Iterator[ProgressCallback]:
    """A bar on a terminal, a line for every tenth elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from unisono.observe.progress import format_count

    console = Console(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
    counts = [0, 0]
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            job = bar.add_task(clean(folder), total=total, rate="")

            def progress(more: int, units: int) -> None:
                counts[0], counts[1] = counts[0] + more, counts[1] + units
                rate = f"{format_count(counts[0])} of {format_count(total)} records, {format_count(counts[1])} {unit}"
                bar.update(job, completed=counts[0], rate=rate)

            yield progress
        return

    def line(more: int, units: int) -> None:
        before = 10 * counts[0] // total
        counts[0], counts[1] = counts[0] + more, counts[1] + units
        if 10 * counts[0] // total > before:
            say(f"{folder}: {counts[0]} of {total} records, {format_count(counts[1])} {unit}", error=True)

    yield line
