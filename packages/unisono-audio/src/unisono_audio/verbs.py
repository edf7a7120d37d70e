"""What this package adds to `unisono data`: which recordings can be decoded, and a cache of them, decoded.

unisono data scan recordings/ out=bad.jsonl                           which recordings cannot be decoded?
unisono data audio-cache recordings/ out=cache rate=32000 duration=5  decode them once, for many epochs
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from unisono.cli import arguments
from unisono.runtime.console import say


def add_verbs(verbs: Any) -> None:
    """Put both among the verbs of `unisono data`."""
    _add(
        verbs,
        "scan",
        _scan,
        "decode every recording and list the rows that cannot be decoded; resumes after an interruption",
        "out=bad_recordings.jsonl, audio=COLUMN, workers=auto",
    )
    _add(
        verbs,
        "audio-cache",
        _audio_cache,
        "decode recordings once for many epochs, into memory-mapped features or samples",
        "out=DIR, kind=features|samples, rate=32000, duration=5, windows=first|centre|all, leave_out=FILE, "
        "num_mel_bins=128, frames=, mean=0, std=1, method=sinc_hann, dtype=float32, on_error=stop|mask, workers=auto",
    )


def _add(verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, words: str) -> None:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("folder", metavar="PATH")
    arguments.add_overrides(verb, words)
    verb.set_defaults(run=run)


def _scan(parsed: argparse.Namespace) -> int:
    from unisono.runtime.display.work_progress import show_progress
    from unisono_audio.sources import open_recordings
    from unisono_audio.sources.scan import scan
    from unisono_audio.verb_settings import Scan

    own = arguments.parse_settings(parsed, Scan)
    source = open_recordings(parsed.folder, audio=own.audio, key="PATH", require_files=False)
    with show_progress(own.out, len(source), "bad") as progress:
        found = scan(source, own.out, workers=None if own.workers == "auto" else own.workers, progress=progress)
    for row, reason in list(found.bad.items())[:10]:
        say(f"row {row}: {reason}")
    if len(found.bad) > 10:
        say(f"… and {len(found.bad) - 10} more")
    if found.cancelled:
        shown = ", ".join(map(str, found.cancelled[:10])) + (", …" if len(found.cancelled) > 10 else "")
        say(
            f"unisono: WARNING: rows {shown}: the channels cancel each other, so the mix to mono is next to silence "
            f"({len(found.cancelled)} of {found.rows} recordings). Invert one channel, or keep only one",
            error=True,
        )
    if found.bad:
        say(
            f"{found.rows} recordings, {len(found.bad)} cannot be decoded; they are listed in {found.path}, "
            f"for leave_out={found.path}"
        )
    else:
        say(f"all {found.rows} recordings can be decoded")
    return 1 if found.bad else 0


def _audio_cache(parsed: argparse.Namespace) -> int:
    from unisono.runtime.communication.communicator import usable_cores
    from unisono.runtime.display.work_progress import show_progress
    from unisono.runtime.errors import BadSamplesError, DataError
    from unisono_audio import Fbank, Pipeline
    from unisono_audio.sources import open_recordings
    from unisono_audio.sources.decoded_cache import cut_rows, make_cache
    from unisono_audio.verb_settings import AudioCache

    own = arguments.parse_settings(parsed, AudioCache)
    source = open_recordings(parsed.folder, audio=own.audio, leave_out=own.leave_out, key="PATH")
    features = Fbank(own.num_mel_bins, window_type=own.window_type) if own.kind == "features" else None
    pipeline = Pipeline(own.rate, own.duration, features, own.frames, mean=own.mean, std=own.std, method=own.method)
    rows = cut_rows(source, pipeline, own.windows)
    with show_progress(own.out, len(rows), "left out") as progress:
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
